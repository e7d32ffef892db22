//! What a guest needs to find its volumes: rules for udev, and scripts for guests without it.
//!
//! A disk is known by its serial. Where udev runs, a rule makes `/dev/NAME` for a disk whenever it appears, also for one
//! that is plugged in later. Where it does not, a script looks at `/sys/block` at each start. Both have the names that
//! Virtlet's scripts had.

use std::fmt::Write;

use super::SeedError;
use super::files::{GuestFile, is_absolute};
use crate::flex::FlexPartition;
use crate::names::{DiskBus, Serial};

/// Makes the links to block volumes.
pub const LINK_SCRIPT: &str = "/etc/cloud/symlink-devs.sh";
/// Mounts flexvolumes.
pub const MOUNT_SCRIPT: &str = "/etc/cloud/mount-volumes.sh";
/// Runs the first script at each start.
pub const PER_BOOT_SCRIPT: &str = "/var/lib/cloud/scripts/per-boot/trellis-volumes.sh";
const UDEV_RULES: &str = "/etc/udev/rules.d/99-trellis-volumes.rules";

const SCRIPT_MODE: u32 = 0o755;
const RULES_MODE: u32 = 0o644;

/// Finds a disk by its serial. virtio-blk shows it in a file; of SCSI disks the kernel has the page of the disk that
/// holds it, behind four bytes.
const FIND: &str = r#"#!/bin/sh
find_disk() {
  for block in /sys/block/*; do
    serial=
    if [ -r "$block/serial" ]; then
      read -r serial < "$block/serial"
    elif [ -r "$block/device/vpd_pg80" ]; then
      serial=$(dd if="$block/device/vpd_pg80" bs=1 skip=4 2>/dev/null | tr -d ' \000')
    fi
    if [ "$serial" = "$1" ]; then
      echo "/dev/${block##*/}"
      return 0
    fi
  done
  return 1
}
"#;

/// A block volume of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// Where the guest shall find it.
    pub device_path: String,
    /// The serial of its disk.
    pub serial: Serial,
}

/// A flexvolume that is mounted in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskMount {
    /// The serial of its disk.
    pub serial: Serial,
    /// What of the disk is mounted.
    pub partition: FlexPartition,
    /// Where.
    pub path: String,
}

impl DiskMount {
    /// The stable path of what is mounted.
    pub fn stable_path(&self, bus: DiskBus) -> String {
        format!(
            "{}{}",
            bus.stable_path(&self.serial),
            self.partition.suffix()
        )
    }
}

/// The scripts and rules for these volumes.
pub(super) struct Scripts {
    pub files: Vec<GuestFile>,
    /// What `@virtlet-mount-script@` stands for.
    pub inline: String,
}

impl Scripts {
    pub fn new(
        bus: DiskBus,
        devices: &[BlockDevice],
        mounts: &[DiskMount],
    ) -> Result<Scripts, SeedError> {
        for device in devices {
            if !is_device_path(&device.device_path) {
                let path = device.device_path.clone();
                return Err(SeedError::BadDevicePath { path });
            }
        }
        for mount in mounts {
            if !is_absolute(&mount.path) {
                return Err(SeedError::BadPath {
                    place: "a mountPath",
                    path: mount.path.clone(),
                });
            }
        }
        let mut scripts = Scripts {
            files: Vec::new(),
            inline: String::new(),
        };
        if !devices.is_empty() {
            let link = link_script(devices);
            scripts.inline.push_str(&link);
            scripts.put(UDEV_RULES, RULES_MODE, udev_rules(bus, devices));
            scripts.put(LINK_SCRIPT, SCRIPT_MODE, link);
            let per_boot = format!("#!/bin/sh\nexec /bin/sh {LINK_SCRIPT}\n");
            scripts.put(PER_BOOT_SCRIPT, SCRIPT_MODE, per_boot);
        }
        if !mounts.is_empty() {
            let mount = mount_script(mounts);
            scripts.inline.push_str(&mount);
            scripts.put(MOUNT_SCRIPT, SCRIPT_MODE, mount);
        }
        Ok(scripts)
    }

    fn put(&mut self, path: &str, mode: u32, text: String) {
        self.files.push(GuestFile {
            path: path.to_owned(),
            mode,
            bytes: text.into_bytes(),
        });
    }
}

/// Rules for disks and their partitions. udev makes links below `/dev` only.
fn udev_rules(bus: DiskBus, devices: &[BlockDevice]) -> String {
    let mut rules = "# The volumes of this VM, by the serials of their disks.\n".to_owned();
    let prefix = match bus {
        DiskBus::Scsi => "0QEMU_QEMU_HARDDISK_",
        DiskBus::Virtio => "",
    };
    for device in devices {
        let Some(name) = device.device_path.strip_prefix("/dev/") else {
            continue;
        };
        let serial = device.serial.as_str();
        for (kind, number) in [("disk", ""), ("partition", "-part%n")] {
            // Writing to a string does not fail.
            let _ = writeln!(
                rules,
                "SUBSYSTEM==\"block\", ENV{{DEVTYPE}}==\"{kind}\", ENV{{ID_SERIAL}}==\"{prefix}{serial}\", SYMLINK+=\"{name}{number}\""
            );
        }
    }
    rules
}

fn link_script(devices: &[BlockDevice]) -> String {
    let mut script = FIND.to_owned();
    for device in devices {
        let path = quoted(&device.device_path);
        let directory = device
            .device_path
            .rsplit_once('/')
            .map_or("/", |(directory, _)| directory);
        let directory = quoted(if directory.is_empty() { "/" } else { directory });
        let _ = writeln!(
            script,
            "disk=$(find_disk {}) && mkdir -p {directory} && ln -fsn \"$disk\" {path}",
            device.serial.as_str()
        );
    }
    script.push_str("if command -v udevadm >/dev/null 2>&1; then\n  udevadm control --reload && udevadm trigger --subsystem-match=block --action=change\nfi\n:\n");
    script
}

/// Mounts what is not mounted, so it can run again.
fn mount_script(mounts: &[DiskMount]) -> String {
    let mut script = FIND.to_owned();
    for mount in mounts {
        let path = quoted(&mount.path);
        let number = match mount.partition {
            FlexPartition::Whole => String::new(),
            FlexPartition::Number(number) => number.to_string(),
        };
        let _ = writeln!(
            script,
            "if ! mountpoint -q {path}; then\n  disk=$(find_disk {}) && mkdir -p {path} && mount \"${{disk}}{number}\" {path}\nfi",
            mount.serial.as_str()
        );
    }
    script
}

/// One word for a shell, whatever is in it.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

fn is_device_path(path: &str) -> bool {
    let is_plain = |byte: u8| {
        byte.is_ascii_alphanumeric()
            || matches!(
                byte,
                b'/' | b'_' | b'.' | b'+' | b':' | b'@' | b'=' | b',' | b'-'
            )
    };
    is_absolute(path) && !path.ends_with('/') && path.bytes().all(is_plain)
}
