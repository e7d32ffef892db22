//! Who may do what. A decision depends on nothing but its arguments.
//!
//! The administrator may do everything. A node may do what one of [`NODE`]'s rules says, and nothing else: it reads
//! what it works with, and writes what is its own. What is a node's own stands in the objects, so a write is decided
//! twice: by its place before anything is read ([`Objects::Unseen`]), and by the old and the new object within the
//! write itself, so that nobody can change the object in between.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use trellis_api::kinds::{AUTHORITY, CHAP_SECRET, NODE_LABEL, SYSTEM_NAMESPACE};

use crate::meta;
use crate::users::{NODE_LEASES_NAMESPACE, User};

const CORE: &str = "";
const OURS: &str = trellis_api::kinds::GROUP;
const LEASES: &str = "coordination.k8s.io";
const CERTIFICATES: &str = "certificates.k8s.io";
/// How our own finalizers begin.
const OUR_FINALIZERS: &str = "trellis.dev/";

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
    DeleteCollection,
}

impl Verb {
    pub(crate) const ALL: [Verb; 8] = [
        Verb::Get,
        Verb::List,
        Verb::Watch,
        Verb::Create,
        Verb::Update,
        Verb::Patch,
        Verb::Delete,
        Verb::DeleteCollection,
    ];

    /// Kubernetes' word for it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Verb::Get => "get",
            Verb::List => "list",
            Verb::Watch => "watch",
            Verb::Create => "create",
            Verb::Update => "update",
            Verb::Patch => "patch",
            Verb::Delete => "delete",
            Verb::DeleteCollection => "deletecollection",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Verb> {
        Verb::ALL.into_iter().find(|verb| verb.name() == name)
    }
}

/// What somebody wants to do, and to what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt<'a> {
    pub(crate) verb: Verb,
    pub(crate) group: &'a str,
    /// The plural of the kind.
    pub(crate) resource: &'a str,
    /// `status`, `approval`, or empty.
    pub(crate) subresource: &'a str,
    /// The namespace; empty for all of them, and for kinds without one.
    pub(crate) namespace: &'a str,
    /// The one object; empty if there are several, or if it is not known yet.
    pub(crate) name: &'a str,
    pub(crate) objects: Objects<'a>,
}

/// The objects of an attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Objects<'a> {
    /// Not looked at yet: whatever could be allowed for some objects is allowed.
    Unseen,
    /// The object as it is stored, and as it would be stored.
    Seen {
        old: Option<&'a Value>,
        new: Option<&'a Value>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Allowed,
    Forbidden,
}

impl From<bool> for Decision {
    fn from(allowed: bool) -> Decision {
        match allowed {
            true => Decision::Allowed,
            false => Decision::Forbidden,
        }
    }
}

/// Decides about an object or several.
pub(crate) fn decide(user: &User, attempt: &Attempt<'_>) -> Decision {
    let allowed = match user {
        User::Admin => true,
        User::Node(node) => NODE.iter().any(|rule| rule.allows(node, attempt)),
        User::Anybody => false,
    };
    allowed.into()
}

/// Whether of a list or a watch that is allowed each object has to be decided about. Reading every object costs time, and
/// most rules do not ask for it.
pub(crate) fn decides_by_object(user: &User, attempt: &Attempt<'_>) -> bool {
    match user {
        User::Admin => false,
        User::Node(node) => !NODE
            .iter()
            .any(|rule| rule.objects.is_none() && rule.allows(node, attempt)),
        User::Anybody => true,
    }
}

/// Decides about a path that is no object. `/debug` shows the whole store.
pub(crate) fn decide_path(user: &User, path: &str) -> Decision {
    let debug = path == "/debug" || path.starts_with("/debug/");
    match user {
        User::Admin => true,
        User::Node(_) => !debug,
        User::Anybody => OPEN_PATHS.contains(&path),
    }
    .into()
}

/// Paths that need no token: they reveal only that the server is there, and its version.
pub(crate) const OPEN_PATHS: [&str; 4] = ["/healthz", "/livez", "/readyz", "/version"];

/// Something that every node may do.
pub(crate) struct Rule {
    pub(crate) group: &'static str,
    /// Plurals, those of a subresource with its name: `pools/status`.
    pub(crate) resources: &'static [&'static str],
    pub(crate) verbs: &'static [Verb],
    /// Where: node, namespace, name.
    place: fn(&str, &str, &str) -> bool,
    /// With which objects, if not with all; lists and watches show no others.
    objects: Option<OfObjects>,
}

/// Node, the old object, the new one.
type OfObjects = fn(&str, Option<&Value>, Option<&Value>) -> bool;

const READ: &[Verb] = &[Verb::Get, Verb::List, Verb::Watch];
const CHANGE: &[Verb] = &[Verb::Update, Verb::Patch];
const MAKE_AND_CHANGE: &[Verb] = &[Verb::Create, Verb::Update, Verb::Patch];

/// All that a node may do. Of Secrets it sees only those for initiators of the volumes whose targets it runs.
pub(crate) const NODE: &[Rule] = &[
    Rule {
        group: OURS,
        resources: &["pools", "volumes", "targets", "replicas", "attachments"],
        verbs: READ,
        place: anywhere,
        objects: None,
    },
    Rule {
        group: OURS,
        resources: &[
            "pools/status",
            "volumes/status",
            "targets/status",
            "replicas/status",
            "attachments/status",
        ],
        verbs: &[Verb::Get],
        place: anywhere,
        objects: None,
    },
    Rule {
        group: OURS,
        resources: &["pools", "attachments"],
        verbs: &[Verb::Create, Verb::Update, Verb::Patch, Verb::Delete],
        place: anywhere,
        objects: Some(on_the_node),
    },
    Rule {
        group: OURS,
        resources: &["targets", "replicas"],
        verbs: CHANGE,
        place: anywhere,
        objects: Some(only_finalizers),
    },
    Rule {
        group: OURS,
        resources: &[
            "pools/status",
            "targets/status",
            "replicas/status",
            "attachments/status",
        ],
        verbs: CHANGE,
        place: anywhere,
        objects: Some(on_the_node),
    },
    Rule {
        group: CORE,
        resources: &["nodes", "nodes/status"],
        verbs: READ,
        place: anywhere,
        objects: None,
    },
    Rule {
        group: CORE,
        resources: &["nodes"],
        verbs: &[Verb::Create],
        place: itself,
        objects: None,
    },
    Rule {
        group: CORE,
        resources: &["nodes", "nodes/status"],
        verbs: CHANGE,
        place: itself,
        objects: Some(only_labels_and_status),
    },
    Rule {
        group: LEASES,
        resources: &["leases"],
        verbs: READ,
        place: anywhere,
        objects: None,
    },
    Rule {
        group: LEASES,
        resources: &["leases"],
        verbs: MAKE_AND_CHANGE,
        place: own_lease,
        objects: None,
    },
    Rule {
        group: CORE,
        resources: &["configmaps"],
        verbs: READ,
        place: |_, namespace, name| namespace == SYSTEM_NAMESPACE && name == AUTHORITY,
        objects: None,
    },
    Rule {
        group: CORE,
        resources: &["events"],
        verbs: MAKE_AND_CHANGE,
        place: anywhere,
        objects: Some(told_by_the_node),
    },
    Rule {
        group: CORE,
        resources: &["secrets"],
        verbs: &[Verb::Get, Verb::Create, Verb::Update],
        place: |_, namespace, _| namespace == SYSTEM_NAMESPACE,
        objects: Some(for_initiators_at_the_node),
    },
    // The server writes the asker's name into a new request. The node waits for the answer to one request at a time. It
    // neither approves nor signs: there is no rule about the subresources.
    Rule {
        group: CERTIFICATES,
        resources: &["certificatesigningrequests"],
        verbs: &[Verb::Create, Verb::Get, Verb::List, Verb::Watch],
        place: |_, _, name| !name.is_empty(),
        objects: Some(asked_by_the_node),
    },
    Rule {
        group: "authorization.k8s.io",
        resources: &["selfsubjectaccessreviews", "selfsubjectrulesreviews"],
        verbs: &[Verb::Create],
        place: anywhere,
        objects: None,
    },
    Rule {
        group: "authentication.k8s.io",
        resources: &["selfsubjectreviews"],
        verbs: &[Verb::Create],
        place: anywhere,
        objects: None,
    },
];

impl Rule {
    fn allows(&self, node: &str, attempt: &Attempt<'_>) -> bool {
        let is_about = |resource: &&str| match resource.split_once('/') {
            Some(parts) => parts == (attempt.resource, attempt.subresource),
            None => **resource == *attempt.resource && attempt.subresource.is_empty(),
        };
        if self.group != attempt.group
            || !self.resources.iter().any(is_about)
            || !self.verbs.contains(&attempt.verb)
        {
            return false;
        }
        match attempt.objects {
            // The name of a new object is known only when the object is.
            Objects::Unseen if attempt.verb == Verb::Create && attempt.name.is_empty() => true,
            Objects::Unseen => (self.place)(node, attempt.namespace, attempt.name),
            Objects::Seen { old, new } => {
                (self.place)(node, attempt.namespace, attempt.name)
                    && self.objects.is_none_or(|holds| holds(node, old, new))
                    && takes_no_others_hold(node, old, new)
            }
        }
    }
}

fn anywhere(_: &str, _: &str, _: &str) -> bool {
    true
}

fn itself(node: &str, _: &str, name: &str) -> bool {
    name == node
}

fn own_lease(node: &str, namespace: &str, name: &str) -> bool {
    namespace == NODE_LEASES_NAMESPACE && name == node
}

/// Before and after: nothing is taken from another node, nor given to it.
fn on_the_node(node: &str, old: Option<&Value>, new: Option<&Value>) -> bool {
    both(old, new, |object| text(object, "/spec/node") == node)
}

fn told_by_the_node(node: &str, old: Option<&Value>, new: Option<&Value>) -> bool {
    both(old, new, |event| {
        [
            text(event, "/source/host"),
            text(event, "/reportingInstance"),
        ] == [node; 2]
    })
}

fn asked_by_the_node(node: &str, old: Option<&Value>, new: Option<&Value>) -> bool {
    let name = User::Node(node.into()).name();
    both(old, new, |request| text(request, "/spec/username") == name)
}

fn for_initiators_at_the_node(node: &str, old: Option<&Value>, new: Option<&Value>) -> bool {
    both(old, new, |secret| {
        let label = secret.pointer("/metadata/labels");
        let label = label.and_then(|labels| labels.get(NODE_LABEL)?.as_str());
        text(secret, "/type") == CHAP_SECRET && label == Some(node)
    })
}

fn only_finalizers(node: &str, old: Option<&Value>, new: Option<&Value>) -> bool {
    on_the_node(node, old, new) && differs_only_in(old, new, &["finalizers"], &[])
}

fn only_labels_and_status(_: &str, old: Option<&Value>, new: Option<&Value>) -> bool {
    differs_only_in(old, new, &["labels", "annotations"], &["status"])
}

/// Whatever a node writes, it may not hold others' objects: it adds and takes away no finalizers but ours, and names no
/// owner but itself.
fn takes_no_others_hold(node: &str, old: Option<&Value>, new: Option<&Value>) -> bool {
    let Some(new) = new else {
        return true;
    };
    let foreign = |object: &Value| -> Vec<String> {
        let all = meta::finalizers(object).into_iter();
        let foreign = all.filter(|name| !name.starts_with(OUR_FINALIZERS));
        foreign.map(str::to_owned).collect()
    };
    let owners = |object: &Value| meta::get(object, "ownerReferences").cloned();
    let is_node = |owner: &Value| text(owner, "/kind") == "Node" && text(owner, "/name") == node;
    // What initiators must know goes with its volume.
    let is_volume = |owner: &Value| {
        text(new, "/type") == CHAP_SECRET
            && text(owner, "/kind") == "Volume"
            && text(owner, "/apiVersion").starts_with(OUR_FINALIZERS)
    };
    let own_owners = || {
        let owners = owners(new);
        let owners = owners.as_ref().and_then(Value::as_array);
        let mut owners = owners.into_iter().flatten();
        owners.all(|owner| is_node(owner) || is_volume(owner))
    };
    foreign(new) == old.map(foreign).unwrap_or_default()
        && (owners(new) == old.and_then(owners) || own_owners())
}

/// Whether a change leaves everything alone but these fields of the metadata and these at the top. What the server
/// itself keeps in the metadata does not count.
fn differs_only_in(
    old: Option<&Value>,
    new: Option<&Value>,
    metadata: &[&str],
    top: &[&str],
) -> bool {
    const KEPT: [&str; 3] = ["managedFields", "resourceVersion", "generation"];
    let (Some(Value::Object(old)), Some(Value::Object(new))) = (old, new) else {
        return false;
    };
    let inner = |object: &Map<String, Value>| {
        let metadata = object.get("metadata").and_then(Value::as_object);
        metadata.cloned().unwrap_or_default()
    };
    same_but_for(old, new, |field| {
        field == "metadata" || top.contains(&field)
    }) && same_but_for(&inner(old), &inner(new), |field| {
        metadata.contains(&field) || KEPT.contains(&field)
    })
}

fn same_but_for(
    old: &Map<String, Value>,
    new: &Map<String, Value>,
    is_left_out: impl Fn(&str) -> bool,
) -> bool {
    let rest = |map: &Map<String, Value>| -> BTreeMap<String, Value> {
        let rest = map
            .iter()
            .filter(|(field, value)| !is_left_out(field) && !value.is_null());
        rest.map(|(field, value)| (field.clone(), value.clone()))
            .collect()
    };
    rest(old) == rest(new)
}

fn both(old: Option<&Value>, new: Option<&Value>, holds: impl Fn(&Value) -> bool) -> bool {
    old.into_iter().chain(new).all(holds)
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    let found = object.pointer(pointer).and_then(Value::as_str);
    found.unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
