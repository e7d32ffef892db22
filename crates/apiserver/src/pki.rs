//! Certificates and the token: how the server knows its clients, and how a client knows the server.
//!
//! All of it is in `DIR/pki` and survives restarts. What is missing, broken, or about to expire is made again. The key
//! of the certificate authority is never stored: it signs only the one server certificate.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::{ToSpan, Zoned};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{RootCertStore, ServerConfig};

/// The names under which the server may be reached.
const SERVER_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];
const VALID_YEARS: i64 = 10;
/// A certificate with less than this left is replaced at the next start.
const RENEW_BEFORE: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// Clocks that are behind ours still accept a new certificate.
const CLOCK_SKEW_DAYS: i64 = 1;
const TOKEN_BYTES: usize = 32;
const ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Why the keys, the token or the kubeconfig cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The directory for keys cannot be made.
    #[error("the directory {} for keys could not be made; check that this user may write there", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file with a secret or a certificate cannot be written.
    #[error("{} could not be written; check the free space and that this user may write there", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file with a secret or a certificate is there but cannot be read.
    #[error("{} could not be read; check that this user may read it, or remove it to have it made anew", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A certificate could not be made.
    #[error("the server's certificate could not be made")]
    Certificate(#[from] rcgen::Error),
    /// The TLS library refuses what was just made.
    #[error("the TLS library refuses the server's new certificate")]
    Tls(#[from] rustls::Error),
    /// The kernel gave no random bytes.
    #[error("the kernel gave no random bytes for a token")]
    Random,
}

/// The bearer token that every client must show.
#[derive(Clone)]
pub struct Token(Arc<str>);

impl Token {
    /// The token's text, for the kubeconfig.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a client showed this token, compared in constant time.
    pub(crate) fn is(&self, shown: &[u8]) -> bool {
        let own = self.0.as_bytes();
        let differing = own
            .iter()
            .zip(shown)
            .fold(0u8, |bits, (a, b)| bits | std::hint::black_box(a ^ b));
        own.len() == shown.len() && differing == 0
    }

    fn is_well_formed(text: &str) -> bool {
        text.len() == 2 * TOKEN_BYTES && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Token(..)")
    }
}

/// What the listener and the kubeconfig need.
#[derive(Clone, Debug)]
pub struct Pki {
    /// The certificate by which clients trust the server.
    pub ca_pem: String,
    /// The token by which the server trusts clients.
    pub token: Token,
    /// The server's side of TLS.
    pub(crate) tls: Arc<ServerConfig>,
}

impl Pki {
    /// Reads the credentials in `directory/pki`, and replaces those that cannot be used.
    pub fn open(directory: &Path) -> Result<Pki, AccessError> {
        let directory = directory.join("pki");
        trellis_files::make_private_directory(&directory).map_err(|source| {
            AccessError::Directory {
                path: directory.clone(),
                source,
            }
        })?;
        let token = open_token(&directory.join("token"))?;
        let files = Files::in_directory(&directory);
        if let Some((ca_pem, tls)) = files.load()? {
            return Ok(Pki { ca_pem, token, tls });
        }
        let (ca_pem, tls) = files.make()?;
        Ok(Pki { ca_pem, token, tls })
    }
}

fn open_token(path: &Path) -> Result<Token, AccessError> {
    let found = read(path)?.filter(|text| Token::is_well_formed(text));
    let text = match found {
        Some(text) => text,
        None => {
            let mut random = [0; TOKEN_BYTES];
            provider()
                .secure_random
                .fill(&mut random)
                .map_err(|_| AccessError::Random)?;
            random.iter().map(|byte| format!("{byte:02x}")).collect()
        }
    };
    write(path, &text)?;
    Ok(Token(text.into()))
}

struct Files {
    ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Files {
    fn in_directory(directory: &Path) -> Files {
        Files {
            ca: directory.join("ca.crt"),
            certificate: directory.join("server.crt"),
            key: directory.join("server.key"),
        }
    }

    /// What is there, if it fits together and will still be valid for a while.
    fn load(&self) -> Result<Option<(String, Arc<ServerConfig>)>, AccessError> {
        let (Some(ca), Some(certificate), Some(key)) =
            (read(&self.ca)?, read(&self.certificate)?, read(&self.key)?)
        else {
            return Ok(None);
        };
        let (Ok(tls), true) = (
            server_config(&certificate, &key),
            is_trusted(&ca, &certificate, UnixTime::now()),
        ) else {
            tracing::warn!(directory = ?self.ca.parent(), "the server's certificate is expired or damaged; making a new one");
            return Ok(None);
        };
        write(&self.key, &key)?;
        Ok(Some((ca, tls)))
    }

    fn make(&self) -> Result<(String, Arc<ServerConfig>), AccessError> {
        let mut ca_params = params("trellis-ca")?;
        ca_params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        ca_params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let ca_key = KeyPair::generate()?;
        let ca_pem = ca_params.self_signed(&ca_key)?.pem();

        let mut server_params = params("trellis")?;
        server_params.subject_alt_names =
            CertificateParams::new(SERVER_NAMES.map(str::to_owned))?.subject_alt_names;
        server_params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        server_params.use_authority_key_identifier_extension = true;
        let server_key = KeyPair::generate()?;
        let certificate = server_params
            .signed_by(&server_key, &Issuer::new(ca_params, ca_key))?
            .pem();

        let key = server_key.serialize_pem();
        let tls = server_config(&certificate, &key)?;
        write(&self.ca, &ca_pem)?;
        write(&self.certificate, &certificate)?;
        write(&self.key, &key)?;
        Ok((ca_pem, tls))
    }
}

fn params(common_name: &str) -> Result<CertificateParams, AccessError> {
    let mut params = CertificateParams::new(Vec::new())?;
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    let today = Zoned::now().with_time_zone(jiff::tz::TimeZone::UTC).date();
    let day = |date: jiff::civil::Date| {
        rcgen::date_time_ymd(
            date.year().into(),
            date.month().unsigned_abs(),
            date.day().unsigned_abs(),
        )
    };
    params.not_before = day(today.saturating_sub(CLOCK_SKEW_DAYS.days()));
    params.not_after = day(today.saturating_add(VALID_YEARS.years()));
    Ok(params)
}

fn server_config(certificate: &str, key: &str) -> Result<Arc<ServerConfig>, rustls::Error> {
    let unreadable =
        |_| rustls::Error::General("the PEM text holds no key or certificate".to_owned());
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).map_err(unreadable)?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(unreadable)?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)?;
    config.alpn_protocols = ALPN.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(config))
}

/// Whether a client that trusts `ca` would trust `certificate`, under each of its names, and for a while to come.
fn is_trusted(ca: &str, certificate: &str, now: UnixTime) -> bool {
    let soon = UnixTime::since_unix_epoch(Duration::from_secs(now.as_secs()) + RENEW_BEFORE);
    let (Ok(ca), Ok(certificate)) = (
        CertificateDer::from_pem_slice(ca.as_bytes()),
        CertificateDer::from_pem_slice(certificate.as_bytes()),
    ) else {
        return false;
    };
    let mut roots = RootCertStore::empty();
    if roots.add(ca).is_err() {
        return false;
    }
    let Ok(verifier) =
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build()
    else {
        return false;
    };
    SERVER_NAMES.iter().all(|name| {
        ServerName::try_from(*name).is_ok_and(|name| {
            [now, soon].iter().all(|time| {
                verifier
                    .verify_server_cert(&certificate, &[], &name, &[], *time)
                    .is_ok()
            })
        })
    })
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn read(path: &Path) -> Result<Option<String>, AccessError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(AccessError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

fn write(path: &Path, text: &str) -> Result<(), AccessError> {
    trellis_files::ensure(path, text.as_bytes())
        .map(|_| ())
        .map_err(|source| AccessError::Write {
            path: path.to_owned(),
            source,
        })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_restart_keeps_the_certificate_and_the_token() {
        // Fails when every start makes new keys, so that every kubeconfig in use breaks.
        let directory = tempfile::tempdir().unwrap();
        let (first, second) = (
            Pki::open(directory.path()).unwrap(),
            Pki::open(directory.path()).unwrap(),
        );
        assert_eq!(first.ca_pem, second.ca_pem);
        assert_eq!(first.token.as_str(), second.token.as_str());
        assert_eq!(first.token.as_str().len(), 64);
    }

    #[test]
    fn keys_and_token_are_their_owners_alone() {
        // Fails when another user of the machine could read a secret.
        let directory = tempfile::tempdir().unwrap();
        Pki::open(directory.path()).unwrap();
        let pki = directory.path().join("pki");
        assert_eq!(
            std::fs::metadata(&pki).unwrap().permissions().mode() & 0o777,
            0o700
        );
        for name in ["token", "server.key"] {
            assert_eq!(
                std::fs::metadata(pki.join(name))
                    .unwrap()
                    .permissions()
                    .mode()
                    & 0o777,
                0o600,
                "{name}"
            );
        }
    }

    #[test]
    fn a_certificate_that_does_not_fit_is_made_anew() {
        // Fails when a torn, foreign or damaged set of files keeps the server from starting, or is served as it is.
        let (ours, foreign) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        Pki::open(foreign.path()).unwrap();
        for name in ["ca.crt", "server.crt", "server.key"] {
            let before = Pki::open(ours.path()).unwrap();
            let path = ours.path().join("pki").join(name);
            std::fs::copy(foreign.path().join("pki").join(name), &path).unwrap();
            let after = Pki::open(ours.path()).unwrap();
            assert_ne!(before.ca_pem, after.ca_pem, "a foreign {name}");
            std::fs::write(&path, "damaged").unwrap();
            assert_ne!(
                after.ca_pem,
                Pki::open(ours.path()).unwrap().ca_pem,
                "a damaged {name}"
            );
        }
    }

    #[test]
    fn a_certificate_is_renewed_before_it_expires() {
        // Fails when clients would meet an expired certificate, or one that was just made is refused.
        const DAY: u64 = 24 * 60 * 60;
        let directory = tempfile::tempdir().unwrap();
        Pki::open(directory.path()).unwrap();
        let text = |name| std::fs::read_to_string(directory.path().join("pki").join(name)).unwrap();
        let (ca, certificate) = (text("ca.crt"), text("server.crt"));
        let in_days = |days: u64| {
            let then = UnixTime::now().as_secs() + days * DAY;
            is_trusted(
                &ca,
                &certificate,
                UnixTime::since_unix_epoch(Duration::from_secs(then)),
            )
        };
        assert!(in_days(0) && in_days(9 * 365));
        assert!(!in_days(10 * 365 - 20) && !in_days(11 * 365));
    }

    #[test]
    fn only_the_whole_token_is_the_token() {
        // Fails when a prefix, an extension or an empty token is let in.
        let token = Token("abcd".into());
        assert!(token.is(b"abcd"));
        for wrong in [&b"abc"[..], b"abcde", b"", b"abce"] {
            assert!(!token.is(wrong), "{wrong:?}");
        }
    }
}
