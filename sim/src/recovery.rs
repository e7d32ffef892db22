//! An operator gives up replicas: the volume goes on with some of those that are left, and the others come back later,
//! when nobody expects them.

use std::collections::BTreeSet;

use trellis_engine::coordinator::Takeover;
use trellis_engine::proto::{Config, Lineage, Region, View};
use uuid::Uuid;

use crate::Failure;
use crate::client::value_of;
use crate::world::{GEOMETRY, Happening, World};

/// A recovery that is under way.
#[derive(Clone, Debug)]
pub(crate) struct Recovery {
    lineage: Lineage,
    config: Config,
    /// The regions that each survivor held when it was decided to go on with them.
    held: Vec<(usize, Vec<Region>)>,
}

fn region_of(block: u64) -> Region {
    GEOMETRY.region_of(block * u64::from(GEOMETRY.block_bytes))
}

impl World {
    /// Somebody decides that some of the replicas are all there is.
    pub(crate) fn recover(&mut self) {
        let Some(view) = self.views.last() else {
            return;
        };
        if self.recovery.is_some() {
            return;
        }
        let lineage = match view.lineage.number() {
            Some(number) if number < Lineage::NUMBER_MAX => Lineage::Recovered {
                number: number + 1,
                id: self.rng.draw(),
            },
            _ => return,
        };
        let members: Vec<usize> = (0..self.nodes.len())
            .filter(|node| view.members().contains(&self.nodes[*node].id))
            .collect();
        let mut survivors: Vec<usize> = members.clone();
        survivors.retain(|_| self.rng.chance(500));
        if survivors.is_empty() {
            survivors.push(members[self.rng.index(members.len())]);
        }
        self.recover_with(&survivors, lineage);
    }

    /// Whether too many replicas have lost their memory for anybody but a person to decide.
    fn is_undecidable(&self) -> bool {
        let view = self.views.last().expect("there is a first view");
        let lost = |id: Uuid| {
            let mut nodes = self.nodes.iter();
            nodes.any(|node| node.id == id && node.disk.has_forgotten())
        };
        !view.takeover_quorum(|id| !lost(id))
    }

    /// When everything else is mended, somebody goes on with all that is left of what nobody can prove.
    pub(crate) fn recover_if_needed(&mut self) {
        let Some(view) = self.views.last() else {
            return;
        };
        if self.recovery.is_some() || !self.is_undecidable() {
            return;
        }
        let (lineage, members) = (view.lineage, view.members());
        let survivors: Vec<usize> = (0..self.nodes.len())
            .filter(|node| members.contains(&self.nodes[*node].id))
            .collect();
        let number = lineage.number().unwrap_or(0) + 1;
        let id = self.rng.draw();
        self.recover_with(&survivors, Lineage::Recovered { number, id });
    }

    fn recover_with(&mut self, survivors: &[usize], lineage: Lineage) {
        let ids = survivors.iter().map(|node| self.nodes[*node].id).collect();
        let mut config = Config::majority(ids);
        if self.rng.chance(300) {
            config.consistency = 1 + self.rng.index(survivors.len());
        }
        self.trace(|| format!("given up are all replicas but {survivors:?}: {lineage}"));
        // Nobody serves what is given up, and nobody else starts it.
        for index in 0..self.chiefs.len() {
            if self.chiefs[index].alive {
                self.kill_chief(index);
            }
        }
        for node in 0..self.nodes.len() {
            if !survivors.contains(&node) {
                self.kill_node(node, false);
                self.nodes[node].away = true;
            }
        }
        let held = survivors
            .iter()
            .map(|node| (*node, self.holds(*node)))
            .collect();
        self.recovery = Some(Recovery {
            lineage,
            config,
            held,
        });
        let generation = self.generation_last + 1;
        self.later(10_000, Happening::TakeOver { generation });
    }

    /// A survivor has lost its memory: what it held is lost with that.
    pub(crate) fn forgets_what_it_held(&mut self, node: usize) {
        if let Some(recovery) = &mut self.recovery {
            for (survivor, held) in &mut recovery.held {
                if *survivor == node {
                    held.clear();
                }
            }
        }
    }

    /// The regions that a node holds, as far as it knows.
    fn holds(&self, node: usize) -> Vec<Region> {
        let disk = &self.nodes[node].disk;
        if disk.is_about_to_forget() {
            return Vec::new();
        }
        let meta = &disk.meta;
        let regions = (0..).map(Region).take(meta.stamps.len());
        regions
            .filter(|region| !meta.stale.contains_key(region))
            .collect()
    }

    /// With what a coordinator starts: the view that it is told, and whose reports it needs.
    pub(crate) fn start_of_chief(&mut self) -> (View, Takeover) {
        if let Some(recovery) = &self.recovery {
            let view = View::recovered(recovery.lineage, recovery.config.clone());
            self.generation_last = self
                .generation_last
                .max(recovery.lineage.generation_min() - 1);
            return (view, Takeover::Survivors);
        }
        let last = self.views.last().expect("there is a first view").clone();
        // What the control plane remembers may be outdated, but for which history it is.
        if self.rng.chance(200) {
            let index = self.rng.index(self.views.len());
            let view = self.views[index].clone();
            if view.lineage == last.lineage {
                return (view, Takeover::Quorum);
            }
        }
        (last, Takeover::Quorum)
    }

    /// A coordinator serves. If it has ended a recovery, what the survivors lacked is lost, and nothing else.
    pub(crate) fn recovered(&mut self, index: usize, size: u64) {
        let status = self.chiefs[index].coordinator.status();
        let Some(recovery) = self
            .recovery
            .take_if(|recovery| recovery.lineage == status.view.lineage)
        else {
            return;
        };
        self.trace(|| format!("the survivors serve {size}"));
        self.stats.recoveries += 1;
        self.views.push(status.view.clone());
        let block_bytes = u64::from(GEOMETRY.block_bytes);
        let before = self.size_served / block_bytes;
        self.size_served = size;
        let value = |node: usize, block: u64| value_of(&self.nodes[node].disk.meant(block));
        for block in 0..before.max(size / block_bytes) {
            let region = region_of(block);
            if block >= size / block_bytes {
                self.oracle.given_up(block, [0].into());
                continue;
            }
            let now = recovery
                .held
                .iter()
                .map(|(node, _)| *node)
                .find(|node| !self.nodes[*node].disk.meta.stale.contains_key(&region));
            let had: BTreeSet<_> = recovery
                .held
                .iter()
                .filter(|(_, held)| held.contains(&region))
                .map(|(node, _)| value(*node, block))
                .collect();
            let Some(now) = now.map(|node| value(node, block)) else {
                // Who was chosen has died since, and is chosen again by the next takeover.
                let any = recovery.held.iter().map(|(node, _)| value(*node, block));
                self.oracle.left_to(block, &had, any.collect());
                continue;
            };
            if let Err(violation) = self.oracle.recovered(block, now, &had) {
                self.failure.get_or_insert(Failure::Read(violation));
            }
        }
        for node in 0..self.nodes.len() {
            if std::mem::take(&mut self.nodes[node].away) {
                let delay = self.rng.between(1_000, 900_000);
                self.later(delay, Happening::Start { node });
            }
        }
    }
}
