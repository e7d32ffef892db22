//! Images of VMs, kept by the digest of their files.
//!
//! ```text
//!   partial/KEY         a download that has not ended, and KEY.json, what its server said
//!        │  complete, synced, checked
//!        ▼
//!   sha256/DIGEST       an image; it never changes
//!        ▲
//!   names/KEY.json      what a reference was when it was fetched last (KEY is the reference's hash)
//! ```
//!
//! Invariant: a file that has a digest for its name has that digest, durably. A death leaves a download, which the next
//! one goes on with, or an image that is found.
//!
//! Several who ask for one reference wait for one download, which runs on if they go. A cache belongs to one process.

mod detect;
mod error;
mod fetch;
mod partial;
mod reference;
mod store;

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, RootCertStore};
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use trellis_api::Bytes;

use crate::ImageDigest;
use fetch::{Fetched, Fetcher, Wanted};
use partial::Partial;

pub use error::ImageError;
pub use fetch::{ATTEMPTS_MAX, REDIRECTS_MAX};
pub use reference::{ImagePlace, ImageReference};

const IMAGES: &str = "sha256";
const NAMES: &str = "names";
const PARTIAL: &str = "partial";
const LOCK: &str = "lock";

/// How a file holds a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The bytes of the disk, one by one.
    Raw,
    /// QEMU's format.
    Qcow2,
}

/// When an image is fetched: `imagePullPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullPolicy {
    /// Asks the server whether there is another one.
    Always,
    /// Only if it is not here.
    IfNotPresent,
    /// Not at all.
    Never,
}

/// What a node allows, and how long it waits.
#[derive(Clone, Debug)]
pub struct ImageSettings {
    /// The largest image.
    pub size_max: Bytes,
    /// How long a server may send nothing.
    pub stall: Duration,
    /// The pause before the first further try; each one doubles it.
    pub pause: Duration,
    /// Whether images without a digest may come without TLS.
    pub plain_http: bool,
    /// Directories of the node whose files may be images. None by default: a pod that could name any file could read it.
    pub local_directories: Vec<PathBuf>,
    /// Authorities besides those that the system knows.
    pub extra_roots: Vec<CertificateDer<'static>>,
}

impl Default for ImageSettings {
    fn default() -> Self {
        ImageSettings {
            size_max: Bytes::gib(256),
            stall: Duration::from_secs(30),
            pause: Duration::from_millis(500),
            plain_http: false,
            local_directories: Vec::new(),
            extra_roots: Vec::new(),
        }
    }
}

/// How far a download is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DownloadProgress {
    /// How many bytes are here.
    pub received: u64,
    /// How many there are, if the server said so.
    pub of: Option<u64>,
}

/// An image that is here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredImage {
    /// Its digest.
    pub digest: ImageDigest,
    /// Its file.
    pub path: PathBuf,
    /// How the file holds the disk.
    pub format: ImageFormat,
    /// The size of the disk.
    pub virtual_size: Bytes,
}

/// What was removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// The images.
    pub images: Vec<ImageDigest>,
    /// The bytes of their files, and of downloads that nobody went on with.
    pub bytes: u64,
}

#[derive(Clone)]
enum Flight {
    Running(DownloadProgress),
    Done(Result<StoredImage, ImageError>),
}

/// The images of a node.
#[derive(Clone)]
pub struct ImageCache(Arc<Inner>);

struct Inner {
    directory: PathBuf,
    settings: ImageSettings,
    tls: Option<Arc<ClientConfig>>,
    flights: Mutex<HashMap<String, watch::Receiver<Flight>>>,
    /// Held as long as the process uses the cache.
    _lock: File,
}

impl ImageCache {
    /// Opens the images in a directory, which is made if it is not there.
    pub fn open(directory: &Path, settings: ImageSettings) -> Result<ImageCache, ImageError> {
        for part in [IMAGES, NAMES, PARTIAL] {
            let path = directory.join(part);
            trellis_files::make_private_directory(&path)
                .map_err(|error| path_error(&path, error))?;
        }
        let path = directory.join(LOCK);
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        let lock = lock.map_err(|error| path_error(&path, error))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| ImageError::InUse {
            directory: directory.to_owned(),
        })?;
        Ok(ImageCache(Arc::new(Inner {
            directory: directory.to_owned(),
            tls: tls(&settings.extra_roots),
            settings,
            flights: Mutex::default(),
            _lock: lock,
        })))
    }

    /// The image that a reference names, fetched if the policy says so. `progress` is called as bytes arrive.
    pub async fn get(
        &self,
        reference: &ImageReference,
        policy: PullPolicy,
        progress: &mut (dyn FnMut(DownloadProgress) + Send),
    ) -> Result<StoredImage, ImageError> {
        // An image that must have a digest cannot have changed.
        if (policy != PullPolicy::Always || reference.digest.is_some())
            && let Some(found) = self.find(reference).await?
        {
            return Ok(found);
        }
        if policy == PullPolicy::Never {
            let reference = reference.as_str().to_owned();
            return Err(ImageError::NotPresent { reference });
        }
        let mut flight = self.join(reference, policy);
        loop {
            let state = flight.borrow_and_update().clone();
            match state {
                Flight::Running(so_far) => progress(so_far),
                Flight::Done(result) => return result,
            }
            if flight.changed().await.is_err() {
                let reference = reference.as_str().to_owned();
                return Err(ImageError::Interrupted { reference });
            }
        }
    }

    /// Removes images that nobody keeps, and downloads that nobody went on with, if they were not used for so long.
    pub async fn collect(
        &self,
        keep: BTreeSet<ImageDigest>,
        unused_for: Duration,
    ) -> Result<Collected, ImageError> {
        self.blocking(move |inner| inner.collect(&keep, unused_for))
            .await
    }

    /// The download of a reference: the one that runs, or a new one.
    fn join(&self, reference: &ImageReference, policy: PullPolicy) -> watch::Receiver<Flight> {
        let key = key_of(reference);
        let mut flights = self
            .0
            .flights
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(flight) = flights.get(&key) {
            return flight.clone();
        }
        let (sender, receiver) = watch::channel(Flight::Running(DownloadProgress::default()));
        flights.insert(key.clone(), receiver.clone());
        let (cache, reference) = (self.clone(), reference.clone());
        tokio::spawn(async move {
            let landing = Landing {
                cache: &cache,
                key: &key,
            };
            let result = cache.bring(&reference, policy, &sender).await;
            drop(landing);
            sender.send_replace(Flight::Done(result));
        });
        receiver
    }

    async fn bring(
        &self,
        reference: &ImageReference,
        policy: PullPolicy,
        sender: &watch::Sender<Flight>,
    ) -> Result<StoredImage, ImageError> {
        // Another download may have ended since the caller looked.
        if policy != PullPolicy::Always
            && let Some(found) = self.find(reference).await?
        {
            return Ok(found);
        }
        let progress = |so_far| {
            sender.send_replace(Flight::Running(so_far));
        };
        let url = match &reference.place {
            ImagePlace::Web(url) => url.clone(),
            ImagePlace::File(path) => {
                let (path, reference) = (path.clone(), reference.clone());
                return self
                    .blocking(move |inner| inner.take_file(&path, &reference))
                    .await;
            }
        };
        let (mut partial, known) = self
            .blocking({
                let reference = reference.clone();
                move |inner| inner.start(&reference)
            })
            .await
            .map(|(partial, known)| (Some(partial), known))?;
        let fetcher = Fetcher {
            settings: &self.0.settings,
            tls: self.0.tls.as_ref(),
        };
        let wanted = Wanted {
            reference: reference.as_str(),
            url: &url,
            is_pinned: reference.digest.is_some(),
            known: known.as_ref().and_then(|(_, etag)| etag.as_deref()),
        };
        let fetched = fetcher.fetch(&wanted, &mut partial, &progress).await;
        let etag = match (fetched, known) {
            (Ok(Fetched::Complete { etag }), _) => etag,
            (Ok(Fetched::Unchanged), Some((image, _))) => {
                partial.inspect(Partial::discard);
                return Ok(image);
            }
            (Ok(Fetched::Unchanged), None) => {
                let (url, what) = (url.to_string(), "status");
                return Err(ImageError::BadAnswer { url, what });
            }
            (Err(error), _) => {
                // What was interrupted is gone on with; what was refused is not.
                let refused = partial.filter(|_| !error.is_passing());
                refused.inspect(Partial::discard);
                return Err(error);
            }
        };
        let reference = reference.clone();
        self.blocking(move |inner| match partial {
            Some(partial) => inner.store(&partial, &reference, etag),
            None => Err(ImageError::Interrupted {
                reference: reference.as_str().to_owned(),
            }),
        })
        .await
    }

    async fn find(&self, reference: &ImageReference) -> Result<Option<StoredImage>, ImageError> {
        let reference = reference.clone();
        self.blocking(move |inner| inner.find(&reference)).await
    }

    /// Does something that waits for the disk.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T, ImageError> + Send + 'static,
    ) -> Result<T, ImageError> {
        let inner = Arc::clone(&self.0);
        let done = spawn_blocking(move || work(&inner)).await;
        done.map_err(|error| path_error(&self.0.directory, io::Error::other(error)))?
    }
}

/// Takes a download off the list when it ends, however it does.
struct Landing<'a> {
    cache: &'a ImageCache,
    key: &'a str,
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        let mut flights = self
            .cache
            .0
            .flights
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        flights.remove(self.key);
    }
}

/// A name for files about a reference.
fn key_of(reference: &ImageReference) -> String {
    let hash: [u8; 32] = Sha256::digest(reference.as_str().as_bytes()).into();
    ImageDigest::new(hash).hex()
}

/// Checks servers by the authorities that the system knows, and the given ones. None, if there are none.
fn tls(extra: &[CertificateDer<'static>]) -> Option<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    // Those that cannot be read are left out; a server that needs them is refused.
    let known = rustls_native_certs::load_native_certs().certs;
    roots.add_parsable_certificates(known.into_iter().chain(extra.iter().cloned()));
    if roots.is_empty() {
        return None;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Some(Arc::new(
        config
            .ok()?
            .with_root_certificates(roots)
            .with_no_client_auth(),
    ))
}

fn path_error(path: &Path, error: io::Error) -> ImageError {
    ImageError::Path {
        path: path.to_owned(),
        source: Arc::new(error),
    }
}
