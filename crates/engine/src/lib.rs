//! The replicated engine: stores a volume's bytes.
//!
//! - [`replica`]: the store. One copy of a volume on one pool directory, which can grow while it is in
//!   use and survives a crash at any point.
//! - [`coordinator`] and [`member`]: the two halves of the protocol that keeps several copies the same, as state
//!   machines without I/O. `docs/engine.md` argues why nothing acknowledged is lost; the simulator in `sim/` runs them
//!   through crashes, partitions and bad disks.
//! - [`sums`]: checksums of blocks, by which a replica notices that its bytes have changed.
//! - [`proto`]: the types and messages that the two share; [`wire`]: their encoding.
//! - [`drive`]: runs the two on sockets, files, threads and clocks. A [`drive::ReplicaServer`] serves one replica; a
//!   [`drive::Volume`] coordinates the replicas of a volume and serves its clients.
//!
//! Invariant: nothing here knows Kubernetes or iSCSI, and only [`drive`] knows an async runtime. File I/O elsewhere
//! blocks; call it from a thread that may block.

pub mod coordinator;
pub mod drive;
mod error;
pub mod member;
pub mod proto;
pub mod replica;
pub mod sums;
pub mod wire;

pub use error::{Error, Result};
