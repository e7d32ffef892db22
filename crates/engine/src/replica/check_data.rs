//! The checker of bytes: compares copies at rest with the sums of their blocks, without touching them.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use trellis_api::Bytes;

use super::check::{Finding, Report};
use super::dir::Dir;
use super::name::Entry;
use super::pair::{choose, read_slot};
use super::pool::REPLICAS;
use super::store::DATA;
use super::sums::{NearSums, SLOTS_MAX};
use super::superblock::Slot as SuperblockSlot;
use super::{BLOCK, meta};
use crate::proto::{Geometry, Region};
use crate::sums::{Slot, Summer, doubtful};
use crate::{Error, Result};

/// Compares the data of every copy on the pool in `dir` with its sums, and adds what it finds to the report.
/// `progress` is told the copy, how far it is, and its size.
pub fn check_data(dir: &Path, report: &mut Report, progress: &mut dyn FnMut(&str, Bytes, Bytes)) {
    if let Err(error) = check_pool(dir, report, progress) {
        report.findings.push(Finding::Unusable { error });
    }
}

fn check_pool(
    dir: &Path,
    report: &mut Report,
    progress: &mut dyn FnMut(&str, Bytes, Bytes),
) -> Result<()> {
    let root = Dir::open(dir)?.ok_or_else(|| Error::PoolNotDirectory {
        path: dir.to_owned(),
    })?;
    let Some(replicas) = root.dir(REPLICAS)? else {
        return Ok(());
    };
    for entry in replicas.entries()? {
        let Entry::Published(name) = Entry::of(&entry) else {
            continue;
        };
        let Some(dir) = replicas.dir(name)? else {
            continue;
        };
        match compare(&dir, name, progress) {
            Ok(findings) => report.findings.extend(findings),
            // The checker of superblocks tells of most of these too; that is better than none telling.
            Err(error) => report.findings.push(Finding::Unusable { error }),
        }
    }
    Ok(())
}

fn compare(
    dir: &Dir,
    name: &str,
    progress: &mut dyn FnMut(&str, Bytes, Bytes),
) -> Result<Vec<Finding>> {
    let path = dir.join(DATA);
    // Whoever serves it holds this lock for as long as it does.
    if !dir.try_lock()? {
        return Ok(vec![Finding::Served { path }]);
    }
    let slot =
        |slot: SuperblockSlot| read_slot(dir, dir.file_read_only(slot.file_name())?.as_ref(), slot);
    let slots = [slot(SuperblockSlot::A)?, slot(SuperblockSlot::B)?];
    let (_, superblock) = choose(dir, name, &slots)?;
    let absent = || Error::DataAbsent { path: path.clone() };
    let data = dir.file_read_only(DATA)?.ok_or_else(absent)?;
    let Some(sums) = NearSums::beside(&path) else {
        return Ok(vec![Finding::NoSums { path }]);
    };
    let meta = meta::look(dir, Geometry::STANDARD)?;
    let in_doubt: std::collections::BTreeSet<Region> = match &meta {
        Some(meta) => doubtful(meta, sums.settled()).collect(),
        None => std::collections::BTreeSet::new(),
    };
    let mut found = Mismatches::default();
    let regions = Geometry::STANDARD.regions(superblock.size.get());
    let regions = (0..).map(Region).take(regions);
    for region in regions {
        let (offset, length) = Geometry::STANDARD.extent(region, superblock.size.get());
        progress(name, Bytes::new(offset), superblock.size);
        let bad = mismatches(&data, &sums, offset, length).map_err(|source| Error::Io {
            doing: "read",
            path: path.clone(),
            source,
        })?;
        found.add(offset, &bad, in_doubt.contains(&region));
    }
    progress(name, superblock.size, superblock.size);
    Ok(found.findings(&path))
}

#[derive(Default)]
struct Mismatches {
    rotten: u64,
    first: Option<Bytes>,
    last: Option<Bytes>,
    doubtful: u64,
}

impl Mismatches {
    fn add(&mut self, offset: u64, bad: &[u64], is_doubtful: bool) {
        let count = u64::try_from(bad.len()).unwrap_or(u64::MAX);
        if is_doubtful {
            self.doubtful += count;
            return;
        }
        self.rotten += count;
        let at = |block: &u64| Bytes::new(offset + block * BLOCK.get());
        self.first = self.first.or_else(|| bad.first().map(at));
        self.last = bad.last().map(at).or(self.last);
    }

    fn findings(&self, path: &Path) -> Vec<Finding> {
        let mut findings = Vec::new();
        let path = path.to_owned();
        if let (Some(first), Some(last)) = (self.first, self.last) {
            findings.push(Finding::Rotten {
                path: path.clone(),
                blocks: self.rotten,
                first,
                last,
            });
        }
        if self.doubtful > 0 {
            let blocks = self.doubtful;
            findings.push(Finding::InDoubt { path, blocks });
        }
        findings
    }
}

/// The blocks of a region that do not match their sums, counted from its first.
fn mismatches(data: &File, sums: &NearSums, offset: u64, length: u64) -> io::Result<Vec<u64>> {
    let block = usize::try_from(BLOCK.get()).unwrap_or(usize::MAX);
    let count = usize::try_from(length / BLOCK.get())
        .unwrap_or(0)
        .min(SLOTS_MAX);
    let mut slots = vec![Slot::default(); count];
    let is_read = sums.load(offset / BLOCK.get(), &mut slots, true);
    is_read.ok_or_else(|| io::Error::other("its sums cannot be read"))?;
    let mut bytes = Vec::with_capacity(count * block);
    let from = At { file: data, offset };
    from.take(length).read_to_end(&mut bytes)?;
    // What is behind the end of the file is zeros.
    bytes.resize(count * block, 0);
    let summer = Summer::new(block);
    let blocks = (0..).zip(summer.sums(&bytes)).zip(&slots);
    Ok(blocks
        .filter(|((_, sum), slot)| !slot.admits(*sum, sums.coverage()))
        .map(|((index, _), _)| index)
        .collect())
}

/// A file, read from a place on.
struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(bytes, self.offset)?;
        self.offset += u64::try_from(read).unwrap_or(0);
        Ok(read)
    }
}
