//! The command window: which command numbers are accepted now, later, or not at all.
//!
//! Numbers are compared as serial numbers (RFC 1982): they wrap.

use crate::limits::COMMAND_WINDOW;

/// What to do with a command number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandTurn {
    /// It is the next one.
    Next,
    /// It is inside the window, but others come first.
    Early,
    /// The number was used before, or was never offered: the command is dropped without an answer.
    Outside,
}

/// The window of one session.
#[derive(Debug, Clone, Copy, Default)]
pub struct Window {
    expected: u32,
    open: u32,
}

impl Window {
    /// A window that begins with this number.
    pub fn new(expected: u32) -> Self {
        Window { expected, open: 0 }
    }

    /// ExpCmdSN.
    pub fn expected(&self) -> u32 {
        self.expected
    }

    /// MaxCmdSN. It never goes back: a command that comes moves the window's start and takes a place.
    pub fn last(&self) -> u32 {
        self.expected
            .wrapping_add(COMMAND_WINDOW - self.open.min(COMMAND_WINDOW))
            .wrapping_sub(1)
    }

    /// Whether it is the number's turn.
    pub fn turn(&self, number: u32) -> CommandTurn {
        let ahead = number.wrapping_sub(self.expected);
        let width = self.last().wrapping_sub(self.expected).wrapping_add(1);
        if ahead >= width {
            CommandTurn::Outside
        } else if ahead == 0 {
            CommandTurn::Next
        } else {
            CommandTurn::Early
        }
    }

    /// The next number has come.
    pub fn advance(&mut self) {
        self.expected = self.expected.wrapping_add(1);
    }

    /// A command stays open.
    pub fn open(&mut self) {
        self.open += 1;
    }

    /// A command that stayed open is over.
    pub fn close(&mut self) {
        self.open = self.open.saturating_sub(1);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_window_takes_what_it_offers_and_nothing_else() {
        // Fails if a number outside of ExpCmdSN..=MaxCmdSN is taken, or wrapping breaks the comparison.
        for start in [0, 5, u32::MAX - 3, u32::MAX] {
            let window = Window::new(start);
            assert_eq!(window.turn(start), CommandTurn::Next);
            assert_eq!(window.turn(start.wrapping_add(1)), CommandTurn::Early);
            assert_eq!(window.turn(window.last()), CommandTurn::Early);
            assert_eq!(
                window.turn(window.last().wrapping_add(1)),
                CommandTurn::Outside
            );
            assert_eq!(window.turn(start.wrapping_sub(1)), CommandTurn::Outside);
        }
    }

    #[test]
    fn the_window_never_shrinks_from_its_end() {
        // Fails if MaxCmdSN goes back, or if more commands can be open than the window is wide.
        let mut window = Window::new(100);
        let end = window.last();
        for _ in 0..COMMAND_WINDOW {
            assert_eq!(window.turn(window.expected()), CommandTurn::Next);
            window.advance();
            window.open();
            assert_eq!(window.last(), end);
        }
        assert_eq!(window.turn(window.expected()), CommandTurn::Outside);
        window.close();
        assert_eq!(window.last(), end.wrapping_add(1));
        assert_eq!(window.turn(window.expected()), CommandTurn::Next);
    }
}
