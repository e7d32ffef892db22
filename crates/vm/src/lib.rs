//! Virtual machines: the disks they begin with, and what they are told when they start.
//!
//! Nothing here knows Kubernetes. A caller brings annotations, keys of ConfigMaps, options and open files; it gets
//! parsed values, bytes of images, and a device that is ready to boot from.
//!
//! ```text
//!   reference ──▶ image (cache, by digest) ──▶ qcow2 (checked, read) ──▶ root (a persistent volume)
//!   annotations, volumes ──▶ seed (cloud-init) ──▶ names (what the guest calls its disks)
//! ```

mod digest;
pub mod flex;
pub mod image;
pub mod medium;
pub mod names;
pub mod qcow2;
pub mod root;
pub mod seed;

pub use digest::{DigestError, ImageDigest};
