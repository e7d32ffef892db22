//! The keeper: one small process for each data directory. It starts, watches, restarts and ends the processes of
//! volumes, and holds the FUSE connections of their targets.
//!
//! ```text
//!   service ──(what shall run)──► keeper ──(starts, watches)──► copies
//!      ▲                          │    ▲                        target ── FUSE file ── loop device ── filesystem
//!      └──────────(events)────────┘    └──(deposits, takes)────────┘
//! ```
//!
//! **Why a process of its own.** A FUSE connection lives as long as some process has its `/dev/fuse` open, and its
//! users wait while nobody serves it. The service makes ioctls and mounts on top of such connections, so one of its
//! threads may be waiting in the kernel for an answer. A process that is killed in that state does not end, and keeps
//! its descriptors. If one of these were the connection, everything would wait for itself, for ever. So a process that
//! holds a connection does nothing that could wait for one:
//!
//! Invariant: the keeper does no I/O, ioctl, mount, stat or sync on a volume or on anything on top of one. It has one
//! thread, which waits only in `poll`. Its files are in the data directory.
//! Invariant: the service never has a descriptor of `/dev/fuse`. A target deposits its connection here itself, before
//! anybody can use the file, and its successor takes it from here.
//!
//! **What may die.** Service, target and copies together: the keeper restarts target and copies, and users of the
//! volume see a pause. The keeper alone: the service starts another one, which finds the running processes by their
//! locks, and targets deposit their connections with it. While there is no keeper, each connection is open in its target
//! alone. The keeper and a target together: the connection closes, and users get errors (`ENOTCONN`) instead of waiting
//! for ever.
//!
//! **Its upgrade.** The keeper becomes another program by `exec` ([`handover`]), when the service asks for it because it
//! runs another build. That is no death: the process, its lock, its children, its sockets and all that it holds stay.
//! No target deposits again, no event is lost, and a request that arrives meanwhile is answered by the new program.
//! Since there is no way back after `exec`, the program is tried first ([`trial`]). If it cannot take over, the keeper
//! goes on as the program that it is, and says why ([`Request::Build`](message::Request::Build)). A death in the middle
//! is the death of the keeper, as above. What it starts from then on is the new program; what runs goes on as the old.
//!
//! **Frozen targets.** The keeper calls every target that has deposited its connection every two seconds, and the
//! target answers from the threads that serve the volume. A target that does not answer is reported within five
//! seconds, and killed after a time that the service sets ([`SILENCE_TIME_MAX`] by default). Then it is restarted like
//! any process that ends.
//!
//! **What must run** is kept in a file ([`wanted`]), so that the successor of a killed keeper goes on where it was.

mod build;
mod calls;
mod error;
mod handover;
mod keeper;
mod link;
pub mod message;
pub mod paths;
pub mod process;
mod processes;
mod trial;
mod wanted;

pub use build::{Build, OWN_PROGRAM};
pub use calls::SILENCE_TIME_MAX;
pub use error::Error;
pub use keeper::{Settings, can_read, go_on, run};
pub use link::Link;
