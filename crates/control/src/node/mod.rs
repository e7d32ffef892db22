//! The node room: brings this node's replicas and attachments to the state that the stored objects ask for, climbs the
//! ladder, and reports what it measured.

pub mod machine;

mod beat;
mod chap;
mod climb;
mod finisher;
pub(crate) mod job;
mod pool;
pub(crate) mod reconcile;
pub(crate) mod report;
mod returns;
pub(crate) mod work;

pub use beat::{LOST_AFTER, run as run_beat};
pub use chap::{ChapSecret, Secrets, target_user};
pub use finisher::{Finisher, NoClaims};
pub use job::{Job, Node, UseJob};
pub use pool::run as run_pools;
pub use reconcile::{Agent, Complaints, Ladders, run};
pub use report::copies_behind;
pub use returns::run as run_returns;
pub use work::Outcome;
