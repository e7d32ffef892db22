//! Volumes of several copies: a process for every copy and one for the target, and the agent's hold on them.
//!
//! ```text
//!   agent ──(control socket)── target ──(engine)── copy 0, copy 1, copy 2 …
//!     └──── keeper ────────────┘  ├── FUSE file ── loop device ── filesystem
//!                                 └── iSCSI portal
//! ```
//!
//! The processes are the same program under hidden verbs. The keeper starts them, at the agent's word, and starts again
//! what ends; they outlive the agent: a service that is stopped or killed leaves I/O running, and finds the processes
//! again when it starts. Each holds a lock on a file in the run directory of its volume, which tells that it lives, and
//! has its log beside it.
//!
//! A target that dies is started again with the next generation; the copies refuse what the dead one still had on its
//! way. The keeper holds a duplicate of the target's FUSE connection, so that whoever uses the volume waits for the
//! successor instead of getting an error.

mod keeper;
mod message;
mod replica;
mod supervisor;
mod target;
mod unserved;
mod watch;

/// The file of a volume's run directory that names the history that was begun from survivors and served.
const RECOVERED: &str = "recovered";

pub use keeper::{Keeper, run as run_keeper};
pub use replica::{ServeReplica, run as run_replica};
pub use supervisor::{Supervisor, Wake};
pub use target::{ServeTarget, run as run_target};
pub use unserved::tell as tell_unserved;
