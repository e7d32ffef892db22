//! Splits a stream of bytes into lines, and keeps no more than one line of bounded length.

/// A line was longer than allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

/// What has arrived of a stream of lines.
#[derive(Debug)]
pub(crate) struct Lines {
    pending: Vec<u8>,
    /// Where the search for the next end of a line goes on, so that a long line is searched once.
    searched: usize,
    line_bytes_max: usize,
}

impl Lines {
    pub(crate) fn new(line_bytes_max: usize) -> Lines {
        Lines {
            pending: Vec::new(),
            searched: 0,
            line_bytes_max,
        }
    }

    /// Takes what has just been read.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// The next whole line without its end, if there is one.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<u8>>, TooLong> {
        let found = self.pending[self.searched..]
            .iter()
            .position(|byte| *byte == b'\n');
        let length = found.map_or(self.pending.len(), |at| self.searched + at);
        if length > self.line_bytes_max {
            return Err(TooLong);
        }
        if found.is_none() {
            self.searched = self.pending.len();
            return Ok(None);
        }
        let rest = self.pending.split_off(length + 1);
        let mut line = std::mem::replace(&mut self.pending, rest);
        self.searched = 0;
        line.pop();
        Ok(Some(line))
    }

    /// How much is kept.
    #[cfg(test)]
    pub(crate) fn kept_bytes(&self) -> usize {
        self.pending.capacity()
    }

    /// Forgets everything that has not been taken.
    pub(crate) fn clear(&mut self) {
        self.pending.clear();
        self.searched = 0;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_out_whole_however_they_came_in() {
        // Fails if a line is cut, joined with its neighbour, or lost at a border between two reads.
        let text = b"one\n\nthree\nfour";
        for piece in 1..text.len() {
            let mut lines = Lines::new(16);
            let mut found = Vec::new();
            for part in text.chunks(piece) {
                lines.push(part);
                while let Some(line) = lines.next().unwrap() {
                    found.push(line);
                }
            }
            assert_eq!(found, [&b"one"[..], b"", b"three"]);
        }
    }

    #[test]
    fn a_line_that_does_not_end_is_refused_at_its_limit() {
        // Fails if an endless line is collected for ever, or if a line of just the limit is refused.
        let mut lines = Lines::new(4);
        lines.push(b"1234\n12345");
        assert_eq!(lines.next(), Ok(Some(b"1234".to_vec())));
        assert_eq!(lines.next(), Err(TooLong));
    }
}
