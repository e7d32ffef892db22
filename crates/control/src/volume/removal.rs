//! A volume that is being deleted, and its bytes.

use kube::ResourceExt;
use serde_json::json;
use trellis_api::kinds::{VOLUME_FINALIZER, Volume};

use crate::plan::Plan;
use crate::stored::StoredVolume;
use crate::write::{Object, Place, Write};

/// The next step of a volume that is being deleted and says that its bytes go with it. This is the only place that lifts
/// the volume's finalizer. A volume that somebody deletes and that does not say so stays, marked, and keeps its bytes; so
/// does one that is still in use.
pub fn remove(stored: &StoredVolume, volume: &Volume) -> Plan {
    if !stored.attachments.is_empty() {
        return Plan::default();
    }
    let kept_bytes = stored.replicas.iter().filter(|each| !each.spec.discard);
    let marks: Vec<Write> = kept_bytes
        .map(|replica| {
            let body = json!({
                "metadata": { "uid": replica.uid() },
                "spec": { "discard": true },
            });
            Write::Patch(Place::named(Object::Replica, replica.name_any()), body)
        })
        .collect();
    if !marks.is_empty() {
        return Plan {
            writes: marks,
            ..Plan::default()
        };
    }
    let kept: Vec<&String> = volume
        .finalizers()
        .iter()
        .filter(|each| *each != VOLUME_FINALIZER)
        .collect();
    if kept.len() == volume.finalizers().len() {
        return Plan::default();
    }
    let body = json!({ "metadata": {
        "finalizers": kept,
        "resourceVersion": volume.metadata.resource_version,
    }});
    Plan {
        writes: vec![Write::Patch(
            Place::named(Object::Volume, &stored.key),
            body,
        )],
        ..Plan::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::sync::Arc;

    fn stored(discard: bool) -> StoredVolume {
        let object = |value: Value| serde_json::from_value(value).expect("a replica");
        let replica = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Replica", "metadata": { "name": "v-0" },
            "spec": {
                "volume": "v", "volumeId": "", "pool": "p", "node": "n", "capacity": "1Gi",
                "discard": discard,
            },
        });
        StoredVolume {
            key: "v".to_owned(),
            replicas: vec![Arc::new(object(replica))],
            ..StoredVolume::default()
        }
    }

    fn volume() -> Volume {
        let volume = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume",
            "metadata": {
                "name": "v", "resourceVersion": "3", "finalizers": [VOLUME_FINALIZER, "example.com/other"],
            },
            "spec": { "capacity": "1Gi", "class": "s", "replicas": 1, "discard": true },
        });
        serde_json::from_value(volume).expect("a volume")
    }

    // Fails if the volume goes before its copies know that their bytes go, takes others' finalizers along, or goes
    // while it is in use.
    #[test]
    fn the_copies_are_told_and_then_the_volume_goes() {
        let body = json!({ "metadata": { "uid": null }, "spec": { "discard": true } });
        let place = Place::named(Object::Replica, "v-0");
        let told = remove(&stored(false), &volume());
        assert_eq!(told.writes, [Write::Patch(place, body)]);
        let body = json!({ "metadata": {
            "finalizers": ["example.com/other"], "resourceVersion": "3",
        }});
        let place = Place::named(Object::Volume, "v");
        let mut known = stored(true);
        let lifted = remove(&known, &volume());
        assert_eq!(lifted.writes, [Write::Patch(place, body)]);
        let attachment = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment", "metadata": { "name": "a" },
            "spec": { "volume": "v", "node": "n", "consumer": { "device": { "path": "/d" } } },
        });
        let attachment = serde_json::from_value(attachment).expect("an attachment");
        known.attachments = vec![Arc::new(attachment)];
        assert_eq!(remove(&known, &volume()), Plan::default());
    }
}
