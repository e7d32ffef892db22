//! The table of known signatures, and the order in which they count.
//!
//! Signatures at the very beginning count first: they belong to what owns the whole device. Then come
//! the filesystems that grow. What lies inside the area of such a filesystem is its user's data and
//! may look like anything; what lies beyond its end (a RAID superblock, a backup partition table) means
//! that the filesystem is a part of something else.

use super::{Content, Foreign, Windows};
use crate::filesystem::{FilesystemKind, Geometry, State, superblock};

/// A magic at a fixed offset from the beginning.
struct Magic {
    offset: u64,
    bytes: &'static [u8],
    what: &'static str,
}

const fn magic(offset: u64, bytes: &'static [u8], what: &'static str) -> Magic {
    Magic {
        offset,
        bytes,
        what,
    }
}

/// Owners of the whole device, before any filesystem.
const OWNERS: &[Magic] = &[
    magic(0, b"LUKS\xba\xbe\x00\x01", "a LUKS1 encrypted volume"),
    magic(0, b"LUKS\xba\xbe\x00\x02", "a LUKS2 encrypted volume"),
    magic(0, b"LUKS\xba\xbe", "a LUKS encrypted volume"),
    magic(0, b"LABELONE", "an LVM physical volume"),
    magic(512, b"LABELONE", "an LVM physical volume"),
    magic(0, b"\xfc\x4e\x2b\xa9", "a member of an md RAID (1.1)"),
    magic(512, b"EFI PART", "a GPT partition table"),
    magic(0, b"hsqs", "a squashfs image"),
    magic(0, b"QFI\xfb", "a qcow2 image"),
    magic(3, b"NTFS    ", "an NTFS filesystem"),
    magic(3, b"EXFAT   ", "an exFAT filesystem"),
    magic(82, b"FAT32   ", "a FAT filesystem"),
    magic(54, b"FAT16   ", "a FAT filesystem"),
    magic(54, b"FAT12   ", "a FAT filesystem"),
    magic(54, b"FAT     ", "a FAT filesystem"),
];

/// Everything else with a fixed place near the beginning; counted if there is no filesystem of ours.
const OTHERS: &[Magic] = &[
    magic(1024, b"LABELONE", "an LVM physical volume"),
    magic(1536, b"LABELONE", "an LVM physical volume"),
    magic(4096, b"EFI PART", "a GPT partition table"),
    magic(4096, b"\xfc\x4e\x2b\xa9", "a member of an md RAID (1.2)"),
    magic(
        4096 + 24,
        b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
        "a bcache device",
    ),
    magic(
        4096 + 24,
        b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef",
        "a bcachefs device",
    ),
    magic(1024, b"\x10\x20\xf5\xf2", "an F2FS filesystem"),
    magic(1024, b"\xe2\xe1\xf5\xe0", "an EROFS image"),
    magic(32_769, b"CD001", "an ISO 9660 image"),
    magic(4086, b"SWAPSPACE2", "swap space"),
    magic(4086, b"SWAP-SPACE", "swap space"),
    magic(8182, b"SWAPSPACE2", "swap space"),
    magic(16_374, b"SWAPSPACE2", "swap space"),
    magic(32_758, b"SWAPSPACE2", "swap space"),
    magic(65_526, b"SWAPSPACE2", "swap space"),
];

/// Copies of superblocks without their original: what is left of a filesystem, or of an mkfs that did
/// not finish.
const COPIES: &[Magic] = &[
    magic(
        (64 << 20) | 0x40,
        b"_BHRfS_M",
        "a copy of a btrfs superblock",
    ),
    magic(
        (64 << 20) | 0x40,
        b"!BHRfS_M",
        "a copy of an unfinished btrfs superblock",
    ),
    magic(
        (128 << 20) | 0x38,
        b"\x53\xef",
        "a copy of an ext superblock",
    ),
    magic(
        (8193 << 10) | 0x38,
        b"\x53\xef",
        "a copy of an ext superblock",
    ),
];

/// Where the second header of a LUKS2 volume may be.
const LUKS2_SECOND: [u64; 9] = [
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
];

/// A ZFS label has its uberblocks in its second half, at multiples of a KiB.
const ZFS_LABEL: u64 = 256 << 10;
const ZFS_MAGIC: u64 = 0x00ba_b10c;

pub(super) fn classify(windows: &Windows) -> Content {
    if let Some(what) = first_of(windows, OWNERS) {
        return known(what);
    }
    if let Some(content) = filesystem(windows) {
        return content;
    }
    let end = at_the_end(windows).find(|(offset, bytes, _)| windows.has(*offset, bytes));
    let other = first_of(windows, OTHERS)
        .or(end.map(|(_, _, what)| what))
        .or_else(|| zfs(windows).then_some("a ZFS device"))
        .or_else(|| {
            luks2_second(windows).then_some("a LUKS2 encrypted volume with a damaged first header")
        })
        .or_else(|| {
            windows
                .has(510, b"\x55\xaa")
                .then_some("an MBR partition table")
        });
    if let Some(what) = other {
        return known(what);
    }
    match (first_of(windows, COPIES), windows.first_data()) {
        (Some(what), _) => torn(what),
        (None, Some(offset)) => Content::Foreign {
            what: Foreign::Unrecognised { offset },
        },
        (None, None) => Content::Empty,
    }
}

/// The filesystem of ours at the beginning of the device, unless it is a part of something else.
fn filesystem(windows: &Windows) -> Option<Content> {
    let (geometry, state): (Geometry, State) = if windows.has(0, superblock::XFS_MAGIC) {
        match windows
            .get(0, superblock::XFS_BYTES)
            .and_then(superblock::xfs)
        {
            Some(found) => found,
            None => return Some(torn("a damaged xfs superblock")),
        }
    } else if windows.has(1024 + 0x38, &superblock::EXT_MAGIC) {
        match windows
            .get(1024, superblock::EXT_BYTES)
            .and_then(superblock::ext)
        {
            Some((Some(geometry), state)) => (geometry, state),
            Some((None, _)) => return Some(known("an ext2 filesystem")),
            None => return Some(torn("a damaged ext superblock")),
        }
    } else {
        windows
            .get(superblock::BTRFS_OFFSET, superblock::BTRFS_BYTES)
            .and_then(superblock::btrfs)?
    };
    let beyond = at_the_end(windows)
        .find(|(offset, bytes, _)| *offset >= geometry.size().get() && windows.has(*offset, bytes));
    if let Some((_, _, what)) = beyond {
        return Some(known(what));
    }
    let kind: FilesystemKind = geometry.kind();
    Some(Content::Filesystem {
        kind,
        size: geometry.size(),
        uuid: geometry.uuid(),
        state,
        geometry,
    })
}

/// Signatures whose place is counted from the end of the device.
fn at_the_end(windows: &Windows) -> impl Iterator<Item = (u64, &'static [u8], &'static str)> {
    const MD: &[u8] = b"\xfc\x4e\x2b\xa9";
    const MD_BIG_ENDIAN: &[u8] = b"\xa9\x2b\x4e\xfc";
    let size = windows.size;
    let from_end = |distance: u64| size.checked_sub(distance);
    let md_10 = (size / 512)
        .checked_sub(16)
        .map(|sector| (sector & !7) * 512);
    let md_090 = (size & !0xffff).checked_sub(0x1_0000);
    [
        (
            from_end(512),
            b"EFI PART".as_slice(),
            "a backup GPT partition table",
        ),
        (from_end(4096), b"EFI PART", "a backup GPT partition table"),
        (md_10, MD, "a member of an md RAID (1.0)"),
        (md_090, MD, "a member of an md RAID (0.90)"),
        (md_090, MD_BIG_ENDIAN, "a member of an md RAID (0.90)"),
    ]
    .into_iter()
    .filter_map(|(offset, bytes, what)| Some((offset?, bytes, what)))
}

/// Whether one of the four labels of a ZFS device has an uberblock.
fn zfs(windows: &Windows) -> bool {
    let end = windows.size / ZFS_LABEL * ZFS_LABEL;
    let labels = [
        Some(0),
        Some(ZFS_LABEL),
        end.checked_sub(2 * ZFS_LABEL),
        end.checked_sub(ZFS_LABEL),
    ];
    labels.into_iter().flatten().any(|label| {
        (128..256).map(|kib| label + kib * 1024).any(|offset| {
            windows.has(offset, &ZFS_MAGIC.to_le_bytes())
                || windows.has(offset, &ZFS_MAGIC.to_be_bytes())
        })
    })
}

fn luks2_second(windows: &Windows) -> bool {
    LUKS2_SECOND
        .into_iter()
        .any(|offset| windows.has(offset, b"SKUL\xba\xbe"))
}

fn first_of(windows: &Windows, table: &[Magic]) -> Option<&'static str> {
    table
        .iter()
        .find(|magic| windows.has(magic.offset, magic.bytes))
        .map(|magic| magic.what)
}

fn known(what: &'static str) -> Content {
    Content::Foreign {
        what: Foreign::Known(what),
    }
}

fn torn(what: &'static str) -> Content {
    Content::Foreign {
        what: Foreign::Torn(what),
    }
}
