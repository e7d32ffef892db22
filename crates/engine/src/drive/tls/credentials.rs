//! What a node proves itself with: a directory with its key, its certificate, and the authority of its home.
//!
//! ```text
//!   node.pem   the node's private key and its certificate, then those between it and the authority, if there are some
//!   ca.crt     the authority's certificate; several while the authority changes
//! ```
//!
//! Both are PEM. Key and certificate are in one file, so that whoever replaces the file replaces both at once. The files
//! are looked at before every handshake, and read again if one has changed, so a renewed certificate needs no restart.
//! Connections that there are go on with what they began with. Files that cannot be used change nothing: the last
//! usable ones count until they are. A node that has none yet gets them later ([`Credentials::expect`]); until then it
//! connects to nobody.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, TrustAnchor};
use rustls::sign::CertifiedKey;
use webpki::{EndEntityCert, anchor_from_trusted_cert};

use super::{NodeName, PROVIDER};
use crate::{Error, Result};

const OWN: &str = "node.pem";
const AUTHORITY: &str = "ca.crt";

/// What is wrong with one of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CredentialFault {
    /// It holds no certificate.
    #[error("holds no certificate as PEM")]
    NoCertificate,
    /// It holds no private key.
    #[error("holds no private key as PEM that can be used")]
    NoKey,
    /// The key is another one than the certificate was made for.
    #[error("holds a key that is not the one of the certificate")]
    OtherKey,
    /// The certificate names no node, or several.
    #[error("does not name one node as trellis://node/NAME")]
    NoName,
    /// The certificate names another node than before.
    #[error("names another node than before")]
    OtherName,
}

/// The credentials of a node, read from a directory and renewed from there. Clones share them.
#[derive(Clone)]
pub struct Credentials(Arc<Shared>);

struct Shared {
    dir: PathBuf,
    node: NodeName,
    read: Mutex<Read>,
}

/// What was read last.
struct Read {
    /// How the files were then, also if they made no sense.
    stamps: Stamps,
    /// What could be used last; none before there was any.
    keys: Option<Arc<Keys>>,
    /// It was said that the files cannot be read. Strangers decide how often they are looked at.
    has_warned: bool,
}

/// The files in a form that TLS takes.
pub(super) struct Keys {
    node: NodeName,
    certified: Arc<CertifiedKey>,
    anchors: Vec<TrustAnchor<'static>>,
}

/// Tells one state of the files from another.
type Stamps = [Option<Stamp>; 2];

#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    file: (u64, u64),
    length: u64,
    written: (i64, i64),
    changed: (i64, i64),
}

impl Credentials {
    /// Reads the files of a directory.
    pub fn read(dir: &Path) -> Result<Credentials> {
        let stamps = stamps(dir);
        let keys = Keys::read(dir)?;
        Ok(Credentials(Arc::new(Shared {
            dir: dir.to_owned(),
            node: keys.node.clone(),
            read: Mutex::new(Read {
                stamps,
                keys: Some(Arc::new(keys)),
                has_warned: false,
            }),
        })))
    }

    /// Those of a node, in a directory where they may appear later.
    pub fn expect(dir: &Path, node: NodeName) -> Credentials {
        Credentials(Arc::new(Shared {
            dir: dir.to_owned(),
            node,
            read: Mutex::new(Read {
                stamps: Stamps::default(),
                keys: None,
                has_warned: false,
            }),
        }))
    }

    /// Whether there are some that can be used. Reads files, so it may block.
    pub fn are_there(&self) -> bool {
        self.current().is_some()
    }

    /// The node that they belong to.
    pub fn node(&self) -> &NodeName {
        &self.0.node
    }

    /// What counts now. Reads files, so it may block.
    pub(super) fn current(&self) -> Option<Arc<Keys>> {
        let mut read = self.lock();
        let found = stamps(&self.0.dir);
        // The stamps are older than what is read: what changes meanwhile is read the next time.
        if found != read.stamps {
            match self.renewed() {
                Ok(keys) => {
                    tracing::info!(node = %self.node(), "the credentials were renewed");
                    read.keys = Some(Arc::new(keys));
                    read.stamps = found;
                    read.has_warned = false;
                }
                Err(error) => {
                    if !read.has_warned && read.keys.is_some() {
                        tracing::warn!("{error}; the previous credentials still count");
                    }
                    read.has_warned = true;
                    // What cannot be used will not become usable by itself; what cannot be read may.
                    if matches!(error, Error::CredentialsBad { .. }) {
                        read.stamps = found;
                        read.has_warned = false;
                    }
                }
            }
        }
        read.keys.clone()
    }

    fn renewed(&self) -> Result<Keys> {
        let keys = Keys::read(&self.0.dir)?;
        if keys.node == self.0.node {
            return Ok(keys);
        }
        Err(Error::CredentialsBad {
            path: self.0.dir.join(OWN),
            fault: CredentialFault::OtherName,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Read> {
        self.0.read.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Without the key.
impl fmt::Debug for Credentials {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Credentials({} in {:?})", self.node(), self.0.dir)
    }
}

impl Keys {
    fn read(dir: &Path) -> Result<Keys> {
        let own = dir.join(OWN);
        let text = bytes(&own)?;
        let chain = certificates(&own, &text)?;
        let bad = |path: &Path, fault| Error::CredentialsBad {
            path: path.to_owned(),
            fault,
        };
        let node = chain
            .first()
            .and_then(|first| EndEntityCert::try_from(first).ok())
            .and_then(|first| NodeName::only_of(first.valid_uri_names()))
            .ok_or_else(|| bad(&own, CredentialFault::NoName))?;
        let private =
            PrivateKeyDer::from_pem_slice(&text).map_err(|_| bad(&own, CredentialFault::NoKey))?;
        let certified =
            CertifiedKey::from_der(chain, private, &PROVIDER).map_err(|error| match error {
                rustls::Error::InconsistentKeys(_) => bad(&own, CredentialFault::OtherKey),
                _ => bad(&own, CredentialFault::NoKey),
            })?;
        let authority = dir.join(AUTHORITY);
        let anchors = certificates(&authority, &bytes(&authority)?)?
            .iter()
            .map(|it| anchor_from_trusted_cert(it).map(|anchor| anchor.to_owned()))
            .collect::<std::result::Result<_, _>>()
            .map_err(|_| bad(&authority, CredentialFault::NoCertificate))?;
        Ok(Keys {
            node,
            certified: Arc::new(certified),
            anchors,
        })
    }

    pub(super) fn node(&self) -> &NodeName {
        &self.node
    }

    pub(super) fn certified(&self) -> &Arc<CertifiedKey> {
        &self.certified
    }

    /// The authorities of the home.
    pub(super) fn anchors(&self) -> &[TrustAnchor<'static>] {
        &self.anchors
    }
}

/// Without the key.
impl fmt::Debug for Keys {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Keys({})", self.node)
    }
}

fn bytes(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|source| Error::Io {
        doing: "read",
        path: path.to_owned(),
        source,
    })
}

/// The certificates of a file; at least one.
fn certificates(path: &Path, text: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let bad = || Error::CredentialsBad {
        path: path.to_owned(),
        fault: CredentialFault::NoCertificate,
    };
    let found = CertificateDer::pem_slice_iter(text)
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|_| bad())?;
    if found.is_empty() {
        return Err(bad());
    }
    Ok(found)
}

fn stamps(dir: &Path) -> Stamps {
    [OWN, AUTHORITY].map(|name| {
        let stat = fs::metadata(dir.join(name)).ok()?;
        Some(Stamp {
            file: (stat.dev(), stat.ino()),
            length: stat.len(),
            written: (stat.mtime(), stat.mtime_nsec()),
            changed: (stat.ctime(), stat.ctime_nsec()),
        })
    })
}
