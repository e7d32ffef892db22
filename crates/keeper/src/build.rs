//! Which build of the program a process runs.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// The file that this process runs, also after it was replaced or removed.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// The file of a program. Two processes with the same one run the same bytes: a program that runs cannot be written
/// to, and its file stays as long as it runs, so nothing else gets its number. The package's version alone would not
/// tell two builds of one version apart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Build {
    /// The package's version.
    pub version: String,
    device: u64,
    inode: u64,
    length: u64,
    modified_s: i64,
    modified_ns: i64,
}

impl Build {
    /// The one that this process runs.
    pub fn own() -> io::Result<Build> {
        Ok(Build::of(&std::fs::metadata(OWN_PROGRAM)?))
    }

    fn of(file: &Metadata) -> Build {
        Build {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: file.dev(),
            inode: file.ino(),
            length: file.size(),
            modified_s: file.mtime(),
            modified_ns: file.mtime_nsec(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    // Fails if a program that a package has put in the place of another one of the same length counts as the same.
    #[test]
    fn a_file_that_was_replaced_is_another_build() {
        let directory = tempfile::tempdir().unwrap();
        let (path, new) = (
            directory.path().join("trellis"),
            directory.path().join("new"),
        );
        std::fs::write(&path, "one").unwrap();
        let runs = std::fs::File::open(&path).unwrap();
        let first = Build::of(&runs.metadata().unwrap());
        assert_eq!(Build::of(&path.metadata().unwrap()), first);
        std::fs::write(&new, "two").unwrap();
        std::fs::rename(&new, &path).unwrap();
        assert_ne!(Build::of(&path.metadata().unwrap()), first);
        assert_eq!(Build::of(&runs.metadata().unwrap()), first);
    }
}
