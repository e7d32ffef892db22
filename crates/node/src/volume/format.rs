//! Makes a filesystem on a device that has none, safe against crashes and never over foreign content.
//!
//! mkfs is not atomic. A crash in the middle leaves bytes that are neither empty nor a filesystem, and nobody could
//! tell them from foreign content. So the intent is made durable first, in a small note next to the mounts, with the
//! identity that the filesystem will have:
//!
//! ```text
//!   device empty ──▶ note written ──▶ mkfs ──▶ note removed
//! ```
//!
//! While the note exists, torn content is ours and is formatted again; content that mkfs cannot have left is foreign
//! as ever. A *finished* filesystem is never formatted again, note or not: another node may have used it meanwhile.
//!
//! The caller that brings the volume into use records, next to its bytes and before anybody can use them, that it was
//! formatted. From then on an empty device is a loss: it is reported, and never formatted. A death before that record
//! cannot have cost anything, since nobody had the filesystem yet.

use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use trellis_api::step::{Step, reached};
use uuid::Uuid;

use super::device::claim;
use super::place;
use crate::error::{Context, Error, Result};
use crate::filesystem::{self, FilesystemKind, Geometry, State};
use crate::holders;
use crate::probe::{self, Content, Foreign};
use crate::sys::block;

/// mkfs fails if another process has a claim on the device at that moment: a scan, or a program that another thread is
/// just starting, which has our own claim until it runs.
const MAKE_ATTEMPTS_MAX: u32 = 3;
const MAKE_PAUSE: Duration = Duration::from_millis(100);

/// The filesystem that is on the device now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formatted {
    /// Its shape.
    pub geometry: Geometry,
    /// Whether it was made by this call.
    pub made: bool,
}

/// What is known of a volume before its device is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Past {
    /// Nobody has ever used a filesystem on it, as far as anybody knows.
    Unused,
    /// It has carried a filesystem that somebody could use.
    Formatted,
}

/// Makes sure that the device of a volume that nobody has used yet has a filesystem of that kind. `note` is a path that
/// belongs to this volume alone, in a directory that exists and survives a restart.
pub fn ensure_filesystem(device: &Path, kind: FilesystemKind, note: &Path) -> Result<Formatted> {
    ensure_filesystem_with_past(device, kind, note, Past::Unused)
}

/// As [`ensure_filesystem`], for a volume with that past: if it was formatted before, an empty device is
/// [`Error::FilesystemGone`].
pub fn ensure_filesystem_with_past(
    device: &Path,
    kind: FilesystemKind,
    note: &Path,
    past: Past,
) -> Result<Formatted> {
    let mut attempts_left = MAKE_ATTEMPTS_MAX;
    loop {
        attempts_left -= 1;
        match observe_and_make(device, kind, note, past) {
            Err(Error::ProgramFailed { output, .. }) if attempts_left > 0 => {
                tracing::warn!(device = %device.display(), output, "mkfs failed and is tried again");
                thread::sleep(MAKE_PAUSE);
            }
            other => return other,
        }
    }
}

fn observe_and_make(
    device: &Path,
    kind: FilesystemKind,
    note: &Path,
    past: Past,
) -> Result<Formatted> {
    // What was in use is not made again, whatever a note says.
    let intent = read_note(note, device)?.filter(|_| past == Past::Unused);
    match look(device)? {
        Content::Filesystem {
            kind: found,
            geometry,
            state,
            ..
        } if state != State::Unfinished => {
            if found != kind {
                return Err(Error::OtherFilesystem {
                    device: device.to_owned(),
                    found,
                    asked: kind,
                });
            }
            trellis_files::remove(note).context("remove", note)?;
            Ok(Formatted {
                geometry,
                made: false,
            })
        }
        Content::Empty if past == Past::Formatted => Err(Error::FilesystemGone {
            device: device.to_owned(),
            kind,
        }),
        Content::Empty => {
            // Before the note: what mkfs will refuse anyway leaves no trace.
            filesystem::require_size(kind, device)?;
            let uuid = Uuid::new_v4();
            trellis_files::replace(note, uuid.to_string().as_bytes()).context("write", note)?;
            finish(device, kind, uuid, note, false)
        }
        found => match intent.filter(|uuid| could_be_torn(&found, *uuid)) {
            Some(uuid) => finish(device, kind, uuid, note, true),
            None => Err(Error::NotEmpty {
                device: device.to_owned(),
                found: Box::new(found),
            }),
        },
    }
}

/// Whether an interrupted mkfs for that identity can have left this content.
fn could_be_torn(found: &Content, intent: Uuid) -> bool {
    match found {
        Content::Filesystem { uuid, state, .. } => *uuid == intent && *state == State::Unfinished,
        Content::Foreign { what } => {
            matches!(what, Foreign::Torn(_) | Foreign::Unrecognised { .. })
        }
        Content::Empty => true,
    }
}

/// Runs mkfs on content that was checked a moment ago, and closes the note.
///
/// The claim of the check cannot be held while mkfs runs, because mkfs claims the device itself. So only another mkfs
/// in between could slip through, and those of xfs and btrfs check once more.
fn finish(
    device: &Path,
    kind: FilesystemKind,
    uuid: Uuid,
    note: &Path,
    overwrite: bool,
) -> Result<Formatted> {
    let geometry = filesystem::make(kind, device, uuid, overwrite)?;
    sync_device(device)?;
    trellis_files::remove(note).context("remove", note)?;
    tracing::info!(device = %device.display(), %kind, size = %geometry.size(), "filesystem made");
    reached(Step::FilesystemMade);
    Ok(Formatted {
        geometry,
        made: true,
    })
}

/// Looks at the device's content. A device that nobody claims is read afresh, not from a cache; one
/// that is mounted is read as it is, and is then not empty.
fn look(device: &Path) -> Result<Content> {
    if let Some(claim) = claim(device)? {
        block::drop_cache(&claim).context("drop the cache of", device)?;
        return probe::probe_open(&claim, device);
    }
    match probe::probe(device)? {
        found @ Content::Filesystem { .. } => Ok(found),
        _ => {
            let holders = holders::of_device(device, place::number_of(device)?);
            Err(Error::Busy {
                what: device.to_owned(),
                holders,
                covered_by: None,
            })
        }
    }
}

fn sync_device(device: &Path) -> Result<()> {
    let node = block::open(device).context("open", device)?;
    node.sync_all().context("sync", device)
}

fn read_note(note: &Path, device: &Path) -> Result<Option<Uuid>> {
    let text = match fs::read_to_string(note) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).context("read", note),
    };
    let bad = |_| Error::BadIntent {
        path: note.to_owned(),
        device: device.to_owned(),
    };
    Uuid::from_str(text.trim()).map(Some).map_err(bad)
}
