//! Names of replicas: DNS labels, so that a name is never a path.

use crate::{Error, Result};

/// The longest name of a replica, which is the longest DNS label.
pub const NAME_LENGTH_MAX: usize = 63;

const MAKING: &str = ".making-";
const REMOVING: &str = ".removing-";

/// What an entry of the `replicas` directory is, by its name alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry<'a> {
    /// A replica that has been published.
    Published(&'a str),
    /// A creation of that replica that was not finished.
    Making(&'a str),
    /// A removal of that replica that was not finished.
    Removing(&'a str),
    /// Not ours.
    Stranger,
}

impl<'a> Entry<'a> {
    pub(super) fn of(file_name: &'a str) -> Entry<'a> {
        if is_label(file_name) {
            return Entry::Published(file_name);
        }
        if let Some(name) = file_name.strip_prefix(MAKING).filter(|n| is_label(n)) {
            return Entry::Making(name);
        }
        if let Some(name) = file_name.strip_prefix(REMOVING).filter(|n| is_label(n)) {
            return Entry::Removing(name);
        }
        Entry::Stranger
    }
}

pub(super) fn validate(name: &str) -> Result<()> {
    if is_label(name) {
        return Ok(());
    }
    Err(Error::NameNotAllowed {
        name: name.to_owned(),
    })
}

/// The directory in which a replica of that name is built.
pub(super) fn making(name: &str) -> String {
    format!("{MAKING}{name}")
}

/// The directory in which a replica of that name is taken apart.
pub(super) fn removing(name: &str) -> String {
    format!("{REMOVING}{name}")
}

fn is_label(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=NAME_LENGTH_MAX).contains(&name.len())
        && name.bytes().all(allowed)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_could_leave_the_directory_is_refused() {
        // Fails if a separator, a dot, an empty or an overlong name passes as a label.
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "../a",
            "a.b",
            "-a",
            "a-",
            "A",
            "a b",
            "a\0",
            "é",
            &"a".repeat(64),
        ] {
            assert!(validate(name).is_err(), "{name:?} was accepted");
        }
        for name in ["a", "0", "pvc-1-r0", &"a".repeat(63)] {
            assert!(validate(name).is_ok(), "{name:?} was refused");
        }
    }

    #[test]
    fn temporary_names_are_told_from_published_ones_and_strangers() {
        // Fails if cleaning a pool could take a stranger's directory for one of its own leftovers.
        assert_eq!(Entry::of(&making("a")), Entry::Making("a"));
        assert_eq!(Entry::of(&removing("a")), Entry::Removing("a"));
        assert_eq!(Entry::of("a"), Entry::Published("a"));
        for name in [
            ".making-",
            ".making-A",
            ".removing-../x",
            "lost+found",
            ".x",
        ] {
            assert_eq!(Entry::of(name), Entry::Stranger, "{name:?}");
        }
    }
}
