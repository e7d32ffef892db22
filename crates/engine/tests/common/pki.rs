//! Certificates of nodes, made for a test.
#![allow(dead_code, reason = "every user uses its own part of this")]
#![allow(clippy::unwrap_used, reason = "a benchmark uses this too")]

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};
use trellis_engine::drive::{Credentials, NodeName};

/// A home with its authority. All of them have the same name, as those of real homes do.
pub(crate) struct Home {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

/// From when to when a certificate is valid.
#[derive(Clone, Copy)]
pub(crate) enum Valid {
    Always,
    Until(SystemTime),
    From(SystemTime),
}

/// A certificate and its key, as PEM.
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Home {
    pub(crate) fn new() -> Home {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).unwrap().pem();
        Home {
            issuer: Issuer::new(params, key),
            certificate,
        }
    }

    /// The authority's certificate, as PEM.
    pub(crate) fn certificate(&self) -> &str {
        &self.certificate
    }

    /// A certificate that the authority has signed, with these URIs.
    pub(crate) fn sign(&self, uris: &[String], valid: Valid) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        let uri = |uri: &String| SanType::URI(uri.as_str().try_into().unwrap());
        params.subject_alt_names = uris.iter().map(uri).collect();
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let at =
            |time: SystemTime| date_time_ymd(1970, 1, 1) + time.duration_since(UNIX_EPOCH).unwrap();
        match valid {
            Valid::Always => {}
            Valid::Until(end) => params.not_after = at(end),
            Valid::From(start) => params.not_before = at(start),
        }
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Pair {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        }
    }

    /// A certificate of a node.
    pub(crate) fn sign_node(&self, node: &str, valid: Valid) -> Pair {
        self.sign(&[name(node).uri()], valid)
    }

    /// Credentials of a node in `DIR/NODE`.
    pub(crate) fn credentials(&self, dir: &Path, node: &str) -> Credentials {
        let pair = self.sign_node(node, Valid::Always);
        Credentials::read(&self.write(dir, node, &pair)).unwrap()
    }

    /// Puts a certificate in `DIR/NAME`, next to this authority's, as a renewal does: file by file, each at once.
    pub(crate) fn write(&self, dir: &Path, name: &str, pair: &Pair) -> PathBuf {
        let dir = dir.join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let own = format!("{}\n{}", pair.key, pair.certificate);
        for (file, text) in [("node.pem", &own), ("ca.crt", &self.certificate)] {
            let new = dir.join("new");
            std::fs::write(&new, text).unwrap();
            std::fs::rename(new, dir.join(file)).unwrap();
        }
        dir
    }
}

pub(crate) fn name(node: &str) -> NodeName {
    node.parse().unwrap()
}

pub(crate) fn ago(seconds: u64) -> SystemTime {
    SystemTime::now() - Duration::from_secs(seconds)
}

pub(crate) fn ahead(seconds: u64) -> SystemTime {
    SystemTime::now() + Duration::from_secs(seconds)
}
