//! The replicated engine: how a volume's bytes are kept.
//!
//! So far this crate is the floor of that engine, the [`replica`] store: one copy of a volume on one
//! pool directory, which can grow while it is in use and survives a crash at any point.
//!
//! Invariant: nothing here knows Kubernetes, iSCSI or an async runtime. File I/O blocks; a caller
//! that must not block calls from a thread that may.

mod error;
pub mod replica;

pub use error::{Error, Result};
