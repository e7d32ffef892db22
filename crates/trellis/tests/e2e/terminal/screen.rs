//! A terminal of a given width, as far as our output uses one: what a person sees in the end.

/// What is on the screen.
pub struct Screen {
    lines: Vec<Vec<char>>,
    width: usize,
    row: usize,
    column: usize,
}

impl Screen {
    /// The screen after a program has written this.
    pub fn after(written: &str, width: usize) -> Screen {
        let mut screen = Screen {
            lines: vec![Vec::new()],
            width,
            row: 0,
            column: 0,
        };
        let mut rest = written.chars();
        while let Some(next) = rest.next() {
            match next {
                '\u{1b}' => screen.escape(&mut rest),
                '\r' => screen.column = 0,
                '\n' => screen.down(),
                letter => screen.put(letter),
            }
        }
        screen
    }

    fn down(&mut self) {
        self.row += 1;
        if self.row == self.lines.len() {
            self.lines.push(Vec::new());
        }
    }

    fn put(&mut self, letter: char) {
        if self.column == self.width {
            self.column = 0;
            self.down();
        }
        let line = &mut self.lines[self.row];
        if line.len() <= self.column {
            line.resize(self.column + 1, ' ');
        }
        line[self.column] = letter;
        self.column += 1;
    }

    /// `ESC [ number letter`.
    fn escape(&mut self, rest: &mut std::str::Chars<'_>) {
        assert_eq!(rest.next(), Some('['), "a code that this terminal knows");
        let mut number = String::new();
        let letter = loop {
            match rest.next().expect("a whole code") {
                digit if digit.is_ascii_digit() || digit == ';' || digit == '?' => {
                    number.push(digit)
                }
                letter => break letter,
            }
        };
        let count: usize = number.parse().unwrap_or(1);
        match letter {
            'A' => self.row = self.row.saturating_sub(count),
            'B' => (0..count).for_each(|_| self.down()),
            'C' => self.column = (self.column + count).min(self.width),
            'D' => self.column = self.column.saturating_sub(count),
            'G' => self.column = count.saturating_sub(1),
            'H' => (self.row, self.column) = (0, 0),
            'K' if number == "2" => self.lines[self.row].clear(),
            'K' => self.lines[self.row].truncate(self.column),
            'J' if number == "2" => self.lines.iter_mut().for_each(Vec::clear),
            'J' => {
                self.lines[self.row].truncate(self.column);
                self.lines.truncate(self.row + 1);
            }
            // Colours, and whether the cursor shows.
            'm' | 'h' | 'l' => {}
            other => panic!("ESC[{number}{other} is not known to this terminal"),
        }
    }

    /// The lines that are not empty.
    pub fn lines(&self) -> Vec<String> {
        let lines = self
            .lines
            .iter()
            .map(|line| line.iter().collect::<String>());
        let lines = lines.map(|line| line.trim_end().to_owned());
        lines.filter(|line| !line.is_empty()).collect()
    }
}
