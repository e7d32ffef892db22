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
pub struct LeaseSettings {
    /// The namespace of the lease.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Who this process is; no two have the same.
    pub identity: String,
    /// How long it lasts without being renewed.
    pub lasts: Duration,
}

impl LeaseSettings {
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
pub async fn take_for_good(client: &Client, settings: &LeaseSettings) -> Result<(), kube::Error> {
    let settings = LeaseSettings {
        lasts: FOR_GOOD,
        ..settings.clone()
    };
    let api = settings.api(client);
    let lease = wanted(&settings, 0, None)?;
    let Some(there) = api.get_opt(&settings.name).await? else {
        return api.create(&PostParams::default(), &lease).await.map(drop);
    };
    let spec = there.spec.unwrap_or_default();
    let is_ours = spec.holder_identity.as_ref() == Some(&settings.identity)
        && spec.lease_duration_seconds == Some(i32::MAX);
    if is_ours {
        return Ok(());
    }
    let patch = Patch::Merge(&lease);
    api.patch(&settings.name, &params(), &patch).await.map(drop)
}

/// Waits until the lease is ours.
pub async fn acquire(client: &Client, settings: &LeaseSettings) -> Tenure {
    let mut seen: Option<(Option<String>, Instant)> = None;
    loop {
        match try_acquire(client, settings, &mut seen).await {
            Ok(Some(held)) => return held,
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(lease = settings.name, %error, "a lease cannot be looked at")
            }
        }
        sleep(settings.pause()).await;
    }
}

/// One look. `seen` is the version that was seen last, and since when.
async fn try_acquire(
    client: &Client,
    settings: &LeaseSettings,
    seen: &mut Option<(Option<String>, Instant)>,
) -> Result<Option<Tenure>, kube::Error> {
    let api = settings.api(client);
    let sent = Instant::now();
    let Some(lease) = api.get_opt(&settings.name).await? else {
        let lease = wanted(settings, 0, None)?;
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
        .is_none_or(|holder| *holder == settings.identity);
    let since = match seen {
        Some((known, since)) if *known == version => *since,
        _ => {
            *seen = Some((version.clone(), sent));
            sent
        }
    };
    // The holder may have been given a longer time than ours.
    let told = u64::try_from(spec.lease_duration_seconds.unwrap_or_default()).unwrap_or_default();
    let lasts = settings.lasts.max(Duration::from_secs(told));
    if !is_free && since.elapsed() < lasts {
        return Ok(None);
    }
    let transitions = spec.lease_transitions.unwrap_or_default().saturating_add(1);
    let lease = wanted(settings, transitions, version)?;
    let patched = api
        .patch(&settings.name, &params(), &Patch::Merge(&lease))
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

fn wanted(
    settings: &LeaseSettings,
    transitions: i32,
    version: Option<String>,
) -> Result<Lease, kube::Error> {
    let now: MicroTime = now();
    let lease = json!({
        "metadata": { "name": settings.name, "resourceVersion": version },
        "spec": {
            "holderIdentity": settings.identity,
            "leaseDurationSeconds": settings.lasts.as_secs().max(1),
            "acquireTime": now, "renewTime": now,
            "leaseTransitions": transitions,
        },
    });
    serde_json::from_value(lease).map_err(kube::Error::SerdeError)
}

/// Renews the lease until it is lost: somebody else has it, or it could not be renewed in time.
pub async fn keep(client: &Client, settings: &LeaseSettings, mut held: Tenure) {
    let (part, whole) = USED;
    let limit = settings.lasts * part / whole;
    loop {
        let rest = limit.saturating_sub(held.renewed.elapsed());
        sleep(settings.pause().min(rest)).await;
        let rest = limit.saturating_sub(held.renewed.elapsed());
        match tokio::time::timeout(rest, renew(client, settings, &held)).await {
            Ok(Ok(Some(renewed))) => held = renewed,
            Ok(Ok(None)) => {
                tracing::warn!(lease = settings.name, "somebody else has taken the lease");
                return;
            }
            Ok(Err(error)) => {
                tracing::debug!(lease = settings.name, %error, "a lease cannot be renewed now");
            }
            Err(_) => {
                tracing::warn!(
                    lease = settings.name,
                    "the lease could not be renewed in time"
                );
                return;
            }
        }
    }
}

async fn renew(
    client: &Client,
    settings: &LeaseSettings,
    held: &Tenure,
) -> Result<Option<Tenure>, kube::Error> {
    let sent = Instant::now();
    let body = json!({
        "metadata": { "resourceVersion": held.version },
        "spec": { "renewTime": now() },
    });
    let api = settings.api(client);
    let answer = api
        .patch(&settings.name, &params(), &Patch::Merge(&body))
        .await;
    taken(answer, sent, held.transitions)
}

/// Gives the lease up if it is still ours, so that the next one need not wait.
pub async fn release(client: &Client, settings: &LeaseSettings) -> Result<(), kube::Error> {
    let api = settings.api(client);
    let Some(lease) = api.get_opt(&settings.name).await? else {
        return Ok(());
    };
    let holder = lease.spec.and_then(|spec| spec.holder_identity);
    if holder.as_ref() != Some(&settings.identity) {
        return Ok(());
    }
    let body = json!({
        "metadata": { "resourceVersion": lease.metadata.resource_version },
        "spec": { "holderIdentity": null },
    });
    let patch = Patch::Merge(&body);
    api.patch(&settings.name, &params(), &patch).await.map(drop)
}
