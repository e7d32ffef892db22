//! The part of Trellis that touches this machine's kernel: loop devices, mounts, filesystems.
//!
//! The crate offers plain blocking functions. It knows nothing of claims, clusters or async; a caller
//! runs it on a thread that may block. The happy path of a volume is
//! [`volume::attach`] → [`volume::ensure_filesystem`] → [`volume::stage`] → [`volume::publish`], and
//! the way back is [`volume::unpublish`] → [`volume::unstage`] → [`volume::detach`]. In between,
//! [`volume::grow_device`] and [`volume::grow_filesystem`] raise the two rungs that live on a node;
//! [`volume::grow_idle`] raises the filesystem of a volume that nobody uses.
//!
//! Invariant: every operation first observes and does only what is missing, so it can be repeated after a crash at any
//! point. Every returned size was read back from the kernel.
//!
//! Invariant: nothing here shrinks anything, and nothing writes to a device whose content is not
//! known to be empty (see [`probe`]), except the kernel's filesystem drivers.
//!
//! [`fuse`] turns a volume that is not a file of this machine into one, and then all of this holds for it. [`iscsi`]
//! turns a volume that is served over iSCSI into a disk.
//!
//! Boundaries: `unsafe` is only in [`sys`]; only [`exec`] runs other programs.

pub mod doctor;
pub mod error;
pub mod exec;
pub mod filesystem;
pub mod fuse;
pub mod ground;
mod holders;
pub mod iscsi;
pub mod probe;
mod reason;
pub mod sys;
pub mod volume;

pub use error::{Error, Result};
pub use holders::Holder;
