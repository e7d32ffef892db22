//! The files of the cache: what is found, stored and removed.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use trellis_api::step::{Step, reached};

use super::partial::{Partial, note_of};
use super::{
    Collected, IMAGES, ImageError, ImageReference, Inner, NAMES, PARTIAL, StoredImage, detect,
    key_of, path_error,
};
use crate::ImageDigest;
use crate::medium::BytesAt;

const IMAGE_MODE: u32 = 0o400;
const PIECE_BYTES: usize = 1 << 20;

/// What a reference was when it was fetched last.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Named {
    reference: String,
    digest: String,
    etag: Option<String>,
}

/// The image that a reference was, and by what its server knows it.
pub(super) type Known = (StoredImage, Option<String>);

impl Inner {
    fn image_path(&self, digest: &ImageDigest) -> PathBuf {
        self.directory.join(IMAGES).join(digest.hex())
    }

    fn name_path(&self, reference: &ImageReference) -> PathBuf {
        self.directory
            .join(NAMES)
            .join(format!("{}.json", key_of(reference)))
    }

    fn partial_path(&self, reference: &ImageReference) -> PathBuf {
        self.directory.join(PARTIAL).join(key_of(reference))
    }

    pub(super) fn find(
        &self,
        reference: &ImageReference,
    ) -> Result<Option<StoredImage>, ImageError> {
        let named = || {
            self.named(&self.name_path(reference))
                .map(|(digest, _)| digest)
        };
        let digest = reference.digest.or_else(named);
        digest.map_or(Ok(None), |digest| self.look(digest, reference.as_str()))
    }

    /// What a reference was. A file that cannot be read says nothing.
    fn named(&self, path: &Path) -> Option<(ImageDigest, Option<String>)> {
        let named: Named = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        Some((named.digest.parse().ok()?, named.etag))
    }

    /// An image that is here. It counts as used now.
    fn look(
        &self,
        digest: ImageDigest,
        reference: &str,
    ) -> Result<Option<StoredImage>, ImageError> {
        let path = self.image_path(&digest);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(path_error(&path, error)),
        };
        let used = file.set_modified(SystemTime::now());
        used.map_err(|error| path_error(&path, error))?;
        let (format, virtual_size) = detect::detect(&file, &path, reference)?;
        Ok(Some(StoredImage {
            digest,
            path,
            format,
            virtual_size,
        }))
    }

    /// The download to go on with, and the image that the reference was, with its tag.
    pub(super) fn start(
        &self,
        reference: &ImageReference,
    ) -> Result<(Partial, Option<Known>), ImageError> {
        let partial = Partial::open(&self.partial_path(reference))?;
        let named = self.named(&self.name_path(reference));
        let known = match named {
            Some((digest, etag)) => self
                .look(digest, reference.as_str())?
                .map(|image| (image, etag)),
            None => None,
        };
        Ok((partial, known))
    }

    /// Gives a whole file the name that it has by its digest.
    pub(super) fn store(
        &self,
        partial: &Partial,
        reference: &ImageReference,
        etag: Option<String>,
    ) -> Result<StoredImage, ImageError> {
        let image = self.check(partial, reference).inspect_err(|_| {
            // Its bytes will not become better.
            partial.discard();
        })?;
        reached(Step::ImageReceived);
        let named = Named {
            reference: reference.as_str().to_owned(),
            digest: image.digest.to_string(),
            etag,
        };
        // The reference comes first: a digest that is not here yet says nothing, and the whole download is found again.
        let name = self.name_path(reference);
        let text = serde_json::to_vec(&named).map_err(|error| path_error(&name, error.into()))?;
        trellis_files::replace(&name, &text).map_err(|error| path_error(&name, error))?;
        let placed = fs::rename(&partial.path, &image.path).and_then(|()| {
            fs::set_permissions(&image.path, Permissions::from_mode(IMAGE_MODE))?;
            File::open(self.directory.join(IMAGES))?.sync_all()
        });
        placed.map_err(|error| path_error(&image.path, error))?;
        reached(Step::ImageStored);
        let note = note_of(&partial.path);
        trellis_files::remove(&note).map_err(|error| path_error(&note, error))?;
        Ok(image)
    }

    /// Makes a file durable, and says what image it is.
    fn check(
        &self,
        partial: &Partial,
        reference: &ImageReference,
    ) -> Result<StoredImage, ImageError> {
        let (file, digest) = partial.finish()?;
        if let Some(wanted) = reference.digest.filter(|wanted| *wanted != digest) {
            return Err(ImageError::OtherDigest {
                reference: reference.as_str().to_owned(),
                found: digest,
                wanted,
            });
        }
        let (format, virtual_size) = detect::detect(file, &partial.path, reference.as_str())?;
        let path = self.image_path(&digest);
        Ok(StoredImage {
            digest,
            path,
            format,
            virtual_size,
        })
    }

    /// Copies a file of the node, if the node lends it out.
    pub(super) fn take_file(
        &self,
        path: &Path,
        reference: &ImageReference,
    ) -> Result<StoredImage, ImageError> {
        let failed = |error| path_error(path, error);
        let real = fs::canonicalize(path).map_err(failed)?;
        let lent = self
            .settings
            .local_directories
            .iter()
            .filter_map(|directory| fs::canonicalize(directory).ok());
        if !lent
            .into_iter()
            .any(|directory| real.starts_with(directory))
        {
            let path = path.to_owned();
            return Err(ImageError::NotLent { path });
        }
        let file = File::open(&real).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            let path = path.to_owned();
            return Err(ImageError::NotLent { path });
        }
        let mut partial = Partial::open(&self.partial_path(reference))?;
        partial.begin(None, None)?;
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let count = BytesAt::read(&file, &mut piece, partial.received).map_err(failed)?;
            if count == 0 {
                break;
            }
            partial.append(&piece[..count])?;
            if partial.received > self.settings.size_max.get() {
                partial.discard();
                return Err(ImageError::TooLarge {
                    reference: reference.as_str().to_owned(),
                    max: self.settings.size_max,
                });
            }
        }
        self.store(&partial, reference, None)
    }

    pub(super) fn collect(
        &self,
        keep: &BTreeSet<ImageDigest>,
        unused_for: Duration,
    ) -> Result<Collected, ImageError> {
        let mut collected = Collected::default();
        let is_old = |path: &Path| {
            let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
            // A time in the future is none that passed.
            modified.is_ok_and(|time| time.elapsed().is_ok_and(|age| age >= unused_for))
        };
        for path in entries(&self.directory.join(IMAGES))? {
            let name = path.file_name().and_then(|name| name.to_str());
            let Some(digest) = name.and_then(ImageDigest::from_hex) else {
                continue;
            };
            if !keep.contains(&digest) && is_old(&path) {
                collected.bytes += remove(&path)?;
                reached(Step::ImageRemoved);
                collected.images.push(digest);
            }
        }
        for path in entries(&self.directory.join(NAMES))? {
            let named = self.named(&path);
            let is_here = named.is_some_and(|(digest, _)| self.image_path(&digest).exists());
            if !is_here && is_old(&path) {
                remove(&path)?;
            }
        }
        let running: BTreeSet<String> = {
            let flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
            flights.keys().cloned().collect()
        };
        for path in entries(&self.directory.join(PARTIAL))? {
            let key = path
                .file_stem()
                .map(|stem| stem.to_string_lossy().into_owned());
            let runs = key.is_some_and(|key| running.contains(&key));
            if !runs && is_old(&path) {
                collected.bytes += remove(&path)?;
            }
        }
        Ok(collected)
    }
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let failed = |error| path_error(directory, error);
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        paths.push(entry.map_err(failed)?.path());
    }
    Ok(paths)
}

/// Removes a file, and says how long it was.
fn remove(path: &Path) -> Result<u64, ImageError> {
    let bytes = fs::metadata(path).map_or(0, |metadata| metadata.len());
    trellis_files::remove(path).map_err(|error| path_error(path, error))?;
    Ok(bytes)
}
