//! A lease: which one of several processes does what only one may do at a time.
//!
//! The holder renews its lease. The others take it when they have not seen it renewed for as long as it lasts, by their
//! own clocks: what a clock elsewhere says is never compared. A holder that cannot renew stops in time, before anybody
//! may take over, so that two never act at once.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::stored::now;
use crate::write::Manager;

/// How much of a lease's time its holder uses before it stops: the rest is for what it has already sent.
const USED: (u32, u32) = (2, 3);
/// The longest time that a lease can have, in seconds.
const FOR_GOOD: Duration = Duration::from_secs(0x7fff_ffff);
/// How often in its time a lease is renewed, or looked at by those who wait for it.
const LOOKS: u32 = 6;

/// The lease of the process that plans the volumes.
pub const VOLUMES_LEASE: &str = "trellis-volumes";

/// What a process wants of a lease.
#[derive(Clone, Debug)]
pub struct Terms {
    /// The namespace of the lease.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Who this process is; no two have the same.
    pub identity: String,
    /// How long it lasts without being renewed.
    pub lasts: Duration,
}

impl Terms {
    fn pause(&self) -> Duration {
        self.lasts / LOOKS
    }

    fn api(&self, client: &Client) -> Api<Lease> {
        Api::namespaced(client.clone(), &self.namespace)
    }
}

/// The time for which this process has a lease.
#[derive(Debug)]
pub struct Tenure {
    version: Option<String>,
    /// When the request that made it ours was sent.
    renewed: Instant,
    transitions: i32,
}

/// Takes the lease for as long as the store exists, whoever had it. The embedded home plans its own volumes, in the
/// process that has the store: nobody else may, and it need not renew anything.
pub async fn take_for_good(client: &Client, terms: &Terms) -> Result<(), kube::Error> {
    let terms = Terms {
        lasts: FOR_GOOD,
        ..terms.clone()
    };
    let api = terms.api(client);
    let lease = wanted(&terms, 0, None)?;
    let Some(there) = api.get_opt(&terms.name).await? else {
        return api.create(&PostParams::default(), &lease).await.map(drop);
    };
    let spec = there.spec.unwrap_or_default();
    let is_ours = spec.holder_identity.as_ref() == Some(&terms.identity)
        && spec.lease_duration_seconds == Some(i32::MAX);
    if is_ours {
        return Ok(());
    }
    let patch = Patch::Merge(&lease);
    api.patch(&terms.name, &params(), &patch).await.map(drop)
}

/// Waits until the lease is ours.
pub async fn acquire(client: &Client, terms: &Terms) -> Tenure {
    let mut seen: Option<(Option<String>, Instant)> = None;
    loop {
        match try_acquire(client, terms, &mut seen).await {
            Ok(Some(held)) => return held,
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(lease = terms.name, %error, "a lease cannot be looked at")
            }
        }
        sleep(terms.pause()).await;
    }
}

/// One look. `seen` is the version that was seen last, and since when.
async fn try_acquire(
    client: &Client,
    terms: &Terms,
    seen: &mut Option<(Option<String>, Instant)>,
) -> Result<Option<Tenure>, kube::Error> {
    let api = terms.api(client);
    let sent = Instant::now();
    let Some(lease) = api.get_opt(&terms.name).await? else {
        let lease = wanted(terms, 0, None)?;
        let params = PostParams {
            field_manager: Some(Manager::Volumes.name().to_owned()),
            ..PostParams::default()
        };
        let made = api.create(&params, &lease).await;
        return taken(made, sent, 0);
    };
    let version = lease.metadata.resource_version.clone();
    let spec = lease.spec.unwrap_or_default();
    let holder = spec.holder_identity.filter(|holder| !holder.is_empty());
    let is_free = holder
        .as_ref()
        .is_none_or(|holder| *holder == terms.identity);
    let since = match seen {
        Some((known, since)) if *known == version => *since,
        _ => {
            *seen = Some((version.clone(), sent));
            sent
        }
    };
    // The holder may have been given a longer time than ours.
    let told = u64::try_from(spec.lease_duration_seconds.unwrap_or_default()).unwrap_or_default();
    let lasts = terms.lasts.max(Duration::from_secs(told));
    if !is_free && since.elapsed() < lasts {
        return Ok(None);
    }
    let transitions = spec.lease_transitions.unwrap_or_default().saturating_add(1);
    let lease = wanted(terms, transitions, version)?;
    let patched = api
        .patch(&terms.name, &params(), &Patch::Merge(&lease))
        .await;
    taken(patched, sent, transitions)
}

fn params() -> PatchParams {
    PatchParams {
        field_manager: Some(Manager::Volumes.name().to_owned()),
        ..PatchParams::default()
    }
}

/// Whether a write made the lease ours. If somebody else was faster, it did not.
fn taken(
    answer: Result<Lease, kube::Error>,
    sent: Instant,
    transitions: i32,
) -> Result<Option<Tenure>, kube::Error> {
    match answer {
        Ok(lease) => Ok(Some(Tenure {
            version: lease.metadata.resource_version,
            renewed: sent,
            transitions,
        })),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
        Err(error) => Err(error),
    }
}

fn wanted(terms: &Terms, transitions: i32, version: Option<String>) -> Result<Lease, kube::Error> {
    let now: MicroTime = now();
    let lease = json!({
        "metadata": { "name": terms.name, "resourceVersion": version },
        "spec": {
            "holderIdentity": terms.identity,
            "leaseDurationSeconds": terms.lasts.as_secs().max(1),
            "acquireTime": now, "renewTime": now,
            "leaseTransitions": transitions,
        },
    });
    serde_json::from_value(lease).map_err(kube::Error::SerdeError)
}

/// Renews the lease until it is lost: somebody else has it, or it could not be renewed in time.
pub async fn keep(client: &Client, terms: &Terms, mut held: Tenure) {
    let (part, whole) = USED;
    let limit = terms.lasts * part / whole;
    loop {
        let rest = limit.saturating_sub(held.renewed.elapsed());
        sleep(terms.pause().min(rest)).await;
        let rest = limit.saturating_sub(held.renewed.elapsed());
        match tokio::time::timeout(rest, renew(client, terms, &held)).await {
            Ok(Ok(Some(renewed))) => held = renewed,
            Ok(Ok(None)) => {
                tracing::warn!(lease = terms.name, "somebody else has taken the lease");
                return;
            }
            Ok(Err(error)) => {
                tracing::debug!(lease = terms.name, %error, "a lease cannot be renewed now");
            }
            Err(_) => {
                tracing::warn!(lease = terms.name, "the lease could not be renewed in time");
                return;
            }
        }
    }
}

async fn renew(
    client: &Client,
    terms: &Terms,
    held: &Tenure,
) -> Result<Option<Tenure>, kube::Error> {
    let sent = Instant::now();
    let body = json!({
        "metadata": { "resourceVersion": held.version },
        "spec": { "renewTime": now() },
    });
    let api = terms.api(client);
    let answer = api
        .patch(&terms.name, &params(), &Patch::Merge(&body))
        .await;
    taken(answer, sent, held.transitions)
}

/// Gives the lease up if it is still ours, so that the next one need not wait.
pub async fn release(client: &Client, terms: &Terms) -> Result<(), kube::Error> {
    let api = terms.api(client);
    let Some(lease) = api.get_opt(&terms.name).await? else {
        return Ok(());
    };
    let holder = lease.spec.and_then(|spec| spec.holder_identity);
    if holder.as_ref() != Some(&terms.identity) {
        return Ok(());
    }
    let body = json!({
        "metadata": { "resourceVersion": lease.metadata.resource_version },
        "spec": { "holderIdentity": null },
    });
    let patch = Patch::Merge(&body);
    api.patch(&terms.name, &params(), &patch).await.map(drop)
}
