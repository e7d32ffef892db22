//! Why there is no image.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use trellis_api::Bytes;

use super::fetch::{ATTEMPTS_MAX, REDIRECTS_MAX};
use crate::qcow2::Qcow2Error;
use crate::{DigestError, ImageDigest};

/// Why there is no image. Several who wait for one download share its error.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ImageError {
    /// The reference cannot be read.
    #[error(
        "{text:?} is no image: write a URL, a URL without https://, or the path of a file on the node, and @sha256:… if it must be a certain one"
    )]
    BadReference {
        /// The reference.
        text: String,
    },
    /// The digest in the reference cannot be read.
    #[error("the image's digest cannot be used")]
    Digest(#[source] DigestError),
    /// Another process has the cache.
    #[error("another process uses the images in {}", directory.display())]
    InUse {
        /// Where the cache is.
        directory: PathBuf,
    },
    /// The image is not here, and may not be fetched.
    #[error("image {reference} is not on this node, and the pod's imagePullPolicy is Never")]
    NotPresent {
        /// The reference.
        reference: String,
    },
    /// Plain HTTP without a digest.
    #[error(
        "image {url} would be fetched without TLS, so that anybody on the way could change it: use https, or add @sha256:… to the reference"
    )]
    PlainHttp {
        /// The URL.
        url: String,
    },
    /// The file is not one that the node lends out.
    #[error("{} is not below a directory whose images this node lends out", path.display())]
    NotLent {
        /// Its path.
        path: PathBuf,
    },
    /// The server cannot be reached.
    #[error("{url} cannot be reached")]
    Connect {
        /// The URL.
        url: String,
        /// What the kernel or TLS said.
        source: Arc<io::Error>,
    },
    /// The server does not speak HTTP well.
    #[error("{url} could not be fetched")]
    Http {
        /// The URL.
        url: String,
        /// What went wrong.
        source: Arc<hyper::Error>,
    },
    /// The server said no.
    #[error("{url} was answered with {status}")]
    Status {
        /// The URL.
        url: String,
        /// The answer.
        status: u16,
    },
    /// The server answered with something that makes no sense.
    #[error("{url} was answered with a {what} that makes no sense")]
    BadAnswer {
        /// The URL.
        url: String,
        /// What of it.
        what: &'static str,
    },
    /// The server sends from place to place.
    #[error("{url} leads from one address to the next more than {REDIRECTS_MAX} times")]
    TooManyRedirects {
        /// The first URL.
        url: String,
    },
    /// A redirect leaves TLS.
    #[error("{url} leads to {to}, which is not protected by TLS")]
    Downgrade {
        /// The URL.
        url: String,
        /// Where it leads.
        to: String,
    },
    /// Nothing came.
    #[error("{url} sent nothing for {} s, after {received} bytes", after.as_secs())]
    Stalled {
        /// The URL.
        url: String,
        /// How much came before.
        received: u64,
        /// How long was waited.
        after: Duration,
    },
    /// The connection ended early, again and again.
    #[error("{url} said that it has {said} bytes and ended after {received}, {ATTEMPTS_MAX} times")]
    CutOff {
        /// The URL.
        url: String,
        /// The length that was announced.
        said: u64,
        /// How much came.
        received: u64,
    },
    /// The image changed while it was fetched.
    #[error("{url} has {now} bytes, and had {before} when the download began")]
    LengthChanged {
        /// The URL.
        url: String,
        /// What it said at first.
        before: u64,
        /// What it says now.
        now: u64,
    },
    /// The image is too large.
    #[error("image {reference} has more than {max}, the most that this node takes")]
    TooLarge {
        /// The reference.
        reference: String,
        /// The most.
        max: Bytes,
    },
    /// The image is another one.
    #[error("image {reference} is {found}, and must be {wanted}")]
    OtherDigest {
        /// The reference.
        reference: String,
        /// What it is.
        found: ImageDigest,
        /// What it must be.
        wanted: ImageDigest,
    },
    /// The file is no image of a disk.
    #[error("image {reference} is {what}, and not a qcow2 or raw image of a disk")]
    NotADisk {
        /// The reference.
        reference: String,
        /// What it is.
        what: &'static str,
    },
    /// The image is qcow2 and cannot be used.
    #[error("image {reference} cannot be used")]
    Qcow2 {
        /// The reference.
        reference: String,
        /// Why.
        source: Arc<Qcow2Error>,
    },
    /// The disk cannot be used.
    #[error("{} cannot be used", path.display())]
    Path {
        /// Which path.
        path: PathBuf,
        /// What the kernel said.
        source: Arc<io::Error>,
    },
    /// The certificates of this machine cannot be used.
    #[error(
        "this machine has no certificates by which a server could be checked; install ca-certificates"
    )]
    NoRoots,
    /// Whoever fetched it has ended.
    #[error("the download of {reference} was interrupted")]
    Interrupted {
        /// The reference.
        reference: String,
    },
}

impl ImageError {
    /// Whether another try may go better.
    pub(super) const fn is_passing(&self) -> bool {
        match self {
            ImageError::Connect { .. }
            | ImageError::Http { .. }
            | ImageError::Stalled { .. }
            | ImageError::CutOff { .. } => true,
            ImageError::Status { status, .. } => *status >= 500 || *status == 429 || *status == 408,
            _ => false,
        }
    }
}
