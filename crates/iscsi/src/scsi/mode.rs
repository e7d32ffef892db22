//! Mode pages: caching, control (software write protect can be changed), informational exceptions.

use super::sense::Sense;

/// What the pages show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModeState {
    /// The volume is write-protected, for whatever reason.
    pub write_protected: bool,
    /// Acknowledged writes may be lost until a flush.
    pub volatile_cache: bool,
    /// An initiator has switched writing off.
    pub software_write_protect: bool,
    /// An initiator wants sense data in the descriptor format.
    pub descriptor_sense: bool,
    /// Blocks.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_size: u32,
}

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct ModeSense {
    /// The ten-byte form.
    pub ten: bool,
    /// Long block descriptors are accepted.
    pub long_lba: bool,
    /// Block descriptors are wanted.
    pub descriptors: bool,
    /// Current, changeable, default or saved values.
    pub control: u8,
    /// The page.
    pub page: u8,
    /// The subpage.
    pub subpage: u8,
}

const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
const EXCEPTIONS: u8 = 0x1c;
const ALL: u8 = 0x3f;

const CHANGEABLE: u8 = 1;
const DEFAULT: u8 = 2;
const SAVED: u8 = 3;

const WCE: u8 = 0x04;
const D_SENSE: u8 = 0x04;
const SWP: u8 = 0x08;

fn caching(state: &ModeState, control: u8) -> [u8; 20] {
    let mut page = [0; 20];
    page[0] = CACHING;
    page[1] = 18;
    if control != CHANGEABLE && state.volatile_cache {
        page[2] = WCE;
    }
    page
}

fn control_page(state: &ModeState, control: u8) -> [u8; 12] {
    let mut page = [0; 12];
    page[0] = CONTROL;
    page[1] = 10;
    if control == CHANGEABLE {
        page[2] = D_SENSE;
        page[4] = SWP;
        return page;
    }
    page[3] = 0x10; // commands may be reordered
    let current = control != DEFAULT;
    if current && state.descriptor_sense {
        page[2] = D_SENSE;
    }
    if current && state.software_write_protect {
        page[4] = SWP;
    }
    page[8..10].copy_from_slice(&[0xff, 0xff]); // busy for any time
    page
}

fn exceptions() -> [u8; 12] {
    let mut page = [0; 12];
    page[0] = EXCEPTIONS;
    page[1] = 10;
    page
}

/// The answer to MODE SENSE, whole; the caller cuts it to the allocation length.
///
/// # Errors
/// There is no such page, or saved values are asked for: none are.
pub fn sense(request: &ModeSense, state: &ModeState) -> Result<Vec<u8>, Sense> {
    if request.control == SAVED {
        return Err(Sense::SAVING_NOT_SUPPORTED);
    }
    if !(request.subpage == 0 || (request.subpage == 0xff && request.page == ALL)) {
        return Err(Sense::INVALID_FIELD_IN_CDB);
    }
    let mut pages = Vec::new();
    let wanted = |page| request.page == page || request.page == ALL;
    if wanted(CACHING) {
        pages.extend_from_slice(&caching(state, request.control));
    }
    if wanted(CONTROL) {
        pages.extend_from_slice(&control_page(state, request.control));
    }
    if wanted(EXCEPTIONS) {
        pages.extend_from_slice(&exceptions());
    }
    if pages.is_empty() {
        return Err(Sense::INVALID_FIELD_IN_CDB);
    }
    Ok(frame(request, state, &pages))
}

fn frame(request: &ModeSense, state: &ModeState, pages: &[u8]) -> Vec<u8> {
    const DPO_FUA: u8 = 0x10;
    let device = DPO_FUA | if state.write_protected { 0x80 } else { 0 };
    let descriptor = descriptor(request, state);
    let descriptor_len = u8::try_from(descriptor.len()).unwrap_or(0);
    let mut data = if request.ten {
        vec![
            0,
            0,
            0,
            device,
            u8::from(descriptor_len == 16),
            0,
            0,
            descriptor_len,
        ]
    } else {
        vec![0, 0, device, descriptor_len]
    };
    data.extend_from_slice(&descriptor);
    data.extend_from_slice(pages);
    if request.ten {
        let len = u16::try_from(data.len() - 2).unwrap_or(u16::MAX);
        data[..2].copy_from_slice(&len.to_be_bytes());
    } else {
        data[0] = u8::try_from(data.len() - 1).unwrap_or(u8::MAX);
    }
    data
}

fn descriptor(request: &ModeSense, state: &ModeState) -> Vec<u8> {
    if !request.descriptors {
        return Vec::new();
    }
    if request.long_lba {
        let mut data = state.blocks.to_be_bytes().to_vec();
        data.extend_from_slice(&[0; 4]);
        data.extend_from_slice(&state.block_size.to_be_bytes());
        return data;
    }
    let mut data = u32::try_from(state.blocks)
        .unwrap_or(u32::MAX)
        .to_be_bytes()
        .to_vec();
    data.extend_from_slice(&state.block_size.to_be_bytes());
    data
}

/// What a MODE SELECT changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModeChange {
    /// Software write protect, from now on.
    pub software_write_protect: bool,
    /// Descriptor sense, from now on.
    pub descriptor_sense: bool,
}

/// Read the parameter list of MODE SELECT.
///
/// # Errors
/// It is cut short, names a page that is not there, or changes a bit that cannot be changed.
pub fn select(ten: bool, list: &[u8], state: &ModeState) -> Result<ModeChange, Sense> {
    let mut change = ModeChange {
        software_write_protect: state.software_write_protect,
        descriptor_sense: state.descriptor_sense,
    };
    if list.is_empty() {
        return Ok(change);
    }
    let (header, descriptor_len) = if ten {
        let head = list.first_chunk::<8>().ok_or(Sense::PARAMETER_LENGTH)?;
        (8, usize::from(u16::from_be_bytes([head[6], head[7]])))
    } else {
        let head = list.first_chunk::<4>().ok_or(Sense::PARAMETER_LENGTH)?;
        (4, usize::from(head[3]))
    };
    let mut rest = list
        .get(header + descriptor_len..)
        .ok_or(Sense::PARAMETER_LENGTH)?;
    while !rest.is_empty() {
        let len = usize::from(*rest.get(1).ok_or(Sense::PARAMETER_LENGTH)?) + 2;
        let (page, more) = rest.split_at_checked(len).ok_or(Sense::PARAMETER_LENGTH)?;
        match page[0] & 0x7f {
            CACHING => unchanged(page, &caching(state, 0), &caching(state, CHANGEABLE))?,
            EXCEPTIONS => unchanged(
                page,
                &exceptions(),
                &[EXCEPTIONS, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            )?,
            CONTROL => {
                unchanged(
                    page,
                    &control_page(state, 0),
                    &control_page(state, CHANGEABLE),
                )?;
                change.software_write_protect = page[4] & SWP != 0;
                change.descriptor_sense = page[2] & D_SENSE != 0;
            }
            _ => return Err(Sense::INVALID_PARAMETER),
        }
        rest = more;
    }
    Ok(change)
}

/// Bits outside of `changeable` have to be what they are.
fn unchanged(page: &[u8], current: &[u8], changeable: &[u8]) -> Result<(), Sense> {
    if page.len() != current.len() {
        return Err(Sense::INVALID_PARAMETER);
    }
    let same = (2..page.len()).all(|at| (page[at] ^ current[at]) & !changeable[at] == 0);
    if same {
        Ok(())
    } else {
        Err(Sense::INVALID_PARAMETER)
    }
}
