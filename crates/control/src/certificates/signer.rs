//! Decides on the requests of nodes for certificates, and signs those that are granted.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use trellis_api::NodeName;
use trellis_api::step::{self, Step};
use trellis_pki::{Asked, Authority, Home, KeyId, Refused, SIGNER, sign, trusted};

use super::publish;

/// How long a node's certificate lasts unless it is said otherwise.
pub const CERTIFICATE_LIFE: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// A request that was decided is kept for so long, as in Kubernetes, and then removed.
const DECIDED_KEPT: SignedDuration = SignedDuration::from_hours(1);

/// The pause after a failure.
const PAUSE: Duration = Duration::from_secs(1);

/// Who signs for a home.
pub struct Signer {
    client: Client,
    authority: Authority,
    /// The certificates of earlier authorities.
    earlier: String,
    /// How long certificates last.
    life: Duration,
}

/// What was decided about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decided {
    Not,
    /// Approved, and not signed yet.
    Approved,
    Done,
}

impl Signer {
    /// Whoever has that authority.
    pub fn new(client: Client, authority: Authority, earlier: String, life: Duration) -> Signer {
        Signer {
            client,
            authority,
            earlier,
            life,
        }
    }

    /// Publishes the authority and signs, for ever.
    pub async fn run(self) {
        let trusted = trusted(&self.authority, &self.earlier, SystemTime::now());
        while let Err(error) = publish(&self.client, &trusted).await {
            tracing::warn!(%error, "the authority's certificate cannot be published; it is tried again");
            tokio::time::sleep(PAUSE).await;
        }
        let all = Api::<CertificateSigningRequest>::all(self.client.clone());
        let ours = watcher::Config::default().fields(&format!("spec.signerName={SIGNER}"));
        let mut changed = pin!(
            watcher(all, ours)
                .default_backoff()
                .applied_objects()
                .filter_map(async |request| request.ok())
        );
        while let Some(request) = changed.next().await {
            let name = request.name_any();
            while let Err(error) = self.attend(&name).await {
                tracing::warn!(%error, name, "a request for a certificate cannot be decided; it is tried again");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    /// Looks at one request, and decides on it unless that was done. What another signer has decided meanwhile stands.
    async fn attend(&self, name: &str) -> Result<(), kube::Error> {
        let requests = Api::<CertificateSigningRequest>::all(self.client.clone());
        let Some(request) = requests.get_opt(name).await? else {
            return Ok(());
        };
        let decided = decided(&request);
        if request.spec.signer_name != SIGNER || decided == Decided::Done {
            return Ok(());
        }
        let ours = ListParams::default().fields(&format!("spec.signerName={SIGNER}"));
        let all = requests.list(&ours).await?.items;
        let nodes = self.node_of(&request).await?;
        let signed = self.judge(&request, &nodes, &keys(&all));
        match signed {
            Ok(certificate) => {
                if decided == Decided::Not {
                    let message = "The node asks for its own certificate.";
                    decide(&requests, &request, "Approved", "NodeItself", message).await?;
                }
                let status =
                    json!({ "status": { "certificate": ByteString(certificate.into_bytes()) } });
                let how = PatchParams::default();
                let stored = requests
                    .patch_status(name, &how, &Patch::Merge(status))
                    .await;
                if unless_outdated(stored)? {
                    step::reached(Step::CertificateSigned);
                }
            }
            // Nothing is wrong with the request.
            Err(refused @ (Refused::AuthorityEnded | Refused::Failed)) => {
                tracing::error!(name, "no certificate can be signed: {refused}");
            }
            Err(refused) => {
                tracing::warn!(
                    name,
                    user = request.spec.username,
                    "a certificate is refused: {refused}"
                );
                let (code, message) = (refused.code(), refused.to_string());
                if decided == Decided::Approved {
                    fail(&requests, &request, code, &message).await?;
                } else {
                    decide(&requests, &request, "Denied", code, &message).await?;
                }
            }
        }
        forget(&requests, &all).await
    }

    /// The request's own node, if there is one.
    async fn node_of(
        &self,
        request: &CertificateSigningRequest,
    ) -> Result<BTreeSet<NodeName>, kube::Error> {
        let user = request.spec.username.as_deref().unwrap_or_default();
        let Some(name) = NodeName::of_user(user) else {
            return Ok(BTreeSet::new());
        };
        let node = Api::<Node>::all(self.client.clone())
            .get_opt(name.as_str())
            .await?;
        let stays = node.is_some_and(|node| node.metadata.deletion_timestamp.is_none());
        Ok(stays.then_some(name).into_iter().collect())
    }

    fn judge(
        &self,
        request: &CertificateSigningRequest,
        nodes: &BTreeSet<NodeName>,
        keys: &BTreeMap<KeyId, NodeName>,
    ) -> Result<String, Refused> {
        let spec = &request.spec;
        let asked = Asked {
            user: spec.username.as_deref().unwrap_or_default(),
            signer: &spec.signer_name,
            usages: spec.usages.as_deref().unwrap_or_default(),
            request: std::str::from_utf8(&spec.request.0).unwrap_or_default(),
            life: spec
                .expiration_seconds
                .and_then(|seconds| u64::try_from(seconds).ok())
                .map(Duration::from_secs),
        };
        let home = Home {
            authority: &self.authority,
            nodes,
            keys,
            life: self.life,
        };
        sign(&asked, &home, SystemTime::now())
    }
}

/// Writes down what was decided.
async fn decide(
    requests: &Api<CertificateSigningRequest>,
    request: &CertificateSigningRequest,
    kind: &str,
    reason: &str,
    message: &str,
) -> Result<(), kube::Error> {
    let body = Patch::Merge(with_condition(request, kind, reason, message));
    let (name, how) = (request.name_any(), PatchParams::default());
    unless_outdated(requests.patch_approval(&name, &how, &body).await).map(drop)
}

/// Says that an approved request cannot be met.
async fn fail(
    requests: &Api<CertificateSigningRequest>,
    request: &CertificateSigningRequest,
    reason: &str,
    message: &str,
) -> Result<(), kube::Error> {
    let body = Patch::Merge(with_condition(request, "Failed", reason, message));
    let (name, how) = (request.name_any(), PatchParams::default());
    unless_outdated(requests.patch_status(&name, &how, &body).await).map(drop)
}

fn with_condition(
    request: &CertificateSigningRequest,
    kind: &str,
    reason: &str,
    message: &str,
) -> serde_json::Value {
    let status = request.status.as_ref();
    let known = status.and_then(|status| status.conditions.clone());
    let mut conditions: Vec<serde_json::Value> = known
        .into_iter()
        .flatten()
        .map(|each| json!(each))
        .collect();
    conditions
        .push(json!({ "type": kind, "status": "True", "reason": reason, "message": message }));
    json!({
        "metadata": { "resourceVersion": request.metadata.resource_version },
        "status": { "conditions": conditions },
    })
}

/// Whether it was written. A request that has changed meanwhile comes again by its event; one that is gone, or that
/// another signer has met, needs nothing.
fn unless_outdated<T>(written: Result<T, kube::Error>) -> Result<bool, kube::Error> {
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => Ok(false),
        Err(error) => Err(error),
    }
}

fn decided(request: &CertificateSigningRequest) -> Decided {
    let status = request.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_deref());
    let is = |kind: &str| conditions.is_some_and(|list| list.iter().any(|each| each.type_ == kind));
    let is_signed = status.is_some_and(|status| status.certificate.is_some());
    if is_signed || is("Denied") || is("Failed") {
        Decided::Done
    } else if is("Approved") {
        Decided::Approved
    } else {
        Decided::Not
    }
}

/// The keys for which certificates were signed.
fn keys(requests: &[CertificateSigningRequest]) -> BTreeMap<KeyId, NodeName> {
    let is_signed = |request: &&CertificateSigningRequest| {
        let status = request.status.as_ref();
        status.is_some_and(|status| status.certificate.is_some())
    };
    let key = |request: &CertificateSigningRequest| {
        let node = NodeName::of_user(request.spec.username.as_deref()?)?;
        let key = KeyId::of(std::str::from_utf8(&request.spec.request.0).ok()?)?;
        Some((key, node))
    };
    requests.iter().filter(is_signed).filter_map(key).collect()
}

/// Removes requests that were decided long ago.
async fn forget(
    requests: &Api<CertificateSigningRequest>,
    all: &[CertificateSigningRequest],
) -> Result<(), kube::Error> {
    let now = Timestamp::now();
    let is_old = |request: &&CertificateSigningRequest| {
        let made = request.creation_timestamp().map(|made| made.0);
        made.is_some_and(|made| now.duration_since(made) > DECIDED_KEPT)
    };
    let done = |request: &&CertificateSigningRequest| decided(request) == Decided::Done;
    for request in all.iter().filter(is_old).filter(done) {
        let (name, how) = (request.name_any(), DeleteParams::default());
        unless_outdated(requests.delete(&name, &how).await)?;
    }
    Ok(())
}
