//! How long a verb may take, whatever the service does: it may be frozen, overloaded or gone.

use std::future::Future;
use std::sync::OnceLock;
use std::time::Duration;

use trellis_api::HoldReason;

use crate::cli::{Global, NodeVerb, PoolVerb, Verb, VolumeVerb};
use crate::exit::{Ended, address};

/// How long a verb may take by default.
const TIME_MAX: Duration = Duration::from_secs(60);
/// The extra time for a verb that reports by itself why it is late.
const GRACE: Duration = Duration::from_secs(1);
/// How long the service may take for one answer, in a verb that otherwise has no limit.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);

/// What the command line says.
static TOLD: OnceLock<Duration> = OnceLock::new();

impl Global {
    /// How long to wait for what was asked for.
    pub fn patience(&self) -> Duration {
        self.timeout.unwrap_or(TIME_MAX)
    }
}

/// Whether a time limit makes sense for the verb.
pub fn has_limit(verb: &Verb) -> bool {
    !matches!(
        verb,
        Verb::Up(_)
            | Verb::Controller(_)
            | Verb::Node(NodeVerb::Run(_))
            | Verb::Check(_)
            | Verb::Doctor(_)
            | Verb::Restore { .. }
            | Verb::Manual { .. }
            | Verb::Completion { .. }
            | Verb::Keeper(_)
            | Verb::ServeReplica(_)
            | Verb::ServeTarget(_)
    )
}

/// How long the verb as a whole may take. A verb that watches, moves copies or compares them takes as long as that does
/// unless a limit is given, and bounds each of its questions itself. `down` waits for the kernel, which nothing can
/// hurry.
fn limit(global: &Global, verb: &Verb) -> Option<Duration> {
    let told = global.timeout;
    match verb {
        verb if !has_limit(verb) => None,
        Verb::Down(_) => None,
        Verb::Df(verb) if verb.output.watch => None,
        Verb::Ladder(verb) if verb.output.watch => None,
        Verb::Explain(verb) | Verb::History(verb) if verb.output.watch => None,
        Verb::Pool(PoolVerb::Ls { output }) if output.watch => None,
        Verb::Node(NodeVerb::Ls { output }) if output.watch => None,
        Verb::Volume(VolumeVerb::Show { output, .. }) if output.watch => None,
        Verb::Pool(PoolVerb::Rm { .. }) | Verb::Volume(VolumeVerb::Scrub { wait: true, .. }) => {
            told
        }
        _ => Some(told.unwrap_or(TIME_MAX)),
    }
}

/// Whether the verb reports by itself what it waited for.
fn tells_itself(verb: &Verb) -> bool {
    match verb {
        Verb::Grow(verb) => verb.wait,
        Verb::Mount(_) | Verb::Umount(_) => true,
        Verb::Pool(PoolVerb::Grow { .. } | PoolVerb::Rm { .. }) => true,
        Verb::Volume(VolumeVerb::Scrub { wait, .. }) => *wait,
        _ => false,
    }
}

/// Runs a verb within its time.
pub async fn bounded<T>(
    global: &Global,
    verb: &Verb,
    act: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    if let Some(told) = global.timeout {
        let _ = TOLD.set(told);
    }
    let Some(limit) = limit(global, verb) else {
        return act.await;
    };
    let grace = if tells_itself(verb) {
        GRACE
    } else {
        Duration::ZERO
    };
    match tokio::time::timeout(limit + grace, act).await {
        Ok(done) => done,
        Err(_) => Err(silent(limit).into()),
    }
}

/// One question to the service, which may be frozen.
pub async fn answered<T>(ask: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let limit = TOLD.get().copied().unwrap_or(ANSWER_TIME_MAX);
    match tokio::time::timeout(limit, ask).await {
        Ok(answer) => answer,
        Err(_) => Err(silent(limit).into()),
    }
}

/// Whether a hold may pass without anybody doing anything: a node that restarts comes back, and so does a process.
pub fn passes(reason: HoldReason) -> bool {
    matches!(
        reason,
        HoldReason::ReplicaUnavailable
            | HoldReason::TooFewReplicas
            | HoldReason::TargetDown
            | HoldReason::TargetSilent
            | HoldReason::PoolNotReady
            | HoldReason::PoolFull
            | HoldReason::OperationRunning
            | HoldReason::ClaimNotBound
            | HoldReason::TargetOutbid
            | HoldReason::UsedElsewhere
    )
}

fn silent(limit: Duration) -> Ended {
    Ended::TimedOut(format!(
        "the service{} has not answered within {limit:?}; look whether its process runs and at its log, and try again: what it \
         was asked for it may still do",
        address()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::Parser;

    // Fails if a service ends by itself after the time that a verb has.
    #[test]
    fn a_service_runs_for_ever() {
        for line in ["up", "controller", "node run --join file"] {
            let words = std::iter::once("trellis").chain(line.split(' '));
            let cli = Cli::parse_from(words);
            assert_eq!(limit(&cli.global, &cli.verb), None, "{line}");
        }
    }
}
