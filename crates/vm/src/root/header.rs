//! The header of a persistent root: whose image is on a volume, where it begins, and whether it is whole.
//!
//! All numbers are big-endian, as in Virtlet's header, whose beginning ours shares. A Virtlet that meets ours finds a
//! version that it does not know.
//!
//! ```text
//!           Virtlet (version 1)             Trellis (version 2)
//!    0   8  magic                           magic
//!    8   2  version                         version
//!   10  32  SHA-256 of the image            SHA-256 of the image
//!   42   1                                  state: 1 being written, 2 ready
//!   48   8                                  generation: which of the two slots counts
//!   56   8                                  where the disk begins
//!   64   8                                  the size of the disk in the image
//!   72  16                                  identity of this root
//!  508   4                                  CRC-32C of the 508 bytes before
//! ```
//!
//! Version 1 is one sector, and the disk begins behind it, at 512. Version 2 has two slots, at 0 and at 4096, and the disk
//! begins at 1 MiB, where the blocks of guests stay aligned. Each write goes to the slot that does not count. So a write
//! that is torn leaves the last state as it was.

use trellis_api::Bytes;
use uuid::Uuid;

use crate::ImageDigest;

/// What a header begins with.
pub const MAGIC: u64 = 0x263d_be52_ba57_6702;
/// Virtlet's version.
pub const VERSION_VIRTLET: u16 = 1;
/// The version that is written here.
pub const VERSION: u16 = 2;

/// A header is one sector.
pub const HEADER_BYTES: usize = 512;
/// Where the two slots of version 2 are.
pub const SLOTS: [u64; 2] = [0, 4096];
/// Where the disk begins in Virtlet's version.
pub const DATA_OFFSET_VIRTLET: Bytes = Bytes::new(512);
/// Where the disk begins in version 2.
pub const DATA_OFFSET: Bytes = Bytes::MIB;

const DIGEST_AT: usize = 10;
const STATE_AT: usize = 42;
const GENERATION_AT: usize = 48;
const DATA_AT: usize = 56;
const SIZE_AT: usize = 64;
const UUID_AT: usize = 72;
const CRC_AT: usize = 508;

const WRITING: u8 = 1;
const READY: u8 = 2;

/// Whether the image is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootState {
    /// The image is being copied; what is there is of no use.
    Writing,
    /// The image is whole, and a guest may have changed it since.
    Ready,
}

/// A header of version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RootHeader {
    /// The image that the disk was made from.
    pub digest: ImageDigest,
    /// Whether it is whole.
    pub state: RootState,
    /// Counts the writes of the header. The slot with the higher one counts.
    pub generation: u64,
    /// Where the disk begins.
    pub data_offset: Bytes,
    /// The size of the disk in the image. The volume may be larger, and the guest's disk with it.
    pub image_size: Bytes,
    /// Which root this is; every copy of an image makes another one.
    pub uuid: Uuid,
}

/// What one sector holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sector {
    /// Something that is no header.
    Other,
    /// Virtlet's header.
    Virtlet {
        /// The image that it names.
        digest: ImageDigest,
    },
    /// A header of ours.
    Ours(RootHeader),
    /// A header of ours that was torn or damaged.
    Torn,
    /// A header of a version that is not known.
    Unknown {
        /// Which.
        version: u16,
    },
}

impl Sector {
    /// Reads one sector.
    pub fn read(bytes: &[u8; HEADER_BYTES]) -> Sector {
        if number(bytes, 0) != MAGIC {
            return Sector::Other;
        }
        let version = u16::from_be_bytes([bytes[8], bytes[9]]);
        let mut digest = [0; 32];
        digest.copy_from_slice(&bytes[DIGEST_AT..DIGEST_AT + 32]);
        let digest = ImageDigest::new(digest);
        match version {
            VERSION_VIRTLET => Sector::Virtlet { digest },
            VERSION => ours(bytes, digest).map_or(Sector::Torn, Sector::Ours),
            version => Sector::Unknown { version },
        }
    }
}

fn ours(bytes: &[u8; HEADER_BYTES], digest: ImageDigest) -> Option<RootHeader> {
    if crc32c::crc32c(&bytes[..CRC_AT]).to_be_bytes() != bytes[CRC_AT..] {
        return None;
    }
    let state = match bytes[STATE_AT] {
        WRITING => RootState::Writing,
        READY => RootState::Ready,
        _ => return None,
    };
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&bytes[UUID_AT..UUID_AT + 16]);
    Some(RootHeader {
        digest,
        state,
        generation: number(bytes, GENERATION_AT),
        data_offset: Bytes::new(number(bytes, DATA_AT)),
        image_size: Bytes::new(number(bytes, SIZE_AT)),
        uuid: Uuid::from_bytes(uuid),
    })
}

impl RootHeader {
    /// The sector that holds this header.
    pub fn to_sector(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC.to_be_bytes());
        put(8, &VERSION.to_be_bytes());
        put(DIGEST_AT, self.digest.bytes());
        put(
            STATE_AT,
            &[match self.state {
                RootState::Writing => WRITING,
                RootState::Ready => READY,
            }],
        );
        put(GENERATION_AT, &self.generation.to_be_bytes());
        put(DATA_AT, &self.data_offset.get().to_be_bytes());
        put(SIZE_AT, &self.image_size.get().to_be_bytes());
        put(UUID_AT, self.uuid.as_bytes());
        let sum = crc32c::crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&sum.to_be_bytes());
        bytes
    }
}

fn number(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    bytes[at..at + 8].try_into().map_or(0, u64::from_be_bytes)
}
