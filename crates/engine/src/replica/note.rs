//! How far a replica's bytes are, left by a process for its successor.
//!
//! ```text
//! NAME/note   magic "TRLN" │ CRC32C u32 of what follows │ boot id, 16 bytes │ epoch u64 │ number u64
//! ```
//!
//! It is written without a sync, before anybody is told that the bytes are there. It survives the process as the bytes
//! do, in the kernel's memory. When that memory is lost, each of the two may be lost without the other. So a note of
//! another run of the kernel does not count, and the durable key does. A missing or damaged note is treated like one
//! of another run: what was flushed is proven without it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use uuid::Uuid;

use super::Replica;
use super::dir::Dir;
use crate::proto::{Epoch, Key};
use crate::{Error, Result};

const NOTE: &str = "note";
const MAGIC: [u8; 4] = *b"TRLN";
const LENGTH: usize = 40;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The note of one replica.
#[derive(Debug)]
pub(crate) struct NoteFile {
    file: File,
    path: PathBuf,
    boot: Uuid,
}

impl NoteFile {
    /// Opens the note, and says which key it has if that still counts.
    pub(crate) fn open(replica: &Replica) -> Result<(NoteFile, Option<Key>)> {
        let dir = &replica.shared.dir;
        let path = dir.join(NOTE);
        let file = match dir.file(NOTE)? {
            Some(file) => file,
            None => {
                let file = make(dir)?;
                dir.sync()?;
                file
            }
        };
        let boot = boot_id()?;
        let mut bytes = [0; LENGTH];
        let key = match file.read_exact_at(&mut bytes, 0) {
            Ok(()) => decode(&bytes, boot),
            // A new one, or one that was cut.
            Err(_) => None,
        };
        Ok((NoteFile { file, path, boot }, key))
    }

    /// Remembers a key. It does not wait for the disk.
    pub(crate) fn write(&self, key: Key) -> Result<()> {
        self.file
            .write_all_at(&encode(key, self.boot), 0)
            .map_err(|source| Error::Io {
                doing: "write",
                path: self.path.clone(),
                source,
            })
    }
}

/// Makes a note that says nothing, in the place of whatever was there. It has its block then, also on a pool that
/// fills up. The caller syncs the directory.
pub(super) fn make(dir: &Dir) -> Result<File> {
    dir.replace_file(NOTE, &encode(Key::NOTHING, Uuid::nil()))
}

fn encode(key: Key, boot: Uuid) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[8..24].copy_from_slice(boot.as_bytes());
    bytes[24..32].copy_from_slice(&key.epoch.get().to_le_bytes());
    bytes[32..].copy_from_slice(&key.seq.to_le_bytes());
    let checksum = crc32c::crc32c(&bytes[8..]);
    bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8; LENGTH], boot: Uuid) -> Option<Key> {
    let number = |from: usize| {
        let mut wide = [0; 8];
        wide.copy_from_slice(&bytes[from..from + 8]);
        u64::from_le_bytes(wide)
    };
    let key = Key {
        epoch: Epoch::from_raw(number(24)),
        seq: number(32),
    };
    (encode(key, boot) == *bytes).then_some(key)
}

fn boot_id() -> Result<Uuid> {
    let path = PathBuf::from(BOOT_ID);
    let text = std::fs::read(&path).map_err(|source| Error::Io {
        doing: "read",
        path: path.clone(),
        source,
    })?;
    Uuid::try_parse_ascii(text.trim_ascii()).map_err(|_| Error::NotAFile { path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_of_another_run_of_the_kernel_does_not_count() {
        // Fails if a key is believed whose bytes a power loss may have taken.
        let key = Key {
            epoch: Epoch::first(3),
            seq: 7,
        };
        let (this, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let bytes = encode(key, this);
        assert_eq!(decode(&bytes, this), Some(key));
        assert_eq!(decode(&bytes, other), None);
        for bit in 0..LENGTH * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&bad, this), None, "bit {bit}");
        }
    }
}
