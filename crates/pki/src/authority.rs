//! The authority of a home: made once, kept as one text, published as a certificate.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PublicKeyData,
};

use crate::certificate::{Lifetime, certificates, key_of, set_life};

/// How long an authority lasts. Nodes renew their certificates often; the authority is changed by hand.
const LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// Clocks that are behind ours accept a new authority at once.
const CLOCK_SKEW: Duration = Duration::from_secs(60 * 60);

/// The name of every authority. Nobody decides anything by it.
const NAME: &str = "trellis-nodes";

/// Why a text is no authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityFault {
    /// There is no certificate in it.
    #[error("it holds no certificate as PEM")]
    NoCertificate,
    /// There is no key in it.
    #[error("it holds no private key as PEM")]
    NoKey,
    /// The key is another one than the certificate was made for.
    #[error("its key is not the one of its certificate")]
    OtherKey,
}

/// An authority with its key. It is whole: the key fits the certificate.
pub struct Authority {
    certificate: String,
    key: KeyPair,
    life: Lifetime,
}

impl Authority {
    /// Makes one.
    pub fn make(now: SystemTime) -> Result<Authority, rcgen::Error> {
        Authority::make_for(now, LIFE)
    }

    /// Makes one that lasts that long.
    pub fn make_for(now: SystemTime, life: Duration) -> Result<Authority, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, NAME);
        // It signs nodes, and no further authorities.
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let life = Lifetime {
            from: now - CLOCK_SKEW,
            until: now + life,
        };
        set_life(&mut params, life);
        let certificate = params.self_signed(&key)?.pem();
        Ok(Authority {
            certificate,
            key,
            life,
        })
    }

    /// Reads what [`Authority::text`] has written.
    pub fn read(text: &str) -> Result<Authority, AuthorityFault> {
        let key = KeyPair::from_pem(text).map_err(|_| AuthorityFault::NoKey)?;
        let all = certificates(text);
        let (certificate, der) = all.first().ok_or(AuthorityFault::NoCertificate)?;
        let life = Lifetime::of_der(der).ok_or(AuthorityFault::NoCertificate)?;
        if key_of(der).as_deref() != Some(key.der_bytes()) {
            return Err(AuthorityFault::OtherKey);
        }
        Ok(Authority {
            certificate: certificate.clone(),
            key,
            life,
        })
    }

    /// Its key and its certificate, as one text to be kept where only its owner can read it.
    pub fn text(&self) -> String {
        format!("{}{}", self.key.serialize_pem(), self.certificate)
    }

    /// Its certificate, as PEM.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// From when to when it counts.
    pub fn life(&self) -> Lifetime {
        self.life
    }

    pub(crate) fn public_key(&self) -> &[u8] {
        self.key.der_bytes()
    }

    pub(crate) fn issuer(&self) -> Result<Issuer<'static, &KeyPair>, rcgen::Error> {
        Issuer::from_ca_cert_pem(&self.certificate, &self.key)
    }
}

/// Without the key.
impl std::fmt::Debug for Authority {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Authority(until {:?})", self.life.until)
    }
}

/// The certificates that nodes believe: that of the authority, and those of earlier ones that have not ended.
pub fn trusted(authority: &Authority, earlier: &str, now: SystemTime) -> String {
    let mut text = authority.certificate.clone();
    for (certificate, der) in certificates(earlier) {
        let counts = Lifetime::of_der(&der).is_some_and(|life| now < life.until);
        if counts && !text.contains(&certificate) {
            text.push_str(&certificate);
        }
    }
    text
}
