//! A download that has not come to its end: its bytes, their hash so far, and what is known about the rest.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{ImageError, path_error};
use crate::ImageDigest;
use crate::medium::BytesAt;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const PIECE_BYTES: usize = 1 << 20;

/// What a server said about the bytes of a download.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Expected {
    /// By what the server knows whether they are still the same.
    pub validator: Option<String>,
    /// How many there are.
    pub said: Option<u64>,
    /// In which run of the kernel they were written. What was not synced may be missing after another one began.
    boot: String,
}

/// A file that bytes are appended to.
pub(super) struct Partial {
    pub path: PathBuf,
    pub expected: Expected,
    pub received: u64,
    file: File,
    hash: Sha256,
}

impl Partial {
    /// Goes on with what is there, if it can be relied on, and else begins anew.
    pub fn open(path: &Path) -> Result<Partial, ImageError> {
        let mut options = File::options();
        let file = options.read(true).append(true).create(true).open(path);
        let mut partial = Partial {
            path: path.to_owned(),
            expected: Expected::default(),
            received: 0,
            file: file.map_err(|error| path_error(path, error))?,
            hash: Sha256::new(),
        };
        match partial.read_expected() {
            Some(expected) if expected.boot == boot() => {
                partial.expected = expected;
                partial
                    .hash_what_is_there()
                    .map_err(|error| path_error(path, error))?;
            }
            _ => partial.begin(None, None)?,
        }
        Ok(partial)
    }

    /// Whether everything has arrived.
    pub fn is_complete(&self) -> bool {
        self.expected.said == Some(self.received) && self.received > 0
    }

    /// Begins with no bytes at all.
    pub fn begin(
        &mut self,
        validator: Option<String>,
        said: Option<u64>,
    ) -> Result<(), ImageError> {
        let note = note_of(&self.path);
        // Bytes without a note count for nothing, so the note goes first and comes last.
        let begun = trellis_files::remove(&note).and_then(|()| self.file.set_len(0));
        begun.map_err(|error| path_error(&self.path, error))?;
        self.received = 0;
        self.hash = Sha256::new();
        self.expected = Expected {
            validator,
            said,
            boot: boot(),
        };
        let text =
            serde_json::to_vec(&self.expected).map_err(|error| path_error(&note, error.into()))?;
        trellis_files::replace(&note, &text).map_err(|error| path_error(&note, error))
    }

    /// Appends bytes.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), ImageError> {
        self.file
            .write_all(bytes)
            .map_err(|error| path_error(&self.path, error))?;
        self.hash.update(bytes);
        self.received += u64::try_from(bytes.len()).unwrap_or_default();
        Ok(())
    }

    /// Makes the bytes durable.
    pub fn finish(&self) -> Result<(&File, ImageDigest), ImageError> {
        self.file
            .sync_all()
            .map_err(|error| path_error(&self.path, error))?;
        let hash: [u8; 32] = self.hash.clone().finalize().into();
        Ok((&self.file, ImageDigest::new(hash)))
    }

    /// Forgets everything. It is no loss if that fails: the next download begins anew.
    pub fn discard(&self) {
        let _ = trellis_files::remove(&note_of(&self.path));
        let _ = fs::remove_file(&self.path);
    }

    fn read_expected(&self) -> Option<Expected> {
        let text = fs::read(note_of(&self.path)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    fn hash_what_is_there(&mut self) -> io::Result<()> {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let count = self.file.read(&mut piece, self.received)?;
            if count == 0 {
                return Ok(());
            }
            self.hash.update(&piece[..count]);
            self.received += u64::try_from(count).map_err(io::Error::other)?;
        }
    }
}

/// Where the note about a download is.
pub(super) fn note_of(path: &Path) -> PathBuf {
    path.with_extension("json")
}

/// Which run of the kernel this is. If it is not known, no earlier one is it either.
fn boot() -> String {
    fs::read_to_string(BOOT_ID).unwrap_or_else(|_| uuid::Uuid::new_v4().to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_before_the_machine_restarted_does_not_count() {
        // Fails if bytes that a power loss may have turned into zeros become a part of an image.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        let mut partial = Partial::open(&path).unwrap();
        partial.begin(Some("\"one\"".to_owned()), Some(10)).unwrap();
        partial.append(b"01234").unwrap();
        let mut same = Partial::open(&path).unwrap();
        assert_eq!((same.received, same.is_complete()), (5, false));
        same.append(b"56789").unwrap();
        let whole: [u8; 32] = Sha256::digest(b"0123456789").into();
        assert!(same.is_complete() && same.finish().unwrap().1 == ImageDigest::new(whole));
        let mut note: Expected =
            serde_json::from_slice(&fs::read(note_of(&path)).unwrap()).unwrap();
        note.boot = "another".to_owned();
        fs::write(note_of(&path), serde_json::to_vec(&note).unwrap()).unwrap();
        let restarted = Partial::open(&path).unwrap();
        assert_eq!((restarted.received, restarted.expected.said), (0, None));
        fs::write(note_of(&path), "torn").unwrap();
        fs::write(&path, "bytes of unknown origin").unwrap();
        assert_eq!(Partial::open(&path).unwrap().received, 0);
    }
}
