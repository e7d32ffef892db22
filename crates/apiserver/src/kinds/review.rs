//! Who a client is and what it may do, for `kubectl auth whoami` and `kubectl auth can-i`.

use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::authorization::v1::{SelfSubjectAccessReview, SelfSubjectRulesReview};
use serde_json::{Value, json};

use super::{Names, built_in, text};
use crate::authorize::{self, Attempt, Decision, NODE, Objects, Verb};
use crate::kind::{Asker, Kind};
use crate::meta;
use crate::users::User;

/// Why a node gets a no, and why the list of its rights is not the whole truth.
const NODES_OWN: &str = "a node reads what it works with, and writes only what is its own";

/// Who am I?
pub(super) fn identity() -> Kind {
    let names = Names {
        plural: "selfsubjectreviews",
        singular: "selfsubjectreview",
        short: &[],
    };
    Kind {
        answer: Some(|review, asker| {
            let (username, groups) = (asker.user.name(), asker.user.groups());
            let info = json!({ "username": username, "groups": groups });
            set_status(review, json!({ "userInfo": info }));
        }),
        ..built_in::<SelfSubjectReview>(names, &[])
    }
}

/// May I do this?
pub(super) fn access() -> Kind {
    let names = Names {
        plural: "selfsubjectaccessreviews",
        singular: "selfsubjectaccessreview",
        short: &[],
    };
    Kind {
        answer: Some(|review, asker| {
            let allowed = may(review, asker);
            let reason = match asker.user {
                User::Admin => "The token of this server allows everything.",
                _ if allowed => "",
                _ => NODES_OWN,
            };
            set_status(review, json!({ "allowed": allowed, "reason": reason }));
        }),
        ..built_in::<SelfSubjectAccessReview>(names, &[])
    }
}

fn may(review: &Value, asker: &Asker<'_>) -> bool {
    if *asker.user == User::Admin {
        return true;
    }
    let of = |field: &str| text(review, &format!("/spec/resourceAttributes/{field}"));
    if of("resource").is_empty() {
        let path = text(review, "/spec/nonResourceAttributes/path");
        let reads = matches!(
            text(review, "/spec/nonResourceAttributes/verb"),
            "get" | "head"
        );
        return reads && authorize::decide_path(asker.user, path) == Decision::Allowed;
    }
    let Some(verb) = Verb::named(of("verb")) else {
        return false;
    };
    let (group, resource, name) = (of("group"), of("resource"), of("name"));
    let stored = asker.get(group, resource, of("namespace"), name);
    let objects = match (&stored, verb) {
        // A change that leaves everything as it is: whether the object is the asker's own decides.
        (Some(old), Verb::Update | Verb::Patch) => Objects::Seen {
            old: Some(old),
            new: Some(old),
        },
        (Some(old), Verb::Get | Verb::Delete) => Objects::Seen {
            old: Some(old),
            new: None,
        },
        _ => Objects::Unseen,
    };
    let attempt = Attempt {
        verb,
        group,
        resource,
        subresource: of("subresource"),
        namespace: of("namespace"),
        name,
        objects,
    };
    authorize::decide(asker.user, &attempt) == Decision::Allowed
}

/// What may I do?
pub(super) fn rules() -> Kind {
    let names = Names {
        plural: "selfsubjectrulesreviews",
        singular: "selfsubjectrulesreview",
        short: &[],
    };
    Kind {
        answer: Some(|review, asker| {
            let everything = json!([{ "verbs": ["*"], "apiGroups": ["*"], "resources": ["*"] }]);
            let everywhere = |verb: &str| json!([{ "verbs": [verb], "nonResourceURLs": ["*"] }]);
            let status = match asker.user {
                User::Admin => json!({
                    "resourceRules": everything,
                    "nonResourceRules": everywhere("*"),
                    "incomplete": false,
                }),
                User::Node(_) => json!({
                    "resourceRules": node_rules(),
                    "nonResourceRules": everywhere("get"),
                    "incomplete": true,
                    "evaluationError": NODES_OWN,
                }),
                User::Anybody => json!({
                    "resourceRules": [], "nonResourceRules": [], "incomplete": false,
                }),
            };
            set_status(review, status);
        }),
        ..built_in::<SelfSubjectRulesReview>(names, &[])
    }
}

fn node_rules() -> Vec<Value> {
    let row = |rule: &authorize::Rule| {
        let verbs: Vec<&str> = rule.verbs.iter().map(|verb| verb.name()).collect();
        json!({ "verbs": verbs, "apiGroups": [rule.group], "resources": rule.resources })
    };
    NODE.iter().map(row).collect()
}

fn set_status(review: &mut Value, status: Value) {
    meta::as_map(review).insert("status".to_owned(), status);
}
