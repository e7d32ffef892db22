//! The replicated engine: how a volume's bytes are kept.
//!
//! - [`replica`]: the store. One copy of a volume on one pool directory, which can grow while it is in
//!   use and survives a crash at any point.
//! - [`coordinator`] and [`member`]: the two halves of the protocol that keeps several copies the same,
//!   as state machines without I/O. `docs/engine.md` has the argument why nothing that was acknowledged
//!   is lost; the simulator in `sim/` runs them through crashes, partitions and bad disks.
//! - [`proto`]: the words that the two share; [`wire`]: their bytes.
//!
//! Invariant: nothing here knows Kubernetes, iSCSI or an async runtime. File I/O blocks; a caller
//! that must not block calls from a thread that may.

pub mod coordinator;
mod error;
pub mod member;
pub mod proto;
pub mod replica;
pub mod wire;

pub use error::{Error, Result};
