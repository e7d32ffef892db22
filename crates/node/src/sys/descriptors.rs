//! Open descriptors across `exec`: which ones a program that is started from here gets, and how it takes them.
//!
//! Everything that safe Rust opens is closed by `exec` (`FD_CLOEXEC`, from its first moment). So a descriptor without
//! that mark came from outside: from whoever started this process, or from the program that ran in it before.

#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::{Errno, FdFlags, Result, fcntl_getfd, fcntl_setfd};

/// The first descriptor that is not standard input, output or error.
const FIRST: RawFd = 3;

/// Takes a descriptor that the program before this one has left open in this process, by its number. It is closed by
/// the next `exec` again. Fails if the number is that of nothing, or of something that this program has opened itself.
pub fn take(number: RawFd) -> Result<OwnedFd> {
    if number < FIRST {
        return Err(Errno::BADF);
    }
    mark(number, |flags| {
        if flags.contains(FdFlags::CLOEXEC) {
            Err(Errno::BADF)
        } else {
            Ok(())
        }
    })?;
    // SAFETY: it is open, and nobody else in this program owns it: whatever this program opens has had the mark since
    // it was opened, and this had none. It has one now, so it cannot be taken twice.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Has everything that is open now closed in programs that are started from here, but for standard input, output and
/// error. Returns how many descriptors would have been passed on.
pub fn keep_from_children() -> std::io::Result<usize> {
    let mut found = 0;
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.parse().ok());
        let Some(number) = number.filter(|number| *number >= FIRST) else {
            continue;
        };
        let marked = mark(number, |flags| {
            if flags.contains(FdFlags::CLOEXEC) {
                Err(Errno::EXIST)
            } else {
                Ok(())
            }
        });
        match marked {
            Ok(()) => found += 1,
            // It has the mark, or was closed meanwhile.
            Err(Errno::EXIST | Errno::BADF) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(found)
}

/// Has a descriptor closed by `exec` if `check` agrees to what its flags are.
fn mark(number: RawFd, check: impl FnOnce(FdFlags) -> Result<()>) -> Result<()> {
    // SAFETY: it is borrowed for these two calls alone, which only look at the mark of this number and set it. The
    // kernel refuses a number that is not open.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(descriptor)?;
    check(flags)?;
    fcntl_setfd(descriptor, flags | FdFlags::CLOEXEC)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Read;
    use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// Held by each test: the second one would mark what the first one has left open.
    static TURN: Mutex<()> = Mutex::new(());

    // Fails if something that this program owns can be taken, something can be taken twice, or what was taken is passed
    // on to the next program.
    #[test]
    fn only_what_was_left_open_is_taken_and_only_once() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut reader, writer) = std::io::pipe().unwrap();
        assert_eq!(take(writer.as_raw_fd()).err(), Some(Errno::BADF));
        fcntl_setfd(&writer, FdFlags::empty()).unwrap();
        let number = writer.into_raw_fd();
        let taken = take(number).unwrap();
        assert_eq!(take(number).err(), Some(Errno::BADF));
        assert_eq!(fcntl_getfd(&taken), Ok(FdFlags::CLOEXEC));
        rustix::io::write(&taken, b"here").unwrap();
        drop(taken);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "here");
        assert_eq!(take(0).err(), Some(Errno::BADF));
        assert_eq!(take(-1).err(), Some(Errno::BADF));
    }

    // Fails if a descriptor that came from outside is passed on, or standard error no longer is.
    #[test]
    fn nothing_but_the_standard_descriptors_is_passed_on() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let file = tempfile::tempfile().unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        assert!(keep_from_children().unwrap() >= 1);
        assert_eq!(fcntl_getfd(file.as_fd()), Ok(FdFlags::CLOEXEC));
        assert_eq!(fcntl_getfd(std::io::stderr()), Ok(FdFlags::empty()));
    }
}
