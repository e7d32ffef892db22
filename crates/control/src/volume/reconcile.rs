//! Carries out the plans of the volume room alone, where somebody else makes the volumes: a CSI controller in a cluster.

use std::sync::Arc;

use kube::Client;

use super::plan::plan;
use crate::carry;
use crate::plan::Plan;
use crate::queue::{Queue, Run};
use crate::record::Recorder;
use crate::stored::{StoredVolume, now};
use crate::world::World;
use crate::write::{Manager, send};

/// Works on the volumes that `queue` names, for ever.
pub async fn run(world: Arc<World>, client: Client, queue: Queue, recorder: Recorder) {
    loop {
        let key = queue.next().await;
        let run = reconcile(&world, &client, &recorder, &key).await;
        queue.finish(&key, run);
    }
}

async fn reconcile(world: &World, client: &Client, recorder: &Recorder, key: &str) -> Run {
    tracing::trace!(volume = key, "planning");
    let stored = StoredVolume::gather(world, key);
    let mut decided = carry::decide(world, key, |rooms| match &stored.volume {
        Some(volume) => plan(&stored, volume, rooms, &now()).plan,
        None => Plan::default(),
    });
    for note in std::mem::take(&mut decided.plan.notes) {
        recorder.note(note);
    }
    if let Some(pause) = decided.plan.look_again_after {
        world.plans.push_later(key, pause);
    }
    if decided.plan.writes.is_empty() {
        return Run::Done;
    }
    let written = send(client, |_| Manager::Volumes, &decided.plan.writes).await;
    carry::conclude(world, key, &decided, &written)
}
