//! The claim room: provisioner, binder, resizer and claim protection, as a cluster has them. It turns claims into
//! volumes, and tells claims what became of their volumes. Of our own kinds it writes only what a volume should be. Only
//! the embedded home has it.

pub mod class;
pub mod finish;
pub mod grow;
pub mod provision;
pub mod reclaim;
pub mod status;

pub(crate) mod by_hand;
mod requester;

pub use requester::asks_for_size;
