//! REPORT SUPPORTED OPERATION CODES: the list of commands, and the bits of each CDB that we use.

use super::sense::Sense;

/// A command: its service action if the opcode has several, and the bits of its CDB that mean something.
struct Entry {
    action: Option<u16>,
    usage: &'static [u8],
}

const fn plain(usage: &'static [u8]) -> Entry {
    Entry {
        action: None,
        usage,
    }
}

const fn action(action: u16, usage: &'static [u8]) -> Entry {
    Entry {
        action: Some(action),
        usage,
    }
}

const FF: u8 = 0xff;

/// The first byte of each usage map is the opcode itself.
const ENTRIES: &[Entry] = &[
    plain(&[0x00, 0, 0, 0, 0, 0x07]),
    plain(&[0x03, 0x01, 0, 0, FF, 0x07]),
    plain(&[0x08, 0x1f, FF, FF, FF, 0x07]),
    plain(&[0x0a, 0x1f, FF, FF, FF, 0x07]),
    plain(&[0x12, 0x01, FF, FF, FF, 0x07]),
    plain(&[0x15, 0x11, 0, 0, FF, 0x07]),
    plain(&[0x16, 0, 0, 0, 0, 0x07]),
    plain(&[0x17, 0, 0, 0, 0, 0x07]),
    plain(&[0x1a, 0x08, FF, FF, FF, 0x07]),
    plain(&[0x1b, 0x01, 0, 0x0f, 0xf7, 0x07]),
    plain(&[0x1e, 0, 0, 0, 0x03, 0x07]),
    plain(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0x07]),
    plain(&[0x28, 0xf8, FF, FF, FF, FF, 0, FF, FF, 0x07]),
    plain(&[0x2a, 0xf8, FF, FF, FF, FF, 0, FF, FF, 0x07]),
    plain(&[0x2e, 0xf6, FF, FF, FF, FF, 0, FF, FF, 0x07]),
    plain(&[0x2f, 0xf6, FF, FF, FF, FF, 0, FF, FF, 0x07]),
    plain(&[0x34, 0x02, FF, FF, FF, FF, 0, FF, FF, 0x07]),
    plain(&[0x35, 0x02, FF, FF, FF, FF, 0, FF, FF, 0x07]),
    plain(&[0x41, 0xf8, FF, FF, FF, FF, 0, FF, FF, 0x07]),
    plain(&[0x42, 0x01, 0, 0, 0, 0, 0, FF, FF, 0x07]),
    plain(&[0x55, 0x11, 0, 0, 0, 0, 0, FF, FF, 0x07]),
    plain(&[0x5a, 0x18, FF, FF, 0, 0, 0, FF, FF, 0x07]),
    action(0, &[0x5e, 0x1f, 0, 0, 0, 0, 0, FF, FF, 0x07]),
    action(1, &[0x5e, 0x1f, 0, 0, 0, 0, 0, FF, FF, 0x07]),
    action(2, &[0x5e, 0x1f, 0, 0, 0, 0, 0, FF, FF, 0x07]),
    action(3, &[0x5e, 0x1f, 0, 0, 0, 0, 0, FF, FF, 0x07]),
    action(0, &[0x5f, 0x1f, FF, 0, 0, FF, FF, FF, FF, 0x07]),
    action(1, &[0x5f, 0x1f, FF, 0, 0, FF, FF, FF, FF, 0x07]),
    action(2, &[0x5f, 0x1f, FF, 0, 0, FF, FF, FF, FF, 0x07]),
    action(3, &[0x5f, 0x1f, FF, 0, 0, FF, FF, FF, FF, 0x07]),
    action(4, &[0x5f, 0x1f, FF, 0, 0, FF, FF, FF, FF, 0x07]),
    action(5, &[0x5f, 0x1f, FF, 0, 0, FF, FF, FF, FF, 0x07]),
    action(6, &[0x5f, 0x1f, FF, 0, 0, FF, FF, FF, FF, 0x07]),
    plain(&[
        0x88, 0xf8, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07,
    ]),
    plain(&[
        0x89, 0xf8, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0, 0, FF, 0, 0x07,
    ]),
    plain(&[
        0x8a, 0xf8, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07,
    ]),
    plain(&[
        0x8b, 0xf8, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07,
    ]),
    plain(&[
        0x8e, 0xf6, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07,
    ]),
    plain(&[
        0x8f, 0xf6, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07,
    ]),
    plain(&[
        0x90, 0x02, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07,
    ]),
    plain(&[
        0x91, 0x02, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07,
    ]),
    plain(&[
        0x93, 0xf9, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07,
    ]),
    action(
        0x10,
        &[0x9e, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0, FF, FF, FF, FF, 0, 0x07],
    ),
    action(
        0x12,
        &[
            0x9e, 0x1f, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07,
        ],
    ),
    plain(&[0xa0, 0, FF, 0, 0, 0, FF, FF, FF, FF, 0, 0x07]),
    action(
        0x0c,
        &[0xa3, 0x1f, 0x87, FF, FF, FF, FF, FF, FF, FF, 0, 0x07],
    ),
    plain(&[0xa8, 0xf8, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07]),
    plain(&[0xaa, 0xf8, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07]),
    plain(&[0xae, 0xf6, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07]),
    plain(&[0xaf, 0xf6, FF, FF, FF, FF, FF, FF, FF, FF, 0, 0x07]),
];

/// A command timeouts descriptor that promises nothing.
const TIMEOUTS: [u8; 12] = [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// The answer.
///
/// # Errors
/// The options are not supported, or do not fit the opcode.
pub fn report(
    options: u8,
    timeouts: bool,
    opcode: u8,
    service_action: u16,
) -> Result<Vec<u8>, Sense> {
    let of_opcode = || ENTRIES.iter().filter(|entry| entry.usage[0] == opcode);
    match options {
        0 => Ok(all(timeouts)),
        1 if of_opcode().any(|entry| entry.action.is_some()) => Err(Sense::INVALID_FIELD_IN_CDB),
        1 => Ok(one(of_opcode().next(), timeouts)),
        2 if of_opcode().any(|entry| entry.action.is_none()) => Err(Sense::INVALID_FIELD_IN_CDB),
        2 => Ok(one(
            of_opcode().find(|entry| entry.action == Some(service_action)),
            timeouts,
        )),
        3 => Ok(one(
            of_opcode().find(|entry| entry.action.unwrap_or(0) == service_action),
            timeouts,
        )),
        _ => Err(Sense::INVALID_FIELD_IN_CDB),
    }
}

fn all(timeouts: bool) -> Vec<u8> {
    let mut data = vec![0; 4];
    for entry in ENTRIES {
        let flags = u8::from(entry.action.is_some()) | if timeouts { 2 } else { 0 };
        let [high, low] = entry.action.unwrap_or(0).to_be_bytes();
        let len = u8::try_from(entry.usage.len()).unwrap_or(0);
        data.extend_from_slice(&[entry.usage[0], 0, high, low, 0, flags, 0, len]);
        if timeouts {
            data.extend_from_slice(&TIMEOUTS);
        }
    }
    let len = u32::try_from(data.len() - 4).unwrap_or(0);
    data[..4].copy_from_slice(&len.to_be_bytes());
    data
}

fn one(entry: Option<&Entry>, timeouts: bool) -> Vec<u8> {
    const NOT_SUPPORTED: u8 = 1;
    const AS_IN_THE_STANDARD: u8 = 3;
    let Some(entry) = entry else {
        return vec![0, NOT_SUPPORTED, 0, 0];
    };
    let flags = AS_IN_THE_STANDARD | if timeouts { 0x80 } else { 0 };
    let mut data = vec![0, flags, 0, u8::try_from(entry.usage.len()).unwrap_or(0)];
    data.extend_from_slice(entry.usage);
    if let Some(action) = entry.action {
        // The map shows the service action itself in its five bits.
        data[5] = data[5] & 0xe0 | u8::try_from(action).unwrap_or(0);
    }
    if timeouts {
        data.extend_from_slice(&TIMEOUTS);
    }
    data
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::scsi::cdb;

    #[test]
    fn what_is_reported_is_what_is_understood() {
        // Fails if a command is added to the parser and not to the list, or the other way round.
        for opcode in 0..=u8::MAX {
            let mut cdb = [0; 16];
            cdb[0] = opcode;
            let parsed = (0..32u8).any(|action| {
                let mut cdb = cdb;
                cdb[1] = action;
                !matches!(cdb::parse(&cdb), Err(Sense::INVALID_OPCODE))
            });
            let listed = ENTRIES.iter().any(|entry| entry.usage[0] == opcode);
            assert_eq!(parsed, listed, "opcode {opcode:02x}h");
        }
    }

    #[test]
    fn usage_maps_have_the_length_of_their_commands() {
        // Fails if a map has one byte too many or too few: the group in the opcode fixes the length.
        for entry in ENTRIES {
            let len = match entry.usage[0] >> 5 {
                0 => 6,
                1 | 2 => 10,
                4 => 16,
                _ => 12,
            };
            assert_eq!(entry.usage.len(), len, "opcode {:02x}h", entry.usage[0]);
        }
    }
}
