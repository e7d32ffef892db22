//! The keeper: one small process for each data directory that starts, watches, starts again and ends the processes of
//! volumes, and holds the FUSE connections of their targets.
//!
//! ```text
//!   service ──(what shall run)──► keeper ──(starts, watches)──► copies
//!      ▲                          │    ▲                        target ── FUSE file ── loop device ── filesystem
//!      └──────────(events)────────┘    └──(deposits, takes)────────┘
//! ```
//!
//! **Why a process of its own.** A FUSE connection lives as long as somebody has its `/dev/fuse` open, and its users wait
//! while nobody serves it. The service makes ioctls and mounts on what stands on such connections, so a thread of it
//! may be waiting in the kernel for an answer; a process that is killed in that state does not end, and keeps its
//! descriptors. If one of them was the connection, everything would wait for itself, for ever. So whoever holds a
//! connection does nothing that could wait for one:
//!
//! Invariant: the keeper does no I/O, ioctl, mount, stat or sync on a volume or on anything that stands on one. It has
//! one thread, which waits in `poll` alone. Its files are in the data directory.
//! Invariant: the service never has a descriptor of `/dev/fuse`. A target deposits its connection here itself, before
//! anybody can use the file, and its successor takes it from here.
//!
//! **Who may die.** Service, target and copies together: the keeper starts target and copies again, and users of the
//! volume see a pause. The keeper alone: targets have their connections, and deposit them with the next keeper, which
//! the service starts and which finds the running processes by their locks. The keeper and a target together: the
//! connection closes, and users get errors (`ENOTCONN`) instead of waiting for ever.
//!
//! **Frozen targets.** A target that has deposited its connection is called every two seconds, and answers from the
//! threads that serve the volume. One that does not is told of within five seconds, and killed after a time that the
//! service says ([`SILENCE_TIME_MAX`] if it does not); then it is started again like any other that ends.
//!
//! **What shall run** is kept in a file ([`wanted`]), so that a keeper that was killed goes on where it was.

mod calls;
mod error;
mod keeper;
mod link;
pub mod message;
pub mod paths;
pub mod process;
mod processes;
mod wanted;

pub use calls::SILENCE_TIME_MAX;
pub use error::Error;
pub use keeper::{Settings, run};
pub use link::Link;
