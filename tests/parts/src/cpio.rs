//! A cpio archive of the form "newc", which the kernel unpacks as its first filesystem.
//!
//! It is not compressed: decompression would run on the emulated processor, and reading does not.

use std::io::{self, Write};

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// An archive that is being written.
pub struct Archive<W> {
    to: W,
    entries: u32,
}

impl<W: Write> Archive<W> {
    /// Begins an archive.
    pub fn new(to: W) -> Archive<W> {
        Archive { to, entries: 0 }
    }

    /// Adds a directory; those above it have to be there already. Names have no slash at their beginning.
    pub fn directory(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, DIRECTORY, (0, 0), &[])
    }

    /// Adds a file that may be executed.
    pub fn file(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        self.entry(name, PROGRAM, (0, 0), content)
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, name: &str, to: &str) -> io::Result<()> {
        self.entry(name, LINK, (0, 0), to.as_bytes())
    }

    /// Adds a character device.
    pub fn device(&mut self, name: &str, major: u32, minor: u32) -> io::Result<()> {
        self.entry(name, CHARACTER_DEVICE, (major, minor), &[])
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn entry(
        &mut self,
        name: &str,
        mode: u32,
        device: (u32, u32),
        content: &[u8],
    ) -> io::Result<()> {
        self.entries += 1;
        let size = u32::try_from(content.len()).map_err(io::Error::other)?;
        let name_size = u32::try_from(name.len() + 1).map_err(io::Error::other)?;
        let fields = [
            self.entries, // inode
            mode,
            0, // owner
            0, // group
            1, // links
            0, // time
            size,
            0, // device
            0,
            device.0,
            device.1,
            name_size,
            0, // checksum, which this form does not have
        ];
        let mut header = b"070701".to_vec();
        for field in fields {
            header.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        header.extend_from_slice(name.as_bytes());
        header.push(0);
        pad(&mut header);
        self.to.write_all(&header)?;
        self.to.write_all(content)?;
        let rest = content.len() % 4;
        self.to.write_all(&[0; 3][..(4 - rest) % 4])
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn another_program_reads_what_was_written() {
        // Fails if a header, a name or the padding is not as the format says.
        let dir = tempfile::tempdir().unwrap();
        let mut archive = Archive::new(Vec::new());
        archive.directory("a").unwrap();
        for length in 0..9 {
            let content = vec![b'x'; length];
            archive.file(&format!("a/{length}"), &content).unwrap();
        }
        archive.link("a/link", "8").unwrap();
        let bytes = archive.finish().unwrap();
        let mut child = Command::new("busybox")
            .args(["cpio", "-i"])
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success());
        for length in 0..9 {
            let found = std::fs::read(dir.path().join(format!("a/{length}"))).unwrap();
            assert_eq!(found, vec![b'x'; length]);
        }
        assert_eq!(std::fs::read(dir.path().join("a/link")).unwrap().len(), 8);
    }
}
