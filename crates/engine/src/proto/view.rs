//! Who the replicas of a volume are, and how many of them make a quorum.

use std::collections::BTreeSet;

use super::ReplicaId;

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
/// While there are two, everything needs a quorum of each. So whoever knows only the older one
/// cannot overlook what was acknowledged, and neither can whoever knows only the newer one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Counts views. A later one replaces an earlier one.
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
            version: 1,
            current,
            next: None,
        }
    }

    fn configs(&self) -> impl Iterator<Item = &Config> {
        std::iter::once(&self.current).chain(&self.next)
    }

    /// Whether what these replicas hold may be acknowledged: they are CF of RF.
    pub fn write_quorum(&self, has: impl Fn(ReplicaId) -> bool) -> bool {
        self.configs()
            .all(|config| config.count(&has) >= config.consistency)
    }

    /// Whether nothing that was acknowledged can have passed by these replicas: there are so many
    /// that every write quorum has one of them in it.
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
        self.configs().all(Config::is_sound)
    }
}
