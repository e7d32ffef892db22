//! What a client may do, for `kubectl auth can-i`. A client with the token may do everything.

use k8s_openapi::api::authorization::v1::{SelfSubjectAccessReview, SelfSubjectRulesReview};
use serde_json::{Value, json};

use super::{Names, built_in};
use crate::kind::Kind;
use crate::meta;

/// May I do this?
pub(super) fn access() -> Kind {
    let names = Names {
        plural: "selfsubjectaccessreviews",
        singular: "selfsubjectaccessreview",
        short: &[],
    };
    Kind {
        answer: Some(|review| {
            let reason = "The token of this server allows everything.";
            set_status(review, json!({ "allowed": true, "reason": reason }));
        }),
        ..built_in::<SelfSubjectAccessReview>(names, &[])
    }
}

/// What may I do?
pub(super) fn rules() -> Kind {
    let names = Names {
        plural: "selfsubjectrulesreviews",
        singular: "selfsubjectrulesreview",
        short: &[],
    };
    Kind {
        answer: Some(|review| {
            let status = json!({
                "resourceRules": [{ "verbs": ["*"], "apiGroups": ["*"], "resources": ["*"] }],
                "nonResourceRules": [{ "verbs": ["*"], "nonResourceURLs": ["*"] }],
                "incomplete": false,
            });
            set_status(review, status);
        }),
        ..built_in::<SelfSubjectRulesReview>(names, &[])
    }
}

fn set_status(review: &mut Value, status: Value) {
    meta::as_map(review).insert("status".to_owned(), status);
}
