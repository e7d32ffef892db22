//! Which volumes the copies on the pools make up. Pure: computed from what was found and what is stored.

use std::collections::{BTreeMap, HashSet};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt;
use trellis_api::Bytes;
use trellis_api::about::About;
use trellis_api::kinds::{Replica, Volume};
use trellis_engine::replica::Surveyed;
use uuid::Uuid;

/// A copy that was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its pool.
    pub pool: String,
    /// The pool's node.
    pub node: String,
    /// What it says.
    pub copy: Surveyed,
}

/// What is stored.
pub struct Known<'a> {
    /// The copies.
    pub replicas: &'a [Replica],
    /// The volumes.
    pub volumes: &'a [Volume],
    /// The claims.
    pub claims: &'a [PersistentVolumeClaim],
    /// The classes.
    pub classes: &'a [StorageClass],
}

/// A volume that no object names, or some of whose copies none does.
#[derive(Clone, Debug)]
pub struct Lost {
    /// The volume's name.
    pub name: String,
    /// What its copies say about it.
    pub about: About,
    /// The claim that it should have, in the namespace of the old one.
    pub claim: String,
    /// The copies to take in.
    pub copies: Vec<Found>,
    /// The volume that is stored and lacks these copies.
    pub stored: Option<Volume>,
    /// How many of its copies there must be, if the copies know.
    pub members: usize,
    /// Whether its class is not stored.
    pub lacks_class: bool,
}

impl Lost {
    /// The size that it has: as much as any copy holds, since nothing shrinks.
    pub fn size(&self) -> Bytes {
        let sizes = self.copies.iter().map(|each| each.copy.size);
        sizes.max().unwrap_or_default()
    }
}

/// What to do about a volume.
#[derive(Clone, Debug)]
pub enum Plan {
    /// Take it in.
    Take(Lost),
    /// Leave it alone, for this reason.
    Leave(Lost, String),
}

impl Plan {
    /// The volume.
    pub fn lost(&self) -> &Lost {
        match self {
            Plan::Take(lost) | Plan::Leave(lost, _) => lost,
        }
    }

    /// Remarks about it.
    pub fn note(&self) -> String {
        let lost = match self {
            Plan::Leave(_, why) => return why.clone(),
            Plan::Take(lost) => lost,
        };
        let mut notes = Vec::new();
        if lost.stored.is_some() {
            notes.push("copies of a volume that is stored".to_owned());
        }
        if lost.copies.len() < lost.members {
            notes.push(format!(
                "{} of {} copies were found",
                lost.copies.len(),
                lost.members
            ));
        }
        if lost.lacks_class {
            notes.push(format!("class {:?} is made anew", lost.about.class));
        }
        notes.join("; ")
    }
}

/// What to do about the copies that no object names, and which of them belong to nothing that can be taken in.
pub fn plan(
    found: Vec<Found>,
    known: &Known<'_>,
    suffix: Option<&str>,
) -> (Vec<Plan>, Vec<(String, String)>) {
    let mut passed_over = Vec::new();
    let named: HashSet<(String, String)> = known
        .replicas
        .iter()
        .map(|each| (each.spec.volume_id.clone(), each.identity()))
        .collect();
    let is_named = |each: &Found| {
        let identity = each.copy.identity;
        named.contains(&(identity.volume.to_string(), identity.replica.to_string()))
    };
    let mut volumes: BTreeMap<Uuid, Vec<Found>> = BTreeMap::new();
    for each in found.into_iter().filter(|each| !is_named(each)) {
        volumes
            .entry(each.copy.identity.volume)
            .or_default()
            .push(each);
    }
    let mut plans = Vec::new();
    for (id, copies) in volumes {
        let copies = newest(copies, &mut passed_over);
        let (copies, members) = counting(copies, &mut passed_over);
        let about = copies.iter().find_map(|each| {
            let text = each.copy.about.as_deref()?;
            serde_json::from_slice::<About>(text).ok()
        });
        let Some(about) = about.filter(|about| !about.volume.is_empty()) else {
            let why =
                "it does not say whose it is; its data file can still be read with ordinary tools";
            passed_over.extend(copies.iter().map(|each| (place(each), why.to_owned())));
            continue;
        };
        let stored = known.volumes.iter();
        let stored = stored
            .clone()
            .find(|each| each.identity() == id.to_string());
        let has_class = known
            .classes
            .iter()
            .any(|each| each.name_any() == about.class);
        let lost = Lost {
            name: about.volume.clone(),
            claim: about.claim.clone(),
            copies,
            stored: stored.cloned(),
            members,
            lacks_class: stored.is_none() && !has_class && !about.class.is_empty(),
            about,
        };
        plans.push(decide(lost, known, suffix));
    }
    (plans, passed_over)
}

/// Of several directories with one identity, the newest: the others are older duplicates of it.
fn newest(mut copies: Vec<Found>, passed_over: &mut Vec<(String, String)>) -> Vec<Found> {
    copies.sort_by_key(|each| {
        let copy = &each.copy;
        std::cmp::Reverse((copy.generation, copy.sequence, copy.size))
    });
    let mut kept: Vec<Found> = Vec::new();
    for each in copies {
        let same = |other: &&Found| other.copy.identity == each.copy.identity;
        match kept.iter().find(same) {
            Some(newer) => {
                let why = format!("it is an older duplicate of {}", place(newer));
                passed_over.push((place(&each), why));
            }
            None => kept.push(each),
        }
    }
    kept.sort_by(|a, b| a.copy.name.cmp(&b.copy.name));
    kept
}

/// The copies that count, according to the copies' newest record, and how many there should be.
fn counting(copies: Vec<Found>, passed_over: &mut Vec<(String, String)>) -> (Vec<Found>, usize) {
    let views = copies.iter().filter_map(|each| each.copy.view.as_ref());
    let Some(view) = views.max_by_key(|view| view.version).cloned() else {
        let count = copies.len();
        return (copies, count);
    };
    let (count, gone): (Vec<Found>, Vec<Found>) = copies
        .into_iter()
        .partition(|each| view.contains(each.copy.identity.replica));
    let why = "the other copies have agreed that it does not count any more";
    passed_over.extend(gone.iter().map(|each| (place(each), why.to_owned())));
    (count, view.members().len())
}

fn place(found: &Found) -> String {
    format!("{} on pool {}", found.copy.name, found.pool)
}

fn decide(mut lost: Lost, known: &Known<'_>, suffix: Option<&str>) -> Plan {
    let taken = |name: &str| known.replicas.iter().any(|each| each.name_any() == name);
    if let Some(copy) = lost.copies.iter().find(|each| taken(&each.copy.name)) {
        let why = format!("another copy is stored as {:?}", copy.copy.name);
        return Plan::Leave(lost, why);
    }
    if lost.stored.is_some() {
        return Plan::Take(lost);
    }
    if known
        .volumes
        .iter()
        .any(|each| each.name_any() == lost.name)
    {
        let why = format!("another volume is stored as {:?}", lost.name);
        return Plan::Leave(lost, why);
    }
    let claim_of = |name: &str| {
        known.claims.iter().find(|each| {
            each.name_any() == name && each.namespace().as_deref() == Some(&lost.about.namespace)
        })
    };
    // A claim that names the volume already waits for it.
    let is_taken = |name: &str| {
        claim_of(name).is_some_and(|claim| {
            let spec = claim.spec.as_ref();
            spec.and_then(|spec| spec.volume_name.as_deref()) != Some(&lost.name)
        })
    };
    if !is_taken(&lost.claim) {
        return Plan::Take(lost);
    }
    let other = suffix.map(|suffix| format!("{}{suffix}", lost.claim));
    match other.filter(|name| !is_taken(name)) {
        Some(name) => {
            lost.claim = name;
            Plan::Take(lost)
        }
        None => {
            let why = format!(
                "claim {}/{} exists and has another volume; delete it, or take this one in under another name with \
                 --suffix=-old",
                lost.about.namespace, lost.claim
            );
            Plan::Leave(lost, why)
        }
    }
}
