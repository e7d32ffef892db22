//! Whether a volume holds something that is not ours.
//!
//! A volume counts as empty only if its beginning and its end are zeros and nothing is at the places where copies of
//! superblocks are kept. What else there is gets a name if it has one, so that a person knows what would be lost.

use std::fmt;
use std::io;

use crate::medium::{BytesAt, is_zero};

/// How much of the beginning and of the end is read. The header's area and the beginning of the disk lie within.
const HEAD_BYTES: u64 = 2 << 20;
const TAIL_BYTES: u64 = 1 << 20;
const PIECE_BYTES: u64 = 64 << 10;

/// Copies of superblocks: ext with 1 KiB and 4 KiB blocks, LUKS2, btrfs, ext.
const COPIES_AT: [u64; 5] = [8193 << 10, 32 << 20, 4 << 20, 64 << 20, 128 << 20];
const COPY_BYTES: u64 = 4096;

/// Something on a volume that is not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignData {
    /// It is known; the text names it with its article.
    Known(&'static str),
    /// It is not known. Its first byte is here.
    At(u64),
}

impl fmt::Display for ForeignData {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ForeignData::Known(what) => out.write_str(what),
            ForeignData::At(offset) => write!(out, "data that is not known here, at byte {offset}"),
        }
    }
}

/// Signatures near the beginning, the owners of whole devices first.
const SIGNATURES: &[(u64, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "a LUKS encrypted volume"),
    (0, b"LABELONE", "an LVM physical volume"),
    (512, b"LABELONE", "an LVM physical volume"),
    (1024, b"LABELONE", "an LVM physical volume"),
    (1536, b"LABELONE", "an LVM physical volume"),
    (0, b"\xfc\x4e\x2b\xa9", "a member of an md RAID"),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of an md RAID"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (0, b"XFSB", "an xfs filesystem"),
    (1080, b"\x53\xef", "an ext filesystem"),
    (0x1_0040, b"_BHRfS_M", "a btrfs filesystem"),
    (0, b"hsqs", "a squashfs image"),
    (0, b"QFI\xfb", "a qcow2 image"),
    (3, b"NTFS    ", "an NTFS filesystem"),
    (3, b"EXFAT   ", "an exFAT filesystem"),
    (82, b"FAT32   ", "a FAT filesystem"),
    (54, b"FAT1", "a FAT filesystem"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS filesystem"),
    (1024, b"\xe2\xe1\xf5\xe0", "an EROFS image"),
    (32_769, b"CD001", "an ISO 9660 image"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4120, b"\xc6\x85\x73\xf6", "a bcache or bcachefs device"),
    (510, b"\x55\xaa", "a partition table"),
];

/// What is on the medium, if anything. The slots of our own headers do not count if they were torn.
pub fn find(medium: &dyn BytesAt, ignoring: &[(u64, u64)]) -> io::Result<Option<ForeignData>> {
    let size = medium.size()?;
    for (offset, magic, what) in SIGNATURES {
        let mut found = [0; 16];
        let found = &mut found[..magic.len()];
        let read = medium.read(found, *offset)?;
        let ignored = ignoring
            .iter()
            .any(|(start, end)| (*start..*end).contains(offset));
        if read == magic.len() && found == *magic && !ignored {
            return Ok(Some(ForeignData::Known(what)));
        }
    }
    let head = (0, size.min(HEAD_BYTES));
    let tail = (size.saturating_sub(TAIL_BYTES), size);
    let copies = COPIES_AT.map(|at| (at.min(size), at.saturating_add(COPY_BYTES).min(size)));
    for (start, end) in [head, tail].into_iter().chain(copies) {
        if let Some(at) = first_data(medium, start, end, ignoring)? {
            return Ok(Some(ForeignData::At(at)));
        }
    }
    Ok(None)
}

fn first_data(
    medium: &dyn BytesAt,
    start: u64,
    end: u64,
    ignoring: &[(u64, u64)],
) -> io::Result<Option<u64>> {
    let mut buffer = vec![0; usize::try_from(PIECE_BYTES).unwrap_or_default()];
    let mut at = start;
    while at < end {
        let wanted = usize::try_from(PIECE_BYTES.min(end - at)).unwrap_or_default();
        medium.read_whole(&mut buffer[..wanted], at)?;
        if is_zero(&buffer[..wanted]) {
            at += PIECE_BYTES;
            continue;
        }
        let data = (at..).zip(&buffer[..wanted]).find(|(at, byte)| {
            **byte != 0
                && !ignoring
                    .iter()
                    .any(|(start, end)| (*start..*end).contains(at))
        });
        if let Some((at, _)) = data {
            return Ok(Some(at));
        }
        at += PIECE_BYTES;
    }
    Ok(None)
}
