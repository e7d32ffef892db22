//! The claim room: provisioner, binder and resizer in one, because all three look at the same objects and must not
//! contradict each other.

pub mod class;
pub mod finish;
pub mod plan;
pub mod provision;
pub mod status;

pub(crate) mod by_hand;
mod grow;
mod history;
mod reclaim;
pub(crate) mod reconcile;

pub use history::asks_for_size;
pub use reconcile::run;
