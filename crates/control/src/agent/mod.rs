//! The node agent: makes this node's replicas and attachments what the stored objects say, climbs the
//! ladder, and reports what it measured.

pub mod machine;

mod climb;
pub(crate) mod job;
mod pool;
pub(crate) mod reconcile;
pub(crate) mod report;
mod returns;
pub(crate) mod work;

pub use job::Node;
pub use pool::run as run_pools;
pub use reconcile::{Agent, Complaints, Ladders, run};
pub use returns::run as run_returns;
