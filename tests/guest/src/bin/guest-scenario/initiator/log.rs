//! What the kernel says from a moment on.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;

/// A record has at most so many bytes.
const RECORD_BYTES_MAX: usize = 8 << 10;

/// The kernel's log.
pub struct KernelLog {
    file: File,
    lines: Vec<String>,
}

impl KernelLog {
    /// Listens from now on.
    pub fn open() -> KernelLog {
        let patient = i32::try_from(OFlags::NONBLOCK.bits()).unwrap();
        let mut options = File::options();
        let mut file = options
            .read(true)
            .custom_flags(patient)
            .open("/dev/kmsg")
            .unwrap();
        file.seek(SeekFrom::End(0)).unwrap();
        KernelLog {
            file,
            lines: Vec::new(),
        }
    }

    /// How many lines so far have that in them.
    pub fn count(&mut self, what: &str) -> usize {
        self.read();
        self.lines.iter().filter(|line| line.contains(what)).count()
    }

    /// Prints the lines that have one of these in them.
    pub fn print_those_with(&mut self, words: &[&str]) {
        self.read();
        for line in &self.lines {
            if words.iter().any(|word| line.contains(word)) {
                println!("kernel: {line}");
            }
        }
    }

    /// Takes what has come: a record with every read, its text behind a semicolon in its first line.
    fn read(&mut self) {
        let mut record = vec![0; RECORD_BYTES_MAX];
        loop {
            match self.file.read(&mut record) {
                Ok(length) => {
                    let text = String::from_utf8_lossy(&record[..length]);
                    let first = text.lines().next().unwrap_or_default();
                    let text = first.split_once(';').map_or(first, |(_, text)| text);
                    self.lines.push(text.to_owned());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("the kernel's log cannot be read: {error}"),
            }
        }
    }
}
