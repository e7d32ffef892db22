//! Controllers: pure plans, thin reconcilers.
//!
//! [`claim`] turns claims into volumes and larger requests into larger goals. [`agent`] is its
//! counterpart on each node: it makes the replicas and attachments of that node what they should be,
//! and reports what it measured. Both look at the same caches ([`world`]) and know the store only as a
//! `kube::Client`.

pub mod bootstrap;
pub mod cache;
pub mod claim;
pub mod disks;
pub mod ledger;
pub mod metrics;
pub mod node;
pub mod plan;
pub mod pods;
pub mod queue;
pub mod record;
pub mod run;
pub mod timely;
pub mod usage;
pub mod view;
pub mod volume;
pub mod world;
pub mod write;

#[cfg(test)]
mod model;
