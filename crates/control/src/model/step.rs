//! What can happen in a history.

use trellis_api::Rung;

/// One step of a history. Whatever it names by a number is one of those that there are.
#[derive(Clone, Debug)]
pub enum Step {
    /// A claim is made, unless one of that name exists.
    Create {
        claim: usize,
        class: usize,
        mib: u64,
        block: bool,
    },
    /// A bound claim asks for another size, as far as the API lets it.
    Ask {
        claim: usize,
        mib: u64,
    },
    Attach {
        claim: usize,
        which: usize,
        node: usize,
        read_only: bool,
    },
    Detach {
        claim: usize,
        which: usize,
    },
    DeleteClaim {
        claim: usize,
    },
    /// The reclaim policy of a claim's persistent volume is changed.
    Policy {
        claim: usize,
        retain: bool,
    },
    /// A volume with several copies is to have so many.
    Scale {
        claim: usize,
        copies: u32,
    },
    /// One of several copies is deleted, to be replaced.
    Replace {
        claim: usize,
        which: usize,
    },
    /// Copies on this pool cannot be reached from now on; with none, all can.
    LosePool {
        pool: Option<usize>,
    },
    PoolSize {
        pool: usize,
        mib: u64,
    },
    Overcommit {
        pool: usize,
        percent: u32,
    },
    /// No raise of this rung succeeds from now on; with none, all do.
    Break {
        rung: Option<Rung>,
    },
    /// One process is told some of what it has not seen of one kind.
    Deliver {
        seat: usize,
        kind: usize,
        count: usize,
    },
    /// The planner looks at a volume, if it does not have a plan for it in its hands.
    Plan {
        volume: usize,
    },
    /// A plan is written; of its writes, those in the mask are lost on the way.
    Write {
        volume: usize,
        lost: u8,
    },
    /// The agent of a node looks at a volume, if it has not looked at it already.
    Look {
        node: usize,
        volume: usize,
    },
    /// The agent does what it saw, and reports.
    Work {
        node: usize,
        volume: usize,
    },
    /// The process of the planner dies and starts again; in the embedded home the agent dies with it.
    Restart,
    /// The agent of a node dies and starts again.
    RestartNode {
        node: usize,
    },
    /// Everything on a node is lost but its disks.
    Die {
        node: usize,
    },
    /// A node that has died starts again.
    Start {
        node: usize,
    },
    /// Nothing on a node goes on.
    Freeze {
        node: usize,
    },
    /// A node that was frozen goes on with what it knew.
    Wake {
        node: usize,
    },
    /// A node does not reach the API; with `data`, it does not reach other nodes either.
    Cut {
        node: usize,
        data: bool,
    },
    /// It does again.
    Heal {
        node: usize,
    },
    /// Nothing happens for a while.
    Wait {
        seconds: u32,
    },
    /// Another process plans from now on. The one before still has the plans that it has made.
    ChangeLeader,
    /// One of these plans is written after all.
    WriteLate {
        volume: usize,
    },
    /// One round in which everybody is told everything and every volume has its turn.
    CatchUp,
}
