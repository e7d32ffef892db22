//! Volumes of several copies: a process for every copy and one for the target, and the agent's hold on them.
//!
//! ```text
//!   agent ──(control socket)── target ──(engine)── copy 0, copy 1, copy 2 …
//!                                 ├── FUSE file ── loop device ── filesystem
//!                                 └── iSCSI portal
//! ```
//!
//! The processes are the same program under hidden verbs. They are started by the agent and outlive it: a service that
//! is stopped or killed leaves I/O running, and finds the processes again when it starts. Each holds a lock on a file
//! in the run directory of its volume, which tells that it lives, and has its log beside it.
//!
//! A target that dies is started again with the next generation; the copies refuse what the dead one still had on its
//! way. The agent keeps a duplicate of the target's FUSE connection, so that whoever uses the volume waits for the
//! successor instead of getting an error.

mod message;
mod orphans;
mod paths;
mod process;
mod replica;
mod supervisor;
mod target;
mod watch;

pub use orphans::free as free_orphans;
pub use replica::{ServeReplica, run as run_replica};
pub use supervisor::{Supervisor, Wake};
pub use target::{ServeTarget, run as run_target};
