//! The boundary to the kernel: ioctls and mount calls, each wrapped once, thinly and safely.
//!
//! `unsafe` is allowed only below this module, in the files that say so, and every block has a SAFETY comment.
//! Decisions are made elsewhere.

pub mod block;
pub mod capability;
pub mod descriptors;
pub mod events;
pub mod fdpass;
pub mod fsctl;
pub mod fuse;
pub mod loopdev;
pub mod mount;
pub mod mountinfo;
pub mod resident;
