//! The replicated engine: how a volume's bytes are kept.
//!
//! - [`replica`]: the store. One copy of a volume on one pool directory, which can grow while it is in
//!   use and survives a crash at any point.
//! - [`coordinator`] and [`member`]: the two halves of the protocol that keeps several copies the same,
//!   as state machines without I/O. `docs/engine.md` has the argument why nothing that was acknowledged
//!   is lost; the simulator in `sim/` runs them through crashes, partitions and bad disks.
//! - [`sums`]: the sums of blocks, by which a replica knows its own bytes again.
//! - [`proto`]: the words that the two share; [`wire`]: their bytes.
//! - [`drive`]: what runs the two: sockets, files, threads and clocks. A [`drive::ReplicaServer`] serves
//!   one replica; a [`drive::Volume`] coordinates the replicas of a volume and is what clients use.
//!
//! Invariant: nothing here knows Kubernetes or iSCSI, and only [`drive`] knows an async runtime. File
//! I/O elsewhere blocks; a caller that must not block calls from a thread that may.

pub mod coordinator;
pub mod drive;
mod error;
pub mod member;
pub mod proto;
pub mod replica;
pub mod sums;
pub mod wire;

pub use error::{Error, Result};
