//! Controllers: pure plans, thin reconcilers, in three rooms.
//!
//! [`claim`] turns claims into volumes and larger requests into larger goals. [`volume`] says which copies a volume has,
//! where they are and which of them count. [`node`] makes the copies and attachments of one node what they should be,
//! and reports what it measured. They look at the same caches ([`world`]) and know the store only as a `kube::Client`.

pub mod bootstrap;
pub mod cache;
pub(crate) mod carry;
pub mod certificates;
pub mod claim;
pub mod disks;
pub mod embedded;
pub mod health;
pub mod lease;
pub mod ledger;
pub mod metrics;
pub mod node;
pub mod plan;
pub mod pods;
pub mod queue;
pub mod record;
pub mod run;
pub mod stored;
pub mod timely;
pub mod unseen;
pub mod usage;
pub mod view;
pub mod volume;
pub mod world;
pub mod write;

#[cfg(test)]
mod model;
