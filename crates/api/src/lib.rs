//! The vocabulary of Trellis: sizes, the ladder and its planner, reasons, steps, and the Kubernetes kinds.
//!
//! Nothing here does I/O. Everything here can be tested with values alone.

pub mod about;
#[cfg(feature = "kinds")]
pub mod kinds;
pub mod quantity;
pub mod step;

mod bytes;
mod filesystem;
mod hold;
mod iscsi;
mod ladder;
mod mount_options;
mod node_name;

pub use bytes::Bytes;
pub use filesystem::{FilesystemKind, UnknownFilesystem};
pub use hold::{Hold, HoldReason};
pub use iscsi::{IscsiAccess, PortalAt};
pub use ladder::{Next, Observed, Rung, next_step};
pub use mount_options::{MountFlag, MountOptions, RefusedOption};
pub use node_name::{NodeName, NodeNameError};
