//! What may not change, or never be, in the kinds of `trellis.dev`.

use serde_json::{Value, json};

use crate::support::{MERGE, Server};

const GROUP: &str = "/apis/trellis.dev/v1alpha1";

/// One kind: where it is, a spec that is accepted, and one change for every field of it.
struct Case {
    collection: String,
    kind: &'static str,
    spec: Value,
    refused: Value,
    accepted: Value,
}

fn cases() -> Vec<Case> {
    let claim = json!({ "namespace": "default", "name": "c", "uid": "u" });
    vec![
        Case {
            collection: format!("{GROUP}/pools"),
            kind: "Pool",
            spec: json!({ "node": "n", "path": "/srv/p" }),
            refused: json!({ "node": "m", "path": "/srv/q" }),
            accepted: json!({ "overcommitPercent": 10_000 }),
        },
        Case {
            collection: format!("{GROUP}/volumes"),
            kind: "Volume",
            spec: json!({ "capacity": "1Gi", "claim": claim, "class": "a", "replicas": 1, "filesystem": "xfs" }),
            refused: json!({ "class": "b", "via": "fuse", "filesystem": null }),
            accepted: json!({ "capacity": "2Gi", "replicas": 2, "consistencyFactor": 2, "claim": { "uid": "v" },
                "growth": { "by": "me", "at": "2026-01-01T00:00:00.000000Z", "from": "1Gi" } }),
        },
        Case {
            collection: format!("{GROUP}/targets"),
            kind: "Target",
            spec: json!({ "volume": "v", "node": "n", "term": 3, "capacity": "1Gi" }),
            refused: json!({ "volume": "w" }),
            accepted: json!({ "capacity": "2Gi", "node": "m", "term": 4, "rests": true }),
        },
        Case {
            collection: format!("{GROUP}/replicas"),
            kind: "Replica",
            spec: json!({ "volume": "v", "volumeId": "i", "replicaId": "r", "pool": "p", "node": "n", "capacity": "1Gi" }),
            refused: json!({ "volume": "w", "volumeId": "j", "replicaId": "s", "pool": "q", "node": "m", "thick": true }),
            accepted: json!({ "capacity": "2Gi" }),
        },
        Case {
            collection: format!("{GROUP}/namespaces/default/attachments"),
            kind: "Attachment",
            spec: json!({ "claimName": "c", "node": "n", "consumer": { "mount": { "path": "/mnt/a" } } }),
            refused: json!({
                "claimName": "d", "node": "m", "consumer": { "mount": { "path": "/mnt/b", "readOnly": true } },
            }),
            accepted: json!({ "volume": "v" }),
        },
    ]
}

#[tokio::test]
async fn an_attachment_names_one_volume_for_good() {
    // Fails if an attachment of nothing is taken, or one can become that of another volume.
    let server = Server::new();
    let collection = format!("{GROUP}/namespaces/default/attachments");
    let spec = json!({ "node": "n", "consumer": { "device": { "path": "/mnt/a" } } });
    let nothing = json!({ "metadata": { "name": "x" }, "spec": spec });
    server.post(&collection, nothing).await.refused(
        422,
        "Invalid",
        "Attachment.trellis.dev \"x\" is invalid: spec.volume: Required value: claimName or volume must be given",
    );
    let mut spec = spec;
    spec["volume"] = json!("v");
    let object = json!({ "metadata": { "name": "x" }, "spec": spec });
    server.post(&collection, object).await.expect(201);
    let path = format!("{collection}/x");
    let change = json!({ "spec": { "volume": "w" } });
    let message = "Attachment.trellis.dev \"x\" is invalid: spec.volume: Invalid value: \"w\": field is immutable";
    let answer = server.patch(&path, MERGE, change).await;
    answer.refused(422, "Invalid", message);
}

#[tokio::test]
async fn what_something_was_made_after_does_not_change() {
    // Fails if a fixed field of a kind of ours can be changed, or one that may change cannot.
    let server = Server::new();
    for case in cases() {
        let path = format!("{}/x", case.collection);
        let object = json!({ "metadata": { "name": "x" }, "spec": case.spec });
        let made = server.post(&case.collection, object).await.expect(201);
        for (field, value) in case.refused.as_object().unwrap() {
            let change = json!({ "spec": { field: value } });
            let message = format!(
                "{}.trellis.dev \"x\" is invalid: spec.{field}: Invalid value: {value}: field is immutable",
                case.kind
            );
            server
                .patch(&path, MERGE, change)
                .await
                .refused(422, "Invalid", &message);
        }
        assert_eq!(server.get(&path).await.expect(200), made);
        let change = json!({ "metadata": { "labels": { "a": "b" } }, "spec": case.accepted });
        let changed = server.patch(&path, MERGE, change).await.expect(200);
        for (field, value) in case.accepted.as_object().unwrap() {
            if !value.is_object() {
                assert_eq!(changed["spec"][field], *value, "{}", case.kind);
            }
        }
    }
}

#[tokio::test]
async fn a_term_only_rises() {
    // Fails if a target can be given a term that its copies have left behind.
    let server = Server::new();
    let targets = format!("{GROUP}/targets");
    let spec = json!({ "volume": "v", "node": "n", "term": 3, "capacity": "1Gi" });
    let object = json!({ "metadata": { "name": "x" }, "spec": spec });
    server.post(&targets, object).await.expect(201);
    let message = "Target.trellis.dev \"x\" is invalid: spec.term: Invalid value: 2: may only rise";
    let change = json!({ "spec": { "term": 2 } });
    let answer = server.patch(&format!("{targets}/x"), MERGE, change).await;
    answer.refused(422, "Invalid", message);
}

#[tokio::test]
async fn paths_are_absolute_and_promises_have_bounds() {
    // Fails if a pool or an attachment gets a relative path, or a pool promises nothing or without measure.
    let server = Server::new();
    let pools = format!("{GROUP}/pools");
    let attachments = format!("{GROUP}/namespaces/default/attachments");
    let pool =
        |spec: Value| server.post(&pools, json!({ "metadata": { "name": "x" }, "spec": spec }));
    let relative = |field: &str| {
        format!("is invalid: spec.{field}: Invalid value: \"srv\": must be an absolute path")
    };
    pool(json!({ "node": "n", "path": "srv" })).await.refused(
        422,
        "Invalid",
        &format!("Pool.trellis.dev \"x\" {}", relative("path")),
    );
    let spec = json!({ "claimName": "c", "node": "n", "consumer": { "mount": { "path": "srv" } } });
    server
        .post(
            &attachments,
            json!({ "metadata": { "name": "x" }, "spec": spec }),
        )
        .await
        .refused(
            422,
            "Invalid",
            &format!(
                "Attachment.trellis.dev \"x\" {}",
                relative("consumer.mount.path")
            ),
        );
    let bounds = |percent: u32| match percent {
        0 => {
            "Pool.trellis.dev \"x\" is invalid: spec.overcommitPercent: Invalid value: 0: spec.overcommitPercent in body should be greater than or equal to 1"
        }
        _ => {
            "Pool.trellis.dev \"x\" is invalid: spec.overcommitPercent: Invalid value: 10001: spec.overcommitPercent in body should be less than or equal to 10000"
        }
    };
    for percent in [0, 10_001] {
        pool(json!({ "node": "n", "path": "/srv", "overcommitPercent": percent }))
            .await
            .refused(422, "Invalid", bounds(percent));
    }
    pool(json!({ "node": "n", "path": "/srv", "overcommitPercent": 1 }))
        .await
        .expect(201);
    for percent in [0, 10_001] {
        let change = json!({ "spec": { "overcommitPercent": percent } });
        server
            .patch(&format!("{pools}/x"), MERGE, change)
            .await
            .refused(422, "Invalid", bounds(percent));
    }
}
