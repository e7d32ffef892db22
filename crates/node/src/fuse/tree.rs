//! The tree of the mount: a directory with one file. Pure functions of the volume's size and mode.
//!
//! Names and numbers never change, so a successor of a dead server shows the same tree. The name may be
//! cached; attributes never are (`valid` is zero), because the size among them grows.

use rustix::fs::FileType;
use zerocopy::IntoBytes;

use super::VOLUME_NAME;
use super::abi::{self, Attr, AttrOut, Dirent, EntryOut, OpenOut, StatfsOut};
use super::request::Node;

/// How long the kernel may know the file by its name without asking.
const ENTRY_VALID_SECONDS: u64 = 3600;
/// The file's preferred unit, and the unit in which a loop device on it gives back space.
const BLOCK_BYTES: u32 = 4096;
/// The unit in which `stat` counts.
const STAT_BLOCK_BYTES: u64 = 512;

/// What is shown of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) size: u64,
    pub(super) read_only: bool,
}

impl Shown {
    pub(super) fn attributes(self, node: Node) -> AttrOut {
        AttrOut {
            attr: self.attr(node),
            ..AttrOut::default()
        }
    }

    pub(super) fn entry(self) -> EntryOut {
        EntryOut {
            nodeid: abi::VOLUME,
            entry_valid: ENTRY_VALID_SECONDS,
            attr: self.attr(Node::Volume),
            ..EntryOut::default()
        }
    }

    pub(super) fn statistics(self) -> StatfsOut {
        StatfsOut {
            blocks: self.size / u64::from(BLOCK_BYTES),
            files: 1,
            bsize: BLOCK_BYTES,
            fragment_size: BLOCK_BYTES,
            name_len: 255,
            ..StatfsOut::default()
        }
    }

    fn attr(self, node: Node) -> Attr {
        let regular = FileType::RegularFile.as_raw_mode();
        match node {
            Node::Root => Attr {
                ino: abi::ROOT,
                mode: FileType::Directory.as_raw_mode() | 0o500,
                nlink: 2,
                block_size: BLOCK_BYTES,
                ..Attr::default()
            },
            Node::Volume => Attr {
                ino: abi::VOLUME,
                size: self.size,
                blocks: self.size / STAT_BLOCK_BYTES,
                mode: regular | if self.read_only { 0o400 } else { 0o600 },
                nlink: 1,
                block_size: BLOCK_BYTES,
                ..Attr::default()
            },
        }
    }
}

/// How the volume is opened: the same for everybody, with a handle that means nothing and so outlives us.
pub(super) fn opened() -> OpenOut {
    OpenOut {
        open_flags: abi::open::DIRECT_IO | abi::open::NOFLUSH | abi::open::PARALLEL_DIRECT_WRITES,
        ..OpenOut::default()
    }
}

/// The entries of the directory from number `offset` on, as many as fit.
pub(super) fn entries(offset: u64, len: u32) -> Vec<u8> {
    let room = usize::try_from(len).unwrap_or(usize::MAX);
    let all = [
        (abi::ROOT, abi::dirent::DIRECTORY, "."),
        (abi::ROOT, abi::dirent::DIRECTORY, ".."),
        (abi::VOLUME, abi::dirent::REGULAR, VOLUME_NAME),
    ];
    let mut listing = Vec::new();
    for ((ino, kind, name), number) in all.into_iter().zip(1u64..) {
        if number <= offset {
            continue;
        }
        let head = Dirent {
            ino,
            offset: number,
            name_len: u32::try_from(name.len()).unwrap_or_default(),
            kind,
        };
        let end = listing.len() + size_of::<Dirent>() + name.len();
        let padded = end.next_multiple_of(8);
        if padded > room {
            break;
        }
        listing.extend_from_slice(head.as_bytes());
        listing.extend_from_slice(name.as_bytes());
        listing.resize(padded, 0);
    }
    listing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_goes_on_where_it_stopped() {
        // Fails if an entry is told twice or left out when the kernel asks with little room.
        let whole = entries(0, 4096);
        let first = entries(0, 40);
        assert_eq!(first.len(), 32);
        let rest = entries(1, 4096);
        assert_eq!([first, rest].concat(), whole);
        assert!(entries(3, 4096).is_empty());
        assert!(entries(0, 0).is_empty());
    }

    #[test]
    fn attributes_are_never_cached() {
        // Fails if the kernel may keep a size: it would be the old one after a growth.
        let shown = Shown {
            size: 1 << 30,
            read_only: false,
        };
        let (entry, attributes) = (shown.entry(), shown.attributes(Node::Volume));
        assert_eq!((entry.attr_valid, entry.attr_valid_ns), (0, 0));
        assert_eq!((attributes.valid, attributes.valid_ns), (0, 0));
        assert_eq!(entry.attr.size, 1 << 30);
    }
}
