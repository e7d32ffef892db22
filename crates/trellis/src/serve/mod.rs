//! Replicated volumes: a process for each copy and one for the target, and how the agent controls them.
//!
//! ```text
//!   agent ──(control socket)── target ──(engine)── copy 0, copy 1, copy 2 …
//!     └──── keeper ────────────┘  ├── FUSE file ── loop device ── filesystem
//!                                 └── iSCSI portal
//! ```
//!
//! The processes are the same program under hidden verbs. The keeper starts them when the agent asks for it, and
//! restarts those that end. They outlive the agent: a service that is stopped or killed leaves I/O running, and finds
//! the processes again when it starts. Each process holds a lock on a file in the run directory of its volume, which
//! shows that it lives, and has its log next to it.
//!
//! A target that dies is started again with the next generation; the copies refuse what the dead one still had in
//! flight. The keeper holds a duplicate of the target's FUSE connection, so users of the volume wait for the successor
//! instead of getting an error.

mod control;
mod keeper;
mod links;
mod message;
mod outliving;
mod renewal;
mod replica;
mod supervisor;
mod target;
mod unserved;
mod watch;

/// The file of a volume's run directory that names the history that was begun from survivors and served.
const RECOVERED: &str = "recovered";

pub use keeper::{Keeper, run as run_keeper};
pub use links::Links;
pub use message::TargetStatus;
pub use outliving::{Outliving, Stays};
pub use renewal::{KeeperRuns, keeper_runs};
pub use replica::{ServeReplica, run as run_replica};
pub use supervisor::{Supervisor, Wake};
pub use target::{ServeTarget, run as run_target};
pub use unserved::tell as tell_unserved;
