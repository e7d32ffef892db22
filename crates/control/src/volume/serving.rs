//! On which node a volume of several copies is served, and whether it has to be served at all.
//!
//! A target runs on the node of whoever uses the volume, because its file can be used only there. It moves when the last
//! use on its node has ended and somebody wants the volume on another node. If its node is lost, it does not wait for
//! that: the uses there cannot be asked. Each move begins a new term, so that a target that was only cut off cannot take
//! the volume back ([`TargetSpec::term`]).
//!
//! A target that nobody uses and that has nothing to do is ended after a while, which gives back its memory. The copies
//! cannot change meanwhile: nobody writes without a target.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::json;
use trellis_api::kinds::{
    Attachment, NODE_LABEL, Replica, ReplicaState, SYSTEM_NAMESPACE, Target, TargetSpec,
    TargetStatus, Via, Volume, chap_secret_name,
};
use trellis_api::step::Step;
use trellis_api::{Hold, HoldReason, PortalAt};

use super::copies::staying;
use super::nodes::Nodes;
use super::parts::was_served;
use super::recovery::is_recovered;
use super::surroundings::{Surroundings, left};
use crate::plan::Plan;
use crate::stored::StoredVolume;
use crate::write::{Object, Place, Write};

/// Moves the target to the node that needs it, gives it a term that its copies accept, or wakes it up. None if it is
/// as it should be.
pub fn assign(
    stored: &StoredVolume,
    volume: &Volume,
    around: Surroundings<'_>,
    now: &MicroTime,
) -> Option<Plan> {
    let target = stored.target.as_ref()?;
    if !volume.spec.is_behind_target() {
        return None;
    }
    let spec = &target.spec;
    let idle = idle(stored, volume, around.nodes, now);
    let rests = spec.rests && idle.is_some();
    let node = match rests {
        true => spec.node.clone(),
        false => node(stored, spec, around, now),
    };
    let status = target.status.as_ref();
    let outbid = status
        .and_then(|status| status.outbid)
        .filter(|term| *term >= spec.term);
    let is_moved = node != spec.node;
    let term = match outbid {
        Some(term) => term + 1,
        None => spec.term + u32::from(is_moved),
    };
    if (&node, term, rests) == (&spec.node, spec.term, spec.rests) {
        return None;
    }
    let body = json!({
        "metadata": { "resourceVersion": target.resource_version() },
        "spec": { "node": node, "term": term, "rests": rests },
    });
    let mut writes = vec![Write::Patch(
        Place::named(Object::Target, target.name_any()),
        body,
    )];
    if is_moved {
        // What initiators must know is for the node on which the target runs.
        let secret = Place::within(
            Object::Secret,
            SYSTEM_NAMESPACE,
            chap_secret_name(&stored.key),
        );
        let body = json!({ "metadata": { "labels": { NODE_LABEL: node } } });
        writes.insert(0, Write::Patch(secret, body));
    }
    Some(Plan {
        writes,
        step: is_moved.then_some(Step::TargetMoved),
        ..Plan::default()
    })
}

/// Lets the target rest if the volume has been idle for long enough. Otherwise says when to look again.
pub fn rest(
    stored: &StoredVolume,
    volume: &Volume,
    around: Surroundings<'_>,
    now: &MicroTime,
) -> Rest {
    let target = stored.target.as_ref();
    let is_behind_target = volume.spec.is_behind_target();
    let Some(target) = target.filter(|_| is_behind_target) else {
        return Rest::NotNow;
    };
    let Some(idle) = idle(stored, volume, around.nodes, now) else {
        return Rest::NotNow;
    };
    if target.spec.rests {
        return match idle {
            Idle::UntilScrub(left) => Rest::LookAfter(left),
            Idle::ForEver => Rest::NotNow,
        };
    }
    let since = volume.status.as_ref();
    let since = since.and_then(|status| status.idle_since.as_ref());
    let Some(since) = since else {
        // It is told first that the volume is idle.
        return Rest::NotNow;
    };
    match left(since.0, around.waits.rest, now) {
        Some(left) => Rest::LookAfter(left),
        None => Rest::Now(Write::Patch(
            Place::named(Object::Target, target.name_any()),
            json!({
                "metadata": { "resourceVersion": target.resource_version() },
                "spec": { "rests": true },
            }),
        )),
    }
}

/// Whether a target can be ended.
#[derive(Debug, PartialEq)]
pub enum Rest {
    /// It has something to do, or rests already.
    NotNow,
    /// It is to be looked at again after this time.
    LookAfter(Duration),
    /// It can be, by this write.
    Now(Write),
}

/// Says so if the node that serves the volume is lost, unless nobody has to serve it now.
pub fn lost(stored: &StoredVolume, nodes: &Nodes) -> Option<Hold> {
    let target = stored.target.as_ref()?;
    let node = &target.spec.node;
    let since = nodes.lost_since(node).filter(|_| !target.spec.rests)?;
    let message = if !nodes.is_known(node) {
        format!(
            "Node {node}, which serves volume {}, was removed.",
            stored.key
        )
    } else {
        format!(
            "Node {node}, which serves volume {}, is lost since {}.",
            stored.key,
            since.0.strftime("%Y-%m-%d %H:%M:%SZ")
        )
    };
    Some(Hold::new(HoldReason::NodeLost, message))
}

/// Whether a volume is idle, for its status.
pub fn is_idle(stored: &StoredVolume, volume: &Volume, nodes: &Nodes, now: &MicroTime) -> bool {
    volume.spec.is_behind_target() && idle(stored, volume, nodes, now).is_some()
}

/// The node on which the target should run.
fn node(
    stored: &StoredVolume,
    spec: &TargetSpec,
    around: Surroundings<'_>,
    now: &MicroTime,
) -> String {
    let nodes = around.nodes;
    let is_lost = nodes.is_lost(&spec.node);
    let mut uses = stored.attachments.iter();
    let is_used_there = uses.any(|each| each.spec.node == spec.node);
    if is_used_there && !is_lost {
        return spec.node.clone();
    }
    let is_wanted = |each: &&Attachment| {
        each.metadata.deletion_timestamp.is_none() && !nodes.is_lost(&each.spec.node)
    };
    let uses = stored.attachments.iter().map(AsRef::as_ref);
    let oldest = uses
        .filter(is_wanted)
        .min_by_key(|each| (each.creation_timestamp(), each.name_any()));
    if let Some(oldest) = oldest {
        return oldest.spec.node.clone();
    }
    // Nobody else wants it. If its users may still be there, cut off from us alone, they keep it until copies have to be
    // replaced.
    let since = nodes.lost_since(&spec.node);
    let is_given_up =
        since.is_some_and(|since| left(since.0, around.waits.copy_lost, now).is_none());
    if !is_lost || (is_used_there && !is_given_up) {
        return spec.node.clone();
    }
    let copies = staying(stored).filter(|each| !nodes.is_lost(&each.spec.node));
    let whole = copies.max_by_key(|each| (is_whole(stored, each), each.name_any()));
    whole.map_or_else(|| spec.node.clone(), |each| each.spec.node.clone())
}

fn is_whole(stored: &StoredVolume, replica: &Replica) -> bool {
    let status = stored.target.as_ref().and_then(|it| it.status.as_ref());
    let mut seen = status.into_iter().flat_map(|status| &status.replicas);
    let id = replica.identity();
    seen.any(|each| each.id == id && each.state == ReplicaState::InSync)
}

/// How long there will be nothing to do for a volume that nobody uses.
enum Idle {
    /// Until its next scrub is due.
    UntilScrub(Duration),
    /// It is never scrubbed by itself.
    ForEver,
}

fn idle(stored: &StoredVolume, volume: &Volume, nodes: &Nodes, now: &MicroTime) -> Option<Idle> {
    let target = stored.target.as_ref()?;
    let status = target.status.as_ref()?;
    let spec = &volume.spec;
    let size = Some(spec.capacity);
    let nobody = stored.attachments.is_empty()
        // Of initiators we know only those that are logged in. A volume that was made for them is there for all that may
        // come.
        && spec.iscsi.portal == PortalAt::Loopback
        && spec.way() != Via::Iscsi
        && status.sessions == 0
        && volume.metadata.deletion_timestamp.is_none()
        && was_served(volume)
        && !spec.volume_id.is_empty();
    let has_its_size =
        status.capacity == size && target.spec.capacity == spec.capacity && stored.usable() == size;
    let is_recovered = spec.recovery.is_none() || is_recovered(stored, volume);
    let is_settled = nobody
        && has_its_size
        && is_recovered
        && status.hold.is_none()
        && status.outbid.is_none()
        && says(status, "RedundancyMet")
        && says(status, "SizeConverged")
        && copies_are_whole(stored, target, status, volume, nodes);
    idle_until(volume, status, now).filter(|_| is_settled)
}

fn says(status: &TargetStatus, kind: &str) -> bool {
    let is_it = |each: &&Condition| each.type_ == kind;
    let found = status.conditions.iter().find(is_it);
    found.is_some_and(|condition| condition.status == "True")
}

/// Whether as many copies as are asked for stay, count, are where they should be and hold everything.
fn copies_are_whole(
    stored: &StoredVolume,
    target: &Target,
    status: &TargetStatus,
    volume: &Volume,
    nodes: &Nodes,
) -> bool {
    let is_well = |replica: &Replica| {
        let of_itself = replica.status.as_ref();
        replica.metadata.deletion_timestamp.is_none()
            && !replica.spec.replica_id.is_empty()
            && of_itself
                .is_some_and(|it| it.hold.is_none() && it.capacity == Some(volume.spec.capacity))
            && !nodes.is_lost(&replica.spec.node)
            && is_whole(stored, replica)
    };
    let wanted = usize::try_from(volume.spec.replicas).unwrap_or(usize::MAX);
    let ids: BTreeSet<String> = stored.replicas.iter().map(|each| each.identity()).collect();
    let members = status.members.as_ref();
    let counts = members.is_some_and(|members| {
        let replicas: BTreeSet<String> = members.replicas.iter().cloned().collect();
        replicas == ids && members.consistency_factor == target.spec.copies.consistency_factor
    });
    ids.len() == wanted && counts && stored.replicas.iter().all(|each| is_well(each))
}

/// How long no scrub is needed. None if one is due, wanted or running.
fn idle_until(volume: &Volume, status: &TargetStatus, now: &MicroTime) -> Option<Idle> {
    let spec = &volume.spec;
    let seen = status.scrub.as_ref();
    let is_running = seen.is_some_and(|seen| seen.running_percent.is_some());
    let met = seen.and_then(|seen| seen.request.as_ref());
    let is_wanted = spec.scrub_requested.is_some() && spec.scrub_requested.as_ref() != met;
    if is_running || is_wanted {
        return None;
    }
    if spec.scrub_interval_seconds == 0 {
        return Some(Idle::ForEver);
    }
    let last = scrubbed_since(volume, seen.and_then(|seen| seen.finished.as_deref()));
    let interval = Duration::from_secs(spec.scrub_interval_seconds);
    left(last, interval, now).map(Idle::UntilScrub)
}

/// When the interval until the next scrub began: with the last one, or with the volume.
pub fn scrubbed_since(volume: &Volume, finished: Option<&str>) -> Timestamp {
    let finished = finished.and_then(|text| text.parse().ok());
    let made = || volume.creation_timestamp().map(|made| made.0);
    finished.or_else(made).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::rooms::{LargerCopy, NewCopy, Rooms};
    use crate::volume::surroundings::Waits;
    use serde_json::Value;
    use std::sync::Arc;
    use trellis_api::kinds::Placement;

    struct Nowhere;

    impl Rooms for Nowhere {
        fn place(&self, _: &[String], _: NewCopy<'_>) -> Result<Placement, Hold> {
            unreachable!("no copy is made here")
        }

        fn is_drained(&self, _: &str) -> bool {
            false
        }

        fn room(&self, _: LargerCopy<'_>) -> Result<(), Hold> {
            unreachable!("nothing grows here")
        }
    }

    const WAITS: Waits = Waits {
        copy_lost: Duration::from_secs(600),
        rest: Duration::from_secs(30),
    };

    fn at(second: i64) -> MicroTime {
        MicroTime(Timestamp::from_second(second).expect("a time"))
    }

    fn read<K: serde::de::DeserializeOwned>(object: Value) -> Arc<K> {
        Arc::new(serde_json::from_value(object).expect("an object"))
    }

    /// A volume of two copies on nodes a and b, served on a, idle since the second 100.
    fn stored() -> StoredVolume {
        let volume = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume",
            "metadata": { "name": "v", "uid": "u", "creationTimestamp": "1970-01-01T00:00:00Z" },
            "spec": {
                "capacity": "1Gi", "class": "c", "replicas": 2, "consistencyFactor": 2, "via": "fuse",
                "volumeId": "u", "scrubIntervalSeconds": 0,
            },
            "status": { "capacity": "1Gi", "idleSince": "1970-01-01T00:01:40.000000Z" },
        });
        let replica = |name: &str| {
            read(json!({
                "apiVersion": "trellis.dev/v1alpha1", "kind": "Replica",
                "metadata": { "name": format!("v-{name}"), "uid": name },
                "spec": {
                    "volume": "v", "volumeId": "u", "replicaId": name, "pool": name, "node": name,
                    "capacity": "1Gi",
                },
                "status": { "phase": "Ready", "capacity": "1Gi" },
            }))
        };
        let condition = |kind: &str| {
            json!({
                "type": kind, "status": "True", "reason": "R", "message": "",
                "lastTransitionTime": "1970-01-01T00:00:00Z",
            })
        };
        let target = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Target", "metadata": { "name": "v" },
            "spec": {
                "volume": "v", "node": "a", "term": 4, "capacity": "1Gi",
                "copies": { "count": 2, "consistencyFactor": 2, "staying": ["a", "b"] },
            },
            "status": {
                "capacity": "1Gi",
                "members": { "version": 1, "consistencyFactor": 2, "replicas": ["a", "b"] },
                "replicas": [{ "id": "a", "state": "InSync" }, { "id": "b", "state": "InSync" }],
                "conditions": [condition("RedundancyMet"), condition("SizeConverged")],
            },
        });
        StoredVolume {
            key: "v".to_owned(),
            volume: Some(read(volume)),
            target: Some(read(target)),
            replicas: vec![replica("a"), replica("b")],
            ..StoredVolume::default()
        }
    }

    fn used_on(stored: &mut StoredVolume, node: &str, second: i64, ends: bool) {
        let mut attachment: Attachment = serde_json::from_value(json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment",
            "metadata": { "name": format!("on-{node}") },
            "spec": { "volume": "v", "node": node, "consumer": { "device": { "path": "/d" } } },
        }))
        .expect("an attachment");
        let time = |second| k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(second).0);
        attachment.metadata.creation_timestamp = Some(time(second));
        attachment.metadata.deletion_timestamp = ends.then(|| time(second));
        stored.attachments.push(Arc::new(attachment));
    }

    fn around(nodes: &Nodes) -> Surroundings<'_> {
        Surroundings {
            rooms: &Nowhere,
            nodes,
            waits: WAITS,
        }
    }

    /// Where the target goes: node, term, and whether it rests. None if it stays as it is.
    fn placed(stored: &StoredVolume, nodes: &Nodes, second: i64) -> Option<(String, u64, bool)> {
        let volume = stored.volume.clone().expect("a volume");
        let plan = assign(stored, &volume, around(nodes), &at(second))?;
        let Some(Write::Patch(_, body)) = plan.writes.last() else {
            panic!("the target is written: {plan:?}");
        };
        let spec = &body["spec"];
        let node = spec["node"].as_str().expect("a node").to_owned();
        Some((node, spec["term"].as_u64()?, spec["rests"].as_bool()?))
    }

    fn all() -> Nodes {
        Nodes::there(&["a", "b", "c"])
    }

    fn goes_to(node: &str) -> Option<(String, u64, bool)> {
        Some((node.to_owned(), 5, false))
    }

    // Fails if a target leaves somebody who uses it, does not follow its user, or keeps its term when it moves.
    #[test]
    fn a_target_follows_its_user_when_nobody_uses_it_where_it_is() {
        let mut both = stored();
        used_on(&mut both, "a", 1, false);
        used_on(&mut both, "c", 0, false);
        assert_eq!(placed(&both, &all(), 200), None);
        // The use on a is ending, and may still have writes to make.
        let mut ending = stored();
        used_on(&mut ending, "a", 1, true);
        used_on(&mut ending, "c", 2, false);
        assert_eq!(placed(&ending, &all(), 200), None);
        let mut moved = stored();
        used_on(&mut moved, "c", 2, false);
        used_on(&mut moved, "b", 1, true);
        assert_eq!(placed(&moved, &all(), 200), goes_to("c"));
    }

    // Fails if a target waits for a node that is lost although another one wants it, or is taken from users who may only
    // be cut off although nobody wants it.
    #[test]
    fn a_target_is_taken_over_when_its_node_is_lost() {
        let lost = all().without("a", at(150).0);
        let mut wanted = stored();
        used_on(&mut wanted, "a", 1, false);
        used_on(&mut wanted, "b", 2, false);
        assert_eq!(placed(&wanted, &lost, 200), goes_to("b"));
        let mut alone = stored();
        used_on(&mut alone, "a", 1, false);
        assert_eq!(placed(&alone, &lost, 200), None);
        // Its copy on a is replaced now, and somebody has to do that.
        assert_eq!(placed(&alone, &lost, 750), goes_to("b"));
        let mut removed = stored();
        used_on(&mut removed, "c", 1, false);
        assert_eq!(placed(&removed, &Nodes::there(&["a", "b"]), 200), None);
    }

    // Fails if a target that its copies refuse keeps its term, or is given a new one again and again.
    #[test]
    fn a_target_that_was_outbid_gets_a_later_term() {
        let mut refused = stored();
        used_on(&mut refused, "a", 1, false);
        let target = Arc::make_mut(refused.target.as_mut().expect("a target"));
        target.status.as_mut().expect("a status").outbid = Some(7);
        let again = placed(&refused, &all(), 200);
        assert_eq!(again, Some(("a".to_owned(), 8, false)));
        let target = Arc::make_mut(refused.target.as_mut().expect("a target"));
        target.spec.term = 8;
        assert_eq!(placed(&refused, &all(), 200), None);
    }

    fn resting(stored: &StoredVolume, nodes: &Nodes, second: i64) -> Rest {
        let volume = stored.volume.clone().expect("a volume");
        rest(stored, &volume, around(nodes), &at(second))
    }

    // Fails if a target is ended while it is needed, or is never ended.
    #[test]
    fn a_target_rests_when_it_has_been_idle_for_a_while() {
        let idle = stored();
        let after = |seconds| Rest::LookAfter(Duration::from_secs(seconds));
        assert_eq!(resting(&idle, &all(), 110), after(20));
        assert!(matches!(resting(&idle, &all(), 130), Rest::Now(_)));
        let mut used = stored();
        used_on(&mut used, "a", 1, true);
        let mut grows = stored();
        let volume = Arc::make_mut(grows.volume.as_mut().expect("a volume"));
        volume.spec.capacity = trellis_api::Bytes::gib(2);
        let mut behind = stored();
        let target = Arc::make_mut(behind.target.as_mut().expect("a target"));
        target.status.as_mut().expect("a status").replicas[1].state = ReplicaState::Repairing;
        let mut held = stored();
        let replica = Arc::make_mut(&mut held.replicas[1]);
        let hold = Hold::new(trellis_api::HoldReason::ReplicaUnavailable, "gone");
        replica.status.as_mut().expect("a status").hold = Some(hold);
        let mut scrubbed = stored();
        let volume = Arc::make_mut(scrubbed.volume.as_mut().expect("a volume"));
        volume.spec.scrub_interval_seconds = 120;
        for (what, stored) in [
            ("used", used),
            ("grows", grows),
            ("behind", behind),
            ("held", held),
            ("scrub", scrubbed),
        ] {
            assert_eq!(resting(&stored, &all(), 130), Rest::NotNow, "{what}");
        }
        let lost = all().without("b", at(120).0);
        assert_eq!(resting(&idle, &lost, 130), Rest::NotNow);
    }

    // Fails if a target that rests is not woken up by what needs it, or is moved while it rests.
    #[test]
    fn a_target_that_rests_is_woken_up_when_it_is_needed() {
        let mut rests = stored();
        Arc::make_mut(rests.target.as_mut().expect("a target"))
            .spec
            .rests = true;
        assert_eq!(placed(&rests, &all(), 200), None);
        let mut used = rests.clone();
        used_on(&mut used, "c", 1, false);
        assert_eq!(placed(&used, &all(), 200), goes_to("c"));
        let lost = all().without("b", at(150).0);
        let woken = Some(("a".to_owned(), 4, false));
        assert_eq!(placed(&rests, &lost, 200), woken);
        let lost = all().without("a", at(150).0);
        assert_eq!(placed(&rests, &lost, 200), goes_to("b"));
    }
}
