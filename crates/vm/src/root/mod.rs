//! Persistent roots: an image on a volume, copied once and then the guest's own.
//!
//! ```text
//!   look ──▶ a version that is not known? refuse, touch nothing
//!     │
//!     ├── whole, this image ───────────────▶ boot from it
//!     ├── whole, another image ──▶ the caller's rule: refuse (default) · keep · replace
//!     ├── half of an image ────────────────▶ copy again
//!     ├── something else ──▶ refuse, unless the caller allows it
//!     └── nothing
//!            │  too small? refuse, touch nothing
//!            ▼
//!     header: WRITING ──sync──▶ copy ──sync──▶ header: READY ──sync──▶ boot from it
//! ```
//!
//! Invariant: a header that says READY lies over a whole image. Between the two headers a death leaves WRITING, and the
//! next start copies again.
//! Invariant: until the header says WRITING nothing was written at all.
//!
//! Virtlet wrote its header before it looked at the size and before it copied, overwrote what it did not know, and a
//! newer version with it. Its roots can be used as they are: their disk begins at 512 bytes. It is the caller who makes sure
//! that one process at a time works on a volume, on one node.
//!
//! What lies beyond the end of the image is left as it is. On a volume that was used before, a guest that grows its last
//! partition finds old bytes there, as on any used disk.

mod foreign;
mod header;

#[cfg(test)]
mod tests;

use std::io;

use trellis_api::Bytes;
use trellis_api::step::{Step, reached};
use uuid::Uuid;

use crate::ImageDigest;
use crate::image::ImageFormat;
use crate::medium::{BytesAt, Medium, is_zero};
use crate::qcow2::{Qcow2Error, Qcow2Image, Run};

pub use foreign::ForeignData;
pub use header::{
    DATA_OFFSET, DATA_OFFSET_VIRTLET, HEADER_BYTES, RootHeader, RootState, Sector, VERSION,
};

use header::SLOTS;

/// The annotation that says what to do when the image of a pod is not the one that its root was made from.
pub const CHANGED_IMAGE_ANNOTATION: &str = "trellis.dev/root-image-changed";
/// The annotation that allows overwriting a volume with something else on it.
pub const OVERWRITE_ANNOTATION: &str = "trellis.dev/root-overwrite";

/// How much is copied at a time at most.
const PIECE_BYTES: u64 = 1 << 20;
/// How much of a raw image is read at a time. Holes that are smaller than this are not seen.
const RAW_PIECE_BYTES: u64 = 64 << 10;
/// QEMU reads a raw file in sectors; what is missing in the last one reads as zeros.
const SECTOR: Bytes = Bytes::new(512);

/// What to do if the root was made from another image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ChangedImage {
    /// Do not start, and say so. Nobody loses a disk because a tag has moved.
    #[default]
    Refuse,
    /// Boot from the disk as it is.
    Keep,
    /// Throw the disk away and begin with the new image.
    Replace,
}

impl ChangedImage {
    /// What the annotation [`CHANGED_IMAGE_ANNOTATION`] says.
    pub fn from_name(name: &str) -> Option<ChangedImage> {
        match name {
            "refuse" => Some(ChangedImage::Refuse),
            "keep" => Some(ChangedImage::Keep),
            "replace" => Some(ChangedImage::Replace),
            _ => None,
        }
    }
}

/// What a caller allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RootRules {
    /// If the root was made from another image.
    pub changed_image: ChangedImage,
    /// Whether something else on the volume may be overwritten.
    pub overwrite_foreign: bool,
}

/// The image that a root shall be made from.
#[derive(Clone, Copy)]
pub struct RootImage<'a> {
    /// Its digest.
    pub digest: ImageDigest,
    /// Its file.
    pub file: &'a dyn BytesAt,
    /// How the file holds the disk.
    pub format: ImageFormat,
}

/// How far a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyProgress {
    /// How much of the disk is done.
    pub done: Bytes,
    /// All of it.
    pub of: Bytes,
}

/// A root that a guest can boot from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PreparedRoot {
    /// Where the guest's disk begins on the volume.
    pub data_offset: Bytes,
    /// The image that the disk was made from. With [`ChangedImage::Keep`] it may be another than the one asked for.
    pub digest: ImageDigest,
    /// Which root this is. Virtlet's have no identity.
    pub uuid: Option<Uuid>,
    /// What was done.
    pub outcome: RootOutcome,
}

/// What was done to a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootOutcome {
    /// Nothing; it was ready.
    Unchanged,
    /// Nothing, although the image is another one now.
    Kept,
    /// The image was copied to a volume without one.
    Written,
    /// A copy that had not come to its end was made again.
    Finished,
    /// The image was copied over another one.
    Replaced,
}

/// Why there is no root.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// The header is newer than this program.
    #[error(
        "the volume holds a persistent root of version {version}, and this program knows versions 1 to {VERSION}; nothing was touched. Start the VM with the program that made it"
    )]
    FutureVersion {
        /// Its version.
        version: u16,
    },
    /// The root was made from another image.
    #[error(
        "the volume's root was made from image {found}, and the pod asks for {wanted}; set the annotation {CHANGED_IMAGE_ANNOTATION} to \"keep\" to boot from it as it is, or to \"replace\" to lose it"
    )]
    OtherImage {
        /// The image that it was made from.
        found: ImageDigest,
        /// The image that the pod asks for.
        wanted: ImageDigest,
    },
    /// Something else is on the volume.
    #[error(
        "the volume holds {what}, which is no root of a VM; nothing was touched. Set the annotation {OVERWRITE_ANNOTATION} to \"true\" to lose it"
    )]
    Foreign {
        /// What.
        what: ForeignData,
    },
    /// The header is damaged, and there is data behind it.
    #[error(
        "the header of the volume's root is damaged, and a disk may lie behind it; nothing was touched. Set the annotation {OVERWRITE_ANNOTATION} to \"true\" to lose it"
    )]
    DamagedHeader,
    /// The volume cannot hold the image.
    #[error(
        "the volume has {have} and the image needs {need}, of which {DATA_OFFSET} are for the header; nothing was touched. Grow the claim to {need}"
    )]
    TooSmall {
        /// The size of the volume.
        have: Bytes,
        /// The size that it needs.
        need: Bytes,
    },
    /// The header says what cannot be.
    #[error(
        "the header of the volume's root says that its disk begins at {data_offset}, and the volume has {have}"
    )]
    Outside {
        /// Where the disk begins.
        data_offset: Bytes,
        /// The size of the volume.
        have: Bytes,
    },
    /// The image has no bytes, or too many.
    #[error("the image holds a disk of {bytes} bytes, which cannot be a root")]
    ImageSize {
        /// How many.
        bytes: u64,
    },
    /// The image cannot be used.
    #[error("the image cannot be used")]
    Image(#[source] Qcow2Error),
    /// The image cannot be read.
    #[error("the image cannot be read")]
    ReadImage(#[source] io::Error),
    /// The volume cannot be read.
    #[error("the volume cannot be read")]
    Read(#[source] io::Error),
    /// The volume cannot be written.
    #[error("the volume cannot be written")]
    Write(#[source] io::Error),
}

/// What was found on a volume.
struct Found {
    size: Bytes,
    /// The header that counts, and its slot.
    header: Option<(usize, RootHeader)>,
    state: FoundState,
    /// The highest generation in any slot.
    generation: u64,
}

enum FoundState {
    Nothing,
    Foreign(ForeignData),
    /// A header of ours that cannot be read, with data behind it.
    Damaged,
    Unfinished,
    Whole {
        digest: ImageDigest,
        data_offset: Bytes,
        uuid: Option<Uuid>,
    },
}

/// Makes a volume ready to boot from, and says where the guest's disk begins on it.
///
/// It can be repeated after any death. `progress` is called after every piece that is copied.
pub fn prepare(
    volume: &dyn Medium,
    image: &RootImage<'_>,
    rules: RootRules,
    progress: &mut dyn FnMut(CopyProgress),
) -> Result<PreparedRoot, RootError> {
    let found = look(volume)?;
    let outcome = match &found.state {
        FoundState::Whole {
            digest,
            data_offset,
            uuid,
        } => {
            let kept = |outcome| PreparedRoot {
                data_offset: *data_offset,
                digest: *digest,
                uuid: *uuid,
                outcome,
            };
            if *data_offset >= found.size {
                let (data_offset, have) = (*data_offset, found.size);
                return Err(RootError::Outside { data_offset, have });
            }
            match rules.changed_image {
                _ if *digest == image.digest => return Ok(kept(RootOutcome::Unchanged)),
                ChangedImage::Keep => return Ok(kept(RootOutcome::Kept)),
                ChangedImage::Replace => RootOutcome::Replaced,
                ChangedImage::Refuse => {
                    let (found, wanted) = (*digest, image.digest);
                    return Err(RootError::OtherImage { found, wanted });
                }
            }
        }
        FoundState::Foreign(what) if !rules.overwrite_foreign => {
            return Err(RootError::Foreign { what: *what });
        }
        FoundState::Damaged if !rules.overwrite_foreign => return Err(RootError::DamagedHeader),
        FoundState::Unfinished => RootOutcome::Finished,
        FoundState::Nothing | FoundState::Foreign(_) | FoundState::Damaged => RootOutcome::Written,
    };
    let written = write(volume, image, &found, progress)?;
    Ok(PreparedRoot {
        data_offset: written.data_offset,
        digest: written.digest,
        uuid: Some(written.uuid),
        outcome,
    })
}

/// Looks at a volume without changing it. The version counts before everything else.
fn look(volume: &dyn Medium) -> Result<Found, RootError> {
    let size = Bytes::new(volume.size().map_err(RootError::Read)?);
    let mut sectors = [Sector::Other; 2];
    for (sector, offset) in sectors.iter_mut().zip(SLOTS) {
        let mut bytes = [0; HEADER_BYTES];
        volume.read(&mut bytes, offset).map_err(RootError::Read)?;
        *sector = Sector::read(&bytes);
    }
    let ours = sectors
        .iter()
        .enumerate()
        .filter_map(|(slot, sector)| match sector {
            Sector::Ours(header) => Some((slot, *header)),
            _ => None,
        });
    let newest = ours.max_by_key(|(_, header)| header.generation);
    let generation = newest.map_or(0, |(_, header)| header.generation);
    let found = |header: Option<(usize, RootHeader)>, state| Found {
        size,
        header,
        state,
        generation,
    };
    match sectors {
        [Sector::Unknown { version }, _] => Err(RootError::FutureVersion { version }),
        // The second slot of Virtlet's roots is a part of the guest's disk.
        [Sector::Virtlet { digest }, _] => {
            let data_offset = DATA_OFFSET_VIRTLET;
            let state = FoundState::Whole {
                digest,
                data_offset,
                uuid: None,
            };
            Ok(found(None, state))
        }
        [Sector::Ours(_) | Sector::Torn, Sector::Unknown { version }] => {
            Err(RootError::FutureVersion { version })
        }
        [Sector::Ours(_) | Sector::Torn, _] => {
            let Some((slot, header)) = newest else {
                return torn(volume).map(|state| found(None, state));
            };
            let state = match header.state {
                RootState::Writing => FoundState::Unfinished,
                RootState::Ready => FoundState::Whole {
                    digest: header.digest,
                    data_offset: header.data_offset,
                    uuid: Some(header.uuid),
                },
            };
            Ok(found(Some((slot, header)), state))
        }
        // A slot counts only behind a header: what has taken the first sector has taken the volume.
        [Sector::Other, _] => {
            let foreign = foreign::find(volume, &[]).map_err(RootError::Read)?;
            let state = foreign.map_or(FoundState::Nothing, FoundState::Foreign);
            Ok(found(None, state))
        }
    }
}

/// No slot can be read. If nothing lies behind them, the very first header was torn and there was never an image.
fn torn(volume: &dyn Medium) -> Result<FoundState, RootError> {
    let header = u64::try_from(HEADER_BYTES).unwrap_or_default();
    let slots = SLOTS.map(|at| (at, at + header));
    let behind = foreign::find(volume, &slots).map_err(RootError::Read)?;
    Ok(behind.map_or(FoundState::Unfinished, |_| FoundState::Damaged))
}

/// Copies the image. Nothing is written before everything that can be checked was checked.
fn write(
    volume: &dyn Medium,
    image: &RootImage<'_>,
    found: &Found,
    progress: &mut dyn FnMut(CopyProgress),
) -> Result<RootHeader, RootError> {
    let mut source = Source::open(image)?;
    let image_size = source.disk_size()?;
    let have = found.size;
    let need = DATA_OFFSET.checked_add(image_size);
    let need = need.ok_or(RootError::ImageSize {
        bytes: image_size.get(),
    })?;
    if have < need {
        return Err(RootError::TooSmall { have, need });
    }
    let writing = RootHeader {
        digest: image.digest,
        state: RootState::Writing,
        generation: found
            .generation
            .checked_add(1)
            .ok_or(RootError::DamagedHeader)?,
        data_offset: DATA_OFFSET,
        image_size,
        uuid: Uuid::new_v4(),
    };
    let ready = RootHeader {
        state: RootState::Ready,
        generation: writing
            .generation
            .checked_add(1)
            .ok_or(RootError::DamagedHeader)?,
        ..writing
    };
    // The header that counts stays until the next one does.
    let slot = found.header.map_or(0, |(slot, _)| 1 - slot);
    put_header(volume, &writing, slot)?;
    reached(Step::RootMarked);
    copy(volume, &mut source, image_size, progress)?;
    volume.sync().map_err(RootError::Write)?;
    reached(Step::RootCopied);
    put_header(volume, &ready, 1 - slot)?;
    reached(Step::RootReady);
    Ok(ready)
}

fn put_header(volume: &dyn Medium, header: &RootHeader, slot: usize) -> Result<(), RootError> {
    let written = volume.write(&header.to_sector(), SLOTS[slot]);
    written
        .and_then(|()| volume.sync())
        .map_err(RootError::Write)
}

fn copy(
    volume: &dyn Medium,
    source: &mut Source<'_>,
    size: Bytes,
    progress: &mut dyn FnMut(CopyProgress),
) -> Result<(), RootError> {
    let mut scratch = vec![0; usize::try_from(PIECE_BYTES).unwrap_or_default()];
    let mut at = 0;
    while at < size.get() {
        let to = DATA_OFFSET.get() + at;
        at += match source.run_at(at)? {
            Run::Data(bytes) => {
                volume.write(bytes, to).map_err(RootError::Write)?;
                u64::try_from(bytes.len()).unwrap_or_default()
            }
            Run::Zeros(count) => {
                let count = count.min(PIECE_BYTES);
                let length = usize::try_from(count).unwrap_or_default();
                zero(volume, to, &mut scratch[..length])?;
                count
            }
        };
        let done = Bytes::new(at);
        progress(CopyProgress { done, of: size });
    }
    Ok(())
}

/// Zeros are written only where something else is: on a fresh volume they would take space for nothing.
fn zero(volume: &dyn Medium, at: u64, scratch: &mut [u8]) -> Result<(), RootError> {
    volume.read_whole(scratch, at).map_err(RootError::Read)?;
    if !is_zero(scratch) {
        scratch.fill(0);
        volume.write(scratch, at).map_err(RootError::Write)?;
    }
    Ok(())
}

/// The disk in an image.
enum Source<'a> {
    Raw {
        file: &'a dyn BytesAt,
        size: u64,
        piece: Vec<u8>,
    },
    Qcow2(Qcow2Image<'a>),
}

impl<'a> Source<'a> {
    fn open(image: &RootImage<'a>) -> Result<Source<'a>, RootError> {
        match image.format {
            ImageFormat::Qcow2 => {
                let image = Qcow2Image::open(image.file).map_err(RootError::Image)?;
                Ok(Source::Qcow2(image))
            }
            ImageFormat::Raw => Ok(Source::Raw {
                file: image.file,
                size: image.file.size().map_err(RootError::ReadImage)?,
                piece: vec![0; usize::try_from(RAW_PIECE_BYTES).unwrap_or_default()],
            }),
        }
    }

    /// A whole number of sectors.
    fn disk_size(&self) -> Result<Bytes, RootError> {
        let bytes = match self {
            Source::Raw { size, .. } => *size,
            Source::Qcow2(image) => image.virtual_size().get(),
        };
        let whole = Bytes::new(bytes).checked_next_multiple_of(SECTOR);
        whole
            .filter(|size| (SECTOR..=Bytes::VOLUME_MAX).contains(size))
            .ok_or(RootError::ImageSize { bytes })
    }

    fn run_at(&mut self, offset: u64) -> Result<Run<'_>, RootError> {
        match self {
            // The last sector may reach beyond the end.
            Source::Qcow2(image) if offset >= image.virtual_size().get() => {
                Ok(Run::Zeros(offset.next_multiple_of(SECTOR.get()) - offset))
            }
            Source::Qcow2(image) => image.run_at(offset).map_err(RootError::Image),
            Source::Raw { file, size, piece } => {
                let left = size.saturating_sub(offset).min(RAW_PIECE_BYTES);
                if left == 0 {
                    return Ok(Run::Zeros(offset.next_multiple_of(SECTOR.get()) - offset));
                }
                let piece = &mut piece[..usize::try_from(left).unwrap_or_default()];
                file.read_whole(piece, offset)
                    .map_err(RootError::ReadImage)?;
                if is_zero(piece) {
                    return Ok(Run::Zeros(left));
                }
                Ok(Run::Data(piece))
            }
        }
    }
}
