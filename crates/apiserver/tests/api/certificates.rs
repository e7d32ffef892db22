//! Requests for certificates: who asks is what the server knows, what was decided stays, and a certificate comes once.

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use trellis_apiserver::users::User;

use crate::support::{MERGE, Server};

const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

fn request(name: &str) -> Value {
    json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest",
        "metadata": { "name": name },
        "spec": {
            "request": "eA==", "signerName": "trellis.dev/node", "usages": ["client auth"],
            "username": "system:node:other", "groups": ["system:masters"], "uid": "1",
        },
        "status": { "certificate": "eA==", "conditions": [{ "type": "Approved", "status": "True" }] },
    })
}

fn says(kind: &str, status: &str) -> Value {
    json!({ "status": { "conditions": [{ "type": kind, "status": status, "reason": "R" }] } })
}

#[tokio::test]
async fn who_asks_is_what_the_server_knows() {
    // Fails if somebody can ask in another's name, approve its own request at once, or change it later.
    let server = Server::new();
    let node = server.api.client_as(User::Node("a".into()));
    let requests = Api::<CertificateSigningRequest>::all(node);
    let asked = serde_json::from_value(request("r")).unwrap();
    let made = requests
        .create(&PostParams::default(), &asked)
        .await
        .unwrap();
    assert_eq!(made.spec.username.as_deref(), Some("system:node:a"));
    let groups = ["system:nodes", "system:authenticated"].map(str::to_owned);
    assert_eq!(made.spec.groups.as_deref(), Some(&groups[..]));
    assert_eq!((made.spec.uid, made.status), (None, None));
    let change =
        Patch::Merge(json!({ "spec": { "username": "system:node:b", "signerName": "x/y" } }));
    let how = PatchParams::default();
    let refused = requests.patch("r", &how, &change).await.unwrap_err();
    assert!(matches!(refused, kube::Error::Api(status) if status.is_forbidden()));
    let by_admin = Api::<CertificateSigningRequest>::all(server.api.client());
    let spec = by_admin.patch("r", &how, &change).await.unwrap().spec;
    assert_eq!(spec.username.as_deref(), Some("system:node:a"));
    assert_eq!(spec.signer_name, "trellis.dev/node");
    // Whoever has no other name is the administrator.
    let reply = server.post(REQUESTS, request("by-admin")).await;
    assert_eq!(reply.body["spec"]["username"], "system:admin", "{reply:?}");
}

#[tokio::test]
async fn a_request_says_whose_signature_it_wants_and_what_for() {
    // Fails if a request is stored that nobody could ever meet.
    let server = Server::new();
    for (field, value, said) in [
        ("signerName", json!(""), "spec.signerName: Required value"),
        (
            "signerName",
            json!("nothing"),
            "must be a fully qualified domain and path",
        ),
        ("usages", json!([]), "spec.usages: Required value"),
        (
            "expirationSeconds",
            json!(599),
            "may not specify a duration less than 600 seconds",
        ),
    ] {
        let mut bad = request("bad");
        bad["spec"][field] = value;
        let reply = server.post(REQUESTS, bad).await;
        assert_eq!(reply.code, 422, "{reply:?}");
        assert!(
            reply.body["message"].as_str().unwrap().contains(said),
            "{reply:?}"
        );
    }
}

#[tokio::test]
async fn a_decision_comes_through_approval_and_a_certificate_through_status_once() {
    // Fails if a signer can approve, an approver can sign, or either can be taken back.
    let server = Server::new();
    server.post(REQUESTS, request("r")).await;
    let (approval, status) = (
        format!("{REQUESTS}/r/approval"),
        format!("{REQUESTS}/r/status"),
    );
    let refused = |reply: &crate::support::Reply, said: &str| {
        let message = reply.body["message"].as_str().unwrap_or_default();
        assert!(reply.code == 422 && message.contains(said), "{reply:?}");
    };
    let reply = server.patch(&status, MERGE, says("Approved", "True")).await;
    refused(
        &reply,
        "updates may not add a condition of type \"Approved\"",
    );
    let reply = server
        .patch(&approval, MERGE, says("Approved", "False"))
        .await;
    refused(&reply, "supported values: \"True\"");
    let mut both = says("Approved", "True");
    both["status"]["certificate"] = json!("eA==");
    let reply = server.patch(&approval, MERGE, both).await;
    assert_eq!(reply.code, 200, "{reply:?}");
    assert_eq!(reply.body["status"]["certificate"], Value::Null);
    let condition = &reply.body["status"]["conditions"][0];
    assert!(condition["lastUpdateTime"].is_string() && condition["lastTransitionTime"].is_string());
    let denied =
        json!([{ "type": "Approved", "status": "True" }, { "type": "Denied", "status": "True" }]);
    let denied = json!({ "status": { "conditions": denied } });
    refused(
        &server.patch(&approval, MERGE, denied).await,
        "mutually exclusive",
    );
    let taken_back = json!({ "status": { "conditions": [] } });
    let reply = server.patch(&approval, MERGE, taken_back).await;
    refused(
        &reply,
        "updates may not remove a condition of type \"Approved\"",
    );
    let signed = json!({ "status": { "certificate": "eQ==", "conditions": null } });
    let reply = server.patch(&status, MERGE, signed).await;
    assert_eq!(reply.body["status"]["certificate"], "eQ==", "{reply:?}");
    assert_eq!(reply.body["status"]["conditions"][0]["type"], "Approved");
    let again = json!({ "status": { "certificate": "eg==" } });
    refused(&server.patch(&status, MERGE, again).await, "once it is set");
    let reply = server
        .send(http::Method::DELETE, &approval, "", Vec::new())
        .await;
    assert_eq!(reply.code, 405);
}
