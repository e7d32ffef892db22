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

/// Works on the volumes that `queue` names, for ever.
pub async fn run(world: Arc<World>, client: Client, queue: Queue, recorder: Recorder) {
    loop {
        let key = queue.next().await;
        let run = reconcile(&world, &client, &recorder, &key).await;
        queue.finish(&key, run);
    }
}

async fn reconcile(world: &World, client: &Client, recorder: &Recorder, key: &str) -> Run {
    if !carry::can_plan(world, key) {
        return Run::Done;
    }
    tracing::trace!(volume = key, "planning");
    let stored = StoredVolume::gather(world, key);
    let decided = carry::decide(world, key, |around| match &stored.volume {
        Some(volume) => {
            let plan = plan(&stored, volume, around, &now()).plan;
            Plan {
                from_volumes: plan.writes.len(),
                ..plan
            }
        }
        None => Plan::default(),
    });
    carry::carry_out(world, client, key, decided, |note| recorder.note(note)).await
}
