//! The node agent: makes this node's replicas and attachments what the stored objects say, climbs the
//! ladder, and reports what it measured.

pub mod machine;

mod climb;
mod job;
mod pool;
mod reconcile;
mod report;
mod work;

pub use pool::run as run_pools;
pub use reconcile::{Agent, Ladders, run};
