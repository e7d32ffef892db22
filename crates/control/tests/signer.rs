//! The signer on the real embedded API: who gets a certificate, who does not, and what everybody can read.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec, CertificateSigningRequestStatus,
};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Secret};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tempfile::TempDir;
use trellis_api::NodeName;
use trellis_api::kinds::{AUTHORITY, AUTHORITY_ENTRY, SYSTEM_NAMESPACE};
use trellis_apiserver::EmbeddedApi;
use trellis_apiserver::users::User;
use trellis_control::certificates::{CERTIFICATE_LIFE, EARLIER_ENTRY, Signer, from_secret};
use trellis_pki::{Authority, NodeKey, SIGNER, USAGES, chains_to, trusted};

/// How long anything may take that takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(30);

struct Home {
    api: EmbeddedApi,
    authority: String,
    signer: tokio::task::JoinHandle<()>,
    _dir: TempDir,
}

impl Home {
    async fn start(nodes: &[&str]) -> Home {
        let dir = tempfile::tempdir().unwrap();
        let api = EmbeddedApi::open(&dir.path().join("store")).unwrap();
        for node in nodes {
            add_node(&api.client(), node).await;
        }
        let authority = Authority::make(SystemTime::now()).unwrap();
        let text = authority.text();
        let signer = Signer::new(api.client(), authority, String::new(), CERTIFICATE_LIFE);
        Home {
            signer: tokio::spawn(signer.run()),
            authority: text,
            api,
            _dir: dir,
        }
    }

    /// Asks as a user for the certificate of a node, and waits for the decision.
    async fn ask(&self, user: User, key: &NodeKey) -> CertificateSigningRequestStatus {
        let client = self.api.client_as(user);
        let requests = Api::<CertificateSigningRequest>::all(client);
        let mut asked = CertificateSigningRequest {
            spec: CertificateSigningRequestSpec {
                request: ByteString(key.request().unwrap().into_bytes()),
                signer_name: SIGNER.to_owned(),
                usages: Some(USAGES.map(str::to_owned).to_vec()),
                ..CertificateSigningRequestSpec::default()
            },
            ..CertificateSigningRequest::default()
        };
        asked.metadata.generate_name = Some("r-".to_owned());
        let made = requests
            .create(&PostParams::default(), &asked)
            .await
            .unwrap();
        let decided = async {
            loop {
                let found = requests.get(&made.name_any()).await.unwrap();
                let status = found.status.unwrap_or_default();
                let is_denied = condition(&status, "Denied").is_some();
                if status.certificate.is_some() || is_denied {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, decided).await.unwrap()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.signer.abort();
    }
}

async fn add_node(client: &Client, name: &str) {
    let node = serde_json::from_value(json!({ "metadata": { "name": name } })).unwrap();
    let nodes = Api::<Node>::all(client.clone());
    nodes.create(&PostParams::default(), &node).await.unwrap();
}

fn condition(status: &CertificateSigningRequestStatus, kind: &str) -> Option<String> {
    let conditions = status.conditions.iter().flatten();
    let mut found = conditions.filter(|each| each.type_ == kind);
    found
        .next()
        .map(|each| each.reason.clone().unwrap_or_default())
}

fn certificate(status: CertificateSigningRequestStatus) -> String {
    String::from_utf8(status.certificate.unwrap().0).unwrap()
}

fn key(node: &str) -> NodeKey {
    NodeKey::make(&name(node)).unwrap()
}

fn node(name: &str) -> User {
    User::Node(name.into())
}

fn name(node: &str) -> NodeName {
    node.parse().unwrap()
}

#[tokio::test]
async fn a_node_gets_its_certificate_and_nobody_elses() {
    // Fails if a node gets none, if somebody else gets one, or if a refusal does not say why.
    let home = Home::start(&["a", "b"]).await;
    let own = key("a");
    let status = home.ask(node("a"), &own).await;
    assert_eq!(
        condition(&status, "Approved").as_deref(),
        Some("NodeItself")
    );
    let text = own.with(&certificate(status)).unwrap();
    let maps = Api::<ConfigMap>::namespaced(home.api.client(), SYSTEM_NAMESPACE);
    let mut published = maps.get(AUTHORITY).await.unwrap().data.unwrap();
    let published = published.remove(AUTHORITY_ENTRY).unwrap();
    assert!(chains_to(&text, &published));
    assert!(!published.contains("PRIVATE"));
    assert!(home.authority.contains(&published));
    for (user, key, reason) in [
        (node("b"), key("a"), "OtherName"),
        (User::Admin, key("a"), "NotANode"),
        (node("c"), key("c"), "UnknownNode"),
    ] {
        let status = home.ask(user, &key).await;
        assert_eq!(status.certificate, None);
        assert_eq!(condition(&status, "Denied").as_deref(), Some(reason));
    }
}

#[tokio::test]
async fn a_node_that_was_removed_gets_no_further_certificate() {
    // Fails if removing a node does not revoke it, or adding it again does not bring it back.
    let home = Home::start(&["a"]).await;
    let client = home.api.client();
    certificate(home.ask(node("a"), &key("a")).await);
    let nodes = Api::<Node>::all(client.clone());
    nodes.delete("a", &DeleteParams::default()).await.unwrap();
    let status = home.ask(node("a"), &key("a")).await;
    assert_eq!(condition(&status, "Denied").as_deref(), Some("UnknownNode"));
    add_node(&client, "a").await;
    certificate(home.ask(node("a"), &key("a")).await);
}

#[tokio::test]
async fn an_authority_in_a_secret_is_made_once_and_can_be_changed() {
    // Fails if two holders make two authorities, if one is lost, or if a broken Secret is replaced silently.
    let dir = tempfile::tempdir().unwrap();
    let api = EmbeddedApi::open(&dir.path().join("store")).unwrap();
    let (client, other) = (api.client(), api.client());
    let (first, second) = tokio::join!(from_secret(&client), from_secret(&other));
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(first.0.text(), second.0.text());
    let secrets = Api::<Secret>::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let patch = async |body: serde_json::Value| {
        let how = PatchParams::default();
        secrets
            .patch(AUTHORITY, &how, &Patch::Merge(body))
            .await
            .unwrap();
    };
    let earlier = ByteString(first.0.text().into_bytes());
    patch(json!({ "data": { "authority.pem": null, EARLIER_ENTRY: earlier } })).await;
    let (next, before) = from_secret(&client).await.unwrap();
    assert_ne!(next.certificate(), first.0.certificate());
    let both = trusted(&next, &before, SystemTime::now());
    assert!(both.contains(first.0.certificate()) && both.contains(next.certificate()));
    patch(json!({ "data": { "authority.pem": "eA==" } })).await;
    let said = from_secret(&client).await.unwrap_err().to_string();
    assert!(said.contains("is no authority"), "{said}");
}
