//! Discovery: how a client learns which kinds there are, and what it may do with them.
//!
//! There are two dialects. The old one is a tree of documents (`/api`, `/apis`, `/apis/GROUP`, `/apis/GROUP/VERSION`);
//! the newer one answers `/api` and `/apis` with everything at once, if the client accepts it.

use serde_json::{Value, json};

use crate::kind::Kind;

/// The Kubernetes release whose behaviour the server follows: kubectl warns when it is too far from its own.
const KUBERNETES_MINOR: &str = "34";
const GIT_VERSION: &str = concat!("v1.34.0+trellis.", env!("CARGO_PKG_VERSION"));

/// The aggregated dialect: the version, and the media type in which its answer must be labelled.
const AGGREGATED: [(&str, &str); 2] = [
    (
        "v2",
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
    ),
    (
        "v2beta1",
        "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList",
    ),
];

const STATUS_VERBS: [&str; 3] = ["get", "patch", "update"];

/// The discovery document at a path, or `None` if the path is not one of discovery's.
pub fn respond(kinds: &'static [Kind], path: &str, accept: &str) -> Option<Value> {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    match parts[..] {
        ["version"] => Some(version()),
        ["api"] => Some(match aggregated_version(accept) {
            Some(version) => aggregated(
                version,
                groups(kinds).filter(|group| group.is_empty()),
                kinds,
            ),
            None => {
                json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
            }
        }),
        ["apis"] => Some(match aggregated_version(accept) {
            Some(version) => aggregated(
                version,
                groups(kinds).filter(|group| !group.is_empty()),
                kinds,
            ),
            None => json!({
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": groups(kinds).filter(|group| !group.is_empty()).map(|name| group(name, kinds)).collect::<Vec<_>>(),
            }),
        }),
        ["api", version] => resource_list("", version, kinds),
        ["apis", name] => {
            let mut found = groups(kinds)
                .find(|group| *group == name && !name.is_empty())
                .map(|name| group(name, kinds))?;
            found["kind"] = json!("APIGroup");
            found["apiVersion"] = json!("v1");
            Some(found)
        }
        ["apis", group, version] if !group.is_empty() => resource_list(group, version, kinds),
        _ => None,
    }
}

/// The `Content-Type` under which a discovery document must be sent: clients recognise the aggregated dialect by it.
pub fn content_type(document: &Value) -> &'static str {
    let version = document["apiVersion"]
        .as_str()
        .and_then(|version| version.strip_prefix("apidiscovery.k8s.io/"));
    AGGREGATED
        .iter()
        .find(|(known, _)| version == Some(known))
        .map_or("application/json", |(_, media_type)| media_type)
}

fn version() -> Value {
    json!({
        "major": "1",
        "minor": KUBERNETES_MINOR,
        "emulationMajor": "1",
        "emulationMinor": KUBERNETES_MINOR,
        "minCompatibilityMajor": "1",
        "minCompatibilityMinor": KUBERNETES_MINOR,
        "gitVersion": GIT_VERSION,
        "gitCommit": "",
        "gitTreeState": "",
        "buildDate": "",
        "goVersion": "",
        "compiler": "rustc",
        "platform": format!("{}/{}", std::env::consts::OS, go_architecture()),
    })
}

/// The architecture under the name that Kubernetes' clients know.
fn go_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The first dialect that the client accepts and that we speak, if that is an aggregated one.
fn aggregated_version(accept: &str) -> Option<&'static str> {
    for range in accept.split(',') {
        let range: String = range.split_whitespace().collect();
        if let Some((version, _)) = AGGREGATED
            .iter()
            .find(|(_, media_type)| range.starts_with(media_type))
        {
            return Some(version);
        }
        if matches!(range.split(';').next(), Some("application/json" | "*/*"))
            && !range.contains("as=")
        {
            return None;
        }
    }
    None
}

/// The groups in the order of the table, each once.
fn groups(kinds: &'static [Kind]) -> impl Iterator<Item = &'static str> {
    kinds
        .iter()
        .enumerate()
        .filter(|(at, kind)| {
            kinds[..*at]
                .iter()
                .all(|earlier| earlier.group != kind.group)
        })
        .map(|(_, kind)| kind.group)
}

/// The versions of a group in the order of the table, each once; the first is the preferred one.
fn versions(group: &str, kinds: &'static [Kind]) -> Vec<&'static str> {
    let mut versions = Vec::new();
    for kind in kinds.iter().filter(|kind| kind.group == group) {
        if !versions.contains(&kind.version) {
            versions.push(kind.version);
        }
    }
    versions
}

fn group(name: &str, kinds: &'static [Kind]) -> Value {
    let versions: Vec<Value> = versions(name, kinds)
        .into_iter()
        .map(|version| json!({"groupVersion": format!("{name}/{version}"), "version": version}))
        .collect();
    json!({"name": name, "preferredVersion": versions.first(), "versions": versions})
}

fn in_version<'a>(
    group: &'a str,
    version: &'a str,
    kinds: &'static [Kind],
) -> impl Iterator<Item = &'static Kind> + use<'a> {
    kinds
        .iter()
        .filter(move |kind| kind.group == group && kind.version == version)
}

fn resource_list(group: &str, version: &str, kinds: &'static [Kind]) -> Option<Value> {
    let mut resources = Vec::new();
    for kind in in_version(group, version, kinds) {
        let mut resource = json!({
            "name": kind.plural,
            "singularName": kind.singular,
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": verbs(kind),
        });
        add_names(&mut resource, kind);
        resources.push(resource);
        let parts = [(kind.status, "status"), (kind.approval, "approval")];
        for (_, part) in parts.into_iter().filter(|(is_there, _)| *is_there) {
            resources.push(json!({
                "name": format!("{}/{part}", kind.plural),
                "singularName": "",
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": STATUS_VERBS,
            }));
        }
    }
    if resources.is_empty() {
        return None;
    }
    let group_version = if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    };
    Some(json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": resources,
    }))
}

fn aggregated(
    version: &str,
    groups: impl Iterator<Item = &'static str>,
    kinds: &'static [Kind],
) -> Value {
    let items: Vec<Value> = groups
        .map(|group| {
            let versions: Vec<Value> = versions(group, kinds)
                .into_iter()
                .map(|version| {
                    let resources: Vec<Value> = in_version(group, version, kinds)
                        .map(aggregated_resource)
                        .collect();
                    json!({"version": version, "resources": resources, "freshness": "Current"})
                })
                .collect();
            let metadata = if group.is_empty() {
                json!({"creationTimestamp": null})
            } else {
                json!({"name": group, "creationTimestamp": null})
            };
            json!({"metadata": metadata, "versions": versions})
        })
        .collect();
    json!({
        "kind": "APIGroupDiscoveryList",
        "apiVersion": format!("apidiscovery.k8s.io/{version}"),
        "metadata": {},
        "items": items,
    })
}

fn aggregated_resource(kind: &Kind) -> Value {
    let response_kind = json!({"group": kind.group, "version": kind.version, "kind": kind.kind});
    let mut resource = json!({
        "resource": kind.plural,
        "responseKind": response_kind,
        "scope": if kind.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": kind.singular,
        "verbs": verbs(kind),
    });
    add_names(&mut resource, kind);
    let parts = [(kind.status, "status"), (kind.approval, "approval")];
    let parts = parts.into_iter().filter(|(is_there, _)| *is_there);
    let parts: Vec<Value> = parts
        .map(|(_, name)| {
            json!({
                "subresource": name,
                "responseKind": response_kind,
                "verbs": STATUS_VERBS,
            })
        })
        .collect();
    if !parts.is_empty() {
        resource["subresources"] = json!(parts);
    }
    resource
}

fn add_names(resource: &mut Value, kind: &Kind) {
    if !kind.short_names.is_empty() {
        resource["shortNames"] = json!(kind.short_names);
    }
    if !kind.categories.is_empty() {
        resource["categories"] = json!(kind.categories);
    }
}

/// Namespaces cannot be deleted all at once, in a cluster or here. A review can only be created.
fn verbs(kind: &Kind) -> Vec<&'static str> {
    const VERBS: [&str; 8] = [
        "create",
        "delete",
        "deletecollection",
        "get",
        "list",
        "patch",
        "update",
        "watch",
    ];
    if kind.answer.is_some() {
        return vec!["create"];
    }
    VERBS
        .into_iter()
        .filter(|verb| kind.kind != "Namespace" || *verb != "deletecollection")
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::kinds;

    #[test]
    fn the_tree_of_discovery_says_what_a_cluster_says() {
        // Fails when a kind, a verb, a short name or a group goes missing or changes.
        let paths = [
            "/api",
            "/apis",
            "/api/v1",
            "/apis/trellis.dev",
            "/apis/trellis.dev/v1alpha1",
        ];
        let documents: Vec<Value> = paths
            .iter()
            .map(|path| respond(kinds::all(), path, "application/json").unwrap())
            .collect();
        insta::assert_json_snapshot!(documents);
    }

    #[test]
    fn everything_at_once_says_the_same_as_the_tree() {
        // Fails when the two dialects disagree on a resource, or when the answer is not labelled as aggregated.
        let accept =
            "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
        let mut at_once = Vec::new();
        for path in ["/api", "/apis"] {
            let document = respond(kinds::all(), path, accept).unwrap();
            assert_eq!(content_type(&document), AGGREGATED[0].1);
            for group in document["items"].as_array().unwrap() {
                for resource in group["versions"][0]["resources"].as_array().unwrap() {
                    at_once.push((
                        resource["resource"].clone(),
                        resource["verbs"].clone(),
                        resource["shortNames"].clone(),
                    ));
                }
            }
        }
        let mut in_the_tree = Vec::new();
        for path in [
            "/api/v1",
            "/apis/storage.k8s.io/v1",
            "/apis/authentication.k8s.io/v1",
            "/apis/authorization.k8s.io/v1",
            "/apis/certificates.k8s.io/v1",
            "/apis/coordination.k8s.io/v1",
            "/apis/trellis.dev/v1alpha1",
        ] {
            let document = respond(kinds::all(), path, accept).unwrap();
            assert_eq!(content_type(&document), "application/json");
            for resource in document["resources"].as_array().unwrap() {
                if !resource["name"].as_str().unwrap().contains('/') {
                    in_the_tree.push((
                        resource["name"].clone(),
                        resource["verbs"].clone(),
                        resource["shortNames"].clone(),
                    ));
                }
            }
        }
        let order = |entry: &(Value, Value, Value)| entry.0.to_string();
        at_once.sort_by_key(order);
        in_the_tree.sort_by_key(order);
        assert_eq!(at_once, in_the_tree);
    }

    #[test]
    fn the_dialect_is_the_first_that_the_client_accepts() {
        // Fails when kubectl 1.27 (v2beta1 only) gets a dialect that it does not know, or curl gets the aggregated one.
        for (accept, version) in [
            (
                "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,application/json",
                Some("v2beta1"),
            ),
            (
                "application/json; g=apidiscovery.k8s.io; v=v2; as=APIGroupDiscoveryList",
                Some("v2"),
            ),
            ("application/json, */*", None),
            ("*/*", None),
            ("", None),
        ] {
            assert_eq!(aggregated_version(accept), version, "{accept}");
        }
    }

    #[test]
    fn other_paths_are_not_discovery() {
        // Fails when discovery answers for objects, or for groups that are not there.
        for path in [
            "/",
            "/apis/",
            "/api/v2",
            "/apis/apps",
            "/apis/apps/v1",
            "/apis/trellis.dev/v1",
            "/api/v1/pods",
            "/apis//v1",
        ] {
            assert_eq!(
                respond(kinds::all(), path, "").is_some(),
                path == "/apis/",
                "{path}"
            );
        }
    }
}
