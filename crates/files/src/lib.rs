//! Small files that are whole or absent, whatever crashes when.
//!
//! A file that is written in place is empty for a moment, and for much longer on the disk: after a power loss a name
//! may lead to a file without its bytes. So whatever is made once, and whatever others depend on, is made like this:
//!
//! ```text
//!   under another name ──▶ written, synced ──▶ renamed ──▶ directory synced ──▶ others may depend on it
//! ```
//!
//! A crash leaves the file as it was before, or as it shall be. A temporary file may stay behind; its name begins with
//! [`TEMPORARY`], and the next write in that directory that succeeds takes it away.
//!
//! Every crate that keeps such files uses this one, except the replica store: that reaches its files by open
//! directories and has the same rule in `engine::replica::dir`.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use trellis_api::step::{Step, reached};
use uuid::Uuid;

/// How the names of unfinished files begin.
pub const TEMPORARY: &str = ".trellis-new-";

const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;
const PERMISSION_BITS: u32 = 0o7777;

/// The most parents of a directory that are made with it.
const PARENTS_MAX: usize = 64;

/// Makes sure that the file holds exactly these bytes, durably, and is its owner's alone. Answers whether it had to be
/// written.
pub fn ensure(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    if holds(path, bytes)? {
        // Whoever wrote it may have died before its name was durable.
        sync_directory(directory_of(path))?;
        return Ok(false);
    }
    replace(path, bytes)?;
    Ok(true)
}

/// Puts a file with these bytes in the place of whatever has that name, durably. It is its owner's alone from its
/// first byte on.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = directory_of(path);
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let unique = Uuid::new_v4().simple();
    let temporary = format!("{TEMPORARY}{unique}-{}", name.to_string_lossy());
    let temporary = directory.join(temporary);
    let written = write_new(&temporary, bytes).and_then(|()| {
        reached(Step::FileWritten);
        fs::rename(&temporary, path)
    });
    if let Err(error) = written {
        // The unfinished file is of no use to anyone, and the error that matters is the one above.
        let _ = fs::remove_file(&temporary);
        return Err(error);
    }
    sync_directory(directory)?;
    reached(Step::FileInPlace);
    forget_unfinished(directory, &name.to_string_lossy());
    Ok(())
}

/// What the file holds, if there is one and `is_whole` takes it. One that is empty or half-made counts as absent: it is
/// to be made again.
pub fn read_whole(path: &Path, is_whole: impl Fn(&str) -> bool) -> io::Result<Option<String>> {
    let text = match fs::read(path) {
        Ok(bytes) => String::from_utf8(bytes).unwrap_or_default(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let text = text.trim().to_owned();
    Ok(Some(text).filter(|text| !text.is_empty() && is_whole(text)))
}

/// Removes a file, durably. Absence is fine.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => sync_directory(directory_of(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes sure that there is a directory, with all above it, and that their names are durable. Those that are made are
/// their owner's alone.
pub fn make_directory(path: &Path) -> io::Result<()> {
    let mut absent: Vec<PathBuf> = Vec::new();
    let mut next = path;
    while absent.len() < PARENTS_MAX && !next.as_os_str().is_empty() && !next.is_dir() {
        absent.push(next.to_owned());
        next = next.parent().unwrap_or(Path::new(""));
    }
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(DIRECTORY_MODE).create(path)?;
    for made in absent.iter().rev() {
        sync_directory(directory_of(made))?;
    }
    Ok(())
}

/// As [`make_directory`], and only its owner may enter it, also if it was there before.
pub fn make_private_directory(path: &Path) -> io::Result<()> {
    make_directory(path)?;
    fs::set_permissions(path, Permissions::from_mode(DIRECTORY_MODE))
}

fn holds(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    match fs::read(path) {
        Ok(found) if found == bytes => {}
        _ => return Ok(false),
    }
    let mode = fs::symlink_metadata(path)?.permissions().mode();
    Ok(mode & PERMISSION_BITS == FILE_MODE)
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(FILE_MODE)
        .open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn directory_of(path: &Path) -> &Path {
    let parent = path.parent();
    parent
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Removes what earlier writes of the same file have left when they died. Two processes do not write one file.
fn forget_unfinished(directory: &Path, name: &str) {
    let is_of = |entry: &fs::DirEntry| {
        let found = entry.file_name();
        let found = found.to_string_lossy();
        let rest = found.strip_prefix(TEMPORARY);
        rest.and_then(|rest| rest.split_once('-'))
            .is_some_and(|(_, of)| of == name)
    };
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries.filter(is_of) {
        // It does no harm where it is.
        let _ = fs::remove_file(entry.path());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & PERMISSION_BITS
    }

    #[test]
    fn a_file_is_its_owners_alone_and_leaves_nothing_beside_it() {
        // Fails when the mode is left to the umask, or when the temporary file stays.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        fs::write(&path, "open to all").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert!(ensure(&path, b"hush").unwrap());
        let found = (fs::read(&path).unwrap(), mode(&path));
        assert_eq!(found, (b"hush".to_vec(), FILE_MODE));
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

    #[test]
    fn what_a_death_left_unfinished_goes_with_the_next_write() {
        // Fails if unfinished files gather, or if those of another file are taken.
        let directory = tempfile::tempdir().unwrap();
        let left = directory.path().join(format!("{TEMPORARY}0-secret"));
        let other = directory.path().join(format!("{TEMPORARY}0-port"));
        for unfinished in [&left, &other] {
            fs::write(unfinished, "").unwrap();
        }
        replace(&directory.path().join("secret"), b"hush").unwrap();
        assert!(!left.exists() && other.exists());
    }

    #[test]
    fn an_empty_or_half_made_file_counts_as_absent() {
        // Fails if what a power loss has emptied is taken for a value.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("number");
        let read = || read_whole(&path, |text| text.parse::<u16>().is_ok()).unwrap();
        assert_eq!(read(), None);
        for torn in ["", " \n", "\0\0\0", "12x"] {
            fs::write(&path, torn).unwrap();
            assert_eq!(read(), None, "{torn:?}");
        }
        fs::write(&path, "12\n").unwrap();
        assert_eq!(read().as_deref(), Some("12"));
    }

    #[test]
    fn directories_are_made_with_all_above_them() {
        // Fails if one that is there already is an error, or those above are open to all.
        let directory = tempfile::tempdir().unwrap();
        let deep = directory.path().join("a/b/c");
        make_directory(&deep).unwrap();
        make_directory(&deep).unwrap();
        assert_eq!(mode(&directory.path().join("a")), DIRECTORY_MODE);
    }
}
