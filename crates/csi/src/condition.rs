//! Whether a volume is well, in CSI's words.

use trellis_api::Hold;
use trellis_api::kinds::Volume;

use crate::codes;
use crate::proto::csi::VolumeCondition;

/// How the volume is: what holds it, or what is told of its copies. A growth that is under way is nothing abnormal.
pub fn of(volume: &Volume) -> VolumeCondition {
    let status = volume.status.clone().unwrap_or_default();
    let told = || {
        let mut conditions = status.conditions.iter();
        let found = conditions.find(|each| match each.type_.as_str() {
            "Ready" => each.status == "False",
            "Resizing" => false,
            _ => each.status == "True",
        })?;
        Some(format!("{}: {}", found.reason, found.message))
    };
    let held = |hold: &Hold| codes::sentence(hold);
    let message = status.hold.as_ref().map(held).or_else(told);
    VolumeCondition {
        abnormal: message.is_some(),
        message: message.unwrap_or_else(|| "The volume is as it should be.".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn volume(status: Value) -> Volume {
        let volume = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume", "metadata": { "name": "v" },
            "spec": { "capacity": "1Gi", "class": "", "replicas": 1 },
            "status": status,
        });
        serde_json::from_value(volume).expect("a volume")
    }

    fn says(kind: &str, status: &str) -> Value {
        json!([{
            "type": kind, "status": status, "reason": "R", "message": "why",
            "lastTransitionTime": "2024-01-01T00:00:00Z",
        }])
    }

    // Fails if a volume that is held or lacks copies looks well, or one that merely grows does not.
    #[test]
    fn a_volume_is_abnormal_when_something_holds_it() {
        let held = json!({ "hold": { "reason": "PoolFull", "message": "It is full." } });
        assert!(of(&volume(held)).abnormal);
        let cases = [
            ("Ready", "False", true),
            ("Ready", "True", false),
            ("Resizing", "True", false),
            ("CopiesHeld", "True", true),
            ("PoolFull", "True", true),
        ];
        for (kind, status, abnormal) in cases {
            let said = of(&volume(json!({ "conditions": says(kind, status) })));
            assert_eq!(said.abnormal, abnormal, "{kind} {status}");
        }
        assert!(!of(&volume(json!({}))).abnormal);
    }
}
