//! Runs the state machines of the engine on sockets, files, threads and clocks.
//!
//! ```text
//!   clients ──▶ Volume ──(Coordinator)── Link ═══ Unix or TLS ═══ Link ──(Member)── Disk ──▶ files
//!               one owner task                                 ReplicaServer, one owner thread
//! ```
//!
//! - [`Volume`]: a handle that many clients share. Behind it one owner runs the coordinator: it takes everything that
//!   has come in from clients and replicas, lets the coordinator run once, and then writes to the sockets.
//! - [`ReplicaServer`]: serves one replica at an [`Address`], on a thread of its own.
//! - [`Credentials`]: what a node proves itself with to other nodes ([`tls`] has the argument).
//! - [`Disk`] and [`FileDisk`]: do what a member asks for, on the files of its directory.
//!
//! Only this part of the crate uses tokio.

mod address;
mod buffers;
mod core;
mod dial;
mod disk;
mod failure;
mod gate;
mod lent;
mod link;
mod reader;
mod refusals;
mod room;
mod server;
mod sums;
mod survey;
pub mod tls;
mod volume;

use std::path::PathBuf;

use uuid::Uuid;

pub use address::{Address, AddressError};
pub use disk::{Disk, FileDisk, Found};
pub use failure::{Failure, Trouble};
pub use lent::Slot;
pub use refusals::Refused;
pub use room::Extent;
pub use server::{ReplicaLinks, ReplicaServer};
pub use survey::{SurveyFault, survey};
pub use tls::{CredentialFault, Credentials, NodeName, NodeNameError, Refusal, Side};
pub use volume::{Compared, Ended, Volume, VolumeError, VolumeSettings, WhenFull};

use crate::replica::{Identity, Provisioning};

/// Which replica is to be served.
#[derive(Clone, Debug)]
pub struct ReplicaSettings {
    /// Its directory, `POOL/replicas/NAME`.
    pub path: PathBuf,
    /// The id that its pool must have, if that is known.
    pub pool: Option<Uuid>,
    /// Whose bytes it must hold.
    pub identity: Identity,
    /// How it gets its space.
    pub provisioning: Provisioning,
    /// Whether it should have sums of its blocks. One that has some keeps them.
    pub checksums: bool,
}

/// An error with its cause, for a line in a log.
fn in_full(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error} ({source})"),
        None => error.to_string(),
    }
}
