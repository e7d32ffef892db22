//! The end of a history: everything is repaired, and must come to rest and be the same everywhere.

use trellis_engine::coordinator::Event;
use trellis_engine::proto::View;
use uuid::Uuid;

use crate::world::{GEOMETRY, World};
use crate::{Failure, Found};

/// How long the volume has to come to rest, in milliseconds of the model.
const REST_MS: u64 = 60_000;

/// How often a growth is asked for again.
const ASK_AGAIN_MS: u64 = 5_000;

/// After so long every copy has what was acknowledged.
const QUIET_MS: u64 = 2_000;

/// How often everything is scrubbed until all must have been found.
const SCRUBS_MAX: usize = 3;

impl World {
    pub(crate) fn finale(&mut self) -> Result<(), Found> {
        self.client.resting = true;
        self.rest("everything in sync")?;
        let largest = self.nodes.iter().map(|node| node.disk.meta.size).max();
        let to = largest.unwrap_or(0) + u64::from(GEOMETRY.region_bytes);
        self.grow_at_last(to)?;
        self.rest("everything in sync after a growth")?;
        self.scrub_mends_all()?;
        self.client_flush();
        let blocks = self.size_served / u64::from(GEOMETRY.block_bytes);
        for first in (0..blocks).step_by(8) {
            self.client_read(first..(first + 8).min(blocks));
            self.rest("a read of everything")?;
        }
        self.compare(blocks)
    }

    /// Grows the volume. A coordinator may be superseded after it was asked; so it is asked again, as the control
    /// plane does.
    fn grow_at_last(&mut self, to: u64) -> Result<(), Found> {
        let end = self.now + REST_MS * 1_000;
        while self.now < end {
            self.tell_chief(self.current, Event::Grow { to });
            let pause = self.now + ASK_AGAIN_MS * 1_000;
            if self.go_on_until(pause, |world| world.size_served >= to)? {
                return Ok(());
            }
        }
        self.stuck("a last growth")
    }

    /// Bits flip on one copy of some blocks. Scrubs find exactly these, and mend all of them. One is enough, unless a
    /// copy goes away while it is asked.
    fn scrub_mends_all(&mut self) -> Result<(), Found> {
        let last = |world: &World| world.chiefs[world.current].coordinator.status().scrub;
        // One that was asked for before may still run, or have found what was left.
        let end = self.now + REST_MS * 1_000;
        if !self.go_on_until(end, |world| last(world).running.is_none())? {
            return self.stuck("an earlier scrub");
        }
        // What was acknowledged may still be on its way to a copy, and would overwrite what has flipped.
        self.go_on_until(self.now + QUIET_MS * 1_000, |_| false)?;
        let flips = self.flip_some();
        let blocks = self.size_served / u64::from(GEOMETRY.block_bytes);
        // A disk that lied has lost what its sums still know, and the scrub finds it by the other copies.
        let has_lied = (0..blocks).any(|block| self.oracle.is_tainted(block));
        let (mut found, mut mended, mut differed) = (0, 0, 0);
        for _ in 0..SCRUBS_MAX {
            let number = last(self).last.map_or(0, |result| result.number);
            self.tell_chief(self.current, Event::Scrub);
            let end = self.now + REST_MS * 1_000;
            let is_over = |world: &World| last(world).last.is_some_and(|it| it.number > number);
            if !self.go_on_until(end, is_over)? {
                return self.stuck("a scrub");
            }
            let result = last(self).last.unwrap_or_default();
            self.trace(|| format!("a scrub has ended: {result:?}"));
            found += result.found;
            mended += result.mended;
            differed += if has_lied { 0 } else { result.differed };
            self.rest("everything in sync after a scrub")?;
            if found == flips && mended == flips && differed == 0 {
                return Ok(());
            }
        }
        Err(self.found(Failure::Scrub {
            flips,
            found,
            mended,
            differed,
        }))
    }

    fn rest(&mut self, what: &str) -> Result<(), Found> {
        let end = self.now + REST_MS * 1_000;
        let rested = |world: &World| {
            let status = world.chiefs[world.current].coordinator.status();
            world.chiefs[world.current].alive
                && world.current == world.newest
                && world.client.waits() == 0
                && status.available
                && status.redundancy_met
                && status.size_converged
                && status.view.next.is_none()
        };
        if self.go_on_until(end, rested)? {
            Ok(())
        } else {
            self.stuck(what)
        }
    }

    fn stuck(&self, what: &str) -> Result<(), Found> {
        let chief = &self.chiefs[self.current];
        let waits_for = format!(
            "{what}: {} requests, generation {}, {:?}",
            self.client.waits(),
            chief.generation,
            chief.coordinator.status()
        );
        Err(self.found(Failure::Stuck { waits_for }))
    }

    fn view(&self) -> View {
        self.chiefs[self.current].coordinator.status().view
    }

    /// All replicas have the same bytes and the same size.
    fn compare(&mut self, blocks: u64) -> Result<(), Found> {
        let members = self.view().members();
        let is_member = |id: &Uuid| members.contains(id);
        let nodes: Vec<_> = self
            .nodes
            .iter()
            .filter(|node| is_member(&node.id))
            .collect();
        for node in &nodes {
            let (volume, replica) = (self.size_served, node.disk.meta.size);
            if volume != replica {
                return Err(self.found(Failure::SizeDiffers { volume, replica }));
            }
        }
        for block in (0..blocks).filter(|block| !self.oracle.is_tainted(*block)) {
            let first = nodes[0].disk.block(block);
            if nodes.iter().any(|node| node.disk.block(block) != first) {
                return Err(self.found(Failure::Differ { block }));
            }
        }
        Ok(())
    }
}
