//! Tells which nodes are lost, in the embedded home: those that have not renewed their lease for as long as the lease
//! itself says. It is written into the condition `Ready` of the Node, as Kubernetes does it in a cluster.
//!
//! Clocks of nodes may differ, so the time of a renewal is when it was seen here. A service that has just started has
//! seen none, and gives every node its full time.

use std::collections::HashMap;
use std::pin::pin;
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::time::Instant;
use trellis_api::kinds::NODE_LEASES_NAMESPACE;

use crate::node::LOST_AFTER;
use crate::stored::now;
use crate::volume::nodes::{READY, UNKNOWN, lost_since};
use crate::write::Manager;

/// The pause before a verdict that could not be stored is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A lease as it was seen last.
struct Seen {
    renewed: Option<MicroTime>,
    at: Instant,
    lasts: Duration,
    /// What its Node says, once that was written by us.
    told: Option<Verdict>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    There,
    Lost,
}

/// Watches the leases for ever. `own` is the node of this process, which is there.
pub async fn run(client: Client, own: String) {
    let leases = Api::<Lease>::namespaced(client.clone(), NODE_LEASES_NAMESPACE);
    let events = watcher(leases, watcher::Config::default().any_semantic()).default_backoff();
    let mut events = pin!(events);
    let mut seen: HashMap<String, Seen> = HashMap::new();
    loop {
        let due = judge(&client, &mut seen).await;
        let event = match tokio::time::timeout_at(due, events.try_next()).await {
            Err(_) => continue,
            Ok(Ok(Some(event))) => event,
            Ok(Ok(None)) => return,
            Ok(Err(error)) => {
                tracing::debug!(%error, "the watch of leases was interrupted and goes on");
                continue;
            }
        };
        match event {
            watcher::Event::Apply(lease) | watcher::Event::InitApply(lease) => {
                if lease.name_any() != own {
                    note(&mut seen, &lease);
                }
            }
            watcher::Event::Delete(lease) => drop(seen.remove(&lease.name_any())),
            watcher::Event::Init | watcher::Event::InitDone => {}
        }
    }
}

fn note(seen: &mut HashMap<String, Seen>, lease: &Lease) {
    let spec = lease.spec.clone().unwrap_or_default();
    let lasts = spec.lease_duration_seconds;
    let lasts = lasts.and_then(|seconds| u64::try_from(seconds).ok());
    let lasts = lasts.map_or(LOST_AFTER, Duration::from_secs);
    let name = lease.name_any();
    let known = seen.get(&name);
    let is_news = known.is_none_or(|known| known.renewed != spec.renew_time);
    let at = known.filter(|_| !is_news).map(|known| known.at);
    let told = known.and_then(|known| known.told);
    let now = Seen {
        renewed: spec.renew_time,
        at: at.unwrap_or_else(Instant::now),
        lasts,
        told,
    };
    seen.insert(name, now);
}

/// Tells what is new, and returns when the next node could be lost.
async fn judge(client: &Client, seen: &mut HashMap<String, Seen>) -> Instant {
    let mut next = Instant::now() + LOST_AFTER;
    for (name, lease) in seen {
        let ends = lease.at + lease.lasts;
        let verdict = if Instant::now() >= ends {
            Verdict::Lost
        } else {
            next = next.min(ends);
            Verdict::There
        };
        if lease.told == Some(verdict) {
            continue;
        }
        match tell(client, name, verdict, lease.lasts).await {
            Ok(()) => lease.told = Some(verdict),
            Err(error) => {
                tracing::warn!(node = name, %error, "whether a node is there cannot be stored; it is tried again");
                next = next.min(Instant::now() + AGAIN_AFTER);
            }
        }
    }
    next
}

async fn tell(
    client: &Client,
    name: &str,
    verdict: Verdict,
    lasts: Duration,
) -> Result<(), kube::Error> {
    let nodes = Api::<Node>::all(client.clone());
    let Some(node) = nodes.get_opt(name).await? else {
        return Ok(());
    };
    let is_lost = lost_since(&node).is_some();
    let (status, reason, message) = match verdict {
        Verdict::Lost if !is_lost => {
            let message = format!("The node has said nothing for {} s.", lasts.as_secs());
            (UNKNOWN, "NodeSilent", message)
        }
        Verdict::There if is_lost => {
            let message = "The node says that it is there again.".to_owned();
            ("True", "NodeHeard", message)
        }
        _ => return Ok(()),
    };
    match verdict {
        Verdict::Lost => tracing::warn!(node = name, "a node is lost: {message}"),
        Verdict::There => tracing::info!(node = name, "a node is back"),
    }
    let body = json!({
        "metadata": { "resourceVersion": node.resource_version() },
        "status": { "conditions": [{
            "type": READY, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": now().0.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        }]},
    });
    let params = PatchParams {
        field_manager: Some(Manager::Volumes.name().to_owned()),
        ..PatchParams::default()
    };
    nodes
        .patch_status(name, &params, &Patch::Strategic(&body))
        .await
        .map(drop)
}
