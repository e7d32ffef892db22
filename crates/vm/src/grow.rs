//! Makes a disk larger, and never smaller.
//!
//! QEMU's `block_resize` means something else for each driver, and for most of them a number that is too small destroys
//! data without a word. So each kind of storage has its own rule, decided by the pure function [`resize_to`]:
//!
//! - **A device** is never told a size. Size 0 makes QEMU read the device's own size again.
//! - **A raw file** is measured first. QEMU does not notice that a file was extended by others, and would cut it back
//!   to what it was told. So it is told the larger of what is wanted and what the file has.
//! - **A qcow2 image** is told what is wanted, if that is more than it has.
//!
//! The node that is resized is the one that the device uses. The size is then read back from QEMU; only that counts.

use std::fs::File;

use serde::Deserialize;
use serde_json::{Value, json};
use trellis_api::Bytes;
use trellis_node::filesystem::Outcome;

use crate::disks::{Inventory, PluggedDisk, Storage};
use crate::error::{Blocker, Context, Error, Result};
use crate::graph::{DiskId, SECTOR};
use crate::qmp::Client;

/// What to tell QEMU about a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    /// Nothing: it is large enough.
    Nothing,
    /// To look at the device again.
    Rescan,
    /// The new size.
    To(Bytes),
}

/// What to tell QEMU so that a disk has at least `want`. `file` is what the file has, if it was measured.
pub fn resize_to(disk: &PluggedDisk, file: Option<Bytes>, want: Bytes) -> Result<Resize> {
    let larger = |size: Bytes| {
        if size <= disk.size {
            Ok(Resize::Nothing)
        } else if size.get().is_multiple_of(SECTOR.get()) {
            Ok(Resize::To(size))
        } else {
            Err(Error::Unaligned { size })
        }
    };
    match disk.storage {
        // Always, because only QEMU's look at the device tells whether it has grown.
        Storage::Device => Ok(Resize::Rescan),
        Storage::Qcow2 => larger(want),
        Storage::File => {
            let file = file.ok_or_else(|| Error::FileNeeded {
                id: disk.id.clone(),
            })?;
            let has = file.saturating_sub(disk.offset);
            // QEMU counts a file's last, incomplete sector as a whole one.
            let counted = has.checked_next_multiple_of(SECTOR).unwrap_or(has);
            if counted < disk.size {
                return Err(Error::FileShorter {
                    id: disk.id.clone(),
                    file,
                    disk: disk.size,
                });
            }
            larger(want.max(counted))
        }
    }
}

/// Grows a disk to `want` at least, or says what is in the way. `file` is the disk's open file, for a raw file.
pub async fn grow(qmp: &Client, id: &DiskId, want: Bytes, file: Option<&File>) -> Result<Outcome> {
    let before = Inventory::ask(qmp).await?.disk(id)?.clone();
    let measured = match (before.storage, file) {
        (Storage::File, Some(file)) => Some(measure(file)?),
        _ => None,
    };
    let size = match resize_to(&before, measured, want)? {
        Resize::Nothing => return Ok(Outcome::Unchanged { size: before.size }),
        Resize::Rescan => Bytes::ZERO,
        Resize::To(size) => size,
    };
    let resize = json!({ "node-name": id.top_node(), "size": size.get() });
    if let Err(error) = qmp.execute("block_resize", resize).await {
        return Err(explain(qmp, id, error).await);
    }
    let after = Inventory::ask(qmp).await?.disk(id)?.size;
    if after < want {
        return Err(Error::NotGrown {
            id: id.clone(),
            size: after,
            want,
        });
    }
    Ok(if after == before.size {
        Outcome::Unchanged { size: after }
    } else {
        Outcome::Raised {
            from: before.size,
            to: after,
        }
    })
}

fn measure(file: &File) -> Result<Bytes> {
    let path = std::path::Path::new("the open file of a disk");
    Ok(Bytes::new(file.metadata().context("measure", path)?.len()))
}

/// Why QEMU refused to resize: its sentences differ from version to version, so it is asked what uses the disk.
async fn explain(qmp: &Client, id: &DiskId, error: Error) -> Error {
    if !matches!(error, Error::Refused { .. }) {
        return error;
    }
    match blocker(qmp, id).await {
        Ok(Some(by)) => Error::Busy { id: id.clone(), by },
        // QEMU's own sentence is the best that there is.
        Ok(None) | Err(_) => error,
    }
}

async fn blocker(qmp: &Client, id: &DiskId) -> Result<Option<Blocker>> {
    #[derive(Deserialize)]
    struct Job {
        id: String,
        status: String,
    }
    #[derive(Deserialize)]
    struct Export {
        id: String,
        #[serde(rename = "node-name")]
        node: String,
    }
    let ours = [id.top_node(), id.format_node(), id.protocol_node()];
    let exports = qmp.execute("query-block-exports", Value::Null).await?;
    let exports: Vec<Export> = serde_json::from_value(exports).unwrap_or_default();
    if let Some(export) = exports.into_iter().find(|each| ours.contains(&each.node)) {
        return Ok(Some(Blocker::Export(export.id)));
    }
    // A job does not say which nodes it holds. That one runs is reason enough to try again later.
    let jobs = qmp.execute("query-jobs", Value::Null).await?;
    let jobs: Vec<Job> = serde_json::from_value(jobs).unwrap_or_default();
    let running = jobs.into_iter().find(|job| job.status != "concluded");
    Ok(running.map(|job| Blocker::Job(job.id)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::graph::Bus;
    use proptest::prelude::*;

    fn disk(storage: Storage, size: u64, offset: u64) -> PluggedDisk {
        PluggedDisk {
            id: DiskId::new("a").unwrap(),
            bus: Bus::Scsi,
            size: Bytes::new(size),
            storage,
            offset: Bytes::new(offset),
            out_of_space: false,
        }
    }

    proptest! {
        #[test]
        fn no_size_that_is_told_to_qemu_makes_anything_smaller(
            size in (0u64..1000).prop_map(|n| n * 512),
            offset in (0u64..4).prop_map(|n| n * 512),
            extra in 0u64..5000,
            want in 0u64..1_000_000,
        ) {
            // Fails if a disk or a file would be cut to a wish, or if a file or an image were told size 0.
            let file = Bytes::new(size + offset + extra);
            for storage in [Storage::Device, Storage::File, Storage::Qcow2] {
                let disk = disk(storage, size, offset);
                match resize_to(&disk, Some(file), Bytes::new(want)) {
                    Ok(Resize::Rescan) => prop_assert_eq!(storage, Storage::Device),
                    Ok(Resize::To(to)) => {
                        prop_assert!(to > disk.size);
                        if storage == Storage::File {
                            prop_assert!(to.get() + offset >= file.get());
                        }
                    }
                    Ok(Resize::Nothing) => prop_assert!(want <= size),
                    Err(Error::Unaligned { size }) => prop_assert!(!size.get().is_multiple_of(512)),
                    Err(other) => prop_assert!(false, "{}", other),
                }
            }
        }
    }

    #[test]
    fn a_file_that_cannot_be_the_disks_is_refused() {
        // Fails if a growth trusts a file that is shorter than the disk on it.
        let disk = disk(Storage::File, 4096, 512);
        let error = resize_to(&disk, Some(Bytes::new(4096)), Bytes::new(8192)).unwrap_err();
        assert!(matches!(error, Error::FileShorter { .. }), "{error}");
        let error = resize_to(&disk, None, Bytes::new(8192)).unwrap_err();
        assert!(matches!(error, Error::FileNeeded { .. }), "{error}");
    }
}
