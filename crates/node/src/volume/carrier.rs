//! How a volume's bytes reach the kernel. Everything above the device is the same for all carriers.

use std::path::{Path, PathBuf};

use trellis_api::Bytes;

use super::device::{self, AttachedDevice};
use super::disk;
use super::observe::{self, Observation};
use crate::error::Result;
use crate::filesystem::Outcome;
use crate::iscsi::{Login, Target};

/// Where a volume's bytes come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// A file, on which a loop device is put.
    File(PathBuf),
    /// A target, at which the kernel's own initiator logs in.
    Target {
        /// Which.
        target: Target,
        /// How.
        login: Login,
    },
}

impl Carrier {
    /// Puts a device on it, or adopts the one that is there.
    pub fn attach(&self, read_only: bool) -> Result<AttachedDevice> {
        match self {
            Carrier::File(backing) => device::attach(backing, read_only),
            Carrier::Target { target, login } => disk::attach(target, login, read_only),
        }
    }

    /// The device on it, if there is one.
    pub fn device(&self) -> Result<Option<AttachedDevice>> {
        match self {
            Carrier::File(backing) => device::find(backing),
            Carrier::Target { target, .. } => disk::find(target),
        }
    }

    /// What is true of the volume whose private place is `staging`.
    pub fn observe(&self, staging: &Path) -> Result<Observation> {
        match self {
            Carrier::File(backing) => observe::observe(backing, staging),
            Carrier::Target { target, .. } => observe::observe_disk(disk::find(target)?, staging),
        }
    }

    /// Raises the device to what it stands on, which has to be at least `want`, and reads it back.
    pub fn grow_device(&self, want: Bytes) -> Result<Outcome> {
        match self {
            Carrier::File(backing) => device::grow_device(backing, want),
            Carrier::Target { target, .. } => disk::grow(target, want),
        }
    }

    /// Takes the device away. Answers whether there was one.
    pub fn detach(&self) -> Result<bool> {
        match self {
            Carrier::File(backing) => device::detach(backing),
            Carrier::Target { target, .. } => disk::detach(target),
        }
    }
}
