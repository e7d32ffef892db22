//! What the kernel's refusal of a growth means.
//!
//! The drivers share error numbers between causes that need opposite actions. EPERM is a missing capability or a
//! damaged filesystem. EROFS is a mount that was meant to be read-only, or a filesystem that stopped writing when it
//! found damage. The superblock and mountinfo have the rest of the truth, and are read here only after a refusal.

use rustix::io::Errno;

use super::{FilesystemKind, Mounted};
use crate::error::{Error, Repair};
use crate::sys::capability::{self, Capability};
use crate::sys::mount;
use crate::sys::mountinfo;

impl Mounted<'_> {
    /// The error for a call on this filesystem that the kernel refused.
    pub(super) fn refused(&self, action: &'static str, errno: Errno) -> Error {
        let what = self.mount_point.to_owned();
        match errno {
            Errno::PERM => self.not_permitted(action),
            Errno::ROFS if self.stopped_writing() => self.damaged(),
            Errno::ROFS => Error::ReadOnly { what },
            Errno::UCLEAN | Errno::BADMSG => self.damaged(),
            // xfs: another growth. ext: another resize. btrfs: a balance, a replacement, a resize.
            Errno::AGAIN | Errno::BUSY | Errno::INPROGRESS => Error::OperationRunning { what },
            errno if is_down(errno) => Error::FilesystemDown {
                what,
                source: errno.into(),
            },
            Errno::OPNOTSUPP => Error::GrowthUnsupported {
                what,
                kind: self.kind,
            },
            Errno::NOTTY => Error::NotThatFilesystem {
                what,
                kind: self.kind,
            },
            other => Error::Io {
                action,
                path: what,
                source: other.into(),
            },
        }
    }

    /// ext returns EPERM for recorded errors too, and only after them for a missing capability.
    fn not_permitted(&self, action: &'static str) -> Error {
        let needed = match self.kind {
            FilesystemKind::Ext4 | FilesystemKind::Ext3 => Capability::SysResource,
            FilesystemKind::Xfs | FilesystemKind::Btrfs => Capability::SysAdmin,
        };
        if super::has_recorded_errors(self.kind, self.device) {
            self.damaged()
        } else if !capability::is_effective(needed) {
            Error::MissingCapability {
                what: self.mount_point.to_owned(),
                capability: needed.name(),
            }
        } else {
            Error::Io {
                action,
                path: self.mount_point.to_owned(),
                source: Errno::PERM.into(),
            }
        }
    }

    fn damaged(&self) -> Error {
        Error::FilesystemErrors {
            what: self.mount_point.to_owned(),
            repair: Repair {
                kind: self.kind,
                device: self.device.to_owned(),
            },
        }
    }

    /// Whether the filesystem turned itself read-only, which no mount asked for.
    fn stopped_writing(&self) -> bool {
        let own = || -> Option<bool> {
            let id = mount::mount_id(&self.place).ok()?;
            let mounts = mountinfo::read().ok()?;
            let own = mounts.iter().find(|mount| mount.id == id)?;
            Some(own.stopped_writing())
        };
        super::has_recorded_errors(self.kind, self.device) || own().unwrap_or(false)
    }
}

/// Whether the error says that a filesystem, or what is below it, does not answer any more.
pub(crate) fn is_down(errno: Errno) -> bool {
    const DOWN: [Errno; 6] = [
        Errno::IO,
        Errno::SHUTDOWN,
        Errno::NOTCONN,
        Errno::STALE,
        Errno::NXIO,
        Errno::NODEV,
    ];
    DOWN.contains(&errno)
}
