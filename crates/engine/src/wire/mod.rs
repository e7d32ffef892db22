//! The bytes of a message: a fixed header, the fields, and the payload as it is.
//!
//! ```text
//!   0  magic "TRLW"     4  version u16    6  kind u16: 0 to 7
//!   8  fields u32      12  payload u32   16  CRC32C u32 of everything else in the frame
//!  20  fields: identity (64 bytes), tag of the message, what belongs to it
//!   …  payload: the bytes of a write, of a read or of a repair, never copied
//! ```
//!
//! Kind 0 is a message. Kind 1 is a message whose checksum does not cover the payload. It is used between processes on
//! one machine, where bytes do not change on the way and three copies would cost six more sums.
//!
//! Kinds 2 to 5 exist only between processes on one machine. A replica sends kind 2 once: where its data file is. Then
//! the volume sends kind 3, where the memory is that it lends, and the replica sends kind 4 if it can see that memory.
//! From then on a message may be of kind 5: its payload is twelve bytes that say where in that memory the real payload
//! is (u64), and how long it is (u32).
//!
//! Kind 6 is a set of bits that says what the sender knows beyond the first version. A volume sends it first of all, a
//! replica only in answer to that. A peer that does not know this kind hangs up; the volume then connects without it.
//! Between nodes it is required: both sides send it before anything else.
//!
//! Kind 7 is the last frame of a connection: why the sender ends it.
//!
//! Magic, version and kind are where they are in every version, past and future. A frame of another version is answered
//! with kind 7 in the version of the one who answers, and the connection ends. So each side learns the version of the
//! other from a header, and both can say what does not fit.
//!
//! All numbers are little-endian. A frame is read in two steps. The header says how long the rest is, and is refused
//! if that is too long, before anything is allocated; then the rest is read. Nothing that a peer sends panics, and a
//! decoded list is never longer than the bytes that it came in.

mod cursor;
mod fields;
mod reserved;
pub(crate) mod stored;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use bytes::{Bytes, BytesMut};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::proto::Envelope;

/// The length of a header.
pub const HEADER_BYTES: usize = 20;

/// The most bytes of fields: a full page of regions, and room.
pub const FIELDS_BYTES_MAX: usize = 160 << 10;

/// The most bytes of payload: a region.
pub const PAYLOAD_BYTES_MAX: usize = 1 << 20;

/// The version that is spoken here.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 4] = *b"TRLW";

const KIND_SUMMED: u16 = 0;
const KIND_UNSUMMED: u16 = 1;
const KIND_DATA_FILE: u16 = 2;
const KIND_LEND: u16 = 3;
const KIND_BORROWS: u16 = 4;
const KIND_LENT: u16 = 5;
const KIND_KNOWS: u16 = 6;
const KIND_OBJECTS: u16 = 7;

/// Bit of kind 6: blocks are compared with their sums on demand (`Verify`, `Salvage`, `RepairPart`).
pub const KNOWS_SUMS: u32 = 1;
/// Bit of kind 6: calls are answered (`Call`).
pub const KNOWS_CALLS: u32 = 2;
/// All that is known here.
pub const KNOWS_ALL: u32 = KNOWS_SUMS | KNOWS_CALLS;
/// What a peer on another node must know. No release speaks to other nodes and lacks one of these.
pub const KNOWS_NEEDED: u32 = KNOWS_SUMS | KNOWS_CALLS;

/// Codes of kind 7.
const OBJECTS_VERSION: u32 = 1;
const OBJECTS_FEATURES: u32 = 2;
const OBJECTS_CROWDED: u32 = 3;

/// What stands for a payload that was lent.
const LENT_BYTES: usize = 12;

/// The longest path of a data file.
const PATH_BYTES_MAX: usize = 4096;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct Header {
    magic: [u8; 4],
    version: U16,
    kind: U16,
    fields: U32,
    payload: U32,
    checksum: U32,
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES);

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// They do not begin like one.
    #[error("the peer does not speak this protocol")]
    Magic,
    /// They are of another version of the protocol.
    #[error("the peer speaks version {theirs} of the protocol, and version {ours} is spoken here")]
    Version {
        /// The version of the peer.
        theirs: u16,
        /// The version that is spoken here.
        ours: u16,
    },
    /// It would be larger than a message may be.
    #[error("the message is longer than a message may be")]
    TooLong,
    /// There are fewer or more bytes than the header says.
    #[error("the message does not have the length that it says")]
    Length,
    /// They have changed on the way.
    #[error("the checksum of the message is wrong")]
    Checksum,
    /// They are whole, and say something that cannot be.
    #[error("the message says something that cannot be")]
    Nonsense,
}

/// A message as bytes: the head, and the payload that follows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Header and fields.
    pub head: Bytes,
    /// The payload, which shares the memory of the message.
    pub payload: Bytes,
}

fn length(bytes: usize) -> Result<U32, WireError> {
    u32::try_from(bytes)
        .map(U32::new)
        .map_err(|_| WireError::TooLong)
}

fn checksum(mut header: Header, fields: &[u8], payload: &[u8]) -> u32 {
    header.checksum = U32::ZERO;
    let head = crc32c::crc32c_append(crc32c::crc32c(header.as_bytes()), fields);
    if header.kind.get() == KIND_UNSUMMED {
        return head;
    }
    crc32c::crc32c_append(head, payload)
}

/// What the checksum of a frame covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// Everything.
    Whole,
    /// All but the payload.
    Head,
}

/// Where a replica's data file is, for a volume on the same machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// Its path, as the replica sees it.
    pub path: PathBuf,
    /// The filesystem and the file, which say whether somebody else sees the same there.
    pub device: u64,
    /// See `device`.
    pub inode: u64,
}

/// Where memory is that a volume lends to replicas on the same machine: an open file of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lend {
    /// The number of the file in that process.
    pub descriptor: u32,
    /// How long it is.
    pub length: u64,
    /// The filesystem and the file, which say whether somebody else sees the same there.
    pub device: u64,
    /// See `device`.
    pub inode: u64,
}

/// What a frame is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "nearly all of them are messages")]
pub enum Arrival {
    /// A message.
    Message(Envelope),
    /// Where a data file is.
    DataFile(DataFile),
    /// Where memory is that is lent.
    Lend(Lend),
    /// The memory is seen.
    Borrows,
    /// What the peer knows.
    Knows(u32),
    /// Why the peer ends the connection.
    Objects(Objection),
}

/// Why a peer ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objection {
    /// It does not speak the version that it was shown.
    Version {
        /// The version that it was shown.
        shown: u16,
    },
    /// It needs something that the other side does not know.
    Features {
        /// What is missing, as bits of kind 6.
        missing: u32,
    },
    /// It has too many connections.
    Crowded,
    /// A reason that is unknown here.
    Unknown,
}

/// What becomes of a message's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// It follows the head.
    Follows(Bytes),
    /// The head says where it is. It has to stay there until the peer needs it no more.
    Lent(Bytes),
}

/// The bytes of a message.
pub fn encode(envelope: &Envelope) -> Result<Frame, WireError> {
    let mut head = BytesMut::new();
    let (Payload::Follows(payload) | Payload::Lent(payload)) =
        encode_into(envelope, Sum::Whole, &|_| None, &mut head)?;
    Ok(Frame {
        head: head.freeze(),
        payload,
    })
}

/// Puts header and fields of a message behind `heads`, and returns its payload. `place_of` says where in
/// lent memory a payload is.
pub fn encode_into(
    envelope: &Envelope,
    sum: Sum,
    place_of: &dyn Fn(&Bytes) -> Option<u64>,
    heads: &mut BytesMut,
) -> Result<Payload, WireError> {
    let kind = match sum {
        Sum::Whole => KIND_SUMMED,
        Sum::Head => KIND_UNSUMMED,
    };
    let start = heads.len();
    heads.extend_from_slice(&[0; HEADER_BYTES]);
    let payload = fields::encode(envelope, heads);
    match place_of(&payload).filter(|_| !payload.is_empty()) {
        None => {
            finish(kind, start, &payload, heads)?;
            Ok(Payload::Follows(payload))
        }
        Some(place) => {
            let mut stands_for = [0; LENT_BYTES];
            stands_for[..8].copy_from_slice(&place.to_le_bytes());
            stands_for[8..].copy_from_slice(length(payload.len())?.as_bytes());
            finish(KIND_LENT, start, &stands_for, heads)?;
            heads.extend_from_slice(&stands_for);
            Ok(Payload::Lent(payload))
        }
    }
}

/// Says behind `heads` where memory is that is lent.
pub fn encode_lend(lend: &Lend, heads: &mut BytesMut) -> Result<(), WireError> {
    let start = heads.len();
    heads.extend_from_slice(&[0; HEADER_BYTES]);
    let mut to = cursor::Writer(heads);
    to.u32(lend.descriptor);
    to.u64(lend.length);
    to.u64(lend.device);
    to.u64(lend.inode);
    finish(KIND_LEND, start, &[], heads)
}

/// Says behind `heads` that the memory is seen.
pub fn encode_borrows(heads: &mut BytesMut) -> Result<(), WireError> {
    let start = heads.len();
    heads.extend_from_slice(&[0; HEADER_BYTES]);
    finish(KIND_BORROWS, start, &[], heads)
}

/// Says behind `heads` what is known here.
pub fn encode_knows(bits: u32, heads: &mut BytesMut) -> Result<(), WireError> {
    let start = heads.len();
    heads.extend_from_slice(&[0; HEADER_BYTES]);
    cursor::Writer(heads).u32(bits);
    finish(KIND_KNOWS, start, &[], heads)
}

/// Says behind `heads` why the connection ends.
pub fn encode_objects(objection: Objection, heads: &mut BytesMut) -> Result<(), WireError> {
    let start = heads.len();
    heads.extend_from_slice(&[0; HEADER_BYTES]);
    let (code, value) = match objection {
        Objection::Version { shown } => (OBJECTS_VERSION, u32::from(shown)),
        Objection::Features { missing } => (OBJECTS_FEATURES, missing),
        Objection::Crowded => (OBJECTS_CROWDED, 0),
        Objection::Unknown => (0, 0),
    };
    let mut to = cursor::Writer(heads);
    to.u32(code);
    to.u32(value);
    finish(KIND_OBJECTS, start, &[], heads)
}

/// Says behind `heads` where a data file is.
pub fn encode_data_file(file: &DataFile, heads: &mut BytesMut) -> Result<(), WireError> {
    let start = heads.len();
    heads.extend_from_slice(&[0; HEADER_BYTES]);
    let mut to = cursor::Writer(heads);
    to.u64(file.device);
    to.u64(file.inode);
    to.list(file.path.as_os_str().as_bytes(), |to, byte| to.u8(*byte));
    finish(KIND_DATA_FILE, start, &[], heads)
}

/// Writes the header of the frame whose fields end `heads`.
fn finish(kind: u16, start: usize, payload: &[u8], heads: &mut BytesMut) -> Result<(), WireError> {
    let fields = &heads[start + HEADER_BYTES..];
    if fields.len() > FIELDS_BYTES_MAX || payload.len() > PAYLOAD_BYTES_MAX {
        heads.truncate(start);
        return Err(WireError::TooLong);
    }
    let mut header = Header {
        magic: MAGIC,
        version: U16::new(VERSION),
        kind: U16::new(kind),
        fields: length(fields.len())?,
        payload: length(payload.len())?,
        checksum: U32::ZERO,
    };
    header.checksum = U32::new(checksum(header, fields, payload));
    heads[start..start + HEADER_BYTES].copy_from_slice(header.as_bytes());
    Ok(())
}

fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<(Header, usize, usize), WireError> {
    let header: Header = zerocopy::transmute!(*bytes);
    if header.magic != MAGIC {
        return Err(WireError::Magic);
    }
    let (theirs, ours) = (header.version.get(), VERSION);
    if theirs != ours {
        return Err(WireError::Version { theirs, ours });
    }
    let length = |value: U32| usize::try_from(value.get()).unwrap_or(usize::MAX);
    let (fields, payload) = (length(header.fields), length(header.payload));
    if fields > FIELDS_BYTES_MAX || payload > PAYLOAD_BYTES_MAX {
        return Err(WireError::TooLong);
    }
    Ok((header, fields, payload))
}

/// How many bytes follow this header: never more than the two limits together.
pub fn body_length(header: &[u8; HEADER_BYTES]) -> Result<usize, WireError> {
    parse(header).map(|(_, fields, payload)| fields + payload)
}

/// The message that these bytes are. Its payload shares their memory.
pub fn decode(header: &[u8; HEADER_BYTES], body: &Bytes) -> Result<Envelope, WireError> {
    match decode_any(header, body, Sum::Whole, &|_, _| None)? {
        Arrival::Message(envelope) => Ok(envelope),
        _ => Err(WireError::Nonsense),
    }
}

/// Whether a frame with this header is a message whose payload is not summed up.
pub fn is_unsummed(header: &[u8; HEADER_BYTES]) -> bool {
    let header: Header = zerocopy::transmute!(*header);
    header.kind.get() == KIND_UNSUMMED
}

/// What these bytes are. A payload shares their memory, or is what `borrowed` shows at the place that they
/// say. `least` says what must be covered by the checksum at least.
pub fn decode_any(
    header: &[u8; HEADER_BYTES],
    body: &Bytes,
    least: Sum,
    borrowed: &dyn Fn(u64, usize) -> Option<Bytes>,
) -> Result<Arrival, WireError> {
    let (header, fields, payload) = parse(header)?;
    if body.len() != fields + payload {
        return Err(WireError::Length);
    }
    let payload = body.slice(fields..);
    if checksum(header, &body[..fields], &payload) != header.checksum.get() {
        return Err(WireError::Checksum);
    }
    let fields = &body[..fields];
    let arrival = match header.kind.get() {
        KIND_SUMMED => fields::decode(fields, payload).map(Arrival::Message),
        KIND_UNSUMMED if least == Sum::Head => {
            fields::decode(fields, payload).map(Arrival::Message)
        }
        KIND_LENT => lent(&payload, borrowed)
            .and_then(|payload| fields::decode(fields, payload))
            .map(Arrival::Message),
        KIND_DATA_FILE if payload.is_empty() => data_file(fields).map(Arrival::DataFile),
        KIND_LEND if payload.is_empty() => lend(fields).map(Arrival::Lend),
        KIND_BORROWS if body.is_empty() => Some(Arrival::Borrows),
        KIND_KNOWS if payload.is_empty() => knows(fields).map(Arrival::Knows),
        KIND_OBJECTS if payload.is_empty() => objects(fields).map(Arrival::Objects),
        _ => None,
    };
    arrival.ok_or(WireError::Nonsense)
}

/// The payload that these bytes stand for.
fn lent(stands_for: &[u8], borrowed: &dyn Fn(u64, usize) -> Option<Bytes>) -> Option<Bytes> {
    let mut from = cursor::Cursor(stands_for);
    let (place, length) = (from.u64()?, from.u32()?);
    let length = usize::try_from(length).ok()?;
    let fits = from.0.is_empty() && (1..=PAYLOAD_BYTES_MAX).contains(&length);
    borrowed(place, length).filter(|_| fits)
}

fn lend(fields: &[u8]) -> Option<Lend> {
    let mut from = cursor::Cursor(fields);
    let lend = Lend {
        descriptor: from.u32()?,
        length: from.u64()?,
        device: from.u64()?,
        inode: from.u64()?,
    };
    from.0.is_empty().then_some(lend)
}

/// Bits of a later version, and what else it may say, mean nothing here.
fn knows(fields: &[u8]) -> Option<u32> {
    cursor::Cursor(fields).u32()
}

/// Codes of a later version are a reason all the same.
fn objects(fields: &[u8]) -> Option<Objection> {
    let mut from = cursor::Cursor(fields);
    let (code, value) = (from.u32()?, from.u32()?);
    Some(match code {
        OBJECTS_VERSION => Objection::Version {
            shown: u16::try_from(value).ok()?,
        },
        OBJECTS_FEATURES => Objection::Features { missing: value },
        OBJECTS_CROWDED => Objection::Crowded,
        _ => Objection::Unknown,
    })
}

fn data_file(fields: &[u8]) -> Option<DataFile> {
    let mut from = cursor::Cursor(fields);
    let (device, inode) = (from.u64()?, from.u64()?);
    let path = from.list(PATH_BYTES_MAX, cursor::Cursor::u8)?;
    from.0.is_empty().then(|| DataFile {
        path: PathBuf::from(OsStr::from_bytes(&path)),
        device,
        inode,
    })
}
