//! INQUIRY: the standard data and the vital product data pages.

use super::sense::Sense;
use crate::limits::{
    COMPARE_AND_WRITE_BLOCKS_MAX, TRANSFER_BYTES_MAX, UNMAP_DESCRIPTORS_MAX, WRITE_SAME_BLOCKS_MAX,
};
use crate::lun::Identity;
use crate::portal::PORTAL_GROUP;

const VENDOR: &[u8; 8] = b"TRELLIS ";
const PRODUCT: &[u8; 16] = b"VOLUME          ";
const REVISION: &[u8; 4] = b"0001";
/// Peripheral qualifier and type of a number that has no logical unit.
const NOBODY: u8 = 0x7f;

/// What the pages are made from.
pub struct About<'a> {
    /// The volume's identity.
    pub identity: &'a Identity,
    /// Bytes of a block.
    pub block_size: u32,
    /// Bytes of a physical block.
    pub physical_block_size: u32,
    /// The name of the target that serves it.
    pub target: &'a str,
}

/// The standard inquiry data, for a logical unit or for a number that has none.
pub fn standard(present: bool) -> Vec<u8> {
    let mut data = vec![0; 96];
    data[0] = if present { 0 } else { NOBODY };
    data[2] = 6; // SPC-4
    data[3] = 0x12; // hierarchical numbers, this format
    data[4] = 91;
    data[7] = 0x02; // command queueing
    data[8..16].copy_from_slice(VENDOR);
    data[16..32].copy_from_slice(PRODUCT);
    data[32..36].copy_from_slice(REVISION);
    // SAM-5, iSCSI, SPC-4, SBC-3: no version of each claimed.
    for (at, version) in [0x00a0_u16, 0x0960, 0x0460, 0x04c0].into_iter().enumerate() {
        data[58 + at * 2..60 + at * 2].copy_from_slice(&version.to_be_bytes());
    }
    data
}

/// A vital product data page.
///
/// # Errors
/// There is no such page.
pub fn page(number: u8, about: &About<'_>) -> Result<Vec<u8>, Sense> {
    let body = match number {
        0x00 => vec![0x00, 0x80, 0x83, 0xb0, 0xb1, 0xb2],
        0x80 => about
            .identity
            .serial
            .as_bytes()
            .iter()
            .copied()
            .take(64)
            .collect(),
        0x83 => identification(about),
        0xb0 => block_limits(about.block_size, about.physical_block_size),
        0xb1 => {
            let mut body = vec![0; 60];
            body[1] = 1; // does not rotate
            body
        }
        // Thin: UNMAP and both WRITE SAMEs give space back, and what has none reads as zeros.
        0xb2 => vec![0, 0xe4, 2, 0],
        _ => return Err(Sense::INVALID_FIELD_IN_CDB),
    };
    let len = u16::try_from(body.len()).unwrap_or(u16::MAX);
    let [high, low] = len.to_be_bytes();
    let mut data = vec![0, number, high, low];
    data.extend_from_slice(&body);
    Ok(data)
}

const ASCII: u8 = 2;
const BINARY: u8 = 1;
const UTF8: u8 = 3;
/// The protocol identifier of iSCSI, for designators of the port.
const ISCSI: u8 = 0x50;
const OF_PORT: u8 = 0x80 | 0x10;
const OF_TARGET: u8 = 0x80 | 0x20;

fn designator(data: &mut Vec<u8>, set: u8, association_and_kind: u8, bytes: &[u8]) {
    let protocol = if association_and_kind & 0x80 != 0 {
        ISCSI
    } else {
        0
    };
    let len = u8::try_from(bytes.len()).unwrap_or(u8::MAX);
    data.extend_from_slice(&[protocol | set, association_and_kind, 0, len]);
    data.extend_from_slice(&bytes[..usize::from(len)]);
}

fn name_string(text: &str) -> Vec<u8> {
    let mut bytes: Vec<u8> = text.bytes().take(247).collect();
    bytes.resize((bytes.len() + 1).next_multiple_of(4), 0);
    bytes
}

fn identification(about: &About<'_>) -> Vec<u8> {
    let mut data = Vec::new();
    let mut naa = about.identity.naa;
    naa[0] = 0x60 | naa[0] & 0x0f;
    designator(&mut data, BINARY, 0x03, &naa);
    let mut vendor = VENDOR.to_vec();
    vendor.extend(about.identity.serial.bytes().take(64));
    designator(&mut data, ASCII, 0x01, &vendor);
    designator(&mut data, BINARY, OF_PORT | 4, &[0, 0, 0, 1]);
    let [high, low] = PORTAL_GROUP.to_be_bytes();
    designator(&mut data, BINARY, OF_PORT | 5, &[0, 0, high, low]);
    designator(
        &mut data,
        UTF8,
        OF_PORT | 8,
        &name_string(&format!("{},t,0x{PORTAL_GROUP:04x}", about.target)),
    );
    designator(&mut data, UTF8, OF_TARGET | 8, &name_string(about.target));
    data
}

fn block_limits(block_size: u32, physical_block_size: u32) -> Vec<u8> {
    let granularity = (physical_block_size / block_size).max(1);
    let transfer = TRANSFER_BYTES_MAX / block_size;
    let mut body = vec![0; 60];
    // WSNZ is not set: WRITE SAME of no blocks means up to the end.
    body[1] = COMPARE_AND_WRITE_BLOCKS_MAX;
    body[2..4].copy_from_slice(&u16::try_from(granularity).unwrap_or(1).to_be_bytes());
    body[4..8].copy_from_slice(&transfer.to_be_bytes());
    body[8..12].copy_from_slice(&(1024 * 1024 / block_size).to_be_bytes());
    body[16..20].copy_from_slice(&u32::MAX.to_be_bytes()); // UNMAP: no limit
    body[20..24].copy_from_slice(&UNMAP_DESCRIPTORS_MAX.to_be_bytes());
    body[24..28].copy_from_slice(&granularity.to_be_bytes());
    body[28] = 0x80; // the alignment, which is zero, is valid
    body[32..40].copy_from_slice(&u64::from(WRITE_SAME_BLOCKS_MAX).to_be_bytes());
    body
}

/// READ CAPACITY(10): the last block, or all ones when it does not fit.
pub fn capacity10(size: u64, block_size: u32) -> Vec<u8> {
    let last = (size / u64::from(block_size)).saturating_sub(1);
    let mut data = u32::try_from(last)
        .unwrap_or(u32::MAX)
        .to_be_bytes()
        .to_vec();
    data.extend_from_slice(&block_size.to_be_bytes());
    data
}

/// READ CAPACITY(16).
pub fn capacity16(size: u64, block_size: u32, physical_block_size: u32) -> Vec<u8> {
    let last = (size / u64::from(block_size)).saturating_sub(1);
    let mut data = vec![0; 32];
    data[..8].copy_from_slice(&last.to_be_bytes());
    data[8..12].copy_from_slice(&block_size.to_be_bytes());
    data[13] =
        u8::try_from((physical_block_size / block_size).max(1).trailing_zeros()).unwrap_or(0);
    data[14] = 0xc0; // thin, and what has no space reads as zeros
    data
}

/// REPORT LUNS.
///
/// # Errors
/// The selection is not one of the standard's.
pub fn luns(select: u8, numbers: &[u16]) -> Result<Vec<u8>, Sense> {
    let numbers = match select {
        0 | 2 => numbers,
        1 => &[], // there are no well-known logical units
        _ => return Err(Sense::INVALID_FIELD_IN_CDB),
    };
    let len = u32::try_from(numbers.len() * 8).unwrap_or(0);
    let mut data = len.to_be_bytes().to_vec();
    data.extend_from_slice(&[0; 4]);
    for number in numbers {
        let [high, low] = number.to_be_bytes();
        data.extend_from_slice(&[high, low, 0, 0, 0, 0, 0, 0]);
    }
    Ok(data)
}
