//! Bounds on memory and patience.

/// Bounds on memory and patience.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Entries kept for replicas that are behind or were away for a moment.
    pub log_entries_max: usize,
    /// Bytes of these entries.
    pub log_bytes_max: u64,
    /// Entries that a replica may have unanswered.
    pub window_entries_max: usize,
    /// Bytes that a replica may have unanswered.
    pub window_bytes_max: u64,
    /// Parts of client requests that may wait.
    pub waiting_max: usize,
    /// How long a replica may owe an answer that the others have given already.
    pub straggler_ms: u64,
    /// When the log is full of what a replica has not been sent, writes wait for it as long as it has owed its answer
    /// for less than this. A replica that merely gets less processor time than the others keeps up that way; one that
    /// hangs is given up.
    pub lag_ms: u64,
    /// How long a replica may owe a read before another one is asked as well.
    pub hedge_ms: u64,
    /// How long a replica may owe any answer.
    pub hang_ms: u64,
    /// After how long without a word a replica of which nothing is asked is called.
    pub call_ms: u64,
    /// After how long without a word a replica that owes an answer is told of as silent.
    pub silent_ms: u64,
    /// How long a takeover waits for replicas beyond a quorum.
    pub gather_ms: u64,
    /// How long replicas have to set space aside, and to raise their size.
    pub growth_ms: u64,
    /// How long until a growth that was held is tried again.
    pub growth_retry_ms: u64,
    /// How often a new epoch begins while there are writes.
    pub roll_ms: u64,
    /// Regions of one replica that are repaired at the same time.
    pub repairs_per_replica_max: usize,
    /// Bytes repaired in a second, over all replicas, not counting regions that clients wait for.
    pub repair_bytes_per_second: u64,
    /// Bytes of the volume that a scrub reads in a second, in every copy, while clients have no requests. While they
    /// have, it is a quarter of that.
    pub scrub_bytes_per_second: u64,
    /// How long until a repair that failed is tried again.
    pub repair_retry_ms: u64,
    /// How long a region may be without any holder before somebody decides again.
    pub retake_ms: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            log_entries_max: 16_384,
            log_bytes_max: 64 << 20,
            window_entries_max: 256,
            window_bytes_max: 16 << 20,
            waiting_max: 1024,
            straggler_ms: 2_000,
            lag_ms: 80,
            hedge_ms: 50,
            hang_ms: 5_000,
            call_ms: 1_000,
            silent_ms: 2_000,
            gather_ms: 500,
            growth_ms: 2_000,
            growth_retry_ms: 5_000,
            roll_ms: 10_000,
            repairs_per_replica_max: 8,
            repair_bytes_per_second: 200 << 20,
            scrub_bytes_per_second: 96 << 20,
            repair_retry_ms: 1_000,
            retake_ms: 2_000,
        }
    }
}
