//! A disk as QEMU sees it: the names of its parts, and the chain of block nodes below its device.
//!
//! ```text
//!  device   dev-ID      scsi-hd or virtio-blk-pci, with the serial number by which the guest knows it
//!    │
//!  vol-ID      throttle    from the start, because a node cannot be put below a device for later limits
//!    │
//!  fmt-ID      raw or qcow2 ─────────── base-ID     the backing image, read-only
//!    │                                    │
//!  file-ID     host_device or file      bfile-ID
//!    │                                    │
//!  /dev/fdset/N                         /dev/fdset/M    open files that QEMU was handed; it never opens a path
//! ```
//!
//! All names follow from the disk's identity, and QEMU keeps that identity beside the descriptor. So whoever connects
//! later finds every disk again without having been told.

use std::fmt;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use trellis_api::Bytes;

use crate::error::{Context, Error, Result};

/// The sector of every disk. Sizes are multiples of it.
pub const SECTOR: Bytes = Bytes::new(512);
/// The longest identity.
const ID_CHARS_MAX: usize = 253;
/// The longest identity that stands in names as it is. QEMU takes node names of 31 characters, and ours add six.
const NAME_CHARS_MAX: usize = 24;
/// How much of a hash stands for what is too long: 80 bits.
const HASH_CHARS: usize = 20;
/// What begins the words that QEMU keeps beside a descriptor of ours.
const OPAQUE_DISK: &str = "trellis-disk:";
const OPAQUE_BACKING: &str = "trellis-backing:";

/// A disk's identity. It stays with the disk, and is free text without spaces.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskId(String);

impl DiskId {
    /// An identity of that text.
    pub fn new(text: &str) -> Result<DiskId> {
        let good = (1..=ID_CHARS_MAX).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_graphic());
        if !good {
            return Err(Error::BadDiskId {
                id: text.to_owned(),
            });
        }
        Ok(DiskId(text.to_owned()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What stands for it in QEMU's names: itself, or a hash if it is too long or has other characters.
    fn stem(&self) -> String {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if self.0.len() <= NAME_CHARS_MAX && self.0.bytes().all(plain) {
            self.0.clone()
        } else {
            // A hash is told from a plain identity by its first character.
            format!("_{}", hash(&self.0))
        }
    }

    /// The name of its device.
    pub fn device(&self) -> String {
        format!("dev-{}", self.stem())
    }

    /// The name of the node that the device uses.
    pub fn top_node(&self) -> String {
        format!("vol-{}", self.stem())
    }

    /// The name of the node that knows the format.
    pub fn format_node(&self) -> String {
        format!("fmt-{}", self.stem())
    }

    /// The name of the node on the open file.
    pub fn protocol_node(&self) -> String {
        format!("file-{}", self.stem())
    }

    /// The name of its group of limits.
    pub fn throttle_group(&self) -> String {
        format!("limits-{}", self.stem())
    }

    fn backing_nodes(&self) -> (String, String) {
        let stem = self.stem();
        (format!("base-{stem}"), format!("bfile-{stem}"))
    }

    /// What QEMU keeps beside the descriptor of its bytes.
    pub(crate) fn opaque(&self) -> String {
        format!("{OPAQUE_DISK}{self}")
    }

    /// What QEMU keeps beside the descriptor of its backing image.
    pub(crate) fn opaque_backing(&self) -> String {
        format!("{OPAQUE_BACKING}{self}")
    }

    /// The disk whose bytes are behind a descriptor that QEMU has these words beside.
    pub(crate) fn from_opaque(words: &str) -> Option<DiskId> {
        DiskId::new(words.strip_prefix(OPAQUE_DISK)?).ok()
    }
}

impl fmt::Display for DiskId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// How a disk is connected to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bus {
    /// virtio-scsi: many disks, and a removal that does not wait for the guest.
    Scsi,
    /// virtio-blk: one spare port a disk, and a removal that the guest acknowledges.
    Virtio,
}

impl Bus {
    /// How long a serial number may be.
    pub const fn serial_bytes_max(self) -> usize {
        match self {
            Bus::Scsi => 36,
            Bus::Virtio => 20,
        }
    }

    /// The serial number for what a disk should be called: the name itself, or a hash of it if it is too long. So two
    /// long names that begin alike stay apart.
    pub fn serial(self, name: &str) -> String {
        if name.len() <= self.serial_bytes_max() {
            name.to_owned()
        } else {
            hash(name)
        }
    }
}

impl fmt::Display for Bus {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Bus::Scsi => "scsi",
            Bus::Virtio => "virtio",
        })
    }
}

/// What an open file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The disk's bytes, from this offset to the end.
    Raw {
        /// How many bytes before the disk are not part of it.
        offset: Bytes,
    },
    /// A qcow2 image.
    Qcow2,
}

impl ImageFormat {
    /// The whole file.
    pub const RAW: ImageFormat = ImageFormat::Raw {
        offset: Bytes::ZERO,
    };
}

/// An open file with what it holds.
#[derive(Debug)]
pub struct OpenImage {
    /// The file, opened for reading, and for writing unless the disk is read-only.
    pub file: OwnedFd,
    /// What it holds.
    pub format: ImageFormat,
}

impl OpenImage {
    /// QEMU's driver for the file.
    fn protocol(&self, id: &DiskId) -> Result<&'static str> {
        let path = std::path::Path::new("the descriptor of a disk");
        let copy = self.file.try_clone().context("duplicate", path)?;
        let kind = File::from(copy).metadata().context("look at", path)?;
        match kind.file_type() {
            kind if kind.is_block_device() => Ok("host_device"),
            kind if kind.is_file() => Ok("file"),
            _ => Err(Error::NotADisk { id: id.clone() }),
        }
    }
}

/// Limits on a disk's use. Zero is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskLimits {
    /// Requests a second.
    pub iops_total: u64,
    /// Bytes a second.
    pub bps_total: u64,
}

impl DiskLimits {
    pub(crate) fn json(self) -> Value {
        json!({ "iops-total": self.iops_total, "bps-total": self.bps_total })
    }
}

/// A disk that a machine shall have.
#[derive(Debug)]
pub struct DiskSpec {
    /// Its identity.
    pub id: DiskId,
    /// What the guest shall call it; [`Bus::serial`] makes the serial number of it.
    pub serial: String,
    /// How it is connected.
    pub bus: Bus,
    /// Its bytes.
    pub source: OpenImage,
    /// The image that a qcow2 source is an overlay of.
    pub backing: Option<OpenImage>,
    /// Whether the guest may only read it.
    pub read_only: bool,
    /// Whether to go around the host's page cache. The file's filesystem has to allow it.
    pub direct: bool,
    /// Its place in the order in which the firmware looks for something to boot.
    pub boot_index: Option<u32>,
    /// Limits on its use.
    pub limits: DiskLimits,
}

impl DiskSpec {
    /// Whether QEMU can be given this disk.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |field, rule| Err(Error::Spec { field, rule });
        if self.backing.is_some() && self.source.format != ImageFormat::Qcow2 {
            return refuse("a backing image", "needs a qcow2 disk on top of it");
        }
        for part in [Some(&self.source), self.backing.as_ref()]
            .into_iter()
            .flatten()
        {
            if let ImageFormat::Raw { offset } = part.format
                && !offset.get().is_multiple_of(SECTOR.get())
            {
                return refuse("the offset of a disk", "must be a whole number of sectors");
            }
        }
        let word = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if self.serial.is_empty() || !self.serial.bytes().all(word) {
            return refuse(
                "a serial number",
                "must be of letters, digits, '-', '_' and '.'",
            );
        }
        Ok(())
    }

    /// The nodes, on the sets of descriptors that QEMU has been given.
    pub(crate) fn nodes(&self, set: u64, backing_set: Option<u64>) -> Result<Value> {
        let names = (self.id.format_node(), self.id.protocol_node());
        let mut format = self.format_node(&self.source, names, set, self.read_only)?;
        if self.source.format == ImageFormat::Qcow2 {
            // Null keeps QEMU from opening the path that an image names.
            format["backing"] = match (&self.backing, backing_set) {
                (Some(backing), Some(set)) => {
                    let names = self.id.backing_nodes();
                    let mut below = self.format_node(backing, names, set, true)?;
                    if backing.format == ImageFormat::Qcow2 {
                        below["backing"] = Value::Null;
                    }
                    below
                }
                _ => Value::Null,
            };
        }
        Ok(json!({
            "driver": "throttle",
            "node-name": self.id.top_node(),
            "throttle-group": self.id.throttle_group(),
            "read-only": self.read_only,
            "discard": "unmap",
            "cache": { "direct": self.direct },
            "file": format,
        }))
    }

    fn format_node(
        &self,
        part: &OpenImage,
        (name, protocol_name): (String, String),
        set: u64,
        read_only: bool,
    ) -> Result<Value> {
        let protocol = json!({
            "driver": part.protocol(&self.id)?,
            "node-name": protocol_name,
            "filename": format!("/dev/fdset/{set}"),
            "read-only": read_only,
            "discard": "unmap",
            "cache": { "direct": self.direct },
            "aio": if self.direct { "native" } else { "threads" },
        });
        let mut node = json!({
            "node-name": name,
            "read-only": read_only,
            "discard": "unmap",
            "cache": { "direct": self.direct },
            "file": protocol,
        });
        match part.format {
            ImageFormat::Qcow2 => node["driver"] = json!("qcow2"),
            ImageFormat::Raw { offset } => {
                node["driver"] = json!("raw");
                if offset > Bytes::ZERO {
                    node["offset"] = json!(offset.get());
                }
            }
        }
        Ok(node)
    }

    /// The device, on a bus of the machine.
    pub(crate) fn device(&self, bus: &str) -> Value {
        let serial = self.bus.serial(&self.serial);
        let mut device = json!({
            "id": self.id.device(),
            "bus": bus,
            "drive": self.id.top_node(),
            "serial": serial,
            // A disk without room pauses the machine, which goes on when there is room again.
            "werror": "enospc",
            "rerror": "report",
        });
        match self.bus {
            Bus::Scsi => {
                device["driver"] = json!("scsi-hd");
                // The guest's name of the disk has the whole of it, not the first 20 characters.
                device["device_id"] = json!(serial);
            }
            Bus::Virtio => {
                device["driver"] = json!("virtio-blk-pci");
                device["iothread"] = json!(crate::launch::IOTHREAD);
                device["disable-legacy"] = json!("on");
            }
        }
        if let Some(index) = self.boot_index {
            device["bootindex"] = json!(index);
        }
        device
    }
}

fn hash(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    hex[..HASH_CHARS].to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn names_fit_and_identities_come_back(text in "[!-~]{1,253}") {
            // Fails if QEMU would refuse a name as too long, or if an identity cannot be read back from QEMU.
            let id = DiskId::new(&text).unwrap();
            let (base, base_file) = id.backing_nodes();
            for node in [id.top_node(), id.format_node(), id.protocol_node(), base, base_file] {
                prop_assert!(node.len() <= 31, "{node}");
                let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
                prop_assert!(node.bytes().all(plain) && node.as_bytes()[0].is_ascii_alphabetic(), "{node}");
            }
            prop_assert_eq!(DiskId::from_opaque(&id.opaque()), Some(id.clone()));
            prop_assert_eq!(DiskId::from_opaque(&id.opaque_backing()), None);
        }

        #[test]
        fn serial_numbers_fit_their_bus(text in "[a-z0-9-]{1,80}") {
            // Fails if a guest would see a serial number that is cut off.
            for bus in [Bus::Scsi, Bus::Virtio] {
                prop_assert!(bus.serial(&text).len() <= bus.serial_bytes_max());
            }
        }
    }

    #[test]
    fn long_names_that_begin_alike_stay_apart() {
        // Fails if a long name is cut instead of hashed: two disks would then share a name or a serial number.
        let stem = "pvc-0123456789-0123456789-0123456789-0123456789-";
        let ids = [format!("{stem}a"), format!("{stem}b")];
        for bus in [Bus::Scsi, Bus::Virtio] {
            let serials: BTreeSet<_> = ids.iter().map(|id| bus.serial(id)).collect();
            assert_eq!(serials.len(), 2);
        }
        let nodes: BTreeSet<_> = ids
            .iter()
            .map(|id| DiskId::new(id).unwrap().top_node())
            .collect();
        assert_eq!(nodes.len(), 2);
    }

    #[test]
    fn a_plain_identity_never_meets_a_hash() {
        // Fails if somebody can choose an identity that has the node name of another disk.
        let long = DiskId::new(&"x".repeat(60)).unwrap();
        let hashed = long.top_node();
        let stolen = hashed.strip_prefix("vol-").unwrap();
        assert_ne!(DiskId::new(stolen).unwrap().top_node(), hashed);
    }
}
