//! What a guest calls its disks.
//!
//! The order is Virtlet's: the root disk, the block volumes as the pod lists them, the flexvolumes by name, and the seed
//! last. A disk's place in it gives the letter that a Linux guest usually gives it (`sda`, `vda`). Only usually: a guest
//! numbers disks as it finds them. What holds is the serial, which every disk has, and the link that udev makes from it
//! below `/dev/disk/by-id`. Whatever Trellis writes for a guest uses that link.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

/// The most disks of one VM. Virtlet stopped at 26 and 21; this bounds lists, and lies far below what virtio-scsi can
/// address.
pub const DISKS_MAX: usize = 1024;

/// The longest serial that every bus carries unchanged: that of virtio-blk.
pub const SERIAL_BYTES_MAX: usize = 20;

/// How a serial begins that was made from a hash. No other one does.
const HASHED: &str = "t-";
const HASHED_DIGITS: usize = SERIAL_BYTES_MAX - HASHED.len();

/// How disks are connected: the annotation `VirtletDiskDriver`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskBus {
    /// virtio-scsi, the default.
    #[default]
    Scsi,
    /// virtio-blk.
    Virtio,
}

impl DiskBus {
    /// As the annotation has it.
    pub const fn name(self) -> &'static str {
        match self {
            DiskBus::Scsi => "scsi",
            DiskBus::Virtio => "virtio",
        }
    }

    const fn prefix(self) -> &'static str {
        match self {
            DiskBus::Scsi => "sd",
            DiskBus::Virtio => "vd",
        }
    }

    /// The link that udev makes in the guest for the disk with this serial.
    pub fn stable_path(self, serial: &Serial) -> String {
        let prefix = match self {
            DiskBus::Scsi => "scsi-0QEMU_QEMU_HARDDISK_",
            DiskBus::Virtio => "virtio-",
        };
        format!("/dev/disk/by-id/{prefix}{}", serial.as_str())
    }
}

/// What a disk is for. Their order is the order of the disks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DiskRole {
    /// The guest boots from it.
    Root,
    /// A block volume of the pod.
    Block,
    /// A flexvolume of the pod.
    Flex,
    /// What cloud-init reads.
    Seed,
}

/// One disk that a VM shall have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedDisk {
    /// What it is for.
    pub role: DiskRole,
    /// The name of the volume in the pod. It is unique in the VM, and the serial is made from it.
    pub volume: String,
}

/// Where a disk stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedDisk {
    /// Which disk.
    pub disk: WantedDisk,
    /// Its number, counted from the root disk's zero. It is the SCSI target, and the order of PCI slots.
    pub unit: u16,
    /// How a Linux guest usually calls it.
    pub usual_name: String,
    /// By what a guest can be sure of it.
    pub serial: Serial,
}

/// Why disks cannot be arranged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// There are more than a VM can have.
    #[error("the VM would have {count} disks, and it can have at most {DISKS_MAX}")]
    TooMany {
        /// How many.
        count: usize,
    },
    /// There is not exactly one root disk, or more than one seed.
    #[error(
        "the VM would have {roots} root disks and {seeds} seeds; it has one root disk and at most one seed"
    )]
    Roles {
        /// How many root disks.
        roots: usize,
        /// How many seeds.
        seeds: usize,
    },
    /// Two volumes have one name.
    #[error(
        "two disks of the VM are called {volume:?}; give each volume of the pod a name of its own"
    )]
    Twice {
        /// The name.
        volume: String,
    },
    /// A volume has no name.
    #[error("a disk of the VM has no name")]
    Nameless,
}

/// What a guest reads as the serial number of a disk: at most [`SERIAL_BYTES_MAX`] small letters, digits and hyphens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Serial(String);

impl Serial {
    /// The serial of the disk of that name: the name if it can be one, and else a hash of it. Different names have
    /// different serials, up to a collision of 72 bits.
    pub fn of(volume: &str) -> Serial {
        let is_plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let fits = !volume.is_empty() && volume.len() <= SERIAL_BYTES_MAX;
        if fits && volume.bytes().all(is_plain) && !volume.starts_with(HASHED) {
            return Serial(volume.to_owned());
        }
        let hash = Sha256::digest(volume.as_bytes());
        let hex = hash.iter().map(|byte| format!("{byte:02x}"));
        let digits: String = hex
            .collect::<String>()
            .chars()
            .take(HASHED_DIGITS)
            .collect();
        Serial(format!("{HASHED}{digits}"))
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Puts disks in their order and names them.
pub fn arrange(bus: DiskBus, disks: Vec<WantedDisk>) -> Result<Vec<PlacedDisk>, NameError> {
    check(&disks)?;
    let mut disks = disks;
    // The sort is stable: block volumes stay as the pod lists them. Virtlet found flexvolumes as a directory lists them.
    disks.sort_by(|one, other| {
        let name = |disk: &WantedDisk| (disk.role == DiskRole::Flex).then(|| disk.volume.clone());
        let by_role = one.role.cmp(&other.role);
        by_role.then_with(|| name(one).cmp(&name(other)))
    });
    let placed = (0u16..).zip(disks).map(|(unit, disk)| PlacedDisk {
        unit,
        usual_name: usual_name(bus, &disk.role, unit),
        serial: Serial::of(&disk.volume),
        disk,
    });
    Ok(placed.collect())
}

fn check(disks: &[WantedDisk]) -> Result<(), NameError> {
    if disks.len() > DISKS_MAX {
        let count = disks.len();
        return Err(NameError::TooMany { count });
    }
    let count = |role: DiskRole| disks.iter().filter(|disk| disk.role == role).count();
    let (roots, seeds) = (count(DiskRole::Root), count(DiskRole::Seed));
    if roots != 1 || seeds > 1 {
        return Err(NameError::Roles { roots, seeds });
    }
    let mut names = BTreeSet::new();
    for disk in disks {
        if disk.volume.is_empty() {
            return Err(NameError::Nameless);
        }
        if !names.insert(disk.volume.as_str()) {
            let volume = disk.volume.clone();
            return Err(NameError::Twice { volume });
        }
    }
    Ok(())
}

fn usual_name(bus: DiskBus, role: &DiskRole, unit: u16) -> String {
    match (bus, role) {
        // On virtio-scsi the seed is a CD-ROM, and takes no letter. virtio-blk has none: there it is a disk like others.
        (DiskBus::Scsi, DiskRole::Seed) => "sr0".to_owned(),
        _ => format!("{}{}", bus.prefix(), letters(unit)),
    }
}

/// `a` to `z`, then `aa`, as Linux counts disks.
fn letters(unit: u16) -> String {
    let mut left = u32::from(unit) + 1;
    let mut letters = Vec::new();
    while left > 0 {
        left -= 1;
        let letter = u8::try_from(left % 26).unwrap_or_default();
        letters.push(char::from(b'a' + letter));
        left /= 26;
    }
    letters.iter().rev().collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn disk(role: DiskRole, volume: &str) -> WantedDisk {
        let volume = volume.to_owned();
        WantedDisk { role, volume }
    }

    fn usual(bus: DiskBus, disks: Vec<WantedDisk>) -> Vec<(String, String)> {
        let placed = arrange(bus, disks).unwrap();
        let pairs = placed.into_iter();
        pairs
            .map(|disk| (disk.disk.volume, disk.usual_name))
            .collect()
    }

    #[test]
    fn disks_stand_in_virtlets_order_whatever_the_order_they_come_in() {
        // Fails if a flexvolume comes before a block volume, if the seed takes a letter of a disk, or if vol1 of the
        // Virtlet example is not sdb.
        let disks = vec![
            disk(DiskRole::Seed, "seed"),
            disk(DiskRole::Flex, "vol2"),
            disk(DiskRole::Block, "zeta"),
            disk(DiskRole::Flex, "vol1"),
            disk(DiskRole::Block, "alpha"),
            disk(DiskRole::Root, "root"),
        ];
        let names = |bus| usual(bus, disks.clone());
        let pair = |(one, other): (&str, &str)| (one.to_owned(), other.to_owned());
        let scsi = [("root", "sda"), ("zeta", "sdb"), ("alpha", "sdc")];
        let rest = [("vol1", "sdd"), ("vol2", "sde"), ("seed", "sr0")];
        let expected: Vec<_> = scsi.into_iter().chain(rest).map(pair).collect();
        assert_eq!(names(DiskBus::Scsi), expected);
        assert_eq!(names(DiskBus::Virtio).last().unwrap().1, "vdf");
    }

    #[test]
    fn names_go_on_after_z() {
        // Fails if the limits of Virtlet come back, or if the 27th disk is not called sdaa.
        for (unit, expected) in [(0, "a"), (25, "z"), (26, "aa"), (701, "zz"), (702, "aaa")] {
            assert_eq!(letters(unit), expected);
        }
        let mut disks = vec![disk(DiskRole::Root, "root")];
        disks.extend((1..DISKS_MAX).map(|index| disk(DiskRole::Block, &format!("v{index}"))));
        assert_eq!(usual(DiskBus::Scsi, disks.clone())[26].1, "sdaa");
        disks.push(disk(DiskRole::Block, "one-more"));
        let refused = arrange(DiskBus::Scsi, disks).unwrap_err();
        assert_eq!(
            refused,
            NameError::TooMany {
                count: DISKS_MAX + 1
            }
        );
    }

    #[test]
    fn a_vm_has_one_root_disk_and_names_that_differ() {
        // Fails if two disks share a serial, or if a VM without a root disk is arranged.
        let twice = vec![disk(DiskRole::Root, "a"), disk(DiskRole::Block, "a")];
        let rootless = vec![disk(DiskRole::Block, "a")];
        let nameless = vec![disk(DiskRole::Root, "")];
        for disks in [twice, rootless, nameless] {
            assert!(arrange(DiskBus::Scsi, disks).is_err());
        }
    }

    #[test]
    fn a_stable_path_is_the_one_that_udev_makes() {
        // Fails if the path is not the one seen in a Debian guest (guest-images.md, A 6).
        let path = |bus: DiskBus| bus.stable_path(&Serial::of("data1"));
        assert_eq!(
            path(DiskBus::Scsi),
            "/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_data1"
        );
        assert_eq!(path(DiskBus::Virtio), "/dev/disk/by-id/virtio-data1");
    }

    proptest! {
        // Fails if a serial is too long for virtio-blk, has a character that udev replaces, or is shared by two names.
        #[test]
        fn serials_fit_every_bus_and_differ(one in "(t-)?[a-z0-9.-]{0,24}", other in "(t-)?[a-z0-9.-]{0,24}") {
            let serials = (Serial::of(&one), Serial::of(&other));
            for serial in [&serials.0, &serials.1] {
                let text = serial.as_str();
                prop_assert!(!text.is_empty() && text.len() <= SERIAL_BYTES_MAX);
                prop_assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'));
            }
            prop_assert_eq!(serials.0 == serials.1, one == other);
        }
    }
}
