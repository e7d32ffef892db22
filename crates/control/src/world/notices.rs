//! What a change of an object means besides a plan for its volume: reservations, counters, and others who are to look.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use trellis_api::kinds::{Attachment, Pool, Replica, RungStatus, Target, Volume};

use super::{World, attachment_key};
use crate::cache::Changed;
use crate::pods;
use crate::volume::{nodes, parts};

impl World {
    /// Keeps the reservations right, and wakes whoever waited for the room that appeared.
    pub(crate) fn note_replica(&self, change: &Changed<Replica>) {
        if let (Some(old), Some(new)) = (&change.old, &change.new) {
            // The target has to be told where its copies are.
            let address = |replica: &Replica| {
                let status = replica.status.as_ref()?;
                Some((status.address.clone(), status.link.clone()))
            };
            if address(old) != address(new) {
                self.passes.push(&new.spec.volume);
            }
            let (old, new) = (&old.status, &new.status);
            let old = old.as_ref().and_then(|status| status.rung.as_ref());
            let new = new.as_ref().and_then(|status| status.rung.as_ref());
            self.growths.note_rungs(old.as_slice(), new);
        }
        if let (None, Some(new)) = (&change.old, &change.new) {
            self.note_taken_in(new);
        }
        let woken = self
            .ledger
            .note(change.old.as_deref(), change.new.as_deref());
        woken.iter().for_each(|key| self.push(key));
        if let (Some(old), None) = (&change.old, &change.new) {
            self.look_whether_removable(&old.spec.pool);
        }
    }

    /// A copy that nobody knew has an object now: its pool is looked at again.
    fn note_taken_in(&self, replica: &Replica) {
        let Some(pool) = self.pools.get("", &replica.spec.pool) else {
            return;
        };
        let status = pool.status.as_ref();
        if status.is_some_and(|status| status.unknown_count > 0) {
            self.pool_queue.push(&pool.name_any());
        }
    }

    /// A volume reserves room before its replica is stored, and releases it if the replica never will be.
    pub(crate) fn note_volume(&self, change: &Changed<Volume>) {
        self.growths.note_volume(change);
        let either = change.new.as_ref().or(change.old.as_ref());
        let Some(volume) = either else { return };
        if change.new.is_some() && parts::was_served(volume) {
            // Its copies are stored, each with its own reservation, and may be others by now than the first ones.
            return;
        }
        let size = change.new.as_ref().map(|_| volume.spec.capacity);
        for (replica, pool) in parts::reservations(volume) {
            let woken = self.ledger.note_volume(&replica, &pool, size);
            woken.iter().for_each(|key| self.push(key));
            if size.is_none() {
                self.look_whether_removable(&pool);
            }
        }
    }

    pub(super) fn note_target(&self, change: &Changed<Target>) {
        if let (Some(old), Some(new)) = (&change.old, &change.new) {
            // A copy that does not count any more may go, wherever it is.
            let members = |target: &Target| Some(target.status.as_ref()?.members.clone());
            // What the target serves now, its copies on other nodes have now too: only these can measure it.
            let served = |target: &Target| target.status.as_ref().and_then(|it| it.capacity);
            let replicas = self.replicas.group(&new.spec.volume);
            let has_others = replicas.iter().any(|it| it.spec.node != new.spec.node);
            let is_news_elsewhere = has_others && served(old) != served(new);
            if members(old) != members(new) || is_news_elsewhere {
                self.passes.push(&new.spec.volume);
            }
            let (old, new) = (&old.status, &new.status);
            let old = old.as_ref().and_then(|status| status.rung.as_ref());
            let new = new.as_ref().and_then(|status| status.rung.as_ref());
            self.growths.note_rungs(old.as_slice(), new);
        }
    }

    /// Several uses on one node share their rungs, and each reports the same raise.
    pub(super) fn note_attachment(&self, change: &Changed<Attachment>) {
        let (Some(old), Some(new)) = (&change.old, &change.new) else {
            return;
        };
        let group = attachment_key(new).unwrap_or_default();
        let others = self.attachments.group(&group);
        let others = others
            .iter()
            .filter(|each| each.name_any() != new.name_any());
        let known: Vec<&RungStatus> = others.chain([old]).flat_map(|each| rungs(each)).collect();
        self.growths.note_rungs(&known, rungs(new));
    }

    /// A node that was lost, or that is back, concerns every volume that has something there.
    pub(super) fn note_node(&self, change: &Changed<Node>) {
        let lost = |node: &Option<Arc<Node>>| node.as_ref().map(|node| nodes::lost_since(node));
        if lost(&change.old) == lost(&change.new) {
            return;
        }
        let Some(node) = change.new.as_ref().or(change.old.as_ref()) else {
            return;
        };
        let name = node.name_any();
        let replicas = self.replicas.all();
        let of_replicas = replicas.iter().filter(|each| each.spec.node == name);
        of_replicas.for_each(|each| self.plans.push(&each.spec.volume));
        let targets = self.targets.all();
        let of_targets = targets.iter().filter(|each| each.spec.node == name);
        of_targets.for_each(|each| self.plans.push(&each.spec.volume));
        let uses = self.attachments.all();
        let of_uses = uses.iter().filter(|each| each.spec.node == name);
        let keys = of_uses.flat_map(|each| self.keys_of_attachment(each));
        keys.for_each(|key| self.plans.push(&key));
    }

    /// A pod that waits is told why.
    pub(super) fn note_pod(&self, change: &Changed<Pod>) {
        if let Some(pod) = change.new.as_ref().filter(|pod| pods::waits_untold(pod)) {
            self.pod_queue.push(&pods::key(pod));
        }
    }

    /// A pool whose spec changed is measured again; one that only reports its own measurement is not.
    pub(super) fn note_pool(&self, change: &Changed<Pool>) {
        let Some(new) = &change.new else {
            // Its directory is released.
            let gone = change.old.as_ref();
            gone.iter()
                .for_each(|old| self.pool_queue.push(&old.name_any()));
            return;
        };
        let same = change.old.as_ref().is_some_and(|old| {
            old.spec == new.spec
                && old.metadata.annotations == new.metadata.annotations
                && old.metadata.deletion_timestamp == new.metadata.deletion_timestamp
        });
        if !same {
            self.pool_queue.push(&new.name_any());
        }
        let ground = |pool: &Pool| {
            let filesystem = pool.status.as_ref().and_then(|it| it.filesystem.clone());
            (pool.spec.drain, filesystem)
        };
        if change.old.as_deref().map(ground) != Some(ground(new)) {
            // Copies there move away, or are worth more or less than before.
            let name = new.name_any();
            let replicas = self.replicas.all();
            let there = replicas.iter().filter(|each| each.spec.pool == name);
            there.for_each(|each| self.push(&each.spec.volume));
        }
    }

    /// A pool that is to be removed may go when nothing needs it any more.
    fn look_whether_removable(&self, pool: &str) {
        let pool = self.pools.get("", pool);
        if let Some(pool) = pool.filter(|pool| pool.metadata.deletion_timestamp.is_some()) {
            self.pool_queue.push(&pool.name_any());
        }
    }
}

fn rungs(attachment: &Attachment) -> &[RungStatus] {
    let status = attachment.status.as_ref();
    status.map_or(&[], |status| status.rungs.as_slice())
}
