//! Volumes behind the iSCSI target for tests and measurements: in memory, in a plain file, and with nothing behind
//! them. No part of Trellis serves one of these.

mod file;
mod null;
mod ram;
mod spare;

pub use file::FileLun;
pub use null::NullLun;
pub use ram::RamLun;

use trellis_iscsi::lun::Identity;

/// An identity made from a name.
fn identity_of(serial: &str) -> Identity {
    let mut naa = [0; 16];
    let low = crc32c::crc32c(serial.as_bytes()).to_be_bytes();
    let high = crc32c::crc32c_append(1, serial.as_bytes()).to_be_bytes();
    naa[0] = 0x60;
    naa[8..12].copy_from_slice(&high);
    naa[12..].copy_from_slice(&low);
    Identity {
        serial: serial.to_owned(),
        naa,
    }
}
