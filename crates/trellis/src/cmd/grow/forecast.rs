//! What a growth would do to each layer, judged before anything is changed.

use std::sync::Arc;

use kube::ResourceExt;
use serde::Serialize;
use trellis_api::kinds::{FilesystemKind, Pool, Replica};
use trellis_api::{Bytes, Hold, HoldReason};
use trellis_control::claim::provision;
use trellis_control::ledger::Ledger;
use trellis_control::plan::Promise;
use trellis_control::view::View;
use trellis_control::volume::nodes::Nodes;
use trellis_control::volume::rooms::{LargerCopy, Pools, Rooms};

use crate::claim_view::reported;
use crate::output::{Table, Tone, precise, precise_or_unknown};

/// The layers of a claim after a growth, lowest first.
#[derive(Debug, Serialize)]
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
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Layer {
    /// Its name.
    pub layer: String,
    /// The size that it has.
    pub from: Option<Bytes>,
    /// The size that it would get.
    pub to: Bytes,
    /// What would hold it.
    pub hold: Option<Hold>,
    /// What else there is to know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Forecast {
    /// Judges a growth of the claim in `view` to `to`, given all pools and all copies on them.
    pub fn new(view: &View, pools: Vec<Pool>, replicas: &[Replica], to: Bytes) -> Forecast {
        let ledger = Ledger::default();
        replicas
            .iter()
            .for_each(|replica| drop(ledger.note(None, Some(replica))));
        let open = ledger.open();
        // A growth asks for room where the copies are, and never for another place.
        let nodes = Nodes::default();
        let rooms = Pools {
            pools: pools.into_iter().map(Arc::new).collect(),
            nodes: &nodes,
            ledger: &open,
        };
        let (to, too_large) = match provision::goal(to) {
            Ok(goal) => (goal, None),
            Err(hold) => (to, Some(hold)),
        };
        let mut layers = copies(view, &rooms, to);
        layers.extend(served(view, to));
        layers.extend(uses(view, to));
        layers.push(Layer {
            layer: "claim".to_owned(),
            from: reported(view),
            to,
            hold: too_large.clone(),
            note: None,
        });
        let hold = too_large.or_else(|| layers.iter().find_map(|layer| layer.hold.clone()));
        Forecast { to, layers, hold }
    }

    /// The forecast as a table.
    pub fn render(&self, colours: bool) -> String {
        let mut table = Table::toned(&["LAYER", "FROM", "TO", "WOULD", "NOTE"], "WOULD");
        let mut kept = false;
        for layer in &self.layers {
            let (would, tone) = match &layer.hold {
                Some(hold) => (format!("be held {}", hold.reason), Tone::Bad),
                None if kept => ("wait".to_owned(), Tone::Moving),
                None if layer.from >= Some(layer.to) => ("stay".to_owned(), Tone::Good),
                None => ("rise".to_owned(), Tone::Good),
            };
            kept |= layer.hold.is_some();
            let cells = vec![
                layer.layer.clone(),
                precise_or_unknown(layer.from),
                precise(layer.to),
                would,
                layer.note.clone().unwrap_or_default(),
            ];
            table.row(cells, Some(tone));
        }
        format!("{}nothing was changed\n", table.render(colours))
    }
}

/// Every copy, and the room on its pool by the controller's own rule.
fn copies(view: &View, rooms: &dyn Rooms, to: Bytes) -> Vec<Layer> {
    let mut planned = Vec::new();
    let copy = |replica: &Arc<Replica>| {
        let (spec, name) = (&replica.spec, replica.name_any());
        let status = replica.status.as_ref();
        let damaged = status.and_then(|status| status.hold.clone());
        let room = rooms.room(LargerCopy {
            replica: &name,
            pool: &spec.pool,
            from: spec.capacity,
            to,
            thick: spec.thick,
            planned: &planned,
        });
        planned.push(Promise {
            pool: spec.pool.clone(),
            size: to,
            replica: name,
        });
        Layer {
            layer: format!("replica on pool {}", spec.pool),
            from: status.and_then(|status| status.capacity),
            to,
            hold: room
                .err()
                .or(damaged.filter(|hold| hold.reason == HoldReason::ReplicaDamaged)),
            note: spec
                .thick
                .then(|| "every byte is allocated at once".to_owned()),
        }
    };
    view.stored.replicas.iter().map(copy).collect()
}

fn served(view: &View, to: Bytes) -> Option<Layer> {
    let target = view.stored.target.as_ref()?;
    Some(Layer {
        layer: "volume".to_owned(),
        from: target.status.as_ref().and_then(|status| status.capacity),
        to,
        hold: None,
        note: None,
    })
}

/// The layers where the volume is used, or what happens to the filesystem if it is not used.
fn uses(view: &View, to: Bytes) -> Vec<Layer> {
    let filesystem = view
        .stored
        .volume
        .as_ref()
        .and_then(|volume| volume.spec.filesystem);
    let mut layers = Vec::new();
    let mut nodes: Vec<&str> = Vec::new();
    for each in &view.stored.attachments {
        let node = each.spec.node.as_str();
        let status = each.status.as_ref();
        let rungs = status
            .map(|status| status.rungs.as_slice())
            .unwrap_or_default();
        if rungs.is_empty() || nodes.contains(&node) {
            continue;
        }
        nodes.push(node);
        let here = view
            .stored
            .attachments
            .iter()
            .filter(|other| other.spec.node == node);
        let read_only = here.clone().all(|other| other.spec.consumer.read_only());
        for rung in rungs {
            let is_filesystem = rung.rung == trellis_api::Rung::Filesystem;
            let kept = read_only.then(|| {
                let message = format!(
                    "It is mounted read-only at {} of node {node}.",
                    each.spec.consumer.path()
                );
                Hold::new(HoldReason::ReadOnly, message)
            });
            let kept = kept.or_else(|| rung.hold.clone()).filter(|_| is_filesystem);
            let note = filesystem
                .filter(|_| is_filesystem)
                .map(|kind| online(kind, node));
            layers.push(Layer {
                layer: rung.rung.to_string(),
                from: Some(rung.size),
                to,
                hold: kept,
                note,
            });
        }
    }
    if layers.is_empty() {
        layers.extend(filesystem.map(|kind| idle(view, kind, to)));
    }
    layers
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
fn idle(view: &View, kind: FilesystemKind, to: Bytes) -> Layer {
    let found = view
        .stored
        .replicas
        .iter()
        .find_map(|each| each.status.as_ref()?.content.as_ref()?.size);
    let note = match found {
        Some(_) => format!("{} grows although it is not mounted", kind.name()),
        None => "made at the first mount, at the full size".to_owned(),
    };
    Layer {
        layer: "filesystem".to_owned(),
        from: found,
        to,
        hold: None,
        note: Some(note),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim_view::samples;
    use trellis_api::kinds::{AtPath, Consumer};

    fn judged(view: &View, pool: Bytes, to: u64) -> Forecast {
        let replicas: Vec<Replica> = view
            .stored
            .replicas
            .iter()
            .map(|each| (**each).clone())
            .collect();
        Forecast::new(
            view,
            vec![samples::pool(pool, 100)],
            &replicas,
            Bytes::gib(to),
        )
    }

    // Fails if a growth that would be done is foretold to be held, or a layer is left out.
    #[test]
    fn a_mounted_claim_with_room_would_rise() {
        let forecast = judged(&samples::mounted(2, 2), Bytes::gib(10), 4);
        assert_eq!(forecast.hold, None);
        insta::assert_snapshot!(forecast.render(false));
    }

    // Fails if a growth that the controller would refuse for want of room is foretold to be done.
    #[test]
    fn a_growth_beyond_the_pool_would_be_held() {
        let forecast = judged(&samples::mounted(2, 2), Bytes::gib(3), 4);
        assert_eq!(
            forecast.hold.as_ref().map(|hold| hold.reason),
            Some(HoldReason::NoSpaceInPool)
        );
        insta::assert_snapshot!(forecast.render(false));
    }

    // Fails if an idle filesystem is foretold to wait for a mount.
    #[test]
    fn an_idle_filesystem_would_grow_where_it_lies() {
        let forecast = judged(&samples::idle(), Bytes::gib(10), 4);
        assert_eq!(forecast.hold, None);
        assert!(
            forecast
                .render(false)
                .contains("although it is not mounted")
        );
    }

    // Fails if a read-only mount is foretold to grow.
    #[test]
    fn a_read_only_mount_would_be_held() {
        let mut view = samples::mounted(2, 2);
        for attachment in &mut view.stored.attachments {
            Arc::make_mut(attachment).spec.consumer = Consumer::Mount(AtPath {
                path: "/mnt/data".to_owned(),
                read_only: true,
            });
        }
        let forecast = judged(&view, Bytes::gib(10), 4);
        assert_eq!(
            forecast.hold.map(|hold| hold.reason),
            Some(HoldReason::ReadOnly)
        );
    }

    // Fails if a size that no volume can have is foretold as if it were one.
    #[test]
    fn a_size_that_no_volume_can_have_would_be_held() {
        let forecast = judged(&samples::mounted(2, 2), Bytes::MAX, 1 << 30);
        assert_eq!(
            forecast.hold.map(|hold| hold.reason),
            Some(HoldReason::SizeTooLarge)
        );
    }
}
