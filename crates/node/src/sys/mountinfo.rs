//! `/proc/self/mountinfo`: what is mounted where, according to the kernel.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::block::DeviceNumber;
use crate::error::{Context, Error, Result};

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The mount's own number.
    pub id: u64,
    /// The number of the mount that it is mounted on.
    pub parent: u64,
    /// The filesystem's device number. btrfs shows an anonymous one here: see [`Mount::is_of`].
    pub device: DeviceNumber,
    /// Which directory of the filesystem is seen.
    pub root: PathBuf,
    /// Where.
    pub mount_point: PathBuf,
    /// The options of this mount, such as `ro,relatime`.
    pub options: String,
    /// Whether mounts made below it appear in other namespaces (`shared:N`).
    pub shared: bool,
    /// The filesystem's name, such as `xfs`.
    pub fs_type: String,
    /// What was mounted, usually a device.
    pub source: PathBuf,
    /// The options of the filesystem itself.
    pub super_options: String,
}

impl Mount {
    /// Whether this mount cannot be written through.
    pub fn read_only(&self) -> bool {
        has_option(&self.options, "ro") || has_option(&self.super_options, "ro")
    }

    /// Whether the filesystem has turned itself read-only, which drivers do when they find damage. A mount that was
    /// requested read-only has the option on the mount as well.
    pub fn stopped_writing(&self) -> bool {
        let stopped = |option| has_option(&self.super_options, option);
        !has_option(&self.options, "ro") && (stopped("ro") || stopped("emergency_ro"))
    }

    /// Whether the filesystem says that it has shut itself down. Not all of them say so here.
    pub fn has_shut_down(&self) -> bool {
        has_option(&self.super_options, "shutdown")
    }

    /// The mount in a few words, for a sentence.
    pub fn describe(&self) -> String {
        let mode = if self.read_only() {
            "read-only"
        } else {
            "writable"
        };
        format!("{} from {} ({mode})", self.fs_type, self.source.display())
    }

    /// Whether the filesystem lives on the block device of that number.
    pub fn is_of(&self, device: DeviceNumber) -> bool {
        self.device == device
            || (self.fs_type == "btrfs"
                && DeviceNumber::of_block_device(&self.source).ok().flatten() == Some(device))
    }
}

fn has_option(options: &str, wanted: &str) -> bool {
    options.split(',').any(|option| option == wanted)
}

/// Every mount that this process sees, in the kernel's order: a later one at the same place hides
/// the earlier.
pub fn read() -> Result<Vec<Mount>> {
    read_file(Path::new("/proc/self/mountinfo"))
}

/// Every mount in a file of that format, such as another process's.
pub fn read_file(path: &Path) -> Result<Vec<Mount>> {
    let text = fs::read(path).context("read", path)?;
    parse(&text).map_err(|line| Error::KernelText {
        path: path.to_owned(),
        line,
    })
}

/// The mount that is visible at exactly `path`, which has to be free of symbolic links.
pub fn at<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    mounts.iter().rev().find(|mount| mount.mount_point == path)
}

/// The mounts of the filesystem on that block device.
pub fn of(mounts: &[Mount], device: DeviceNumber) -> impl Iterator<Item = &Mount> {
    mounts.iter().filter(move |mount| mount.is_of(device))
}

/// Parses the whole text, or returns the number of the first line that is not in the documented form.
pub fn parse(text: &[u8]) -> std::result::Result<Vec<Mount>, usize> {
    text.split(|byte| *byte == b'\n')
        .enumerate()
        .filter(|(_, line)| !line.is_empty())
        .map(|(index, line)| parse_line(line).ok_or(index + 1))
        .collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let device = DeviceNumber {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
    };
    let root = PathBuf::from(unescape(fields.next()?));
    let mount_point = PathBuf::from(unescape(fields.next()?));
    let options = text(fields.next()?);
    // Optional fields, as many as there are, up to a lone hyphen.
    let mut shared = false;
    loop {
        match fields.next()? {
            b"-" => break,
            field => shared |= field.starts_with(b"shared:"),
        }
    }
    let fs_type = text(fields.next()?);
    let source = PathBuf::from(unescape(fields.next()?));
    let super_options = text(fields.next()?);
    Some(Mount {
        id,
        parent,
        device,
        root,
        mount_point,
        options,
        shared,
        fs_type,
        source,
        super_options,
    })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn text(field: &[u8]) -> String {
    unescape(field).to_string_lossy().into_owned()
}

/// Undoes the kernel's escapes: a backslash and three octal digits for space, tab, newline, `#` and
/// backslash. A backslash that begins no such escape stands for itself.
pub fn unescape(field: &[u8]) -> OsString {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        match octal(rest) {
            Some(byte) => {
                plain.push(byte);
                rest = rest.get(4..).unwrap_or_default();
            }
            None => {
                plain.push(first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(plain)
}

fn octal(bytes: &[u8]) -> Option<u8> {
    match bytes {
        [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] => {
            Some((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'))
        }
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use proptest::prelude::*;

    use super::*;

    /// Escapes as the kernel does.
    fn escape(path: &OsStr) -> Vec<u8> {
        let mut escaped = Vec::new();
        for byte in path.as_bytes() {
            match byte {
                b' ' | b'\t' | b'\n' | b'\\' | b'#' => {
                    escaped.extend(format!("\\{byte:03o}").bytes())
                }
                other => escaped.push(*other),
            }
        }
        escaped
    }

    #[test]
    fn the_kernels_own_example_is_read_field_by_field() {
        // Fails if optional fields, the separator, or an escape are read wrongly.
        let line = b"36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=continue\n";
        let mounts = parse(line).unwrap();
        assert_eq!(
            mounts,
            [Mount {
                id: 36,
                parent: 35,
                device: DeviceNumber {
                    major: 98,
                    minor: 0
                },
                root: "/mnt1".into(),
                mount_point: "/mnt 2".into(),
                options: "rw,noatime".into(),
                shared: true,
                fs_type: "ext3".into(),
                source: "/dev/root".into(),
                super_options: "rw,errors=continue".into(),
            }]
        );
    }

    #[test]
    fn the_kernels_text_of_now_is_understood() {
        // Fails if the running kernel writes a form that the parser does not know.
        let mounts = read().unwrap();
        assert!(at(&mounts, Path::new("/")).is_some());
    }

    proptest! {
        #[test]
        fn any_path_survives_escape_and_unescape(path in proptest::collection::vec(1u8..=255, 0..64)) {
            // Fails if an escape is not undone, or undone twice.
            let path = OsString::from_vec(path);
            prop_assert_eq!(unescape(&escape(&path)), path);
        }

        #[test]
        fn any_mount_point_is_read_back(path in proptest::collection::vec(1u8..=255, 1..64)) {
            // Fails if a strange mount point shifts the fields after it.
            let path = OsString::from_vec(path);
            let mut line = b"1 0 7:3 / ".to_vec();
            line.extend(escape(&path));
            line.extend(b" rw - xfs /dev/loop3 rw\n");
            let mounts = parse(&line).unwrap();
            prop_assert_eq!(mounts[0].mount_point.as_os_str(), path.as_os_str());
            prop_assert_eq!(&mounts[0].fs_type, "xfs");
        }

        #[test]
        fn arbitrary_text_never_panics(text in proptest::collection::vec(any::<u8>(), 0..512)) {
            // Fails if some text makes the parser panic.
            let _ = parse(&text);
        }
    }
}
