//! Certificates as texts: what a node makes, and what it reads of its own.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, KeyPair, PublicKeyData, SanType, date_time_ymd,
};
use trellis_api::NodeName;
use x509_parser::pem::parse_x509_pem;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// Where a certificate begins and ends in PEM.
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// What is wrong with a node's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateFault {
    /// There is none in the text.
    #[error("it is no certificate as PEM")]
    NoCertificate,
    /// It is for another key.
    #[error("it was made for another key")]
    OtherKey,
    /// It names another node, or none.
    #[error("it does not name this node")]
    OtherNode,
}

/// A private key of a node. It exists in memory until there is a certificate for it.
pub struct NodeKey {
    node: NodeName,
    key: KeyPair,
}

impl NodeKey {
    /// Makes one.
    pub fn make(node: &NodeName) -> Result<NodeKey, rcgen::Error> {
        Ok(NodeKey {
            node: node.clone(),
            key: KeyPair::generate()?,
        })
    }

    /// The request for a certificate, as PEM. It proves that whoever made it has the key.
    pub fn request(&self) -> Result<String, rcgen::Error> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, self.node.as_str());
        params.subject_alt_names = vec![SanType::URI(self.node.uri().try_into()?)];
        params.serialize_request(&self.key)?.pem()
    }

    /// Key and certificate as one text, if they fit together.
    pub fn with(&self, certificate: &str) -> Result<String, CertificateFault> {
        let all = certificates(certificate);
        let (_, first) = all.first().ok_or(CertificateFault::NoCertificate)?;
        if key_of(first).as_deref() != Some(self.key.der_bytes()) {
            return Err(CertificateFault::OtherKey);
        }
        if node_of(first).as_ref() != Some(&self.node) {
            return Err(CertificateFault::OtherNode);
        }
        Ok(format!("{}{certificate}", self.key.serialize_pem()))
    }
}

/// From when to when a certificate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// From when.
    pub from: SystemTime,
    /// Until when.
    pub until: SystemTime,
}

impl Lifetime {
    /// That of the first certificate in the text.
    pub fn of(text: &str) -> Option<Lifetime> {
        Lifetime::of_der(&certificates(text).first()?.1)
    }

    pub(crate) fn of_der(der: &[u8]) -> Option<Lifetime> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let at = |seconds: i64| {
            let seconds = u64::try_from(seconds).unwrap_or_default();
            UNIX_EPOCH + Duration::from_secs(seconds)
        };
        let validity = certificate.validity();
        Some(Lifetime {
            from: at(validity.not_before.timestamp()),
            until: at(validity.not_after.timestamp()),
        })
    }

    /// When to get the next one: after two thirds of the time, so that there is a third to try in.
    pub fn renew_at(&self) -> SystemTime {
        let whole = self.until.duration_since(self.from).unwrap_or_default();
        self.from + whole * 2 / 3
    }
}

/// Whether the first certificate in `text` was signed by one of those in `authorities`.
pub fn chains_to(text: &str, authorities: &str) -> bool {
    let all = certificates(text);
    let Some(Ok((_, own))) = all.first().map(|(_, der)| X509Certificate::from_der(der)) else {
        return false;
    };
    certificates(authorities).iter().any(|(_, der)| {
        X509Certificate::from_der(der)
            .is_ok_and(|(_, authority)| own.verify_signature(Some(authority.public_key())).is_ok())
    })
}

/// The certificates in a text: each as PEM of its own, and as DER. What else the text holds is passed over.
pub(crate) fn certificates(text: &str) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(begin) = rest.find(BEGIN) {
        let Some(length) = rest[begin..].find(END).map(|at| at + END.len()) else {
            break;
        };
        let (piece, after) = rest[begin..].split_at(length);
        if let Ok((_, block)) = parse_x509_pem(piece.as_bytes()) {
            found.push((format!("{piece}\n"), block.contents));
        }
        rest = after;
    }
    found
}

/// The public key of a certificate.
pub(crate) fn key_of(der: &[u8]) -> Option<Vec<u8>> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    Some(certificate.public_key().subject_public_key.data.to_vec())
}

/// The only node that a certificate names.
pub(crate) fn node_of(der: &[u8]) -> Option<NodeName> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let names = certificate.subject_alternative_name().ok().flatten()?;
    let uris = names
        .value
        .general_names
        .iter()
        .filter_map(|name| match name {
            GeneralName::URI(uri) => Some(*uri),
            _ => None,
        });
    NodeName::only_of(uris)
}

/// Says in `params` from when to when a certificate counts. Certificates know whole seconds; the end is never early.
pub(crate) fn set_life(params: &mut CertificateParams, life: Lifetime) {
    let seconds = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + Duration::from_secs(seconds(life.from));
    params.not_after =
        epoch + Duration::from_secs(seconds(life.until + Duration::from_millis(999)));
}
