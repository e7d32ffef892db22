//! Trellis' words: sizes, the ladder and its planner, reasons, steps, and the Kubernetes kinds.
//!
//! Nothing here does I/O. Everything here can be tested with values alone.

pub mod step;

mod bytes;

pub use bytes::Bytes;
