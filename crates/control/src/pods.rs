//! Pods in a home without a kubelet: nobody runs their containers. Each pod is told so at once, instead of waiting
//! silently.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::{Client, ResourceExt};
use serde_json::{Value, json};

use crate::plan::Note;
use crate::queue::{Queue, Run};
use crate::record::Recorder;
use crate::stored::now;
use crate::world::World;
use crate::write::{Manager, Object, Place, Write, Written, send};

/// The condition by which Kubernetes says whether a pod has found a node.
const SCHEDULED: &str = "PodScheduled";
const MESSAGE: &str = "Trellis runs no containers: the pod stays Pending here. A claim that it names can be used on this \
                       machine with `trellis mount CLAIM PATH`; run the pod on a Kubernetes cluster.";

/// The key of a pod in the queue.
pub fn key(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

/// Whether a pod waits and has not been told why.
pub fn waits_untold(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let phase = status.and_then(|status| status.phase.as_deref());
    let mut conditions = status
        .and_then(|status| status.conditions.as_ref())
        .into_iter()
        .flatten();
    phase.is_none_or(|phase| phase == "Pending")
        && pod.metadata.deletion_timestamp.is_none()
        && conditions.all(|condition| condition.type_ != SCHEDULED)
}

/// Tells the pods that `queue` names, for ever.
pub async fn run(world: Arc<World>, client: Client, queue: Queue, recorder: Recorder) {
    loop {
        let key = queue.next().await;
        let pod = key
            .split_once('/')
            .and_then(|(namespace, name)| world.pods.get(namespace, name))
            .filter(|pod| waits_untold(pod));
        let run = match pod {
            Some(pod) => tell(&pod, &client, &recorder).await,
            None => Run::Done,
        };
        queue.finish(&key, run);
    }
}

async fn tell(pod: &Pod, client: &Client, recorder: &Recorder) -> Run {
    let place = Place::within(
        Object::Pod,
        pod.namespace().unwrap_or_default(),
        pod.name_any(),
    );
    let write = Write::PatchStatus(place.clone(), untold(pod));
    if matches!(
        send(client, Manager::Claims, &[write]).await[..],
        [Written::Failed(_)]
    ) {
        return Run::Failed;
    }
    recorder.note(Note {
        about: place,
        uid: pod.uid(),
        warning: true,
        reason: "FailedScheduling",
        message: MESSAGE.to_owned(),
    });
    Run::Done
}

/// The condition, to be merged into those that the pod has.
fn untold(pod: &Pod) -> Value {
    let scheduled = json!({
        "type": SCHEDULED,
        "status": "False",
        "reason": "Unschedulable",
        "message": MESSAGE,
        "lastTransitionTime": now().0.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    });
    json!({
        "metadata": { "resourceVersion": pod.resource_version() },
        "status": { "conditions": [scheduled] },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(status: Value) -> Pod {
        let pod = json!({
            "metadata": { "name": "p", "namespace": "d" },
            "spec": { "containers": [{ "name": "c", "image": "i" }] },
            "status": status,
        });
        serde_json::from_value(pod).expect("a pod")
    }

    // Fails if a pod is told again and again, or one that is over is told that it waits.
    #[test]
    fn a_pod_that_waits_is_told_once() {
        assert!(waits_untold(&pod(json!({ "phase": "Pending" }))));
        assert!(!waits_untold(&pod(json!({ "phase": "Succeeded" }))));
        let told =
            json!({ "phase": "Pending", "conditions": [{ "type": SCHEDULED, "status": "False" }] });
        assert!(!waits_untold(&pod(told)));
    }

    // Fails if a condition that somebody else has set is lost.
    #[test]
    fn conditions_of_others_stay() {
        let mut has = json!([{ "type": "Ready", "status": "False" }]);
        let body = untold(&pod(json!({ "phase": "Pending", "conditions": has })));
        crate::write::merge_conditions(&mut has, &body["status"]["conditions"]);
        let kinds: Vec<&Value> = has
            .as_array()
            .expect("a list")
            .iter()
            .map(|each| &each["type"])
            .collect();
        assert_eq!(kinds, ["Ready", SCHEDULED]);
    }
}
