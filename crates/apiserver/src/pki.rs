//! Certificates and the token: how the server knows its clients, and how a client knows the server.
//!
//! All of it is in `DIR/pki` and survives restarts. What is missing, broken, about to expire, or made for other
//! addresses is made again. The authority stays as long as it can, because the kubeconfigs of other machines carry its
//! certificate. Its key signs only the one server certificate.

use std::fmt;
use std::io;
use std::net::IpAddr;
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

/// The names under which the server may always be reached.
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
    /// Reads the credentials in `directory/pki`, and replaces those that cannot be used by a server on loopback and, if
    /// it is given, on one more address.
    pub fn open(directory: &Path, address: Option<IpAddr>) -> Result<Pki, AccessError> {
        let directory = directory.join("pki");
        trellis_files::make_private_directory(&directory).map_err(|source| {
            AccessError::Directory {
                path: directory.clone(),
                source,
            }
        })?;
        let token = open_token(&directory.join("token"))?;
        let mut names: Vec<String> = SERVER_NAMES.map(str::to_owned).into();
        names.extend(address.map(|address| address.to_string()));
        let files = Files::in_directory(&directory);
        let (ca_pem, tls) = match files.load(&names)? {
            Some(usable) => usable,
            None => files.make(&names)?,
        };
        Ok(Pki { ca_pem, token, tls })
    }
}

fn open_token(path: &Path) -> Result<Token, AccessError> {
    let found = read(path)?.filter(|text| Token::is_well_formed(text));
    let text = match found {
        Some(text) => text,
        None => hexadecimal(&random::<TOKEN_BYTES>()?),
    };
    write(path, &text)?;
    Ok(Token(text.into()))
}

/// Bytes that nobody can guess.
pub(crate) fn random<const COUNT: usize>() -> Result<[u8; COUNT], AccessError> {
    let mut bytes = [0; COUNT];
    let filled = provider().secure_random.fill(&mut bytes);
    filled.map_err(|_| AccessError::Random)?;
    Ok(bytes)
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Files {
    ca: PathBuf,
    ca_key: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Files {
    fn in_directory(directory: &Path) -> Files {
        Files {
            ca: directory.join("ca.crt"),
            ca_key: directory.join("ca.key"),
            certificate: directory.join("server.crt"),
            key: directory.join("server.key"),
        }
    }

    /// What is there, if it fits together, has the names, and will still be valid for a while.
    fn load(&self, names: &[String]) -> Result<Option<(String, Arc<ServerConfig>)>, AccessError> {
        let (Some(ca), Some(certificate), Some(key)) =
            (read(&self.ca)?, read(&self.certificate)?, read(&self.key)?)
        else {
            return Ok(None);
        };
        let (Ok(tls), true) = (
            server_config(&certificate, &key),
            is_trusted(&ca, &certificate, names, UnixTime::now()),
        ) else {
            tracing::warn!(directory = ?self.ca.parent(), "the server's certificate is expired, damaged or for other addresses; making a new one");
            return Ok(None);
        };
        write(&self.key, &key)?;
        Ok(Some((ca, tls)))
    }

    fn make(&self, names: &[String]) -> Result<(String, Arc<ServerConfig>), AccessError> {
        let key_pair = KeyPair::generate()?;
        let sign = |authority: &Authority| authority.sign(names, &key_pair);
        let mut authority = self.authority()?;
        let mut certificate = sign(&authority)?;
        if !is_trusted(&authority.pem, &certificate, names, UnixTime::now()) {
            // Most likely the authority itself is about to expire.
            authority = Authority::make()?;
            certificate = sign(&authority)?;
        }
        let key = key_pair.serialize_pem();
        let tls = server_config(&certificate, &key)?;
        write(&self.ca, &authority.pem)?;
        write(&self.ca_key, &authority.key.serialize_pem())?;
        write(&self.certificate, &certificate)?;
        write(&self.key, &key)?;
        Ok((authority.pem, tls))
    }

    /// The authority that is there, or a new one.
    fn authority(&self) -> Result<Authority, AccessError> {
        let (Some(pem), Some(key)) = (read(&self.ca)?, read(&self.ca_key)?) else {
            return Authority::make();
        };
        match KeyPair::from_pem(&key) {
            Ok(key) => Ok(Authority { pem, key }),
            Err(_) => Authority::make(),
        }
    }
}

/// Who signs the server's certificate. If key and certificate do not fit together, nobody trusts what it signs.
struct Authority {
    pem: String,
    key: KeyPair,
}

impl Authority {
    fn make() -> Result<Authority, AccessError> {
        let key = KeyPair::generate()?;
        let pem = Authority::params()?.self_signed(&key)?.pem();
        Ok(Authority { pem, key })
    }

    fn params() -> Result<CertificateParams, AccessError> {
        let mut params = params("trellis-ca")?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Ok(params)
    }

    /// A certificate of the server under these names.
    fn sign(&self, names: &[String], server_key: &KeyPair) -> Result<String, AccessError> {
        let mut params = params("trellis")?;
        params.subject_alt_names = CertificateParams::new(names)?.subject_alt_names;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let issuer = Issuer::new(Authority::params()?, &self.key);
        Ok(params.signed_by(server_key, &issuer)?.pem())
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

/// Whether a client that trusts `ca` would trust `certificate`, under each of the names, and for a while to come.
fn is_trusted(ca: &str, certificate: &str, names: &[String], now: UnixTime) -> bool {
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
    names.iter().all(|name| {
        ServerName::try_from(name.as_str()).is_ok_and(|name| {
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
            Pki::open(directory.path(), None).unwrap(),
            Pki::open(directory.path(), None).unwrap(),
        );
        assert_eq!(first.ca_pem, second.ca_pem);
        assert_eq!(first.token.as_str(), second.token.as_str());
        assert_eq!(first.token.as_str().len(), 64);
    }

    #[test]
    fn keys_and_token_are_their_owners_alone() {
        // Fails when another user of the machine could read a secret.
        let directory = tempfile::tempdir().unwrap();
        Pki::open(directory.path(), None).unwrap();
        let pki = directory.path().join("pki");
        assert_eq!(
            std::fs::metadata(&pki).unwrap().permissions().mode() & 0o777,
            0o700
        );
        for name in ["token", "server.key", "ca.key"] {
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

    fn names(more: &[&str]) -> Vec<String> {
        let all = SERVER_NAMES.iter().chain(more);
        all.map(|name| (*name).to_owned()).collect()
    }

    /// Whether a client that got `ca` from the server would trust it now under these names.
    fn serves(directory: &Path, ca: &str, names: &[String]) -> bool {
        let read = |name: &str| std::fs::read_to_string(directory.join("pki").join(name)).unwrap();
        let certificate = read("server.crt");
        read("ca.crt") == ca
            && server_config(&certificate, &read("server.key")).is_ok()
            && is_trusted(ca, &certificate, names, UnixTime::now())
    }

    #[test]
    fn a_certificate_that_does_not_fit_is_made_anew() {
        // Fails when a torn, foreign or damaged set of files keeps the server from starting, or is served as it is, or
        // when the authority changes although it could have stayed.
        let (ours, foreign) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        Pki::open(foreign.path(), None).unwrap();
        let open = || Pki::open(ours.path(), None).unwrap().ca_pem;
        let file = |name: &str| ours.path().join("pki").join(name);
        for name in ["ca.crt", "server.crt", "server.key"] {
            let before = open();
            std::fs::copy(foreign.path().join("pki").join(name), file(name)).unwrap();
            let after = open();
            assert_eq!(before == after, name != "ca.crt", "a foreign {name}");
            assert!(serves(ours.path(), &after, &names(&[])), "a foreign {name}");
            std::fs::write(file(name), "damaged").unwrap();
            let last = open();
            assert_eq!(after == last, name != "ca.crt", "a damaged {name}");
            assert!(serves(ours.path(), &last, &names(&[])), "a damaged {name}");
        }
        // Only the key of the authority is gone or wrong: nothing needs it until something has to be signed.
        for content in ["damaged", ""] {
            let before = open();
            std::fs::write(file("ca.key"), content).unwrap();
            assert_eq!(open(), before);
            std::fs::write(file("server.crt"), "damaged").unwrap();
            let after = open();
            assert_ne!(before, after);
            assert!(serves(ours.path(), &after, &names(&[])));
        }
    }

    #[test]
    fn another_address_is_covered_without_another_authority() {
        // Fails when a server that listens elsewhere is not trusted there, or when the kubeconfigs of other machines
        // break because it listens on one address more.
        let directory = tempfile::tempdir().unwrap();
        let open =
            |address: &str| Pki::open(directory.path(), Some(address.parse().unwrap())).unwrap();
        let first = Pki::open(directory.path(), None).unwrap().ca_pem;
        assert!(!serves(directory.path(), &first, &names(&["10.88.1.1"])));
        assert_eq!(open("10.88.1.1").ca_pem, first);
        assert!(serves(directory.path(), &first, &names(&["10.88.1.1"])));
        assert_eq!(open("fd00::1").ca_pem, first);
        assert!(serves(directory.path(), &first, &names(&["fd00::1"])));
    }

    #[test]
    fn a_certificate_is_renewed_before_it_expires() {
        // Fails when clients would meet an expired certificate, or one that was just made is refused.
        const DAY: u64 = 24 * 60 * 60;
        let directory = tempfile::tempdir().unwrap();
        Pki::open(directory.path(), None).unwrap();
        let text = |name| std::fs::read_to_string(directory.path().join("pki").join(name)).unwrap();
        let (ca, certificate) = (text("ca.crt"), text("server.crt"));
        let in_days = |days: u64| {
            let then = UnixTime::now().as_secs() + days * DAY;
            is_trusted(
                &ca,
                &certificate,
                &names(&[]),
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
