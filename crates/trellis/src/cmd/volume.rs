//! `trellis volume`: the copies of a claim, their states, and how many there should be.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};
use trellis_api::kinds::{
    Pool, Replica, ReplicaPhase, ReplicaSeen, ReplicaState, ScrubSeen, Volume,
};
use trellis_api::{Bytes, Hold, HoldReason};
use trellis_control::disks;
use trellis_control::stored::StoredClaim;
use trellis_control::view::{degraded, held, requested};
use trellis_control::volume::copies::staying;
use trellis_control::volume::redundancy;
use trellis_control::volume::space::full_pools;

use super::{changes, scrub};
use crate::cli::{Global, Output};
use crate::connect::{Service, connect};
use crate::exit::{Ended, from_service, refuse};
use crate::load::{list, load};
use crate::output::{self, Table, Tone, UNKNOWN, age, human, precise_or_unknown};

/// Shows a claim's volume and its copies.
pub async fn show(global: &Global, claim: &str, how: &Output) -> anyhow::Result<()> {
    let service = connect(global).await?;
    changes::show(&service.client, how, || async {
        let look = load(&service, claim).await?;
        let pools = Api::<Pool>::all(service.client.clone());
        let pools = list(pools, &ListParams::default()).await?;
        let now = Timestamp::now();
        let Some(shown) = Shown::of(&look, pools, now) else {
            return Err(Ended::NotFound(format!("claim {claim:?} has no volume yet")).into());
        };
        output::text(how.output, &shown, |_| shown.render(now, output::colours()))
    })
    .await
}

/// Asks for another number of copies.
pub async fn scale(
    global: &Global,
    claim: &str,
    replicas: u32,
    consistency: Option<u32>,
    allow_shared_disk: bool,
) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let look = load(&service, claim).await?;
    let volume = volume_of(&look, claim)?;
    if !volume.spec.is_behind_target() {
        return refuse(format!(
            "claim {claim:?} has a single copy that is used where it lies; only a claim of a class with several \
             replicas can have more or fewer"
        ));
    }
    require_quorum(&look)?;
    let consistency = consistency.unwrap_or(replicas / 2 + 1);
    if consistency > replicas {
        return refuse(format!(
            "{consistency} copies cannot have a write if there are {replicas}"
        ));
    }
    let mut body = json!({ "spec": { "replicas": replicas, "consistencyFactor": consistency } });
    if allow_shared_disk {
        body["spec"]["allowSharedDisk"] = json!(true);
    }
    patch(&service, volume, claim, &body).await?;
    output::print(&format!(
        "claim {claim:?} shall have {replicas} copies, of which {consistency} must have a write; see `trellis volume \
         show {claim} --watch`\n"
    ))
}

/// Replaces the copy on one pool by a copy on another.
pub async fn replace(global: &Global, claim: &str, pool: &str) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let look = load(&service, claim).await?;
    if !volume_of(&look, claim)?.spec.is_behind_target() {
        return refuse(format!(
            "claim {claim:?} has a single copy, which cannot be replaced while it is the only one"
        ));
    }
    require_quorum(&look)?;
    let found = look
        .stored
        .replicas
        .iter()
        .find(|each| each.spec.pool == pool);
    let Some(replica) = found else {
        return Err(
            Ended::NotFound(format!("claim {claim:?} has no copy on pool {pool:?}")).into(),
        );
    };
    let replicas = Api::<Replica>::all(service.client.clone());
    replicas
        .delete(&replica.name_any(), &DeleteParams::default())
        .await
        .map_err(|error| from_service(error, claim))?;
    output::print(&format!(
        "the copy of claim {claim:?} on pool {pool:?} goes when another one holds everything; see `trellis volume \
         show {claim} --watch`\n"
    ))
}

/// Only the copies that count can change who counts. Without a quorum of them the change would never happen.
fn require_quorum(look: &StoredClaim) -> anyhow::Result<()> {
    let target = look.stored.target.as_ref();
    let status = target.and_then(|target| target.status.as_ref());
    let is_short =
        |condition: &Condition| condition.type_ == "Available" && condition.status == "False";
    let Some(status) = status.filter(|status| status.conditions.iter().any(is_short)) else {
        return Ok(());
    };
    let reason = HoldReason::TooFewReplicas;
    let hold = status.hold.clone().filter(|hold| hold.reason == reason);
    let message = "Nothing can be changed while too few copies are there.";
    Err(Ended::Held(hold.unwrap_or_else(|| Hold::new(reason, message))).into())
}

/// Changes the volume of a claim.
pub(super) async fn patch(
    service: &Service,
    volume: &Volume,
    claim: &str,
    body: &Value,
) -> anyhow::Result<()> {
    let volumes = Api::<Volume>::all(service.client.clone());
    let (name, how) = (volume.name_any(), PatchParams::default());
    let patched = volumes.patch(&name, &how, &Patch::Merge(body)).await;
    patched.map_err(|error| from_service(error, claim))?;
    Ok(())
}

/// The volume of a claim.
pub fn volume_of<'a>(look: &'a StoredClaim, claim: &str) -> anyhow::Result<&'a Volume> {
    let found = look.stored.volume.as_deref();
    found.ok_or_else(|| Ended::NotFound(format!("claim {claim:?} has no volume yet")).into())
}

/// Copies that are lost together.
fn warnings(look: &StoredClaim, volume: &Volume, pools: Vec<Pool>) -> Vec<String> {
    let pools: Vec<Arc<Pool>> = pools.into_iter().map(Arc::new).collect();
    let find = |name: &str| pools.iter().find(|pool| pool.name_any() == name).cloned();
    let worth = if volume.spec.allow_shared_disk {
        "as the volume allows (allowSharedDisk)"
    } else {
        "so they count as one"
    };
    let shared = disks::shared_by(staying(&look.stored), &find).into_iter();
    let said = shared.map(|pools| {
        format!(
            "the copies on pools {} are on one filesystem, {worth}: what takes it takes all of them",
            pools.join(", ")
        )
    });
    said.collect()
}

/// What a copy that leaves waits for.
fn waits_for(look: &StoredClaim, volume: &Volume, seen: &[ReplicaSeen]) -> String {
    let is_whole = |replica: &&std::sync::Arc<Replica>| {
        let id = replica.identity();
        let mut whole = seen
            .iter()
            .filter(|each| each.state == ReplicaState::InSync);
        whole.any(|each| each.id == id)
    };
    format!(
        "{} of {} others hold everything",
        staying(&look.stored).filter(is_whole).count(),
        volume.spec.replicas
    )
}

/// A volume, as programs read it; sizes are exact.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    volume: String,
    requested: Bytes,
    capacity: Option<Bytes>,
    replicas: u32,
    consistency_factor: u32,
    iqn: Option<String>,
    portal: Option<String>,
    /// `Available`, `RedundancyMet` and `SizeConverged` of several copies, in this order; null if it is not known now.
    conditions: Vec<(String, Option<bool>)>,
    scrub: Option<ScrubSeen>,
    copies: Vec<Copy>,
    /// What keeps the volume from what is asked of it.
    hold: Option<Hold>,
    /// What its copies lack; that does not stop a growth.
    #[serde(skip_serializing_if = "Option::is_none")]
    degraded: Option<Hold>,
    /// What its owner should know although nothing is held.
    warnings: Vec<String>,
}

/// One copy.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Copy {
    id: String,
    name: String,
    pool: String,
    node: String,
    size: Option<Bytes>,
    /// Its last known state.
    state: &'static str,
    /// Since when nobody has heard of it; none if it is heard of.
    #[serde(skip_serializing_if = "Option::is_none")]
    silent_since: Option<MicroTime>,
    behind: Bytes,
    repair_left: Bytes,
    repair_total: Bytes,
    reason: Option<String>,
}

impl Shown {
    fn of(look: &StoredClaim, pools: Vec<Pool>, now: Timestamp) -> Option<Shown> {
        let volume = look.stored.volume.as_deref()?;
        let status = look
            .stored
            .target
            .as_ref()
            .and_then(|target| target.status.clone());
        let status = status.unwrap_or_default();
        let is_unasked = redundancy::unasked(&status).is_some();
        let said = |kind: &str| {
            let found = status.conditions.iter().find(|each| each.type_ == kind)?;
            // If the target does not answer, what it said before is no news of its copies.
            let is_known = kind == "Available" || !is_unasked;
            Some((kind.to_owned(), is_known.then(|| found.status == "True")))
        };
        Some(Shown {
            volume: volume.name_any(),
            requested: requested(look).unwrap_or(volume.spec.capacity),
            capacity: status.capacity,
            replicas: volume.spec.replicas,
            consistency_factor: volume.spec.consistency_factor,
            conditions: ["Available", "RedundancyMet", "SizeConverged"]
                .into_iter()
                .filter_map(said)
                .collect(),
            copies: look
                .stored
                .replicas
                .iter()
                .map(|each| Copy::of(each, look, volume, &status.replicas))
                .collect(),
            hold: held(look, now)
                .map(|held| held.hold)
                .or_else(|| volume.status.as_ref()?.hold.clone())
                .or_else(|| full_pools(&look.stored, volume)),
            degraded: degraded(look, now),
            scrub: status.scrub,
            warnings: warnings(look, volume, pools),
            iqn: status.iqn,
            portal: status.portal,
        })
    }

    fn render(&self, now: Timestamp, colours: bool) -> String {
        let mut text = format!(
            "volume {} asks for {} and has {}; {} of {} copies must have a write\n",
            self.volume,
            self.requested,
            precise_or_unknown(self.capacity),
            self.consistency_factor,
            self.replicas
        );
        if let (Some(iqn), Some(portal)) = (&self.iqn, &self.portal) {
            text.push_str(&format!("iscsi {iqn} at {portal}\n"));
        }
        if !self.conditions.is_empty() {
            let word = |(kind, is_true): &(String, Option<bool>)| match is_true {
                Some(true) => format!("{kind} yes"),
                Some(false) => format!("{kind} NO"),
                None => format!("{kind} unknown"),
            };
            let words: Vec<String> = self.conditions.iter().map(word).collect();
            text.push_str(&words.join(", "));
            text.push('\n');
        }
        if let Some(seen) = &self.scrub {
            if let Some(percent) = seen.running_percent {
                text.push_str(&format!("scrub {percent} % done\n"));
            }
            if let Some(finished) = &seen.finished {
                text.push_str(&format!("last scrub {finished}: {}\n", scrub::result(seen)));
            }
            for (id, blocks) in &seen.rotten {
                let copy = self.copies.iter().find(|copy| copy.id == *id);
                let pool = copy.map_or(id.as_str(), |copy| &copy.pool);
                text.push_str(&format!(
                    "ROT {blocks} blocks of the copy on {pool} did not match\n"
                ));
            }
        }
        let mut table = Table::toned(
            &[
                "POOL",
                "NODE",
                "SIZE",
                "STATE",
                "BEHIND",
                "TO REPAIR",
                "REASON",
            ],
            "STATE",
        );
        for copy in &self.copies {
            let repair = if copy.repair_left == Bytes::ZERO {
                UNKNOWN.to_owned()
            } else {
                format!(
                    "{} of {}",
                    human(copy.repair_left),
                    human(copy.repair_total)
                )
            };
            let behind = if copy.behind == Bytes::ZERO {
                UNKNOWN.to_owned()
            } else {
                human(copy.behind)
            };
            let tone = match copy.state {
                "InSync" | "Ready" => Tone::Good,
                "Repairing" | "Arriving" | "Pending" | "Leaving" => Tone::Moving,
                _ => Tone::Bad,
            };
            let cells = vec![
                copy.pool.clone(),
                copy.node.clone(),
                precise_or_unknown(copy.size),
                match &copy.silent_since {
                    Some(since) => format!("{} {}", copy.state, age(since, now)),
                    None => copy.state.to_owned(),
                },
                behind,
                repair,
                copy.reason.clone().unwrap_or_else(|| UNKNOWN.to_owned()),
            ];
            table.row(cells, Some(tone));
        }
        text.push_str(&table.render(colours));
        for warning in &self.warnings {
            text.push_str(&format!("warning: {warning}\n"));
        }
        for hold in self.hold.iter().chain(&self.degraded) {
            let action = hold.reason.action();
            text.push_str(&format!(
                "{}: {}\nwhat to do: {action}\n",
                hold.reason, hold.message
            ));
        }
        text
    }
}

impl Copy {
    fn of(replica: &Replica, look: &StoredClaim, volume: &Volume, all: &[ReplicaSeen]) -> Copy {
        let id = replica.identity();
        let seen = all.iter().find(|each| each.id == id);
        let now_seen = redundancy::seen(&look.stored, replica);
        let status = replica.status.clone().unwrap_or_default();
        let is_full = seen.is_some_and(|seen| seen.full);
        // What the target says of a copy that it does not reach counts more than what strangers tried at the copy.
        let unlinked = seen.and_then(|seen| seen.link_hold.clone());
        let is_refused = unlinked.is_some();
        let link = unlinked.or_else(|| status.link_hold.clone());
        let leaves = replica.metadata.deletion_timestamp.is_some();
        let state = match (now_seen.state, status.phase) {
            _ if leaves => "Leaving",
            (Some(ReplicaState::Away), _) if is_refused => "Refused",
            (Some(ReplicaState::InSync), _) => "InSync",
            (Some(ReplicaState::Repairing), _) => "Repairing",
            (Some(ReplicaState::Arriving), _) => "Arriving",
            (Some(ReplicaState::Away), _) => "Away",
            (Some(ReplicaState::Silent), _) => "Silent",
            (None, ReplicaPhase::Ready) => "Ready",
            (None, ReplicaPhase::Pending) => "Pending",
            (None, ReplicaPhase::Failed) => "Failed",
        };
        Copy {
            id,
            name: replica.name_any(),
            pool: replica.spec.pool.clone(),
            node: replica.spec.node.clone(),
            size: status.capacity,
            state,
            silent_since: now_seen.silent_since.filter(|_| !leaves),
            behind: seen.map(|seen| seen.behind).unwrap_or_default(),
            repair_left: seen.map(|seen| seen.repair_left).unwrap_or_default(),
            repair_total: seen.map(|seen| seen.repair_total).unwrap_or_default(),
            reason: status
                .hold
                .map(|hold| hold.reason.code().to_owned())
                .or_else(|| link.map(|hold| format!("{}: {}", hold.reason, hold.message)))
                .or_else(|| leaves.then(|| waits_for(look, volume, all)))
                .or_else(|| is_full.then(|| HoldReason::PoolFull.code().to_owned())),
        }
    }
}
