//! The ladder of one volume on this node, as something to climb.

use std::cell::RefCell;

use trellis_api::kinds::RungStatus;
use trellis_api::{Bytes, Hold, HoldReason, Rung};

use crate::node::climb::{Climbable, Measured};
use crate::node::machine::{Machine, ReplicaFound, ReplicaPlace, Stage, StageFound};

/// The lower rungs of a volume: its copies, and what is served of them.
pub(super) trait Lower {
    /// What was last measured of both.
    fn sizes(&self) -> (Bytes, Bytes);
    /// Measures again.
    fn measure_again(&self) -> Result<(), Hold>;
    /// Raises both.
    fn raise(&self, to: Bytes) -> Result<(), Hold>;
}

/// A single copy that is used in place.
pub(super) struct Single<'a> {
    pub(super) machine: &'a Machine,
    pub(super) place: &'a ReplicaPlace,
    pub(super) found: RefCell<ReplicaFound>,
}

impl Lower for Single<'_> {
    fn sizes(&self) -> (Bytes, Bytes) {
        let found = self.found.borrow();
        (found.size, found.served)
    }

    fn measure_again(&self) -> Result<(), Hold> {
        self.found
            .replace(self.machine.copies.find_replica(self.place)?);
        Ok(())
    }

    fn raise(&self, to: Bytes) -> Result<(), Hold> {
        self.machine.copies.raise_replica(self.place, to)
    }
}

/// The ladder of one volume on this node, with what was last measured of it.
pub(super) struct Subject<'a> {
    pub(super) machine: &'a Machine,
    pub(super) lower: &'a dyn Lower,
    pub(super) stage: Option<&'a Stage>,
    pub(super) provided: RefCell<Option<StageFound>>,
    pub(super) early: &'a dyn Fn(&[RungStatus]),
}

impl Subject<'_> {
    fn lower(&self) -> Vec<Measured> {
        let (copies, served) = self.lower.sizes();
        vec![
            Measured {
                rung: Rung::Replica,
                size: copies,
                full: false,
                note: None,
            },
            Measured {
                rung: Rung::Volume,
                size: served,
                full: false,
                note: None,
            },
        ]
    }

    fn upper(&self) -> Vec<Measured> {
        let found = self.provided.borrow();
        let rungs = found.iter().flat_map(|found| &found.rungs);
        rungs
            .map(|each| Measured {
                rung: each.rung,
                size: each.size,
                full: each.full,
                note: each.note.clone(),
            })
            .collect()
    }
}

impl Climbable for Subject<'_> {
    fn measure(&self) -> Result<Vec<Measured>, Hold> {
        // Both were measured a moment ago, in this pass.
        Ok(self.lower().into_iter().chain(self.upper()).collect())
    }

    fn measure_again(&self, raised: Rung) -> Result<Vec<Measured>, Hold> {
        match self.stage {
            Some(stage) if raised > Rung::Volume => {
                self.provided
                    .replace(Some(self.machine.consumers.find_stage(stage)?));
                Ok(self.upper())
            }
            _ => {
                self.lower.measure_again()?;
                Ok(self.lower())
            }
        }
    }

    fn raise(&self, rung: Rung, to: Bytes) -> Result<(), Hold> {
        match (rung, self.stage) {
            (Rung::Replica | Rung::Volume, _) => self.lower.raise(to),
            (Rung::Filesystem, Some(stage)) if stage.read_only => {
                let message = format!("Every use of volume {} is read-only.", stage.volume);
                Err(Hold::new(HoldReason::ReadOnly, message))
            }
            (Rung::Filesystem, Some(stage)) if !stage.online_growth => {
                let message = format!(
                    "Volume {} is mounted, and its filesystem may not grow while it is.",
                    stage.volume
                );
                Err(Hold::new(HoldReason::OnlineGrowthOff, message))
            }
            (rung, Some(stage)) => self.machine.consumers.raise_stage(stage, rung, to),
            (_, None) => Ok(()),
        }
    }

    fn climbed(&self, ladder: &[RungStatus]) {
        (self.early)(ladder);
    }
}
