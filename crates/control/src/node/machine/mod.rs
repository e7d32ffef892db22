//! What the agent needs from its machine: pools, copies and consumers, each behind a trait of its own.
//!
//! The binary implements the traits with the replica store and the kernel, the model with numbers. Every call blocks,
//! is idempotent, and measures instead of remembering. A refusal is returned as the hold that a user will read.

mod consumers;
mod copies;
mod pools;

use std::sync::Arc;

pub use consumers::{Consumers, Provided, RungFound, Stage, StageFound, Use};
pub use copies::{
    Copies, CopyFound, ReplicaFound, ReplicaPlace, ScrubWish, TargetFound, TargetPlace,
};
pub use pools::{PoolMeasured, Pools};

/// One machine. Whoever needs a part of it takes that part.
#[derive(Clone)]
pub struct Machine {
    /// Its pools.
    pub pools: Arc<dyn Pools>,
    /// The copies on them, and the targets that run here.
    pub copies: Arc<dyn Copies>,
    /// What uses volumes here.
    pub consumers: Arc<dyn Consumers>,
}

impl Machine {
    /// The machine that one value stands for.
    pub fn of<M: Pools + Copies + Consumers>(machine: Arc<M>) -> Machine {
        Machine {
            pools: machine.clone(),
            copies: machine.clone(),
            consumers: machine,
        }
    }
}
