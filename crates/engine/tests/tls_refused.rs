//! Peers that must not be spoken to: each is refused, and both sides know why.
#![allow(clippy::unwrap_used)]

#[path = "common/nodes.rs"]
mod nodes;
#[path = "common/pki.rs"]
mod pki;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use nodes::{Copy, page, ready, shown};
use pki::{Home, Pair, Valid, ago, ahead, name};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    AlertDescription, ClientConfig, ClientConnection, DigitallySignedStruct, DistinguishedName,
    ServerConfig, ServerConnection, SignatureScheme, StreamOwned,
};
use trellis_engine::drive::{Address, Credentials, Failure, Refusal, Side, Volume, VolumeSettings};
use trellis_engine::proto::Config;
use trellis_engine::wire::{
    self, Arrival, HEADER_BYTES, KNOWS_ALL, KNOWS_NEEDED, Objection, Sum, VERSION,
};
use uuid::Uuid;

const COPY: &str = "copy";
const TARGET: &str = "target";

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Credentials with a certificate of `pair`, and the authority of `home`.
fn credentials(home: &Home, dir: &Path, pair: &Pair) -> Credentials {
    Credentials::read(&home.write(dir, "some", pair)).unwrap()
}

/// Certificates that a node of `home` must not accept of `node`, with what it says of them.
fn unacceptable(home: &Home, node: &str) -> Vec<(Pair, Refusal)> {
    let found = name("somebody");
    vec![
        (
            Home::new().sign_node(node, Valid::Always),
            Refusal::OtherHome,
        ),
        (
            home.sign_node("somebody", Valid::Always),
            Refusal::OtherNode { found },
        ),
        (
            home.sign_node(node, Valid::Until(ago(60))),
            Refusal::Expired,
        ),
        (
            home.sign_node(node, Valid::From(ahead(3600))),
            Refusal::NotYetValid,
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_refuses_who_is_not_allowed_and_both_sides_know_why() {
    // Fails if a certificate of another home or node, or out of its time, lets somebody in, or if one side does not
    // say so.
    let (dir, home) = (dir(), Home::new());
    let copy = Copy::serve(&home.credentials(dir.path(), COPY), &[TARGET]);
    for (pair, refusal) in unacceptable(&home, TARGET) {
        let volume = copy.volume(&credentials(&home, dir.path(), &pair));
        shown(&volume, &Failure::RefusedUs(refusal.clone())).await;
        copy.noted(Side::Here, &refusal);
        assert!(!volume.status().available);
    }
    for refused in copy.server.refusals() {
        println!("{:?} {:?}: {}", refused.from, refused.by, refused.why);
        assert_eq!(refused.from, Some([127, 0, 0, 1].into()));
    }
    ready(&copy.volume(&home.credentials(dir.path(), TARGET))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_refuses_a_copy_that_is_not_the_expected_one_and_both_sides_know_why() {
    // Fails if a volume gives its bytes to somebody else at the address of a copy.
    let (dir, home) = (dir(), Home::new());
    let target = home.credentials(dir.path(), TARGET);
    for (pair, refusal) in unacceptable(&home, COPY) {
        let copy = Copy::serve(&credentials(&home, dir.path(), &pair), &[TARGET]);
        let node = name(COPY);
        let address = Address::Tls {
            node,
            at: copy.at(),
        };
        let volume = copy.volume_at(address, &target);
        shown(&volume, &Failure::Refused(refusal.clone())).await;
        copy.noted(Side::There, &refusal);
        assert!(!volume.status().available);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_without_credentials_says_so() {
    // Fails if a volume tries to speak to another node without showing who it is.
    let (dir, home) = (dir(), Home::new());
    let copy = Copy::serve(&home.credentials(dir.path(), COPY), &[TARGET]);
    let replica = Uuid::new_v4();
    let config = Config::majority([replica].into());
    let addresses = [(replica, copy.server.address().clone())].into();
    let volume = Volume::start(VolumeSettings::new(Uuid::new_v4(), config, addresses));
    shown(&volume, &Failure::NoCredentials).await;
}

/// Accepts every certificate: what a peer shows is what is tested.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl Anybody {
    fn new() -> Arc<Anybody> {
        Arc::new(Anybody(provider()))
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Anybody {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

fn der(pair: &Pair) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let certificate = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
    (vec![certificate], key)
}

fn patient(stream: TcpStream) -> TcpStream {
    let limit = Some(Duration::from_secs(20));
    stream.set_read_timeout(limit).unwrap();
    stream
}

/// A client that shows this certificate, or none.
fn client(
    at: SocketAddr,
    pair: Option<&Pair>,
    versions: &[&'static rustls::SupportedProtocolVersion],
) -> StreamOwned<ClientConnection, TcpStream> {
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(versions)
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Anybody::new());
    let config = match pair.map(der) {
        None => config.with_no_client_auth(),
        Some((chain, key)) => config.with_client_auth_cert(chain, key).unwrap(),
    };
    let session = ClientConnection::new(Arc::new(config), at.ip().into()).unwrap();
    StreamOwned::new(session, patient(TcpStream::connect(at).unwrap()))
}

/// The alert with which a peer ends a connection.
fn alert(stream: &mut impl Read) -> AlertDescription {
    let error = stream.read(&mut [0; 16]).unwrap_err();
    let error = error.get_ref().unwrap().downcast_ref::<rustls::Error>();
    match error {
        Some(rustls::Error::AlertReceived(alert)) => *alert,
        other => panic!("{other:?} is no alert"),
    }
}

#[test]
fn a_peer_without_a_certificate_or_without_the_name_of_a_node_is_refused() {
    // Fails if the certificate of a server or of a person lets somebody in, or none at all does.
    let (dir, home) = (dir(), Home::new());
    let copy = Copy::serve(&home.credentials(dir.path(), COPY), &[TARGET]);
    let tls13 = [&rustls::version::TLS13];
    let mut nobody = client(copy.at(), None, &tls13);
    assert_eq!(alert(&mut nobody), AlertDescription::CertificateRequired);
    copy.noted(Side::Here, &Refusal::NoCertificate);
    let two = [name(TARGET).uri(), name("b").uri()];
    for uris in [&["https://target".to_owned()][..], &two] {
        let pair = home.sign(uris, Valid::Always);
        let mut unnamed = client(copy.at(), Some(&pair), &tls13);
        assert_eq!(alert(&mut unnamed), AlertDescription::BadCertificate);
    }
    copy.noted(Side::Here, &Refusal::NoName);
}

#[test]
fn who_speaks_an_older_tls_or_none_is_refused() {
    // Fails if a connection can be talked down to TLS 1.2, or if garbage costs more than its own connection.
    let (dir, home) = (dir(), Home::new());
    let copy = Copy::serve(&home.credentials(dir.path(), COPY), &[TARGET]);
    let pair = home.sign_node(TARGET, Valid::Always);
    let mut old = client(copy.at(), Some(&pair), &[&rustls::version::TLS12]);
    assert_eq!(alert(&mut old), AlertDescription::ProtocolVersion);
    copy.noted(Side::Here, &Refusal::NoCommonTls);
    let mut plain = patient(TcpStream::connect(copy.at()).unwrap());
    plain.write_all(&knows(VERSION, KNOWS_ALL)).unwrap();
    let mut told = Vec::new();
    plain.read_to_end(&mut told).unwrap();
    assert!(told.len() < 64, "{told:?}");
    copy.noted(Side::Here, &Refusal::Nonsense);
}

/// The first frame of a peer, as that version would have it.
fn knows(version: u16, bits: u32) -> Vec<u8> {
    let mut frame = BytesMut::new();
    wire::encode_knows(bits, &mut frame).unwrap();
    frame[4..6].copy_from_slice(&version.to_le_bytes());
    frame.to_vec()
}

/// Reads one frame, unless it is the end.
fn next_frame(stream: &mut impl Read) -> Option<Arrival> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).ok()?;
    let mut body = vec![0; wire::body_length(&header).unwrap()];
    stream.read_exact(&mut body).unwrap();
    Some(wire::decode_any(&header, &Bytes::from(body), Sum::Head, &|_, _| None).unwrap())
}

fn frame(stream: &mut impl Read) -> Arrival {
    next_frame(stream).unwrap()
}

/// First frames that do not fit, with what is said of them here, and to the peer.
fn misfits() -> [(Vec<u8>, Refusal, Objection); 3] {
    let (older, newer) = (VERSION - 1, VERSION + 1);
    let version = |theirs| {
        let ours = VERSION;
        let shown = theirs;
        (
            knows(theirs, KNOWS_ALL),
            Refusal::Wire { theirs, ours },
            Objection::Version { shown },
        )
    };
    let missing = KNOWS_NEEDED;
    let lacks = (
        knows(VERSION, 0),
        Refusal::Features { missing },
        Objection::Features { missing },
    );
    [version(older), version(newer), lacks]
}

#[test]
fn a_copy_refuses_a_volume_of_another_version_and_both_sides_know_why() {
    // Fails if a volume of another release is spoken to, or is not told which versions do not fit.
    let (dir, home) = (dir(), Home::new());
    let copy = Copy::serve(&home.credentials(dir.path(), COPY), &[TARGET]);
    let pair = home.sign_node(TARGET, Valid::Always);
    for (first, refusal, objection) in misfits() {
        let mut peer = client(copy.at(), Some(&pair), &[&rustls::version::TLS13]);
        peer.write_all(&first).unwrap();
        // The header of the answer has the version of the copy, which tells a peer of another version the rest.
        assert_eq!(frame(&mut peer), Arrival::Objects(objection));
        copy.noted(Side::Here, &refusal);
    }
    let mut fits = client(copy.at(), Some(&pair), &[&rustls::version::TLS13]);
    fits.write_all(&knows(VERSION, KNOWS_ALL | 1 << 31))
        .unwrap();
    assert_eq!(frame(&mut fits), Arrival::Knows(KNOWS_ALL));
}

/// Listens as a copy, answers the first frame with this one, and gives back what the volume says to that. Who connects
/// later waits in vain, as long as the listener is there.
fn answering(
    home: &Home,
    first: Vec<u8>,
) -> (TcpListener, std::thread::JoinHandle<Option<Arrival>>) {
    let (chain, key) = der(&home.sign_node(COPY, Valid::Always));
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_client_cert_verifier(Anybody::new())
        .with_single_cert(chain, key)
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = listener.try_clone().unwrap();
    let answer = move || {
        let socket = patient(ours.accept().unwrap().0);
        let session = ServerConnection::new(Arc::new(config)).unwrap();
        let mut stream = StreamOwned::new(session, socket);
        assert_eq!(frame(&mut stream), Arrival::Knows(KNOWS_ALL));
        stream.write_all(&first).unwrap();
        stream.flush().unwrap();
        next_frame(&mut stream)
    };
    (listener, std::thread::spawn(answer))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_refuses_a_copy_of_another_version_and_both_sides_know_why() {
    // Fails if a copy of another release is spoken to, or if a person cannot see which versions do not fit.
    let (dir, home) = (dir(), Home::new());
    let target = home.credentials(dir.path(), TARGET);
    let reached = |listener: &TcpListener| {
        let at = listener.local_addr().unwrap();
        let address = format!("tls:{COPY}@{at}").parse().unwrap();
        lonely(address, Some(target.clone()))
    };
    for (first, refusal, objection) in misfits() {
        let (listener, answered) = answering(&home, first);
        let volume = reached(&listener);
        shown(&volume, &Failure::Refused(refusal)).await;
        let answer = answered.join().unwrap();
        assert_eq!(answer, Some(Arrival::Objects(objection)));
    }
    // What a copy says before it hangs up is shown.
    let mut last = BytesMut::new();
    wire::encode_objects(Objection::Crowded, &mut last).unwrap();
    let (listener, _) = answering(&home, last.to_vec());
    let volume = reached(&listener);
    shown(&volume, &Failure::RefusedUs(Refusal::Crowded)).await;
}

/// A volume with one copy at that address.
fn lonely(address: Address, credentials: Option<Credentials>) -> Volume {
    let replica = Uuid::new_v4();
    let config = Config::majority([replica].into());
    Volume::start(VolumeSettings {
        credentials,
        ..VolumeSettings::new(Uuid::new_v4(), config, [(replica, address)].into())
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn another_version_on_the_same_machine_is_refused_with_the_same_words() {
    // Fails if a Unix socket hides which versions do not fit. (`served` has the other side.)
    let dir = dir();
    for theirs in [VERSION - 1, VERSION + 1] {
        let path = dir.path().join(format!("{theirs}.sock"));
        let listener = UnixListener::bind(&path).unwrap();
        let answered = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            assert_eq!(frame(&mut stream), Arrival::Knows(KNOWS_ALL));
            stream.write_all(&knows(theirs, KNOWS_ALL)).unwrap();
            loop {
                // The volume has greeted the copy before it knew.
                if let Arrival::Objects(objection) = frame(&mut stream) {
                    return objection;
                }
            }
        });
        let volume = lonely(Address::Unix(path), None);
        let ours = VERSION;
        shown(&volume, &Failure::Refused(Refusal::Wire { theirs, ours })).await;
        let shown = theirs;
        assert_eq!(answered.join().unwrap(), Objection::Version { shown });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_and_memory_of_another_machine_mean_nothing_here() {
    // Fails if a peer on another node can have a file of this one opened, or memory mapped.
    let (dir, home) = (dir(), Home::new());
    let copy = Copy::serve(&home.credentials(dir.path(), COPY), &[TARGET]);
    let pair = home.sign_node(TARGET, Valid::Always);
    let mut peer = client(copy.at(), Some(&pair), &[&rustls::version::TLS13]);
    peer.write_all(&knows(VERSION, KNOWS_ALL)).unwrap();
    assert_eq!(frame(&mut peer), Arrival::Knows(KNOWS_ALL));
    let mut lend = BytesMut::new();
    let place = wire::Lend {
        descriptor: 0,
        length: 4096,
        device: 1,
        inode: 1,
    };
    wire::encode_lend(&place, &mut lend).unwrap();
    peer.write_all(&lend).unwrap();
    assert_eq!(peer.read(&mut [0; 16]).unwrap_or(0), 0);
    copy.noted(Side::Here, &Refusal::Nonsense);
    let volume = copy.volume(&home.credentials(dir.path(), TARGET));
    ready(&volume).await;
    volume.write(0, page(1), true).await.unwrap();
}
