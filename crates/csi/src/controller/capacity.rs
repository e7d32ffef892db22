//! GetCapacity: what could still be promised to a new volume.

use std::sync::Arc;

use kube::ResourceExt;
use tonic::Status;
use trellis_api::Bytes;
use trellis_api::kinds::{NODE_LABEL, Pool};
use trellis_control::claim::class::Class;
use trellis_control::ledger::Ledger;
use trellis_control::volume::nodes::Nodes;
use trellis_control::volume::parts::reservations;
use trellis_control::volume::rooms::Pools;

use super::create::class;
use crate::capability::Usage;
use crate::objects::Objects;
use crate::proto::csi::{GetCapacityRequest, GetCapacityResponse};
use crate::range::wire;

/// The room for volumes with these parameters, on the node that the topology names, or anywhere.
pub async fn capacity(
    objects: &Objects,
    request: &GetCapacityRequest,
) -> Result<GetCapacityResponse, Status> {
    let usages = request.volume_capabilities.iter();
    let usages: Result<Vec<Usage>, Status> = usages.map(|each| Usage::read(Some(each))).collect();
    let class = class(&request.parameters, &Default::default(), &usages?)?;
    let topology = request.accessible_topology.as_ref();
    let node = topology.and_then(|topology| topology.segments.get(NODE_LABEL));
    // Several copies can be anywhere: their volume comes to the node that uses it.
    let node = node.filter(|_| class.via.is_none());
    let rooms = rooms(objects, &class, node.map(String::as_str)).await?;
    let (total, most) = promisable(&class, rooms);
    Ok(GetCapacityResponse {
        available_capacity: wire(total),
        maximum_volume_size: Some(wire(most)),
        minimum_volume_size: Some(wire(Bytes::MIB)),
    })
}

/// A pool, and what is left on its filesystem.
struct Room {
    pool: Arc<Pool>,
    left: Bytes,
}

async fn rooms(objects: &Objects, class: &Class, node: Option<&str>) -> Result<Vec<Room>, Status> {
    let pools: Vec<Arc<Pool>> = objects.pools().await?.into_iter().map(Arc::new).collect();
    let nodes: Vec<_> = objects
        .all_nodes()
        .await?
        .into_iter()
        .map(Arc::new)
        .collect();
    let nodes = Nodes::of(&nodes);
    // The volume room counts the same way; here it is counted from what is stored alone.
    let ledger = Ledger::default();
    for volume in objects.all_volumes().await? {
        for (replica, pool) in reservations(&volume) {
            ledger.note_volume(&replica, &pool, Some(volume.spec.capacity));
        }
    }
    for replica in objects.replicas().await? {
        ledger.note(None, Some(&replica));
    }
    let open = ledger.open();
    let stored = Pools {
        pools: pools.clone(),
        nodes: &nodes,
        ledger: &open,
    };
    let is_named = |pool: &Pool| class.pools.is_empty() || class.pools.contains(&pool.name_any());
    let is_here = |pool: &Pool| node.is_none_or(|node| pool.spec.node == node);
    let fitting = pools.iter().filter(|pool| is_named(pool) && is_here(pool));
    let room = |pool: &Arc<Pool>| {
        let left = stored.left(pool, class.thick)?;
        Some(Room {
            pool: pool.clone(),
            left,
        })
    };
    Ok(fitting.filter_map(room).collect())
}

/// How much all volumes, and how much one volume can have. Each of its copies is on a filesystem of its own, unless the
/// class allows otherwise; pools on one filesystem have the same room.
fn promisable(class: &Class, mut rooms: Vec<Room>) -> (Bytes, Bytes) {
    rooms.sort_by_key(|room| std::cmp::Reverse((room.left, room.pool.name_any())));
    let mut disks: Vec<&Room> = Vec::new();
    for room in &rooms {
        let is_new = disks
            .iter()
            .all(|disk| !disk.pool.shares_disk_with(&room.pool));
        if is_new {
            disks.push(room);
        }
    }
    let copies = u64::from(class.replicas.max(1));
    let total: Bytes = disks.iter().map(|disk| disk.left).sum();
    let total = Bytes::new(total.get() / copies);
    let Ok(last) = usize::try_from(copies - 1) else {
        return (Bytes::ZERO, Bytes::ZERO);
    };
    let most = match class.allow_shared_disk && rooms.len() > last {
        // Copies beside each other share what one filesystem has.
        true => total,
        false => disks.get(last).map(|disk| disk.left).unwrap_or_default(),
    };
    let whole = Bytes::new(most.get() / Bytes::MIB.get() * Bytes::MIB.get());
    let is_enough = whole >= Bytes::MIB;
    (if is_enough { total } else { Bytes::ZERO }, whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::HashMap;

    fn room(name: &str, disk: &str, gib: u64) -> Room {
        let pool = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Pool", "metadata": { "name": name },
            "spec": { "node": "n", "path": "/p" },
            "status": { "filesystem": disk },
        });
        Room {
            pool: Arc::new(serde_json::from_value(pool).expect("a pool")),
            left: Bytes::gib(gib),
        }
    }

    fn asked(given: &[(&str, &str)], rooms: Vec<Room>) -> (u64, u64) {
        let given = given.iter();
        let given = given.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let given: HashMap<String, String> = given.collect();
        let class = class(&given, &HashMap::new(), &[]).expect("a class");
        let (total, most) = promisable(&class, rooms);
        (total.get() >> 30, most.get() >> 30)
    }

    // Fails if two pools on one disk are counted twice, or a volume is promised more than its second copy can have.
    #[test]
    fn a_disk_counts_once_and_a_volume_has_what_its_last_copy_can_have() {
        let rooms = || vec![room("a", "x", 4), room("b", "x", 4), room("c", "y", 2)];
        assert_eq!(asked(&[], rooms()), (6, 4));
        assert_eq!(asked(&[("replicas", "2")], rooms()), (3, 2));
        assert_eq!(asked(&[("replicas", "3")], rooms()), (0, 0));
        let shared = [("replicas", "2"), ("allowSharedDisk", "true")];
        assert_eq!(asked(&shared, rooms()), (3, 3));
        assert_eq!(asked(&[], Vec::new()), (0, 0));
    }
}
