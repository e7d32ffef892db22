//! The doors to the kernel: ioctls and mount calls, each wrapped once, thinly and safely.
//!
//! `unsafe` is allowed below this module only, in the files that say so, and every block has the
//! sentence that makes it sound. What is decided with the numbers is decided elsewhere.

pub mod block;
pub mod capability;
pub mod events;
pub mod fdpass;
pub mod fsctl;
pub mod fuse;
pub mod loopdev;
pub mod mount;
pub mod mountinfo;
pub mod resident;
