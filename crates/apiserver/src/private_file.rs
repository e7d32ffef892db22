//! Files that only their owner may read, from their first byte on.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;
const PERMISSION_BITS: u32 = 0o7777;

/// Makes sure that the file holds exactly these bytes and is its owner's alone; whether it had to be written.
///
/// It appears whole or not at all: the bytes go to a file beside it, to the disk, and then under the name.
pub(crate) fn ensure(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    if let Ok(found) = fs::read(path)
        && found == bytes
        && fs::symlink_metadata(path)?.permissions().mode() & PERMISSION_BITS == FILE_MODE
    {
        return Ok(false);
    }
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let temporary = directory.join(format!(".trellis-{}.tmp", uuid::Uuid::new_v4()));
    let written = write_new(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = written {
        // The file beside is of no use to anyone, and the error that matters is the one above.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    File::open(directory)?.sync_all()?;
    Ok(true)
}

/// Makes sure that there is a directory which only its owner may enter.
pub(crate) fn ensure_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(path)?;
    fs::set_permissions(path, Permissions::from_mode(DIRECTORY_MODE))
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(FILE_MODE)
        .open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & PERMISSION_BITS
    }

    #[test]
    fn a_private_file_is_its_owners_alone_and_leaves_nothing_beside_it() {
        // Fails when the mode is left to the umask, or when the temporary file stays.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        fs::write(&path, "open to all").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert!(ensure(&path, b"hush").unwrap());
        assert_eq!(
            (fs::read(&path).unwrap(), mode(&path)),
            (b"hush".to_vec(), FILE_MODE)
        );
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_is_as_it_should_be_is_not_written_again() {
        // Fails when a restart touches files that did not change, or keeps one that others may read.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        assert!(ensure(&path, b"hush").unwrap());
        assert!(!ensure(&path, b"hush").unwrap());
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert!(ensure(&path, b"hush").unwrap());
        assert_eq!(mode(&path), FILE_MODE);
    }
}
