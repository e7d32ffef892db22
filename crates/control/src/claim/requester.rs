//! Who asked for the size of a claim.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;

/// Whether an entry of a claim's managed fields owns the size that the claim asks for.
pub fn asks_for_size(entry: &ManagedFieldsEntry) -> bool {
    let fields = entry.fields_v1.as_ref().map(|fields| &fields.0);
    fields
        .is_some_and(|fields| !fields["f:spec"]["f:resources"]["f:requests"]["f:storage"].is_null())
}

/// Who last changed the size that a claim asks for, by the name that its client gave.
pub fn requester(claim: &PersistentVolumeClaim) -> String {
    let entries = claim.metadata.managed_fields.iter().flatten();
    let latest = entries
        .filter(|entry| asks_for_size(entry))
        .max_by_key(|entry| entry.time.clone());
    latest
        .and_then(|entry| entry.manager.clone())
        .unwrap_or_else(|| "unknown".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;
    use serde_json::{Value, json};

    // Fails if a growth is ascribed to whoever wrote the claim last, for whatever reason.
    #[test]
    fn the_requester_is_who_last_set_the_size() {
        let size = json!({ "f:spec": { "f:resources": { "f:requests": { "f:storage": {} } } } });
        let entry = |manager: &str, second, fields: &Value| {
            json!({ "manager": manager, "time": Time(Timestamp::from_second(second).expect("a valid time")),
                "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": fields })
        };
        let mut claim = PersistentVolumeClaim::default();
        assert_eq!(requester(&claim), "unknown");
        let entries = json!([
            entry("first", 1, &size),
            entry("second", 2, &size),
            entry("labels", 3, &json!({ "f:metadata": {} })),
        ]);
        claim.metadata.managed_fields = serde_json::from_value(entries).ok();
        assert_eq!(requester(&claim), "second");
    }
}
