//! Follows the objects of one claim until every layer has the size, or something holds it.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, select_all};
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::jiff::Timestamp;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until, timeout_at};
use trellis_api::kinds::{Attachment, Replica, Target, VOLUME_LABEL, Volume};
use trellis_api::{Bytes, Hold};
use trellis_control::claim::{provision, status};
use trellis_control::stored::StoredClaim;
use trellis_control::view::{RungState, RungView, held, reported, rungs};

use super::screen::Screen;
use crate::cmd::patience::passes;
use crate::connect::Service;
use crate::exit::Ended;

/// How long a hold has to last before it is believed. Objects are written one by one, and for a moment a hold of the
/// old size may stand next to the new goal.
const HOLD_SETTLES: Duration = Duration::from_millis(300);

/// How long the rungs may lag behind a claim that already reports the size. They are objects of their own and are
/// stored one after the other.
const RUNGS_SETTLE: Duration = Duration::from_secs(1);

/// How many kinds are followed.
const KINDS: usize = 5;

/// One claim and its objects, kept fresh.
pub struct Follow {
    look: StoredClaim,
    updates: BoxStream<'static, Update>,
}

/// Whether an attachment uses a claim, given by its name and its volume.
fn is_use(attachment: &Attachment, (claim, volume): &(String, String)) -> bool {
    let names_it = attachment.spec.claim_name.as_ref() == Some(claim);
    attachment.volume().map_or(names_it, |of| of == volume)
}

/// A claim that has its size.
pub struct Reached {
    /// When the claim was seen to report it.
    pub at: Instant,
    /// The rungs.
    pub rungs: Vec<RungView>,
}

enum Update {
    /// An object was stored or removed.
    Change(Box<dyn FnOnce(&mut StoredClaim) + Send>),
    /// A kind was listed for the first time, or again after an interruption.
    Listed,
}

impl Follow {
    /// Begins to follow the claim in `look`.
    pub fn start(service: &Service, look: &StoredClaim) -> Follow {
        let client = &service.client;
        let claim = look
            .claim
            .as_ref()
            .map(|claim| claim.name_any())
            .unwrap_or_default();
        let named =
            |name: &str| watcher::Config::default().fields(&format!("metadata.name={name}"));
        let of_volume =
            watcher::Config::default().labels(&format!("{VOLUME_LABEL}={}", look.stored.key));
        let namespace = &service.namespace;
        let key = look.stored.key.clone();
        let (own, gone) = ((claim.clone(), key.clone()), (claim.clone(), key));
        let updates: [BoxStream<'static, Update>; KINDS] = [
            follow(
                Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace),
                named(&claim),
                |look, claim| look.claim = Some(Arc::new(claim)),
                |look, _| look.claim = None,
            ),
            follow(
                Api::<Volume>::all(client.clone()),
                named(&look.stored.key),
                |look, volume| look.stored.volume = Some(Arc::new(volume)),
                |look, _| look.stored.volume = None,
            ),
            follow(
                Api::<Target>::all(client.clone()),
                named(&look.stored.key),
                |look, target| look.stored.target = Some(Arc::new(target)),
                |look, _| look.stored.target = None,
            ),
            follow(
                Api::<Replica>::all(client.clone()),
                of_volume,
                |look, replica| put(&mut look.stored.replicas, replica),
                |look, replica| remove(&mut look.stored.replicas, &replica),
            ),
            follow(
                Api::<Attachment>::namespaced(client.clone(), namespace),
                watcher::Config::default(),
                move |look, each: Attachment| {
                    if is_use(&each, &own) {
                        put(&mut look.stored.attachments, each);
                    }
                },
                move |look, each| {
                    if is_use(&each, &gone) {
                        remove(&mut look.stored.attachments, &each);
                    }
                },
            ),
        ];
        Follow {
            look: look.clone(),
            updates: select_all(updates).boxed(),
        }
    }

    /// Waits until every kind is being watched, so that nothing that happens from now on is missed or
    /// measured late.
    pub async fn listed(&mut self, deadline: Instant, limit: Duration) -> anyhow::Result<()> {
        let mut listed = 0;
        while listed < KINDS {
            match timeout_at(deadline, self.updates.next()).await {
                Ok(Some(Update::Listed)) => listed += 1,
                Ok(Some(Update::Change(change))) => change(&mut self.look),
                Ok(None) | Err(_) => {
                    let text = format!(
                        "the service did not show the claim's objects within {limit:?}; nothing was changed"
                    );
                    return Err(Ended::TimedOut(text).into());
                }
            }
        }
        Ok(())
    }

    /// Waits until the claim reports `requested`, and every rung with it.
    pub async fn reached(
        &mut self,
        requested: Bytes,
        deadline: Instant,
        limit: Duration,
        screen: &mut Screen,
    ) -> anyhow::Result<Reached> {
        let goal = provision::goal(requested).unwrap_or(requested);
        let mut kept: Option<(Hold, Instant)> = None;
        let mut reported_at: Option<Instant> = None;
        loop {
            let Some(claim) = self.look.claim.clone() else {
                return Err(Ended::NotFound("the claim was deleted meanwhile".to_owned()).into());
            };
            let rungs = rungs(&self.look, Timestamp::now());
            let seen = status::requested(&claim).is_some_and(|size| size >= requested);
            if seen {
                screen.show(&rungs, goal);
            }
            let has = status::reported(&claim).is_some_and(|size| size >= goal);
            if seen && has && status::progress(&claim).is_none() {
                let at = *reported_at.get_or_insert_with(Instant::now);
                let all = rungs.iter().all(|rung| rung.state == RungState::Ok);
                if all || Instant::now() >= at + RUNGS_SETTLE {
                    return Ok(Reached { at, rungs });
                }
            }
            // A hold counts once the controllers have taken up the size that we wait for.
            let taken = status::allocated(&claim).is_some_and(|size| size >= goal);
            let hold = held(&self.look, Timestamp::now())
                .map(|held| held.hold)
                .filter(|_| taken && reported_at.is_none());
            kept = match (hold, kept) {
                (Some(hold), Some((before, since))) if hold == before => Some((hold, since)),
                (Some(hold), _) => Some((hold, Instant::now())),
                (None, _) => None,
            };
            let believed = kept.as_ref().filter(|(hold, _)| !passes(hold.reason));
            let settled = match (reported_at, believed) {
                (Some(at), _) => at + RUNGS_SETTLE,
                (None, Some((_, since))) => deadline.min(*since + HOLD_SETTLES),
                (None, None) => deadline,
            };
            tokio::select! {
                update = self.updates.next() => match update {
                    Some(Update::Change(change)) => change(&mut self.look),
                    Some(Update::Listed) => {}
                    None => return Err(self.late(kept.as_ref(), limit)),
                },
                () = sleep_until(settled) => match (reported_at, believed) {
                    (Some(_), _) => {}
                    (None, Some((hold, since))) if Instant::now() >= *since + HOLD_SETTLES => {
                        return Err(Ended::Held(hold.clone()).into());
                    }
                    (None, _) => return Err(self.late(kept.as_ref(), limit)),
                },
            }
        }
    }

    fn late(&self, kept: Option<&(Hold, Instant)>, limit: Duration) -> anyhow::Error {
        let has = reported(&self.look).unwrap_or_default();
        let why = match kept {
            Some((hold, _)) => format!("held {}: {}", hold.reason, hold.message),
            None => "it goes on; see `trellis ladder`".to_owned(),
        };
        Ended::TimedOut(format!("the claim has {has} after {limit:?}; {why}")).into()
    }
}

fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
    put: impl Fn(&mut StoredClaim, K) + Clone + Send + Sync + 'static,
    remove: impl Fn(&mut StoredClaim, K) + Clone + Send + Sync + 'static,
) -> BoxStream<'static, Update>
where
    K: kube::Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
{
    // An interrupted watch goes on by itself; the deadline ends one that never comes back.
    let events = watcher(api, config).default_backoff();
    let updates = events.flat_map(move |event| {
        let (put, remove) = (put.clone(), remove.clone());
        let update = match event {
            Ok(watcher::Event::Apply(object) | watcher::Event::InitApply(object)) => {
                Some(Update::Change(Box::new(move |look| put(look, object))))
            }
            Ok(watcher::Event::Delete(object)) => {
                Some(Update::Change(Box::new(move |look| remove(look, object))))
            }
            Ok(watcher::Event::InitDone) => Some(Update::Listed),
            Ok(watcher::Event::Init) | Err(_) => None,
        };
        stream::iter(update)
    });
    updates.boxed()
}

fn put<K: ResourceExt>(objects: &mut Vec<Arc<K>>, object: K) {
    match objects
        .iter_mut()
        .find(|each| each.name_any() == object.name_any())
    {
        Some(place) => *place = Arc::new(object),
        None => objects.push(Arc::new(object)),
    }
}

fn remove<K: ResourceExt>(objects: &mut Vec<Arc<K>>, object: &K) {
    objects.retain(|each| each.name_any() != object.name_any());
}
