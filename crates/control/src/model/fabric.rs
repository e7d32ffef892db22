//! Several machines in memory, and the network between them. Replicas, devices and filesystems are numbers; whatever
//! would lose data on real machines is recorded as a breach.
//!
//! A machine that dies loses its processes, devices and mounts, and keeps its disks. One that freezes keeps everything
//! and does nothing. One that is cut off goes on alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

use trellis_api::{Bytes, Rung};

use super::law::{Breach, Law};
use super::targets::{Agreed, Generation, TargetProcess};
use crate::node::machine::TargetPlace;

/// Filesystems grow in whole units of this size, and may leave the rest of a device unused.
const FILESYSTEM_UNIT: u64 = 8 << 20;

/// A fault that a test plants, to see that a rule finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Copies take writes of a target that they have left for a later one.
    NoFence,
    /// A target takes a generation above all that it sees, whatever its term.
    NoTerm,
    /// A target decides from the first report that it gets.
    TrustsOne,
    /// A copy stops counting as soon as it is to go.
    LetsGoEarly,
    /// A copy goes with its process.
    RemovesRetired,
    /// Device and filesystem are said to have grown with their volume.
    DeviceLies,
    /// A target that takes over serves the smallest size that it finds.
    TakesSmallest,
    /// A target says something else at every look.
    Wavers,
}

pub struct Fabric {
    state: Mutex<State>,
}

pub(super) struct State {
    pub(super) hosts: Vec<Host>,
    /// What the copies of each volume of several have agreed on, by the volume's name. They keep it among themselves.
    pub(super) volumes: BTreeMap<String, Agreed>,
    pub(super) broken: Option<Rung>,
    /// The pool whose copies cannot be reached.
    pub(super) pool_away: Option<PathBuf>,
    pub(super) breaches: Vec<Breach>,
    pub(super) flaw: Option<Flaw>,
}

/// One machine.
#[derive(Default)]
pub(super) struct Host {
    is_down: bool,
    is_frozen: bool,
    /// No other machine reaches it, nor it any other.
    is_cut: bool,
    pub(super) boots: u32,
    /// On its disks, by name.
    pub(super) copies: BTreeMap<String, Copy>,
    /// By volume.
    pub(super) targets: BTreeMap<String, TargetProcess>,
    /// Volumes in use, by the names of the files that they are used through.
    pub(super) stages: BTreeMap<String, Staged>,
}

/// A copy on a disk.
#[derive(Default)]
pub(super) struct Copy {
    pub(super) id: String,
    pub(super) pool: PathBuf,
    pub(super) size: Bytes,
    /// It is one of several.
    pub(super) is_of_several: bool,
    /// Its process runs.
    pub(super) is_served: bool,
    /// Of a single copy. What several hold belongs to the volume.
    pub(super) filesystem: Option<Bytes>,
    /// The target that it follows: it takes nothing from earlier ones.
    pub(super) promised: Generation,
    /// The last write that it has. It has all before it.
    pub(super) has: u64,
}

/// A volume in use on one machine.
#[derive(Default)]
pub(super) struct Staged {
    /// Which use of the volume it is, of several copies.
    pub(super) number: u64,
    pub(super) device: Bytes,
    pub(super) uses: BTreeSet<PathBuf>,
}

/// The size of the largest filesystem on a device.
pub(super) fn whole_units(size: Bytes) -> Bytes {
    Bytes::new(size.get() - size.get() % FILESYSTEM_UNIT)
}

impl Fabric {
    pub fn of(hosts: usize) -> Self {
        let state = State {
            hosts: (0..hosts).map(|_| Host::default()).collect(),
            volumes: BTreeMap::new(),
            broken: None,
            pool_away: None,
            breaches: Vec::new(),
            flaw: None,
        };
        Fabric {
            state: Mutex::new(state),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("no test panics while it holds this")
    }

    pub fn plant(&self, flaw: Flaw) {
        self.state().flaw = Some(flaw);
    }

    /// The rung that cannot be raised from now on, if any.
    pub fn break_rung(&self, rung: Option<Rung>) {
        self.state().broken = rung;
    }

    /// The pool that is away from now on, if any.
    pub fn lose_pool(&self, pool: Option<PathBuf>) {
        self.state().pool_away = pool;
    }

    pub fn die(&self, host: usize) {
        let host = &mut self.state().hosts[host];
        host.is_down = true;
        host.is_frozen = false;
        host.targets.clear();
        host.stages.clear();
        for copy in host.copies.values_mut() {
            copy.is_served = false;
        }
    }

    pub fn start(&self, host: usize) {
        let host = &mut self.state().hosts[host];
        host.is_down = false;
        host.boots += 1;
    }

    pub fn freeze(&self, host: usize, is_frozen: bool) {
        self.state().hosts[host].is_frozen = is_frozen;
    }

    pub fn cut(&self, host: usize, is_cut: bool) {
        self.state().hosts[host].is_cut = is_cut;
    }

    /// Time passes for every target that runs.
    pub fn tick(&self) {
        let mut state = self.state();
        for host in 0..state.hosts.len() {
            let volumes: Vec<String> = state.hosts[host].targets.keys().cloned().collect();
            for volume in volumes {
                state.advance(host, &volume);
            }
        }
    }

    /// What must not have happened and did.
    pub fn breaches(&self) -> Vec<Breach> {
        self.state().breaches.clone()
    }

    /// The machines whose targets of a volume could acknowledge a write now, for every volume.
    pub fn acknowledging(&self) -> BTreeMap<String, Vec<usize>> {
        let state = self.state();
        let mut found: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (index, host) in state.hosts.iter().enumerate() {
            for (volume, process) in &host.targets {
                if state.can_acknowledge(index, process) {
                    found.entry(volume.clone()).or_default().push(index);
                }
            }
        }
        found
    }

    /// The true size of a volume: what its copies have agreed on, or what its only replica has.
    pub fn size(&self, volume: &str) -> Option<Bytes> {
        let state = self.state();
        let agreed = state.volumes.get(volume).map(Agreed::size);
        agreed.or_else(|| {
            let name = format!("{volume}-0");
            let mut alone = state.hosts.iter().filter_map(|host| host.copies.get(&name));
            let alone = alone.find(|copy| !copy.is_of_several);
            alone.map(|copy| copy.size)
        })
    }

    /// Whether anything of a volume is left.
    pub fn has_bytes(&self, volume: &str) -> bool {
        let state = self.state();
        state.volumes.contains_key(volume) || state.has_copies(volume)
    }

    /// The identity and the size of every copy, by machine and name.
    pub fn copies(&self) -> BTreeMap<(usize, String), (String, Bytes)> {
        let state = self.state();
        let hosts = state.hosts.iter().enumerate();
        let copies = hosts.flat_map(|(index, host)| {
            let copies = host.copies.iter();
            copies.map(move |(name, copy)| ((index, name.clone()), (copy.id.clone(), copy.size)))
        });
        copies.collect()
    }

    /// What a user of the volume gets on each machine where it is in use.
    pub fn branches(&self, volume: &str) -> Vec<(usize, Bytes)> {
        let state = self.state();
        let name = format!("{volume}-0");
        let hosts = state.hosts.iter().enumerate();
        let branches = hosts.filter_map(|(index, host)| {
            let single = host.copies.get(&name);
            let (staged, filesystem) = match host.stages.get(volume) {
                Some(staged) => (staged, state.volumes.get(volume)?.filesystem()),
                None => (host.stages.get(&name)?, single?.filesystem),
            };
            let falls_short = |size: &Bytes| *size < whole_units(staged.device);
            let filesystem = filesystem.filter(falls_short);
            Some((index, filesystem.unwrap_or(staged.device)))
        });
        branches.collect()
    }
}

impl State {
    /// What runs on a machine goes on.
    pub(super) fn runs(&self, host: usize) -> bool {
        !self.hosts[host].is_down && !self.hosts[host].is_frozen
    }

    fn connects(&self, from: usize, to: usize) -> bool {
        from == to || !(self.hosts[from].is_cut || self.hosts[to].is_cut)
    }

    /// The copies whose address a target knows and whose process it reaches.
    pub(super) fn reachable(&self, from: usize, place: &TargetPlace) -> Vec<String> {
        let mut found = Vec::new();
        for (index, host) in self.hosts.iter().enumerate() {
            if !self.runs(index) || !self.connects(from, index) {
                continue;
            }
            let there = |copy: &&Copy| {
                let has_pool = self.pool_away.as_ref() != Some(&copy.pool);
                copy.is_served && has_pool && place.addresses.contains_key(&copy.id)
            };
            let copies = host.copies.values().filter(there);
            found.extend(copies.map(|copy| copy.id.clone()));
        }
        found
    }

    pub(super) fn copy_of(&mut self, id: &str) -> Option<&mut Copy> {
        let hosts = self.hosts.iter_mut();
        let mut copies = hosts.flat_map(|host| host.copies.values_mut());
        copies.find(|copy| copy.id == id)
    }

    pub(super) fn look_at(&self, id: &str) -> Option<&Copy> {
        let mut copies = self.hosts.iter().flat_map(|host| host.copies.values());
        copies.find(|copy| copy.id == id)
    }

    pub(super) fn has_copies(&self, volume: &str) -> bool {
        let of_volume = |name: &String| name.rsplit_once('-').is_some_and(|(of, _)| of == volume);
        let mut names = self.hosts.iter().flat_map(|host| host.copies.keys());
        names.any(of_volume)
    }

    pub(super) fn breach(&mut self, law: Law, what: String) {
        self.breaches.push(Breach::of(law, what));
    }
}
