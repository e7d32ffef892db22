//! Looks for copies whose files are missing, because their disk is not mounted or their directory is gone.
//!
//! Nothing else would notice their return: the kernel sends us no event when a directory gets its name back, and
//! retries after a failure become rare. While no copy is missing, nothing is looked at.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use trellis_api::kinds::Replica;

use super::reconcile::Agent;

/// How often to look.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A copy that cannot be served.
struct Held {
    name: String,
    volume: String,
    pool: String,
    data: PathBuf,
}

/// Looks for ever.
pub async fn run(agent: Arc<Agent>) {
    let mut missing = BTreeSet::new();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let held = held(&agent);
        if held.is_empty() {
            missing.clear();
            continue;
        }
        let machine = agent.machine.clone();
        // On a thread of its own: a disk that does not answer blocks this look and no other work.
        let look = move || {
            let looked = held.into_iter().map(|copy| {
                let is_there = machine.copies.is_there(&copy.data);
                (copy, is_there)
            });
            looked.collect::<Vec<_>>()
        };
        let Ok(looked) = tokio::task::spawn_blocking(look).await else {
            continue;
        };
        let names = looked
            .iter()
            .map(|(copy, there)| (copy.name.as_str(), *there));
        let back = returned(&mut missing, names);
        for (copy, _) in looked
            .into_iter()
            .filter(|(copy, _)| back.contains(&copy.name))
        {
            tracing::info!(
                volume = copy.volume,
                pool = copy.pool,
                "a copy's files are back"
            );
            agent.world.pool_queue.push(&copy.pool);
            agent.world.passes.push(&copy.volume);
            let machine = agent.machine.clone();
            tokio::task::spawn_blocking(move || machine.copies.serve_again(&copy.volume));
        }
    }
}

/// The copies of this node that once existed and cannot be served now.
fn held(agent: &Agent) -> Vec<Held> {
    let held = |replica: &Arc<Replica>| {
        let status = replica.status.as_ref()?;
        status.hold.as_ref()?;
        Some(Held {
            name: replica.name_any(),
            volume: replica.spec.volume.clone(),
            pool: replica.spec.pool.clone(),
            data: PathBuf::from(status.path.as_ref()?),
        })
    };
    let replicas = agent.world.replicas.all();
    let here = replicas
        .iter()
        .filter(|each| each.spec.node == agent.node.name);
    here.filter_map(held).collect()
}

/// Those that were missing at the last look and are there now. Copies that are held for another reason are not among
/// them.
fn returned<'a>(
    missing: &mut BTreeSet<String>,
    looked: impl Iterator<Item = (&'a str, bool)>,
) -> BTreeSet<String> {
    let (there, away): (Vec<_>, Vec<_>) = looked.partition(|(_, is_there)| *is_there);
    let before = std::mem::take(missing);
    missing.extend(away.into_iter().map(|(name, _)| name.to_owned()));
    let there = there.into_iter().map(|(name, _)| name.to_owned());
    there.filter(|name| before.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a return is overlooked, or one that is held for another reason is tried without a pause.
    #[test]
    fn a_copy_returns_once_and_only_after_it_was_missing() {
        let mut missing = BTreeSet::new();
        let mut look = |looked: &[(&str, bool)]| {
            let back = returned(&mut missing, looked.iter().copied());
            back.into_iter().collect::<Vec<_>>()
        };
        assert!(look(&[("a", true), ("b", false)]).is_empty());
        assert!(look(&[("a", true), ("b", false)]).is_empty());
        assert_eq!(look(&[("a", true), ("b", true)]), ["b"]);
        assert!(look(&[("a", true), ("b", true)]).is_empty());
    }
}
