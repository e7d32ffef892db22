//! Paths of the kinds: which operations there are, and which query parameters they take.
//!
//! kubectl looks here before it sends `dryRun` or `fieldValidation`, and before it builds a strategic merge patch.

use serde_json::{Map, Value, json};

use super::schemas::{
    DELETE_OPTIONS, PATCH, STATUS, component_name, group_version_kind, list_name, reference,
};
use crate::kind::{Kind, Origin};

/// Query parameters: name, type, meaning.
const DRY_RUN: (&str, &str, &str) = (
    "dryRun",
    "string",
    "With `All`, checks everything and changes nothing.",
);
const FIELD_MANAGER: (&str, &str, &str) = ("fieldManager", "string", "Who makes the change.");
const FIELD_VALIDATION: (&str, &str, &str) = (
    "fieldValidation",
    "string",
    "What happens to unknown and duplicate fields: Ignore, Warn or Strict.",
);
const FORCE: (&str, &str, &str) = (
    "force",
    "boolean",
    "Takes over fields that another manager applied.",
);
const LIST: [(&str, &str, &str); 7] = [
    ("labelSelector", "string", "Only objects with these labels."),
    ("fieldSelector", "string", "Only objects with these fields."),
    ("limit", "integer", "At most so many objects at once."),
    ("continue", "string", "Where the list goes on."),
    (
        "resourceVersion",
        "string",
        "The version of the store to read or to watch from.",
    ),
    ("timeoutSeconds", "integer", "How long a watch lasts."),
    ("watch", "boolean", "Stream changes instead of a list."),
];

/// The paths of these kinds.
pub(super) fn of(kinds: &[&Kind]) -> Map<String, Value> {
    let mut paths = Map::new();
    for kind in kinds {
        let root = if kind.group.is_empty() {
            format!("/api/{}", kind.version)
        } else {
            format!("/apis/{}/{}", kind.group, kind.version)
        };
        let collection = if kind.namespaced {
            let everywhere = format!("{root}/{}", kind.plural);
            paths.insert(
                everywhere,
                json!({"get": operation(kind, Verb::ListEverywhere)}),
            );
            format!("{root}/namespaces/{{namespace}}/{}", kind.plural)
        } else {
            format!("{root}/{}", kind.plural)
        };
        if kind.answer.is_some() {
            paths.insert(collection, item(kind, false, &[Verb::Create]));
            continue;
        }
        let object = format!("{collection}/{{name}}");
        paths.insert(
            collection,
            item(kind, false, &[Verb::List, Verb::Create, Verb::DeleteAll]),
        );
        if kind.status {
            paths.insert(
                format!("{object}/status"),
                item(
                    kind,
                    true,
                    &[Verb::ReadStatus, Verb::ReplaceStatus, Verb::PatchStatus],
                ),
            );
        }
        if kind.approval {
            paths.insert(
                format!("{object}/approval"),
                item(
                    kind,
                    true,
                    &[
                        Verb::ReadApproval,
                        Verb::ReplaceApproval,
                        Verb::PatchApproval,
                    ],
                ),
            );
        }
        paths.insert(
            object,
            item(
                kind,
                true,
                &[Verb::Read, Verb::Replace, Verb::Patch, Verb::Delete],
            ),
        );
    }
    paths
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verb {
    ListEverywhere,
    List,
    Create,
    DeleteAll,
    Read,
    Replace,
    Patch,
    Delete,
    ReadStatus,
    ReplaceStatus,
    PatchStatus,
    ReadApproval,
    ReplaceApproval,
    PatchApproval,
}

impl Verb {
    /// HTTP method, Kubernetes' action, and the beginning and the end of the operation's name.
    fn names(self) -> (&'static str, &'static str, &'static str, &'static str) {
        match self {
            Verb::ListEverywhere => ("get", "list", "list", "ForAllNamespaces"),
            Verb::List => ("get", "list", "list", ""),
            Verb::Create => ("post", "post", "create", ""),
            Verb::DeleteAll => ("delete", "deletecollection", "deleteCollection", ""),
            Verb::Read => ("get", "get", "read", ""),
            Verb::Replace => ("put", "put", "replace", ""),
            Verb::Patch => ("patch", "patch", "patch", ""),
            Verb::Delete => ("delete", "delete", "delete", ""),
            Verb::ReadStatus => ("get", "get", "read", "Status"),
            Verb::ReplaceStatus => ("put", "put", "replace", "Status"),
            Verb::PatchStatus => ("patch", "patch", "patch", "Status"),
            Verb::ReadApproval => ("get", "get", "read", "Approval"),
            Verb::ReplaceApproval => ("put", "put", "replace", "Approval"),
            Verb::PatchApproval => ("patch", "patch", "patch", "Approval"),
        }
    }

    fn query(self) -> Vec<Value> {
        let parameters: &[_] = match self {
            Verb::ListEverywhere | Verb::List | Verb::DeleteAll => &LIST,
            Verb::Create | Verb::Replace | Verb::ReplaceStatus | Verb::ReplaceApproval => {
                &[DRY_RUN, FIELD_MANAGER, FIELD_VALIDATION]
            }
            Verb::Patch | Verb::PatchStatus | Verb::PatchApproval => {
                &[DRY_RUN, FIELD_MANAGER, FIELD_VALIDATION, FORCE]
            }
            Verb::Delete => &[DRY_RUN],
            Verb::Read | Verb::ReadStatus | Verb::ReadApproval => &[],
        };
        parameters
            .iter()
            .map(|(name, r#type, meaning)| parameter(name, "query", r#type, meaning))
            .collect()
    }
}

fn item(kind: &Kind, named: bool, verbs: &[Verb]) -> Value {
    let mut item = Map::new();
    for verb in verbs {
        item.insert(verb.names().0.to_owned(), operation(kind, *verb));
    }
    let mut parameters = Vec::new();
    if named {
        parameters.push(parameter("name", "path", "string", "Name of the object."));
    }
    if kind.namespaced {
        parameters.push(parameter(
            "namespace",
            "path",
            "string",
            "Namespace of the object.",
        ));
    }
    if !parameters.is_empty() {
        item.insert("parameters".to_owned(), json!(parameters));
    }
    Value::Object(item)
}

fn parameter(name: &str, place: &str, r#type: &str, meaning: &str) -> Value {
    let mut parameter = json!({
        "name": name,
        "in": place,
        "description": meaning,
        "schema": {"type": r#type, "uniqueItems": true},
    });
    if place == "path" {
        parameter["required"] = json!(true);
    }
    parameter
}

fn operation(kind: &Kind, verb: Verb) -> Value {
    let (_, action, begin, end) = verb.names();
    let answer = match verb {
        Verb::List | Verb::ListEverywhere => list_name(kind),
        Verb::Delete | Verb::DeleteAll => STATUS.to_owned(),
        _ => component_name(kind),
    };
    let body = |component: &str, media_types: &[&str]| {
        let content: Map<String, Value> = media_types
            .iter()
            .map(|media_type| {
                (
                    (*media_type).to_owned(),
                    json!({"schema": reference(component)}),
                )
            })
            .collect();
        json!({"content": content, "required": verb != Verb::Delete && verb != Verb::DeleteAll})
    };
    let mut operation = json!({
        "operationId": operation_id(kind, begin, end),
        "tags": [tag(kind)],
        "parameters": verb.query(),
        "responses": {
            "200": {"description": "OK", "content": {"application/json": {"schema": reference(&answer)}}},
            "401": {"description": "Unauthorized"},
        },
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": group_version_kind(kind),
    });
    match verb {
        Verb::Create | Verb::Replace | Verb::ReplaceStatus | Verb::ReplaceApproval => {
            operation["requestBody"] = body(&component_name(kind), &["*/*"]);
        }
        Verb::Patch | Verb::PatchStatus | Verb::PatchApproval => {
            operation["requestBody"] = body(PATCH, patch_types(kind))
        }
        Verb::Delete | Verb::DeleteAll => operation["requestBody"] = body(DELETE_OPTIONS, &["*/*"]),
        Verb::List | Verb::ListEverywhere | Verb::Read | Verb::ReadStatus | Verb::ReadApproval => {}
    }
    operation
}

/// A cluster knows strategic merge patches only for its built-in kinds.
fn patch_types(kind: &Kind) -> &'static [&'static str] {
    const ALL: [&str; 4] = [
        "application/apply-patch+yaml",
        "application/json-patch+json",
        "application/merge-patch+json",
        "application/strategic-merge-patch+json",
    ];
    if kind.origin == Origin::Custom {
        &ALL[..3]
    } else {
        &ALL
    }
}

/// `patchCoreV1NamespacedPersistentVolumeClaimStatus`, `listTrellisV1alpha1Pool`.
fn operation_id(kind: &Kind, begin: &str, end: &str) -> String {
    let group = kind
        .group
        .split('.')
        .next()
        .filter(|group| !group.is_empty())
        .unwrap_or("core");
    let namespaced = if kind.namespaced && end != "ForAllNamespaces" {
        "Namespaced"
    } else {
        ""
    };
    format!(
        "{begin}{}{}{namespaced}{}{end}",
        capital(group),
        capital(kind.version),
        kind.kind
    )
}

fn tag(kind: &Kind) -> String {
    let group = kind
        .group
        .split('.')
        .next()
        .filter(|group| !group.is_empty())
        .unwrap_or("core");
    format!("{group}_{}", kind.version)
}

fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters
        .next()
        .map(|first| first.to_uppercase().chain(letters).collect())
        .unwrap_or_default()
}
