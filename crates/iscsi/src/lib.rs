//! An iSCSI target.
//!
//! - [`pdu`]: headers as types, framing, digests.
//! - [`login`]: identity, authentication, negotiation.
//! - [`session`]: a connection without I/O.
//! - [`scsi`]: what commands mean.
//! - [`unit`]: what the nexuses of a logical unit share, including growth.
//! - [`portal`]: targets, access, and the sessions that are open.
//! - [`server`]: the driver on tokio; [`socket`]: how it writes.
//! - [`lun`]: the trait that a volume implements.
//!
//! Invariant: nothing here knows what a volume is made of, and only [`server`] and [`socket`] touch the network.

pub mod limits;
pub mod login;
pub mod lun;
pub mod pdu;
pub mod portal;
pub mod scsi;
pub mod server;
pub mod session;
pub mod socket;
pub mod unit;

mod error;
mod pool;

pub use error::{Breach, Disconnect, Error};
pub use lun::{Answer, Lun};
pub use pool::{Memory, Room};
pub use portal::{Access, Portal, Target};
pub use server::{Server, ServerConfig};
