//! A seeded simulator of the replicated engine.
//!
//! The coordinator and the members are the real ones. Everything around them is a model with a clock of its own:
//! connections that delay, lose, repeat and reorder; disks that forget what was not synced, fill up, rot, slow down and
//! lie; processes and machines that die. A model disk ([`oracle::Oracle`]) knows what clients may read. One seed is one
//! history: its number replays a failure.

mod client;
pub mod disk;
mod faults;
mod finale;
mod net;
pub mod oracle;
mod recovery;
pub mod rng;
mod world;

use std::fmt;

use trellis_engine::{coordinator, member};

use world::World;

/// Faults of the engine itself, to see that they are found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flaws {
    /// Those of the coordinator.
    pub coordinator: coordinator::Flaws,
    /// Those of the replicas.
    pub member: member::Flaws,
}

/// What a history was like.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    /// Events that were worked on.
    pub events: u64,
    /// Milliseconds that passed in the model.
    pub virtual_ms: u64,
    /// Requests of clients that were answered.
    pub answered: u64,
    /// Values that were compared with the model disk.
    pub compared: u64,
    /// Takeovers that led to a serving volume.
    pub takeovers: u64,
    /// Growths that clients were told of.
    pub growths: u64,
    /// Regions that were repaired.
    pub repairs: u64,
    /// Reads of a replica's disk that did not ask the replica.
    pub peeks: u64,
    /// Power losses of replicas.
    pub power_losses: u64,
    /// Changes of who the replicas are.
    pub view_changes: u64,
    /// Replicas that have lost their memory.
    pub memories_lost: u64,
    /// Recoveries from survivors.
    pub recoveries: u64,
    /// Blocks whose bits flipped.
    pub flips: u64,
    /// Blocks that a power loss has torn.
    pub torn: u64,
}

/// A rule that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A read showed what it must not.
    Read(oracle::Violation),
    /// A volume was served with less than it had.
    Shrunk {
        /// The size before.
        from: u64,
        /// The size now.
        to: u64,
    },
    /// A volume was served larger than CF replicas are durably.
    RaisedEarly {
        /// The size that is served.
        size: u64,
    },
    /// After everything was healed, the volume did not come to rest.
    Stuck {
        /// What it still waited for.
        waits_for: String,
    },
    /// After everything came to rest, two replicas differ.
    Differ {
        /// The block.
        block: u64,
    },
    /// After everything came to rest, a replica has another size than the volume.
    SizeDiffers {
        /// The size of the volume.
        volume: u64,
        /// The size of the replica.
        replica: u64,
    },
    /// A replica has obeyed a coordinator of another volume.
    ObeyedStranger,
    /// A superseded coordinator has acknowledged a write.
    SplitBrain,
    /// A scrub has not found, or not mended, what there was.
    Scrub {
        /// Blocks whose bits had flipped.
        flips: u64,
        /// Blocks that it says did not match.
        found: u64,
        /// Blocks that it says it mended.
        mended: u64,
        /// Regions in which copies differed although all sums matched.
        differed: u64,
    },
    /// A change of who the replicas are has let a full copy go before there was another one.
    FullCopyLost {
        /// Full copies among the replicas before.
        before: usize,
        /// Full copies among those that are to follow.
        after: usize,
    },
}

/// A failure and when it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The rule.
    pub failure: Failure,
    /// The milliseconds that had passed.
    pub at_ms: u64,
}

impl fmt::Display for Found {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "after {} ms: {:?}", self.at_ms, self.failure)
    }
}

/// How a history is run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Faults of the engine.
    pub flaws: Flaws,
    /// Print what happens.
    pub trace: bool,
}

/// Runs the history of a seed.
pub fn run(seed: u64, options: Options) -> (Stats, Result<(), Found>) {
    let mut world = World::new(seed, options);
    let result = world.run();
    (world.stats(), result)
}
