//! What the copies on this machine say about themselves and their past.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{MutexGuard, PoisonError};

use trellis_api::Hold;
use trellis_api::about::About;
use trellis_api::step::{self, Step};
use trellis_control::node::machine::{ReplicaPlace, Stage};
use trellis_node::volume::Past;

use super::ThisMachine;
use super::copies::identity;
use super::hold::store_hold;

impl ThisMachine {
    pub(super) fn descriptions(&self) -> MutexGuard<'_, HashMap<(PathBuf, String), About>> {
        let descriptions = self.descriptions.lock();
        descriptions.unwrap_or_else(PoisonError::into_inner)
    }

    /// What a copy says about itself; nothing if it says nothing that can be read.
    fn about(&self, place: &ReplicaPlace) -> Result<Option<About>, Hold> {
        let key = (place.pool.clone(), place.name.clone());
        if let Some(known) = self.descriptions().get(&key) {
            return Ok(Some(known.clone()));
        }
        let identity = identity(place)?;
        let text = self.with_pool(&place.pool, place.pool_id.as_deref(), |pool| {
            pool.about(&place.name, identity).map_err(store_hold)
        })?;
        let about: Option<About> = text.and_then(|text| serde_json::from_slice(&text).ok());
        if let Some(about) = &about {
            self.descriptions().insert(key, about.clone());
        }
        Ok(about)
    }

    /// Makes a copy say this about itself, together with what it knows better. Returns what it says then.
    pub(super) fn describe(&self, place: &ReplicaPlace, wanted: &About) -> Result<About, Hold> {
        let found = self.about(place)?;
        let new = found
            .as_ref()
            .map_or_else(|| wanted.clone(), |found| found.renewed(wanted));
        if found.is_some_and(|found| found.is_but_for_size(&new)) {
            return Ok(new);
        }
        let identity = identity(place)?;
        self.with_pool(&place.pool, place.pool_id.as_deref(), |pool| {
            let text = text_of(&new);
            pool.describe(&place.name, identity, &text)
                .map_err(store_hold)
        })?;
        let key = (place.pool.clone(), place.name.clone());
        self.descriptions().insert(key, new.clone());
        Ok(new)
    }

    /// Whether the volume ever had a filesystem: the stored objects know it, or a copy does. A copy that cannot be
    /// asked is away, and then the others know it.
    pub(super) fn past(&self, stage: &Stage) -> Past {
        let knows = |place: &ReplicaPlace| {
            let about = self.about(place).ok().flatten();
            about.is_some_and(|about| about.formatted)
        };
        if stage.formatted || stage.copies.iter().any(knows) {
            Past::Formatted
        } else {
            Past::Unused
        }
    }

    /// Records next to the bytes that they carry a filesystem, before anybody can use it.
    pub(super) fn note_formatted(&self, stage: &Stage) -> Result<(), Hold> {
        for place in &stage.copies {
            let Some(wanted) = &place.about else { continue };
            let wanted = About {
                formatted: true,
                ..wanted.clone()
            };
            match self.describe(place, &wanted) {
                Ok(_) => {}
                // One of several copies that is away is told when it is back; its objects know it by then.
                Err(hold) if stage.copies.len() > 1 => {
                    tracing::warn!(replica = place.name, "{}", hold.message);
                }
                Err(hold) => return Err(hold),
            }
        }
        step::reached(Step::FormattingNoted);
        Ok(())
    }
}

/// The text of a copy's description: for people, so it has lines.
pub(super) fn text_of(about: &About) -> Vec<u8> {
    let mut text = serde_json::to_vec_pretty(about).unwrap_or_default();
    text.push(b'\n');
    text
}
