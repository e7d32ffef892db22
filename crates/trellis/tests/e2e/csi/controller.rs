//! Volumes as provisioners and resizers ask for them.

use std::collections::BTreeSet;

use trellis_csi::Code;
use trellis_csi::proto::csi::*;

use super::caller::{Caller, GIB, MIB, NODE, block, mount, range, request, with};
use super::leftovers;
use crate::harness::said;
use crate::room::SmallPool;

// Fails if one name gives two volumes, if another wish is answered with a volume that does not meet it, or if what the
// provisioner tells of the claim is lost.
#[test]
fn a_name_is_one_volume_and_no_other() {
    let caller = Caller::start(&[]);
    let asked = with(
        request("pvc-same", GIB, mount()),
        &[
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/pvc/namespace", "shop"),
        ],
    );
    let first = caller.create_with(asked.clone()).unwrap();
    assert_eq!(first.volume_id, "pvc-same");
    assert_eq!(first.capacity_bytes, GIB);
    assert_eq!(
        first.accessible_topology[0].segments["trellis.dev/node"],
        NODE
    );
    assert_eq!(caller.create_with(asked.clone()).unwrap(), first);
    let stored = caller.service.object("volumes.trellis.dev", "pvc-same");
    assert_eq!(
        stored["metadata"]["annotations"]["trellis.dev/pvc-name"],
        "data"
    );
    let larger = caller.create("pvc-same", 2 * GIB, mount());
    assert_eq!(larger, Err(Code::AlreadyExists));
    assert_eq!(
        caller.create("pvc-same", GIB, block()),
        Err(Code::AlreadyExists)
    );
    let long = "Ä long name ".repeat(10);
    let odd = caller.create(&long, GIB, mount()).unwrap();
    assert_eq!(caller.create(&long, GIB, mount()).unwrap(), odd);
    caller.delete("pvc-same").unwrap();
    caller.delete(&odd).unwrap();
    assert_eq!(leftovers(&caller), Vec::<String>::new());
}

// Fails if calls beside each other make two volumes or two growths, or if one of them fails for another reason than that
// the other is under way.
#[test]
fn calls_beside_each_other_do_the_work_once() {
    let caller = Caller::start(&[]);
    let made = caller.wait(async {
        let calls = (0..8).map(|_| {
            let mut controller = caller.driver.controller.clone();
            async move {
                controller
                    .create_volume(request("pvc-race", GIB, mount()))
                    .await
            }
        });
        futures::future::join_all(calls).await
    });
    assert!(made.iter().any(Result::is_ok));
    for answer in made {
        match answer {
            Ok(made) => assert_eq!(made.into_inner().volume.unwrap().volume_id, "pvc-race"),
            Err(status) => assert_eq!(status.code(), Code::Aborted, "{status}"),
        }
    }
    assert_eq!(caller.service.objects("volumes.trellis.dev").len(), 1);
    let grown = caller.wait(async {
        let calls = (0..8).map(|_| {
            let mut controller = caller.driver.controller.clone();
            let request = ControllerExpandVolumeRequest {
                volume_id: "pvc-race".to_owned(),
                capacity_range: range(2 * GIB, 0),
                volume_capability: None,
            };
            async move { controller.controller_expand_volume(request).await }
        });
        futures::future::join_all(calls).await
    });
    assert!(grown.iter().any(Result::is_ok));
    for answer in grown {
        match answer {
            Ok(grown) => assert_eq!(grown.into_inner().capacity_bytes, 2 * GIB),
            Err(status) => assert_eq!(status.code(), Code::Aborted, "{status}"),
        }
    }
}

// Fails if a size is outside of what was asked for, or a refusal has another code than a resizer understands.
#[test]
fn sizes_are_within_what_was_asked_for() {
    let caller = Caller::start(&[]);
    let sized = |name: &str, least: i64, most: i64| {
        let mut asked = request(name, 0, mount());
        asked.capacity_range = range(least, most);
        let made = caller.create_with(asked);
        made.map(|volume| volume.capacity_bytes)
            .map_err(|status| status.code())
    };
    assert_eq!(sized("pvc-a", GIB + 1, 0), Ok(GIB + MIB));
    assert_eq!(sized("pvc-b", 0, 0), Ok(GIB));
    assert_eq!(sized("pvc-c", 0, 512 * MIB + 5), Ok(512 * MIB));
    assert_eq!(sized("pvc-d", GIB + 1, GIB + 2), Err(Code::OutOfRange));
    assert_eq!(
        sized("pvc-e", 100 * MIB, 0),
        Err(Code::OutOfRange),
        "xfs needs 300 MiB"
    );
    assert_eq!(sized("pvc-f", -1, 0), Err(Code::InvalidArgument));
    assert_eq!(sized("pvc-g", i64::MAX, 0), Err(Code::OutOfRange));
    let beyond = ControllerExpandVolumeRequest {
        volume_id: "pvc-b".to_owned(),
        capacity_range: range(0, 512 * MIB),
        volume_capability: None,
    };
    let mut controller = caller.driver.controller.clone();
    let refused = caller
        .wait(controller.controller_expand_volume(beyond))
        .unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "nothing is shrunk");
}

// Fails if a growth without room is not told as infeasible with its reason, if a lowered request after it is not honoured,
// or if a volume without room is left behind.
#[test]
fn no_room_is_out_of_range_and_a_lowered_request_is_honoured() {
    let caller = Caller::start(&[]);
    let pool = SmallPool::mount(caller.service.path("pool"), "3G");
    caller
        .service
        .trellis(&["pool", "add", "small", pool.path.to_str().unwrap()]);
    let small = |name: &str, bytes: i64| with(request(name, bytes, mount()), &[("pools", "small")]);
    let capacity = |node: &str| {
        let mut controller = caller.driver.controller.clone();
        let request = GetCapacityRequest {
            parameters: small("", 0).parameters,
            accessible_topology: Some(topology(node)),
            ..GetCapacityRequest::default()
        };
        let told = caller
            .wait(controller.get_capacity(request))
            .unwrap()
            .into_inner();
        (told.available_capacity, told.maximum_volume_size.unwrap())
    };
    caller.service.wait("the pool is measured", |_| {
        (capacity(NODE).0 > 2 * GIB).then_some(())
    });
    let (before, _) = capacity(NODE);
    let id = caller
        .create_with(small("pvc-small", GIB))
        .unwrap()
        .volume_id;
    caller.service.wait("the promise counts", |_| {
        let (now, most) = capacity(NODE);
        (now <= before - GIB && most <= now && most > 0).then_some(())
    });
    assert_eq!(capacity("another-node"), (0, 0));
    let refused = caller.expand(&id, 10 * GIB).unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    assert!(
        refused.message().starts_with("NoSpaceInPool: "),
        "{refused}"
    );
    let again = caller.expand(&id, 10 * GIB).unwrap_err();
    assert_eq!(again.code(), Code::OutOfRange, "{again}");
    let lowered = caller.expand(&id, GIB + 512 * MIB).unwrap();
    assert_eq!(lowered.capacity_bytes, GIB + 512 * MIB);
    assert!(!lowered.node_expansion_required);
    let refused = caller.create_with(small("pvc-none", 10 * GIB)).unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    // A provisioner that is told so has the scheduler try another node.
    let mut bound = small("pvc-bound", 10 * GIB);
    bound.accessibility_requirements = Some(TopologyRequirement {
        requisite: vec![topology(NODE)],
        preferred: vec![topology(NODE)],
    });
    let refused = caller.create_with(bound.clone()).unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    bound.capacity_range = range(GIB, 0);
    let placed = caller.create_with(bound).unwrap();
    assert_eq!(placed.accessible_topology, [topology(NODE)]);
    for id in [&id, &placed.volume_id] {
        caller.delete(id).unwrap();
    }
    caller.service.wait("the copies are gone", |service| {
        service
            .objects("replicas.trellis.dev")
            .is_empty()
            .then_some(())
    });
    assert_eq!(caller.service.objects("volumes.trellis.dev").len(), 0);
    caller.service.trellis(&["pool", "rm", "small"]);
}

fn topology(node: &str) -> Topology {
    Topology {
        segments: [("trellis.dev/node".to_owned(), node.to_owned())].into(),
    }
}

// Fails if a volume is shown twice or not at all, if the deletion of a page's last volume loses the next page, or if a
// token of somebody else is taken.
#[test]
fn pages_show_every_volume_once() {
    let caller = Caller::start(&[]);
    let names: Vec<String> = (0..5).map(|index| format!("pvc-{index}")).collect();
    for name in &names {
        caller.create(name, GIB, block()).unwrap();
    }
    caller.publish_to("pvc-4", NODE, block()).unwrap();
    let page = |max_entries: i32, starting_token: &str| {
        let mut controller = caller.driver.controller.clone();
        let request = ListVolumesRequest {
            max_entries,
            starting_token: starting_token.to_owned(),
        };
        let listed = caller.wait(controller.list_volumes(request));
        listed
            .map(|listed| listed.into_inner())
            .map_err(|status| status.code())
    };
    let ids = |page: &ListVolumesResponse| -> Vec<String> {
        let volumes = page
            .entries
            .iter()
            .map(|entry| entry.volume.as_ref().unwrap());
        volumes.map(|volume| volume.volume_id.clone()).collect()
    };
    assert_eq!(ids(&page(0, "").unwrap()), names);
    let first = page(2, "").unwrap();
    assert_eq!(ids(&first), names[..2]);
    caller.delete("pvc-1").unwrap();
    let second = page(2, &first.next_token).unwrap();
    assert_eq!(ids(&second), names[2..4]);
    let third = page(2, &second.next_token).unwrap();
    assert_eq!(ids(&third), names[4..]);
    assert_eq!(third.next_token, "");
    let status = third.entries[0].status.as_ref().unwrap();
    assert_eq!(status.published_node_ids, [NODE]);
    assert!(!status.volume_condition.as_ref().unwrap().abnormal);
    assert_eq!(page(-1, ""), Err(Code::InvalidArgument));
    assert_eq!(page(2, "pvc-1"), Err(Code::Aborted));
}

// Fails if two nodes have a volume at a time, or a node that does not exist gets one.
#[test]
fn a_volume_is_published_to_one_node_at_a_time() {
    let caller = Caller::start(&[]);
    caller
        .service
        .apply("apiVersion: v1\nkind: Node\nmetadata:\n  name: other\n");
    let id = caller.create("pvc-one", GIB, mount()).unwrap();
    let publish = |node: &str| {
        caller
            .publish_to(&id, node, mount())
            .map(drop)
            .map_err(|status| status.code())
    };
    assert_eq!(publish("nobody"), Err(Code::NotFound));
    assert_eq!(publish("../nodes"), Err(Code::NotFound));
    assert_eq!(publish(NODE), Ok(()));
    assert_eq!(publish(NODE), Ok(()));
    assert_eq!(publish("other"), Err(Code::FailedPrecondition));
    assert_eq!(caller.delete(&id), Err(Code::FailedPrecondition));
    caller.unpublish_from(&id, "other").unwrap();
    assert_eq!(publish("other"), Err(Code::FailedPrecondition));
    caller.unpublish_from(&id, NODE).unwrap();
    assert_eq!(publish("other"), Ok(()));
    caller.unpublish_from(&id, "").unwrap();
    caller.delete(&id).unwrap();
}

// Fails if copies cannot be changed while a volume is in use, or if a change that cannot be is not told.
#[test]
fn copies_and_intervals_change_on_demand() {
    let caller = Caller::start(&[]);
    let pools = ["one", "two"];
    for pool in pools {
        let path = caller.service.path(pool);
        std::fs::create_dir_all(&path).unwrap();
        caller
            .service
            .trellis(&["pool", "add", pool, path.to_str().unwrap()]);
    }
    let asked = with(
        request("pvc-copies", GIB, mount()),
        &[
            ("replicas", "2"),
            ("allowSharedDisk", "true"),
            ("pools", "one,two"),
        ],
    );
    let made = caller.create_with(asked).unwrap();
    assert_eq!(made.accessible_topology, []);
    let (staging, _) = caller.paths("a");
    caller.stage("pvc-copies", &staging, mount()).unwrap();
    let modify = |name: &str, value: &str| {
        let mut controller = caller.driver.controller.clone();
        let request = ControllerModifyVolumeRequest {
            volume_id: "pvc-copies".to_owned(),
            mutable_parameters: [(name.to_owned(), value.to_owned())].into(),
        };
        let changed = caller.wait(controller.controller_modify_volume(request));
        changed.map(drop).map_err(|status| status.code())
    };
    assert_eq!(modify("consistencyFactor", "1"), Ok(()));
    assert_eq!(modify("scrubInterval", "12h"), Ok(()));
    assert_eq!(modify("thick", "true"), Err(Code::InvalidArgument));
    assert_eq!(modify("replicas", "3"), Err(Code::OutOfRange));
    assert_eq!(modify("replicas", "2"), Ok(()));
    let spec = caller.service.object("volumes.trellis.dev", "pvc-copies")["spec"].clone();
    assert_eq!(spec["scrubIntervalSeconds"], 43_200);
    assert_eq!(spec["consistencyFactor"], 2);
    assert!(
        !caller
            .expand("pvc-copies", 2 * GIB)
            .unwrap()
            .node_expansion_required
    );
    caller.unstage("pvc-copies", &staging).unwrap();
    caller.delete("pvc-copies").unwrap();
    let data = caller.service.data();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_trellis"))
        .args(["down", "--all", "--data"])
        .arg(data)
        .output();
    said(&output.unwrap(), "trellis down --all");
    let seen: BTreeSet<String> = crate::harness::mounts_below(&caller.service.path(""))
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    assert_eq!(seen, BTreeSet::new());
}
