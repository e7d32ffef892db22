//! How full the filesystems mounted on this node are. They are measured when somebody asks; from time to time the
//! figures are written to the attachments' status, for other nodes.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{Client, ResourceExt};
use serde_json::json;
use trellis_api::Bytes;
use trellis_api::kinds::{Attachment, AttachmentPhase, Usage};

use crate::stored::now;
use crate::timely::Timely;
use crate::world::World;
use crate::write::{Manager, Object, Place, Write, Written, send};

/// How often the attachments' status is checked. Whoever needs it fresher measures, or scrapes.
const EVERY: Duration = Duration::from_secs(60);
/// How long one filesystem may take to tell how full it is.
pub const MEASURE_TIME_MAX: Duration = Duration::from_secs(1);
/// How many filesystems are asked at the same time.
const AT_ONCE: usize = 16;
/// A change of less than one part in so many is not worth a write.
const PARTS: u64 = 100;

/// How full a filesystem is, just measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// All bytes that files could have.
    pub capacity: Bytes,
    /// Bytes in use.
    pub used: Bytes,
    /// Bytes that a user without privileges can still write.
    pub available: Bytes,
    /// All inodes; zero where they are made as needed.
    pub inodes: u64,
    /// Inodes in use.
    pub inodes_used: u64,
    /// Inodes that can still be made.
    pub inodes_free: u64,
}

impl Fill {
    /// As it stands in a status.
    pub fn status(&self, at: MicroTime) -> Usage {
        Usage {
            used: self.used,
            available: self.available,
            inodes_used: self.inodes_used,
            inodes_free: self.inodes_free,
            observed_at: Some(at),
        }
    }
}

/// The machine, as far as it tells how full its mounted volumes are. Calls block, and may hang.
pub trait Gauge: Send + Sync + 'static {
    /// The volumes whose filesystem is mounted.
    fn mounted(&self) -> HashSet<String>;

    /// How full the filesystem of a mounted volume is.
    fn fill(&self, volume: &str) -> Option<Fill>;
}

/// A claim that is mounted on this node.
#[derive(Clone, Debug, Default)]
pub struct InUse {
    /// Its volume.
    pub volume: String,
    /// Its uses here.
    pub attachments: Vec<Arc<Attachment>>,
    /// How full it is; none if it could not be measured in time.
    pub fill: Option<Fill>,
}

/// The claims with a filesystem that this node has attached, by namespace and name.
fn attached(world: &World, node: &str) -> BTreeMap<(String, String), InUse> {
    let mut claims: BTreeMap<(String, String), InUse> = BTreeMap::new();
    for attachment in world.attachments.all() {
        let Some(status) = &attachment.status else {
            continue;
        };
        let here = attachment.spec.node == node && status.phase == AttachmentPhase::Attached;
        let (Some(volume), true, Some(_)) = (&status.volume, here, status.filesystem) else {
            continue;
        };
        let Some(claim) = claim_of(world, &attachment, volume) else {
            continue;
        };
        let in_use = claims.entry(claim).or_default();
        in_use.volume.clone_from(volume);
        in_use.attachments.push(attachment);
    }
    claims
}

/// Namespace and name of the claim that an attachment uses: the one that it names, or that of its volume.
fn claim_of(world: &World, attachment: &Attachment, volume: &str) -> Option<(String, String)> {
    if let Some(claim) = &attachment.spec.claim_name {
        return Some((attachment.namespace().unwrap_or_default(), claim.clone()));
    }
    let volume = world.volumes.get("", volume)?;
    let claim = volume.spec.claim.as_ref()?;
    Some((claim.namespace.clone(), claim.name.clone()))
}

/// Measures every claim that is mounted on this node, now. One that hangs does not stop the others.
pub async fn measure(
    world: &World,
    node: &str,
    gauge: &Arc<dyn Gauge>,
    timely: &Timely,
) -> BTreeMap<(String, String), InUse> {
    let claims = attached(world, node);
    if claims.is_empty() {
        return claims;
    }
    let asked = gauge.clone();
    let mounted = timely.measure("", move || asked.mounted()).await;
    let mounted = mounted.unwrap_or_default();
    let measured = claims.into_iter().map(|(claim, mut in_use)| {
        let gauge = gauge.clone();
        // Without its mount, the path would show the filesystem below.
        let is_mounted = mounted.contains(&in_use.volume);
        async move {
            if is_mounted {
                let volume = in_use.volume.clone();
                let measured = timely.measure(&in_use.volume, move || gauge.fill(&volume));
                in_use.fill = measured.await.flatten();
            }
            (claim, in_use)
        }
    });
    futures::stream::iter(measured)
        .buffer_unordered(AT_ONCE)
        .collect()
        .await
}

/// Keeps the attachments' status fresh enough, for ever. A system at rest writes nothing.
pub async fn refresh(world: Arc<World>, client: Client, node: String, gauge: Arc<dyn Gauge>) {
    let timely = Timely::new(MEASURE_TIME_MAX);
    loop {
        tokio::time::sleep(EVERY).await;
        let measured = measure(&world, &node, &gauge, &timely).await;
        let writes: Vec<Write> = measured
            .values()
            .flat_map(|in_use| renewals(in_use, &now()))
            .collect();
        for written in send(&client, Manager::Node, &writes).await {
            if let Written::Failed(error) = written {
                tracing::warn!(%error, "how full a volume is could not be stored and will be again");
            }
        }
    }
}

/// The uses whose status is out of date.
fn renewals(in_use: &InUse, now: &MicroTime) -> Vec<Write> {
    let Some(fill) = &in_use.fill else {
        return Vec::new();
    };
    let told = |attachment: &Attachment| attachment.status.as_ref()?.usage.clone();
    let outdated = in_use
        .attachments
        .iter()
        .filter(|each| told(each).is_none_or(|told| has_moved(&told, fill)));
    let write = |each: &Arc<Attachment>| {
        let namespace = each.namespace().unwrap_or_default();
        let place = Place::within(Object::Attachment, namespace, each.name_any());
        // Meant for this use, and not for a later one of the same name.
        let body = json!({
            "metadata": { "uid": each.uid() },
            "status": { "usage": fill.status(now.clone()) },
        });
        Write::PatchStatus(place, body)
    };
    outdated.map(write).collect()
}

/// Whether the change is worth a write: one part in a hundred of all bytes, or of all inodes.
fn has_moved(told: &Usage, fill: &Fill) -> bool {
    let far = |told: u64, now: u64, all: u64| {
        let change = u128::from(told.abs_diff(now));
        change > 0 && change * u128::from(PARTS) >= u128::from(all)
    };
    let bytes = fill.capacity.get();
    far(told.used.get(), fill.used.get(), bytes)
        || far(told.available.get(), fill.available.get(), bytes)
        || far(told.inodes_used, fill.inodes_used, fill.inodes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::runtime::watcher::Event;

    fn fill(used: u64) -> Fill {
        Fill {
            capacity: Bytes::new(10_000),
            used: Bytes::new(used),
            available: Bytes::new(10_000 - used),
            inodes: 1_000,
            inodes_used: 3,
            inodes_free: 997,
        }
    }

    fn attachment(name: &str, claim: &str, node: &str, usage: Option<&Fill>) -> Attachment {
        let at: MicroTime =
            serde_json::from_value(json!("2026-01-01T00:00:00.000000Z")).expect("a time");
        let attachment = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Attachment",
            "metadata": { "name": name, "namespace": "d", "uid": name },
            "spec": { "claimName": claim, "node": node, "consumer": { "mount": { "path": "/mnt" } } },
            "status": {
                "phase": "Attached", "volume": format!("v-{claim}"), "filesystem": "xfs",
                "usage": usage.map(|fill| fill.status(at)),
            },
        });
        serde_json::from_value(attachment).expect("an attachment")
    }

    fn in_use(told: Option<&Fill>, fill: Option<Fill>) -> InUse {
        InUse {
            volume: "v".to_owned(),
            attachments: vec![Arc::new(attachment("a", "c", "n", told))],
            fill,
        }
    }

    // Fails if a system at rest would write every minute, or a volume that fills up is never told of.
    #[test]
    fn only_what_moved_is_told() {
        let renewed = |told: Option<&Fill>, now: Option<Fill>| {
            let at = now_at();
            renewals(&in_use(told, now), &at).len()
        };
        assert_eq!(renewed(Some(&fill(500)), Some(fill(500))), 0);
        assert_eq!(renewed(Some(&fill(500)), Some(fill(599))), 0);
        assert_eq!(renewed(Some(&fill(500)), Some(fill(600))), 1);
        assert_eq!(renewed(Some(&fill(500)), Some(fill(400))), 1);
        assert_eq!(renewed(None, Some(fill(500))), 1);
        assert_eq!(renewed(Some(&fill(500)), None), 0);
        let more_files = Fill {
            inodes_used: 13,
            ..fill(500)
        };
        assert_eq!(renewed(Some(&fill(500)), Some(more_files)), 1);
    }

    // Fails if a filesystem without a fixed number of inodes is written of at every look.
    #[test]
    fn no_inodes_are_no_change() {
        let uncounted = Fill {
            inodes: 0,
            inodes_used: 0,
            inodes_free: 0,
            ..fill(500)
        };
        assert!(!has_moved(&uncounted.status(now_at()), &uncounted));
    }

    // Fails if a write could land on another use of the same name, or touches more than the usage.
    #[test]
    fn a_renewal_names_its_use_and_nothing_else() {
        let writes = renewals(&in_use(None, Some(fill(1))), &now_at());
        let [Write::PatchStatus(_, body)] = writes.as_slice() else {
            panic!("one status: {}", writes.len());
        };
        assert_eq!(body["metadata"], json!({ "uid": "a" }));
        let status = body["status"].as_object().expect("a status");
        assert_eq!(status.keys().collect::<Vec<_>>(), ["usage"]);
        assert_eq!(body["status"]["usage"]["used"], "1");
    }

    fn now_at() -> MicroTime {
        now()
    }

    /// Of three volumes one hangs and one is not mounted.
    struct Troubled {
        hang: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
    }

    impl Gauge for Troubled {
        fn mounted(&self) -> HashSet<String> {
            HashSet::from(["v-well".to_owned(), "v-hung".to_owned()])
        }

        fn fill(&self, volume: &str) -> Option<Fill> {
            if volume == "v-hung" {
                let _ = self.hang.lock().expect("not poisoned").recv();
            }
            Some(fill(7))
        }
    }

    // Fails (or never ends) if a hung filesystem holds the others up, a path without its mount is measured,
    // or another node's volume is.
    #[tokio::test]
    async fn what_hangs_keeps_nothing_else_from_being_measured() {
        let world = World::new();
        for (name, claim, node) in [
            ("a1", "well", "n"),
            ("a2", "well", "n"),
            ("a3", "hung", "n"),
            ("a4", "gone", "n"),
            ("a5", "far", "other"),
        ] {
            let object = attachment(name, claim, node, None);
            world.attachments.apply(Event::Apply(object));
        }
        let (release, hang) = std::sync::mpsc::channel();
        let gauge: Arc<dyn Gauge> = Arc::new(Troubled {
            hang: std::sync::Mutex::new(hang),
        });
        let timely = Timely::new(Duration::from_millis(200));
        let measured = measure(&world, "n", &gauge, &timely).await;
        let fills: Vec<(&str, usize, Option<Fill>)> = measured
            .iter()
            .map(|((_, claim), each)| (claim.as_str(), each.attachments.len(), each.fill))
            .collect();
        assert_eq!(
            fills,
            [
                ("gone", 1, None),
                ("hung", 1, None),
                ("well", 2, Some(fill(7)))
            ]
        );
        drop(release);
    }
}
