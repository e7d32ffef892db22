//! The CSI driver `trellis.dev`.
//!
//! It translates calls into Volumes and Attachments, waits for their status, and answers with it. It decides nothing:
//! where copies go, whether there is room, and which node may write is decided where it always is, and a refusal is told
//! with the hold's own sentence ([`codes`]).
//!
//! ```text
//!  sidecars ──▶ controller ── spec ──▶ Volume ──────────▶ the volume room
//!                   ◀──────── status ────┘
//!  kubelet ───▶ node ──────── spec ──▶ Attachment ──────▶ the node room: device, filesystem, staging path
//!                 │ ◀──────── status ────┘
//!                 └─ Host: a bind from the staging path to the pod's path
//! ```
//!
//! A call that is given up leaves its wish behind, and a repeated call finds it: nothing here is remembered between two
//! calls. Kernel and mounts are behind [`host::Host`], which the binary hands in.

pub mod client;
pub mod codes;
pub mod host;
pub mod proto;
pub mod serve;
pub mod socket;

mod capability;
mod condition;
mod controller;
mod error;
mod identity;
mod names;
mod node;
mod objects;
mod patience;
mod range;
mod registration;
mod turns;

pub use error::Error;
pub use names::{attachment_name, volume_name};
pub use tonic::{Code, Status};
