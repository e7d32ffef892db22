//! The checker: finds faults in a pool without touching it.
//!
//! It takes no lock and writes nothing, so it can look at a pool that is in use. What it finds there may be an
//! unfinished growth, creation or removal; such findings are notes.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use trellis_api::Bytes;
use uuid::Uuid;

use super::dir::{Dir, facts};
use super::name::Entry;
use super::pair::{Slots, choose, read_slot};
use super::pool::REPLICAS;
use super::store::DATA;
use super::superblock::{Fault, Slot, Superblock};
use super::{Identity, REPLICAS_MAX};
use crate::{Error, Result};

/// How often a replica is looked at before its flaws are believed: a superblock that is being
/// overwritten at this moment can look torn.
const LOOKS_MAX: usize = 3;

/// What the checker has found.
#[derive(Debug, Default)]
pub struct Report {
    /// How many replicas were looked at.
    pub replicas: usize,
    /// Everything that is not as it should be, in the order of the names.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The worst that was found, if anything was.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(Finding::severity).max()
    }
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Harmless: work on its way, or work that a crash has cut short.
    Note,
    /// A flaw that opening the replica repairs.
    Healable,
    /// Something that needs a person, or another replica to repair from.
    Broken,
}

/// One thing that is not as it should be.
#[derive(Debug)]
pub enum Finding {
    /// The pool, or a part of it, could not be looked at, or cannot be used as it is.
    Unusable {
        /// Why, in a sentence that names the place.
        error: Error,
    },
    /// A creation or removal that is on its way, or was cut short.
    Leftover {
        /// The temporary directory.
        path: PathBuf,
    },
    /// Something that Trellis has not put there.
    Stranger {
        /// What was found.
        path: PathBuf,
    },
    /// One superblock is unusable, and the other is good.
    SuperblockBad {
        /// The unusable one.
        path: PathBuf,
        /// What is wrong with it.
        fault: Fault,
    },
    /// One superblock is older than the other.
    SuperblockBehind {
        /// The older one.
        path: PathBuf,
        /// The size that it says.
        size: Bytes,
        /// The size that counts.
        current: Bytes,
    },
    /// The data file is shorter than the size, in a part that was never acknowledged.
    DataShort {
        /// The data file.
        path: PathBuf,
        /// Its length.
        length: Bytes,
        /// The replica's size.
        size: Bytes,
    },
    /// The data file is longer than the size.
    DataLong {
        /// The data file.
        path: PathBuf,
        /// Its length.
        length: Bytes,
        /// The replica's size.
        size: Bytes,
    },
    /// Blocks are not what was written there.
    Rotten {
        /// The data file.
        path: PathBuf,
        /// How many blocks.
        blocks: u64,
        /// Where the first of them is.
        first: Bytes,
        /// Where the last of them is.
        last: Bytes,
    },
    /// Blocks do not match sums that were not durable when the copy was last stopped.
    InDoubt {
        /// The data file.
        path: PathBuf,
        /// How many blocks.
        blocks: u64,
    },
    /// There are no sums to compare with.
    NoSums {
        /// The data file.
        path: PathBuf,
    },
    /// It is in use, and was not compared with its sums.
    Served {
        /// The data file.
        path: PathBuf,
    },
    /// Two directories say that they are the same replica.
    IdentityTwice {
        /// Whose bytes both hold.
        identity: Identity,
        /// The first of the two.
        first: PathBuf,
        /// The second of the two.
        second: PathBuf,
    },
}

impl Finding {
    /// How bad it is.
    pub fn severity(&self) -> Severity {
        match self {
            Finding::Leftover { .. }
            | Finding::Stranger { .. }
            | Finding::SuperblockBehind { .. }
            | Finding::DataLong { .. }
            | Finding::InDoubt { .. }
            | Finding::NoSums { .. }
            | Finding::Served { .. } => Severity::Note,
            Finding::SuperblockBad { .. } | Finding::DataShort { .. } => Severity::Healable,
            Finding::Unusable { .. } | Finding::Rotten { .. } | Finding::IdentityTwice { .. } => {
                Severity::Broken
            }
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Unusable { error } => match std::error::Error::source(error) {
                Some(source) => write!(out, "{error} ({source})"),
                None => write!(out, "{error}"),
            },
            Finding::Leftover { path } => write!(
                out,
                "{} belongs to a creation or removal that is not finished; opening the pool cleans it up",
                path.display()
            ),
            Finding::Stranger { path } => {
                write!(
                    out,
                    "{} is not of Trellis' making and is left alone",
                    path.display()
                )
            }
            Finding::SuperblockBad { path, fault } => write!(
                out,
                "{} {fault}; the other superblock is good, and opening the replica repairs this one",
                path.display()
            ),
            Finding::SuperblockBehind {
                path,
                size,
                current,
            } => write!(
                out,
                "{} still says {size}, while {current} counts; it is brought up to date by itself",
                path.display()
            ),
            Finding::DataShort { path, length, size } => write!(
                out,
                "{} has {length} of {size}; the rest was never written, and opening the replica extends it",
                path.display()
            ),
            Finding::DataLong { path, length, size } => write!(
                out,
                "{} has {length}, which is more than the size {size}; the rest does not count",
                path.display()
            ),
            Finding::Rotten {
                path,
                blocks,
                first,
                last,
            } => write!(
                out,
                "{} has {blocks} blocks that are not what was written, from byte {} to {}; start the volume, and they \
                 are mended from another copy when they are read or scrubbed",
                path.display(),
                first.get(),
                last.get()
            ),
            Finding::InDoubt { path, blocks } => write!(
                out,
                "{} has {blocks} blocks that were being written when it was stopped; this is sorted out when it is \
                 opened",
                path.display()
            ),
            Finding::NoSums { path } => write!(
                out,
                "{} has no sums to compare with: it is the only copy of its volume, or its class has checksums: \
                 \"false\"",
                path.display()
            ),
            Finding::Served { path } => write!(
                out,
                "{} is in use and was not compared; `trellis volume scrub CLAIM` compares it",
                path.display()
            ),
            Finding::IdentityTwice {
                identity,
                first,
                second,
            } => write!(
                out,
                "{} and {} both hold {identity}; one is a copy, so move the older one away",
                first.display(),
                second.display()
            ),
        }
    }
}

/// Looks at the pool in `dir` and changes nothing. The pool may be in use.
pub fn check(dir: &Path) -> Report {
    let mut report = Report::default();
    if let Err(error) = check_pool(dir, &mut report) {
        report.findings.push(Finding::Unusable { error });
    }
    report
}

fn check_pool(dir: &Path, report: &mut Report) -> Result<()> {
    let root = Dir::open(dir)?.ok_or_else(|| Error::PoolNotDirectory {
        path: dir.to_owned(),
    })?;
    // A pool that was never opened has no replicas.
    let Some(replicas) = root.dir(REPLICAS)? else {
        return Ok(());
    };
    let mut seen = BTreeMap::<Uuid, PathBuf>::new();
    for entry in replicas.entries()? {
        let path = replicas.join(&entry);
        match Entry::of(&entry) {
            Entry::Making(_) | Entry::Removing(_) => {
                report.findings.push(Finding::Leftover { path })
            }
            Entry::Stranger => report.findings.push(Finding::Stranger { path }),
            Entry::Published(_) if report.replicas == REPLICAS_MAX => {
                return Err(Error::PoolCrowded {
                    path: dir.to_owned(),
                });
            }
            Entry::Published(name) => match check_replica(&replicas, name) {
                // Removed since the directory was listed.
                Ok(None) => {}
                Ok(Some((identity, findings))) => {
                    report.replicas += 1;
                    report.findings.extend(findings);
                    if let Some(first) = seen.insert(identity.replica, path.clone()) {
                        let twice = Finding::IdentityTwice {
                            identity,
                            first,
                            second: path,
                        };
                        report.findings.push(twice);
                    }
                }
                Err(error) => {
                    report.replicas += 1;
                    report.findings.push(Finding::Unusable { error });
                }
            },
        }
    }
    Ok(())
}

/// Looks at one replica until it looks well, or has looked ill often enough to be believed.
fn check_replica(replicas: &Dir, name: &str) -> Result<Option<(Identity, Vec<Finding>)>> {
    let mut looks = 1;
    loop {
        let looked = match replicas.dir(name)? {
            Some(dir) => look(&dir, name).map(Some),
            None => Ok(None),
        };
        let well = match &looked {
            Ok(Some((_, findings))) => findings.iter().all(|f| f.severity() == Severity::Note),
            Ok(None) => true,
            Err(_) => false,
        };
        if well || looks == LOOKS_MAX {
            return looked;
        }
        looks += 1;
    }
}

fn look(dir: &Dir, name: &str) -> Result<(Identity, Vec<Finding>)> {
    let slot = |slot: Slot| read_slot(dir, dir.file_read_only(slot.file_name())?.as_ref(), slot);
    let slots = [slot(Slot::A)?, slot(Slot::B)?];
    let (committed, superblock) = choose(dir, name, &slots)?;
    let mut findings = Vec::new();
    findings.extend(look_at_other(dir, committed.other(), &slots, &superblock));
    findings.extend(look_at_data(dir, &superblock)?);
    Ok((superblock.identity, findings))
}

fn look_at_other(dir: &Dir, slot: Slot, slots: &Slots, current: &Superblock) -> Option<Finding> {
    let path = dir.join(slot.file_name());
    match slots[slot.index()] {
        Err(fault) => Some(Finding::SuperblockBad { path, fault }),
        Ok(other) if other != *current => Some(Finding::SuperblockBehind {
            path,
            size: other.size,
            current: current.size,
        }),
        Ok(_) => None,
    }
}

fn look_at_data(dir: &Dir, superblock: &Superblock) -> Result<Option<Finding>> {
    let path = dir.join(DATA);
    let Some(data) = dir.file_read_only(DATA)? else {
        return Err(Error::DataAbsent { path });
    };
    let (length, size) = (facts(&data, &path)?.length, superblock.size);
    if length < superblock.data_synced {
        return Err(Error::DataCut {
            path,
            length,
            expected: superblock.data_synced,
        });
    }
    if length < size {
        return Ok(Some(Finding::DataShort { path, length, size }));
    }
    Ok((length > size).then_some(Finding::DataLong { path, length, size }))
}
