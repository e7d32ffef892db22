use serde_json::json;

use super::*;
use crate::kinds;
use crate::users::Caller;

const CSR: &str = "certificatesigningrequests";

/// What the node `b` may do to `resource`, or to its subresource after a slash.
fn allows(
    verb: Verb,
    resource: &str,
    (namespace, name): (&str, &str),
    objects: Objects<'_>,
) -> bool {
    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
    let kind = kinds::all().iter().find(|kind| kind.plural == resource);
    let attempt = Attempt {
        verb,
        group: kind.map_or("no.such.group", |kind| kind.group),
        resource,
        subresource,
        namespace,
        name,
        objects,
    };
    decide(&User::Node("b".into()), &attempt) == Decision::Allowed
}

fn changes(verb: Verb, resource: &str, place: (&str, &str), old: &Value, new: &Value) -> bool {
    let objects = Objects::Seen {
        old: Some(old),
        new: Some(new),
    };
    allows(verb, resource, place, objects)
}

fn makes(resource: &str, place: (&str, &str), new: &Value) -> bool {
    let objects = Objects::Seen {
        old: None,
        new: Some(new),
    };
    allows(Verb::Create, resource, place, objects)
}

fn deletes(resource: &str, place: (&str, &str), old: &Value) -> bool {
    let objects = Objects::Seen {
        old: Some(old),
        new: None,
    };
    allows(Verb::Delete, resource, place, objects)
}

/// An object of ours on a node.
fn on(node: &str) -> Value {
    json!({
        "metadata": { "name": "x", "finalizers": ["trellis.dev/data", "example.com/other"] },
        "spec": { "node": node, "capacity": "1Gi" },
        "status": { "phase": "Ready" },
    })
}

/// The object with another value somewhere.
fn with(object: &Value, pointer: &str, value: Value) -> Value {
    let mut object = object.clone();
    let (parent, field) = pointer.rsplit_once('/').unwrap_or(("", pointer));
    if let Some(Value::Object(parent)) = object.pointer_mut(parent) {
        parent.insert(field.to_owned(), value);
    }
    object
}

#[test]
fn what_no_rule_names_is_forbidden_to_nodes() {
    // Fails when a rule grows too wide: this is every kind, every verb, and what is left open by its path alone.
    let mut open = Vec::new();
    for kind in kinds::all() {
        let parts = [
            (true, ""),
            (kind.status, "/status"),
            (kind.approval, "/approval"),
        ];
        for (_, subresource) in parts.into_iter().filter(|(is_there, _)| *is_there) {
            let resource = format!("{}{subresource}", kind.plural);
            let verbs = Verb::ALL.into_iter().filter(|verb| {
                let place = if kind.namespaced { "default" } else { "" };
                allows(*verb, &resource, (place, "x"), Objects::Unseen)
            });
            let verbs: Vec<&str> = verbs.map(Verb::name).collect();
            if !verbs.is_empty() {
                open.push(format!("{resource}: {}", verbs.join(" ")));
            }
        }
    }
    assert_eq!(
        open,
        [
            "nodes: get list watch",
            "nodes/status: get list watch",
            "events: create update patch",
            "leases: get list watch",
            "certificatesigningrequests: get list watch create",
            "selfsubjectreviews: create",
            "selfsubjectaccessreviews: create",
            "selfsubjectrulesreviews: create",
            "pools: get list watch create update patch delete",
            "pools/status: get update patch",
            "volumes: get list watch",
            "volumes/status: get",
            "targets: get list watch update patch",
            "targets/status: get update patch",
            "replicas: get list watch update patch",
            "replicas/status: get update patch",
            "attachments: get list watch create update patch delete",
            "attachments/status: get update patch",
        ]
    );
}

#[test]
fn a_node_writes_only_what_is_on_it() {
    // Fails when a node can write an object of another node, take it over, or give one of its own away.
    let (own, others) = (on("b"), on("a"));
    let none = with(&own, "/spec/node", Value::Null);
    for kind in ["pools", "targets", "replicas", "attachments"] {
        let status = format!("{kind}/status");
        for verb in [Verb::Update, Verb::Patch] {
            let place = ("", "x");
            for resource in [kind, &status] {
                assert!(changes(verb, resource, place, &own, &own), "{resource}");
                assert!(!changes(verb, resource, place, &others, &others));
                assert!(!changes(verb, resource, place, &others, &own));
                assert!(!changes(verb, resource, place, &own, &others));
                assert!(!changes(verb, resource, place, &none, &none));
            }
        }
    }
    for kind in ["pools", "attachments"] {
        let new = with(&own, "/metadata/finalizers", json!(["trellis.dev/pool"]));
        assert!(makes(kind, ("", "x"), &new));
        assert!(!makes(
            kind,
            ("", "x"),
            &with(&new, "/spec/node", json!("a"))
        ));
        assert!(deletes(kind, ("", "x"), &own));
        assert!(!deletes(kind, ("", "x"), &others));
    }
    for kind in ["targets", "replicas", "volumes"] {
        assert!(!makes(kind, ("", "x"), &own), "{kind}");
        assert!(!deletes(kind, ("", "x"), &own), "{kind}");
    }
    assert!(!changes(Verb::Patch, "volumes", ("", "x"), &own, &own));
    assert!(!changes(
        Verb::Patch,
        "volumes/status",
        ("", "x"),
        &own,
        &own
    ));
}

#[test]
fn of_a_copy_or_a_target_a_node_writes_status_and_our_finalizers_alone() {
    // Fails when a node can change what the controllers have decided, or lift a finalizer that is not ours.
    let own = on("b");
    let lifted = with(&own, "/metadata/finalizers", json!(["example.com/other"]));
    let may = |new: &Value| changes(Verb::Patch, "replicas", ("", "x"), &own, new);
    assert!(may(&lifted));
    assert!(may(&with(&own, "/metadata/resourceVersion", json!("7"))));
    for (pointer, value) in [
        ("/spec/capacity", json!("2Gi")),
        ("/spec/discard", json!(true)),
        ("/metadata/labels", json!({ "trellis.dev/volume": "other" })),
        ("/metadata/annotations", json!({ "a": "b" })),
        ("/metadata/finalizers", json!([])),
        ("/metadata/finalizers", json!(["trellis.dev/data"])),
        (
            "/metadata/finalizers",
            json!(["trellis.dev/data", "example.com/other", "more"]),
        ),
        (
            "/metadata/ownerReferences",
            json!([{ "kind": "Node", "name": "b", "uid": "1" }]),
        ),
        ("/status", json!({ "phase": "Lost" })),
    ] {
        assert!(!may(&with(&own, pointer, value)), "{pointer}");
    }
}

#[test]
fn a_node_is_only_itself() {
    // Fails when a node can be another one: in a Node object, a Lease, an Event, or a request for a certificate.
    let node = json!({ "metadata": { "name": "b" }, "spec": { "unschedulable": true } });
    let labelled = with(&node, "/metadata/labels", json!({ "zone": "1" }));
    let ready = with(&labelled, "/status", json!({ "conditions": [] }));
    for resource in ["nodes", "nodes/status"] {
        assert!(changes(Verb::Patch, resource, ("", "b"), &node, &ready));
        assert!(!changes(Verb::Patch, resource, ("", "a"), &node, &ready));
        for (pointer, value) in [
            ("/spec/unschedulable", json!(false)),
            ("/metadata/finalizers", json!(["trellis.dev/mine"])),
            (
                "/metadata/ownerReferences",
                json!([{ "kind": "Node", "name": "b" }]),
            ),
        ] {
            let new = with(&node, pointer, value);
            assert!(
                !changes(Verb::Update, resource, ("", "b"), &node, &new),
                "{pointer}"
            );
        }
    }
    assert!(makes("nodes", ("", "b"), &node));
    assert!(!makes("nodes", ("", "a"), &node));
    assert!(!deletes("nodes", ("", "b"), &node));

    let lease = json!({ "metadata": { "name": "b" }, "spec": { "holderIdentity": "b" } });
    assert!(makes("leases", ("kube-node-lease", "b"), &lease));
    for elsewhere in [("kube-node-lease", "a"), ("kube-system", "b"), ("", "b")] {
        assert!(!makes("leases", elsewhere, &lease));
        assert!(!changes(Verb::Update, "leases", elsewhere, &lease, &lease));
    }
    let held = with(
        &lease,
        "/metadata/ownerReferences",
        json!([{ "kind": "Volume", "name": "v" }]),
    );
    assert!(!makes("leases", ("kube-node-lease", "b"), &held));

    let event = |host: &str| json!({ "source": { "host": host }, "reportingInstance": "b" });
    assert!(makes("events", ("default", "e"), &event("b")));
    assert!(!makes("events", ("default", "e"), &event("a")));
    assert!(!changes(
        Verb::Patch,
        "events",
        ("default", "e"),
        &event("a"),
        &event("b")
    ));

    let secret = |kind: &str, node: &str| {
        json!({
            "type": kind,
            "metadata": {
                "labels": { "trellis.dev/node": node },
                "ownerReferences": [{ "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume", "name": "v" }],
            },
        })
    };
    let place = ("trellis-system", "chap-v");
    let own = secret("trellis.dev/chap", "b");
    assert!(makes("secrets", place, &own));
    assert!(changes(Verb::Update, "secrets", place, &own, &own));
    assert!(!makes("secrets", ("kube-system", "chap-v"), &own));
    assert!(!deletes("secrets", place, &own));
    for other in [secret("trellis.dev/chap", "a"), secret("Opaque", "b")] {
        assert!(!makes("secrets", place, &other));
        assert!(!changes(Verb::Update, "secrets", place, &other, &own));
        assert!(!changes(Verb::Update, "secrets", place, &own, &other));
    }

    let own_name: trellis_api::NodeName = "b".parse().unwrap();
    assert_eq!(own_name.user(), User::Node("b".into()).name());
    let request = |user: &str| json!({ "spec": { "username": user } });
    let reads = |request: &Value| {
        let objects = Objects::Seen {
            old: Some(request),
            new: None,
        };
        let answers = READ
            .iter()
            .map(|verb| allows(*verb, CSR, ("", "r"), objects));
        let answers: Vec<bool> = answers.collect();
        assert!(answers.windows(2).all(|pair| pair[0] == pair[1]));
        answers[0]
    };
    assert!(reads(&request("system:node:b")) && makes(CSR, ("", "r"), &request("system:node:b")));
    assert!(!reads(&request("system:node:a")) && !makes(CSR, ("", "r"), &request("system:admin")));
    for verb in [Verb::List, Verb::Watch] {
        assert!(!allows(verb, CSR, ("", ""), Objects::Unseen));
    }
    let own = request("system:node:b");
    for part in ["approval", "status"] {
        let resource = format!("{CSR}/{part}");
        for verb in [Verb::Update, Verb::Patch] {
            assert!(!changes(verb, &resource, ("", "r"), &own, &own), "{part}");
        }
    }
}

#[test]
fn a_node_reads_one_config_map_and_no_secret() {
    // Fails when a node can read what is not meant for it, the store as a whole included.
    for verb in [Verb::Get, Verb::List, Verb::Watch] {
        let unseen = Objects::Unseen;
        assert!(allows(
            verb,
            "configmaps",
            (SYSTEM_NAMESPACE, AUTHORITY),
            unseen
        ));
        for other in [
            (SYSTEM_NAMESPACE, ""),
            (SYSTEM_NAMESPACE, "x"),
            ("kube-system", AUTHORITY),
        ] {
            assert!(!allows(verb, "configmaps", other, unseen), "{other:?}");
        }
        let token = ("kube-system", "node-token.b");
        assert!(!allows(verb, "secrets", token, unseen));
        assert!(!allows(
            verb,
            "persistentvolumeclaims",
            ("default", "x"),
            unseen
        ));
    }
    let node = User::Node("b".into());
    for (path, decision) in [
        ("/debug/backup", Decision::Forbidden),
        ("/debug/store", Decision::Forbidden),
        ("/debug", Decision::Forbidden),
        ("/apis", Decision::Allowed),
        ("/version", Decision::Allowed),
    ] {
        assert_eq!(decide_path(&node, path), decision, "{path}");
        assert_eq!(decide_path(&User::Admin, path), Decision::Allowed);
    }
    assert_eq!(decide_path(&User::Anybody, "/apis"), Decision::Forbidden);
    assert_eq!(
        decide_path(Caller::ANYBODY.user(), "/version"),
        Decision::Allowed
    );
}
