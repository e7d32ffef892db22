//! Who the replicas of a volume are, and how many of them make a quorum.

use std::collections::BTreeSet;

use super::{Lineage, ReplicaId};

/// The most replicas that a volume has.
pub const REPLICAS_PER_VOLUME_MAX: usize = 5;

/// A set of replicas and the consistency factor: how many of them must hold what is acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The replicas.
    pub members: BTreeSet<ReplicaId>,
    /// The consistency factor, between 1 and the number of replicas.
    pub consistency: usize,
}

impl Config {
    /// The replicas with the usual consistency factor, RF/2 + 1.
    pub fn majority(members: BTreeSet<ReplicaId>) -> Config {
        let consistency = members.len() / 2 + 1;
        Config {
            members,
            consistency,
        }
    }

    /// Whether it is a set of 1 to 5 replicas with a consistency factor that it can reach.
    pub fn is_sound(&self) -> bool {
        (1..=REPLICAS_PER_VOLUME_MAX).contains(&self.members.len())
            && (1..=self.members.len()).contains(&self.consistency)
    }

    fn count(&self, has: &impl Fn(ReplicaId) -> bool) -> usize {
        self.members.iter().filter(|id| has(**id)).count()
    }
}

/// The configuration in force, and the one to which the volume is moving.
///
/// While there are two, everything needs a quorum of each. So neither a coordinator that knows only the older one nor
/// one that knows only the newer one can overlook an acknowledged write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The history in which it is in force.
    pub lineage: Lineage,
    /// Counts views. A later one of the same history replaces an earlier one.
    pub version: u64,
    /// The configuration in force.
    pub current: Config,
    /// The configuration that is to follow it.
    pub next: Option<Config>,
}

impl View {
    /// The first view of a volume.
    pub fn first(current: Config) -> View {
        View {
            lineage: Lineage::Original,
            version: 1,
            current,
            next: None,
        }
    }

    /// The first view of a history that begins with these replicas.
    ///
    /// The last bytes of a region may be on one of them alone until the others are repaired. So at first no takeover
    /// may do without any of them, which is what a factor of 1 means.
    pub fn recovered(lineage: Lineage, survivors: Config) -> View {
        let alone = Config {
            members: survivors.members.clone(),
            consistency: 1,
        };
        View {
            lineage,
            version: lineage.floor() + 1,
            next: (survivors != alone).then_some(survivors),
            current: alone,
        }
    }

    /// The view of a caller that knows the replicas of a history, but not which view it has reached.
    pub fn assumed(lineage: Lineage, current: Config) -> View {
        View {
            lineage,
            version: lineage.floor().max(1),
            ..View::first(current)
        }
    }

    /// What a replica knows that has never taken part.
    pub fn blank(replica: ReplicaId) -> View {
        View {
            version: 0,
            ..View::first(Config::majority([replica].into()))
        }
    }

    /// Whether it is what a replica knows that has never taken part.
    pub fn is_blank(&self) -> bool {
        self.lineage == Lineage::Original && self.version == 0
    }

    /// Whether it replaces another one: it is of the same history and later, or of a later history.
    pub fn replaces(&self, other: &View) -> bool {
        if self.lineage == other.lineage {
            return self.version > other.version;
        }
        self.lineage.number() > other.lineage.number()
    }

    fn configs(&self) -> impl Iterator<Item = &Config> {
        std::iter::once(&self.current).chain(&self.next)
    }

    /// Whether what these replicas hold may be acknowledged: they are CF of RF.
    pub fn write_quorum(&self, has: impl Fn(ReplicaId) -> bool) -> bool {
        self.configs()
            .all(|config| config.count(&has) >= config.consistency)
    }

    /// Whether no acknowledged write can be missing from all of these replicas: there are so many that every write
    /// quorum includes one of them.
    pub fn takeover_quorum(&self, has: impl Fn(ReplicaId) -> bool) -> bool {
        self.configs()
            .all(|config| config.count(&has) > config.members.len() - config.consistency)
    }

    /// Whether all replicas of both configurations are among these.
    pub fn complete(&self, has: impl Fn(ReplicaId) -> bool) -> bool {
        self.configs()
            .all(|config| config.count(&has) == config.members.len())
    }

    /// Whether the replica belongs to one of the configurations.
    pub fn contains(&self, id: ReplicaId) -> bool {
        self.configs().any(|config| config.members.contains(&id))
    }

    /// All replicas of both configurations.
    pub fn members(&self) -> BTreeSet<ReplicaId> {
        self.configs()
            .flat_map(|config| config.members.iter().copied())
            .collect()
    }

    /// Whether a peer may have sent this.
    pub fn is_sound(&self) -> bool {
        self.lineage.is_sound() && self.configs().all(Config::is_sound)
    }
}
