//! A Unix socket that only its owner can use, made so that nobody can get in between.
//!
//! It is made under another name, given its mode, and then renamed to its own: at no moment can anybody else connect, and
//! a socket that a dead process left is replaced in one step.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

use crate::error::Error;

/// Root alone: whoever can connect can delete volumes.
const MODE: u32 = 0o600;

/// A socket that is listened on. Its name goes with it.
#[derive(Debug)]
pub struct Socket {
    pub(crate) listener: UnixListener,
    pub(crate) name: Name,
}

/// The name of a socket, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Name(pub(crate) PathBuf);

impl Drop for Name {
    fn drop(&mut self) {
        // If it is gone already, somebody else has removed it.
        let _ = fs::remove_file(&self.0);
    }
}

/// Listens at `path`. A socket there at which nobody answers is replaced; anything else is an error.
pub async fn listen(path: &Path) -> Result<Socket, Error> {
    let no_path = || Error::NoPath {
        path: path.to_owned(),
    };
    let refused = |source| Error::Socket {
        path: path.to_owned(),
        source,
    };
    let (Some(directory), Some(name), true) = (path.parent(), path.file_name(), path.is_absolute())
    else {
        return Err(no_path());
    };
    if !directory.is_dir() {
        return Err(no_path());
    }
    require_free(path).await?;
    let unfinished = directory.join(format!(
        ".{}-{}",
        name.to_string_lossy(),
        std::process::id()
    ));
    let listener = bind(&unfinished).and_then(|listener| {
        fs::rename(&unfinished, path)?;
        Ok(listener)
    });
    match listener {
        Ok(listener) => Ok(Socket {
            listener,
            name: Name(path.to_owned()),
        }),
        Err(error) => {
            let _ = fs::remove_file(&unfinished);
            Err(refused(error))
        }
    }
}

/// Makes a socket that is its owner's alone. Between the two calls it has a name that nobody knows.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(MODE))?;
    Ok(listener)
}

async fn require_free(path: &Path) -> Result<(), Error> {
    let path = path.to_owned();
    match fs::symlink_metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(Error::Socket { path, source }),
        Ok(found) if !found.file_type().is_socket() => Err(Error::NotASocket { path }),
        Ok(_) => match UnixStream::connect(&path).await {
            Ok(_) => Err(Error::Answered { path }),
            Err(_) => Ok(()),
        },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    // Fails if others can use the socket, if its name stays behind, or if an unfinished one does.
    #[tokio::test]
    async fn a_socket_is_its_owners_alone_and_goes_with_its_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("csi.sock");
        let socket = listen(&path).await.unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(UnixStream::connect(&path).await.is_ok());
        drop(socket);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    // Fails if a service takes the socket of one that runs, or does not start after one that was killed.
    #[tokio::test]
    async fn a_socket_that_nobody_answers_at_is_replaced_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("csi.sock");
        let first = listen(&path).await.unwrap();
        assert!(matches!(listen(&path).await, Err(Error::Answered { .. })));
        let Socket { listener, name } = first;
        std::mem::forget(name);
        drop(listener);
        assert!(path.exists(), "as after a kill");
        let second = listen(&path).await.unwrap();
        drop(second);
        fs::write(&path, "somebody's file").unwrap();
        assert!(matches!(listen(&path).await, Err(Error::NotASocket { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "somebody's file");
    }

    // Fails if a path that can be no socket is not refused in words.
    #[tokio::test]
    async fn a_socket_needs_an_absolute_path_in_a_directory() {
        for path in ["csi.sock", "/", "/nonexistent-of-trellis/csi.sock"] {
            let refused = listen(Path::new(path)).await;
            assert!(matches!(refused, Err(Error::NoPath { .. })), "{path}");
        }
    }
}
