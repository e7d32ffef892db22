//! Virtual machines on QEMU. Nothing here knows Kubernetes: a caller brings annotations, keys of ConfigMaps, options and
//! open files.
//!
//! ```text
//!   reference ──▶ image (cache, by digest) ──▶ qcow2 (checked, read) ──▶ root (a persistent volume)
//!   annotations, volumes ──▶ seed (cloud-init) ──▶ names (what the guest calls its disks)
//!   spec ──▶ launch (command line) ──▶ QEMU ◀── driver (qmp, plug, grow) ── agent (inside the guest)
//! ```
//!
//! The happy path: [`launch`] turns a [`launch::VmSpec`] into QEMU's command line. Whoever starts processes starts it.
//! [`driver`] connects to its monitor with [`qmp`], plugs the disks as open files ([`plug`], with nodes from
//! [`graph`]), and lets the machine run. Disks come, grow ([`grow`]) and go while it runs. [`agent`] talks to the
//! guest.
//!
//! Failure paths: a driver that dies costs nothing, because the next one asks QEMU what it has ([`disks`]). A QEMU that
//! dies ends its driver, which says so. An unplug that the guest does not acknowledge is reported, and its disk stays.
//! A growth that QEMU cannot do now names what is in its way.
//!
//! Invariant: no disk ever gets smaller. QEMU's `block_resize` would shrink most of them without a word, so [`grow`]
//! is the only place that sends it.

pub mod agent;
mod digest;
pub mod disks;
pub mod driver;
pub mod error;
pub mod flex;
pub mod graph;
pub mod grow;
pub mod image;
pub mod launch;
mod line;
pub mod medium;
pub mod names;
pub mod plug;
pub mod qcow2;
pub mod qmp;
pub mod root;
pub mod seed;

pub use digest::{DigestError, ImageDigest};
pub use error::{Error, Result};
