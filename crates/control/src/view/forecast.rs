//! What a growth would do to each layer, judged before anything is changed.
//!
//! The claim's request becomes a wish ([`grow::wish`]), and the wish becomes goals where there is room for them
//! ([`goals::grant`]), by the very functions that the planner uses. So what is foretold of the trunk is what the planner
//! would decide. What would become of a use is judged by what its node last reported.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use serde::Serialize;
use trellis_api::kinds::{Attachment, FilesystemKind, Pool, Replica, RungStatus, Volume};
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use super::head::reported;
use crate::claim::{grow, provision};
use crate::ledger::Ledger;
use crate::stored::{StoredClaim, StoredVolume};
use crate::volume::goals::{self, Grant};
use crate::volume::nodes::Nodes;
use crate::volume::parts;
use crate::volume::rooms::{Pools, Rooms};

/// What has a say in the room on pools.
#[derive(Clone, Debug, Default)]
pub struct Stock {
    /// All pools.
    pub pools: Vec<Arc<Pool>>,
    /// All copies on them.
    pub replicas: Vec<Arc<Replica>>,
    /// All volumes: one whose copies are not stored yet has room all the same.
    pub volumes: Vec<Arc<Volume>>,
}

/// The layers of a claim after a growth: the trunk, lowest first, then those of each node that uses it, then the claim.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Forecast {
    /// The size that every layer should have.
    pub to: Bytes,
    /// The layers.
    pub layers: Vec<Layer>,
    /// The first thing that would hold the growth.
    pub hold: Option<Hold>,
}

/// One layer.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Layer {
    /// Its name.
    pub layer: String,
    /// The node of a use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The size that it has.
    pub from: Option<Bytes>,
    /// The size that it would get.
    pub to: Bytes,
    /// What would become of it.
    pub would: Would,
    /// What would hold it.
    pub hold: Option<Hold>,
    /// What else there is to know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// What would become of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Would {
    /// It would get the size.
    Rise,
    /// It has the size.
    Stay,
    /// It would wait for a layer below it.
    Wait,
    /// It would be held.
    BeHeld,
}

impl Stock {
    /// The reservations of everything that is stored, as a process that starts now would find them.
    fn ledger(&self) -> Ledger {
        let ledger = Ledger::default();
        for replica in &self.replicas {
            ledger.note(None, Some(replica));
        }
        let unserved = self.volumes.iter().filter(|each| !parts::was_served(each));
        for volume in unserved {
            for (replica, pool) in parts::reservations(volume) {
                ledger.note_volume(&replica, &pool, Some(volume.spec.capacity));
            }
        }
        ledger
    }
}

impl Forecast {
    /// Judges a growth of the claim to `to`.
    pub fn of(look: &StoredClaim, stock: &Stock, to: Bytes, now: &MicroTime) -> Forecast {
        let ledger = stock.ledger();
        let open = ledger.open();
        // A growth asks for room where the copies are, and never for another place.
        let nodes = Nodes::default();
        let rooms = Pools {
            pools: stock.pools.clone(),
            nodes: &nodes,
            ledger: &open,
        };
        let trunk = Trunk::of(look, &rooms, to, now);
        let mut layers = trunk.layers;
        let is_trunk_kept = trunk.refused.is_some();
        for mut layer in uses(&look.stored, trunk.goal) {
            layer.wait_if(is_trunk_kept);
            layers.push(layer);
        }
        wait_within_nodes(&mut layers);
        let mut hold = trunk.refused;
        hold = hold.or_else(|| layers.iter().find_map(|layer| layer.hold.clone()));
        let mut claim = Layer::new("claim", reported(look), trunk.goal);
        claim.wait_if(hold.is_some());
        claim.keep(trunk.unfit);
        layers.push(claim);
        Forecast {
            to: trunk.goal,
            layers,
            hold,
        }
    }
}

impl Layer {
    fn new(layer: impl Into<String>, from: Option<Bytes>, to: Bytes) -> Layer {
        Layer {
            layer: layer.into(),
            node: None,
            would: if from >= Some(to) {
                Would::Stay
            } else {
                Would::Rise
            },
            from,
            to,
            hold: None,
            note: None,
        }
    }

    /// Something holds the layer, if there is something.
    fn keep(&mut self, hold: Option<Hold>) {
        if hold.is_some() {
            self.would = Would::BeHeld;
            self.hold = hold;
        }
    }

    /// A layer below would not rise.
    fn wait_if(&mut self, is_kept: bool) {
        if is_kept && self.would == Would::Rise {
            self.would = Would::Wait;
        }
    }
}

/// What the planner would decide about the trunk.
struct Trunk {
    goal: Bytes,
    layers: Vec<Layer>,
    /// Why nothing would rise at all.
    refused: Option<Hold>,
    /// Why no volume can have the size, which is told at the claim.
    unfit: Option<Hold>,
}

impl Trunk {
    fn of(look: &StoredClaim, rooms: &dyn Rooms, to: Bytes, now: &MicroTime) -> Trunk {
        let stored = &look.stored;
        let unfit = match (&look.claim, &stored.volume) {
            (Some(claim), Some(volume)) => {
                match grow::wish(&asking(claim, to), volume, stored.committed(), now) {
                    Ok(wish) => {
                        let wanted = wish.map(|wish| wish.of(volume));
                        let wanted = wanted.as_ref().unwrap_or(volume);
                        return Trunk::granted(stored, wanted, rooms);
                    }
                    Err(hold) => Some(hold),
                }
            }
            _ => provision::goal(to).err(),
        };
        let goal = provision::goal(to).unwrap_or(to);
        let copies = stored.replicas.iter().map(|each| copy(each, goal));
        let mut layers: Vec<Layer> = copies.chain(served(stored, goal)).collect();
        layers
            .iter_mut()
            .for_each(|layer| layer.wait_if(unfit.is_some()));
        Trunk {
            goal,
            layers,
            refused: unfit.clone(),
            unfit,
        }
    }

    /// The goal is given to every copy, or to none.
    fn granted(stored: &StoredVolume, wanted: &Volume, rooms: &dyn Rooms) -> Trunk {
        let goal = goals::goal(stored, wanted);
        let refused = match goals::grant(stored, wanted, rooms) {
            Grant::Refused(hold) => Some(hold),
            Grant::Given | Grant::Now { .. } => None,
        };
        let verdicts = goals::copies_at(stored, goal, wanted.spec.thick, rooms);
        let mut layers: Vec<Layer> = Vec::new();
        for (replica, (_, room)) in stored.replicas.iter().zip(verdicts) {
            let mut layer = copy(replica, goal);
            layer.wait_if(refused.is_some());
            layer.keep(room.err().filter(|_| refused.is_some()));
            layers.push(layer);
        }
        let damaged = stored.replicas.iter().zip(&mut layers);
        let mut is_damaged = None;
        for (replica, layer) in damaged {
            let hold = replica.status.as_ref().and_then(|it| it.hold.clone());
            let hold = hold.filter(|hold| hold.reason == HoldReason::ReplicaDamaged);
            if hold.is_some() && layer.hold.is_none() {
                is_damaged = is_damaged.or_else(|| hold.clone());
                layer.keep(hold);
            }
        }
        // One of several copies that is damaged holds nothing up.
        let refused = refused.or(is_damaged.filter(|_| !stored.is_replicated()));
        let mut of_volume = served(stored, goal);
        of_volume
            .iter_mut()
            .for_each(|layer| layer.wait_if(refused.is_some()));
        layers.extend(of_volume);
        Trunk {
            goal,
            layers,
            refused,
            unfit: None,
        }
    }
}

/// The claim with another request.
fn asking(claim: &PersistentVolumeClaim, to: Bytes) -> PersistentVolumeClaim {
    let mut claim = claim.clone();
    let spec = claim.spec.get_or_insert_default();
    let resources = spec.resources.get_or_insert_default();
    let requests = resources.requests.get_or_insert_default();
    requests.insert("storage".to_owned(), Quantity(to.to_quantity()));
    claim
}

fn copy(replica: &Replica, to: Bytes) -> Layer {
    let spec = &replica.spec;
    let from = replica.status.as_ref().and_then(|status| status.capacity);
    let note = "every byte is allocated at once";
    Layer {
        note: spec.thick.then(|| note.to_owned()),
        ..Layer::new(format!("replica on pool {}", spec.pool), from, to)
    }
}

fn served(stored: &StoredVolume, to: Bytes) -> Option<Layer> {
    let target = stored.target.as_ref()?;
    let from = target.status.as_ref().and_then(|status| status.capacity);
    Some(Layer::new("volume", from, to))
}

/// The layers where the volume is used, or what happens to the filesystem if it is not used. Several uses on one node
/// share their layers.
fn uses(stored: &StoredVolume, to: Bytes) -> Vec<Layer> {
    let kind = stored
        .volume
        .as_ref()
        .and_then(|volume| volume.spec.filesystem);
    let mut branches: Vec<(&Arc<Attachment>, &[RungStatus])> = stored.branches().collect();
    branches.sort_by_key(|(each, _)| (&each.spec.node, each.spec.consumer.path()));
    let mut nodes = BTreeSet::new();
    let mut layers = Vec::new();
    for (each, rungs) in branches {
        let node = each.spec.node.as_str();
        if nodes.insert(node) {
            layers.extend(rungs.iter().map(|rung| used(stored, each, rung, kind, to)));
        }
    }
    if layers.is_empty() {
        layers.extend(kind.map(|kind| idle(stored, kind, to)));
    }
    layers
}

/// One rung of a use.
fn used(
    stored: &StoredVolume,
    each: &Attachment,
    rung: &RungStatus,
    kind: Option<FilesystemKind>,
    to: Bytes,
) -> Layer {
    let node = &each.spec.node;
    let is_filesystem = rung.rung == Rung::Filesystem;
    let mut here = stored.attachments.iter().filter(|it| it.spec.node == *node);
    let is_read_only = here.all(|other| other.spec.consumer.read_only());
    let kept = is_read_only.then(|| {
        let path = each.spec.consumer.path();
        let message = format!("It is mounted read-only at {path} of node {node}.");
        Hold::new(HoldReason::ReadOnly, message)
    });
    let kept = kept.or_else(|| rung.hold.clone());
    let kept = kept.filter(|_| is_filesystem);
    let grows = kind.filter(|_| is_filesystem && kept.is_none());
    let mut layer = Layer {
        node: Some(node.clone()),
        note: grows.map(|kind| online(kind, node)),
        ..Layer::new(rung.rung.name(), Some(rung.size), to)
    };
    layer.keep(kept);
    layer
}

/// On each node, what stands above a layer that would be held waits for it.
fn wait_within_nodes(layers: &mut [Layer]) {
    let mut kept = BTreeSet::new();
    for layer in layers.iter_mut() {
        let Some(node) = layer.node.clone() else {
            continue;
        };
        layer.wait_if(kept.contains(&node));
        if layer.hold.is_some() {
            kept.insert(node);
        }
    }
}

/// How a filesystem grows while it is mounted.
fn online(kind: FilesystemKind, node: &str) -> String {
    match kind {
        FilesystemKind::Xfs | FilesystemKind::Btrfs => {
            format!("{} grows while it is mounted", kind.name())
        }
        FilesystemKind::Ext4 | FilesystemKind::Ext3 => format!(
            "{} grows while it is mounted if Trellis on node {node} has CAP_SYS_RESOURCE",
            kind.name()
        ),
    }
}

/// Nobody uses the volume. A filesystem on it grows in place, unless it was not unmounted cleanly or has recorded
/// errors, which its node finds out then. One that is not made yet is made at the full size.
fn idle(stored: &StoredVolume, kind: FilesystemKind, to: Bytes) -> Layer {
    let mut contents = stored.contents().into_iter().flatten();
    let found = contents.find_map(|content| content.size);
    let note = match found {
        Some(_) => format!("{} grows although it is not mounted", kind.name()),
        None => "made at the first mount, at the full size".to_owned(),
    };
    let mut layer = Layer {
        note: Some(note),
        ..Layer::new(Rung::Filesystem.name(), found, to)
    };
    layer.keep(stored.foreign_content());
    layer
}

#[cfg(test)]
mod tests;
