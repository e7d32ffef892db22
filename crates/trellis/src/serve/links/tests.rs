//! Two nodes on one machine: a copy at 127.0.0.2 and a target at 127.0.0.3, with certificates that the real signer has
//! signed through the real API.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::BytesMut;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned};
use serde_json::json;
use tempfile::TempDir;
use trellis_api::{HoldReason, NodeName};
use trellis_apiserver::EmbeddedApi;
use trellis_apiserver::users::User;
use trellis_control::certificates::{CERTIFICATE_LIFE, Signer};
use trellis_engine::drive::{
    Address, Credentials, Failure, Refusal, ReplicaServer, ReplicaSettings, Volume, VolumeSettings,
};
use trellis_engine::proto::Config;
use trellis_engine::replica::{Identity, Pool, Provisioning};
use trellis_engine::wire::{self, KNOWS_ALL, VERSION};
use trellis_keeper::message::send;
use trellis_keeper::paths::{ProcessPaths, RunDir};
use trellis_pki::{Authority, Lifetime, chains_to};
use uuid::Uuid;

use super::Links;
use crate::credentials;
use crate::serve::message::{CopyRequest, CopyStatus, tell_copy};
use crate::serve::replica::links::Links as CopyLinks;
use crate::serve::target::status::link_hold;

const COPY: &str = "copy";
const TARGET: &str = "target";
const COPY_IP: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 2));
/// How long anything may take that must come.
const PATIENCE: Duration = Duration::from_secs(30);
const SIZE: u64 = 16 << 20;

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

// Fails if a node is let in that is neither the target's nor this one, or that was removed.
#[test]
fn a_copy_admits_the_node_of_its_target_as_long_as_that_is_a_node() {
    let links = Links::new(Path::new("/d"), "a", Some(COPY_IP));
    let allowed = |target: Option<&str>| links.for_copy(target).allowed;
    assert_eq!(allowed(Some("b")), names(&["a", "b"]));
    assert_eq!(allowed(None), names(&["a"]));
    assert!(links.know(names(&["a", "b"])));
    assert!(!links.know(names(&["a", "b"])));
    assert_eq!(allowed(Some("b")), names(&["a", "b"]));
    assert_eq!(allowed(Some("c")), names(&["a"]));
    assert!(links.know(names(&["a"])));
    assert_eq!(allowed(Some("b")), names(&["a"]));
    let silent = Links::new(Path::new("/d"), "a", None);
    assert_eq!(silent.for_copy(None).link, None);
}

/// A home: an API, somebody who signs, and nodes that keep their certificates.
struct Home {
    api: EmbeddedApi,
    signer: tokio::task::AbortHandle,
    tasks: tokio::task::JoinSet<()>,
    dir: TempDir,
}

impl Home {
    fn start(life: Duration) -> Home {
        let dir = tempfile::tempdir().unwrap();
        let api = EmbeddedApi::open(&dir.path().join("store")).unwrap();
        let authority = Authority::make(SystemTime::now()).unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        let signer = Signer::new(api.client(), authority, String::new(), life);
        Home {
            signer: tasks.spawn(signer.run()),
            api,
            tasks,
            dir,
        }
    }

    /// Another authority signs from now on; these before are still believed.
    fn change_authority(&mut self, authority: Authority, earlier: &str) {
        self.signer.abort();
        let client = self.api.client();
        let signer = Signer::new(client, authority, earlier.to_owned(), CERTIFICATE_LIFE);
        self.signer = self.tasks.spawn(signer.run());
    }

    fn trusted(&self, node: &str) -> String {
        std::fs::read_to_string(credentials::of_node(&self.data(node)).join("ca.crt")).unwrap()
    }

    fn data(&self, node: &str) -> PathBuf {
        self.dir.path().join(node)
    }

    /// Adds a node, which gets its certificate and keeps it until the answer is aborted.
    async fn join(&mut self, node: &str) -> tokio::task::AbortHandle {
        let object = serde_json::from_value(json!({ "metadata": { "name": node } })).unwrap();
        let nodes = Api::<Node>::all(self.api.client());
        nodes.create(&PostParams::default(), &object).await.unwrap();
        let name: NodeName = node.parse().unwrap();
        let client = self.api.client_as(User::Node(node.into()));
        let data = self.data(node);
        let keeping = credentials::keep_certificate(client, name, data.clone());
        let task = self.tasks.spawn(keeping);
        let own = credentials::of_node(&data).join("node.pem");
        until("the node has a certificate", || own.exists().then_some(())).await;
        task
    }

    fn credentials(&self, node: &str) -> Credentials {
        let dir = credentials::of_node(&self.data(node));
        Credentials::expect(&dir, node.parse().unwrap())
    }

    fn certificate(&self, node: &str) -> String {
        std::fs::read_to_string(credentials::of_node(&self.data(node)).join("node.pem")).unwrap()
    }
}

/// A copy on the node `copy`, served as its process serves it, and told what its agent tells it.
struct Copy {
    server: Option<ReplicaServer>,
    identity: Identity,
    paths: ProcessPaths,
    links: Links,
    dir: TempDir,
}

impl Copy {
    fn serve(home: &Home) -> Copy {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity {
            volume: Uuid::new_v4(),
            replica: Uuid::new_v4(),
        };
        let pool = Pool::open(dir.path()).unwrap();
        let size = trellis_api::Bytes::new(SIZE);
        pool.create("r", identity, size, Provisioning::Thin)
            .unwrap();
        let mut copy = Copy {
            server: None,
            identity,
            paths: RunDir::at(dir.path().to_owned()).process("0"),
            links: Links::new(&home.data(COPY), COPY, Some(COPY_IP)),
            dir,
        };
        copy.start();
        copy
    }

    fn start(&mut self) {
        self.server = None;
        let settings = ReplicaSettings {
            path: self.dir.path().join("replicas/r"),
            pool: None,
            identity: self.identity,
            provisioning: Provisioning::Thin,
            checksums: true,
        };
        let near = Address::Unix(self.paths.socket.clone());
        let server = ReplicaServer::start(settings, &near).unwrap();
        CopyLinks::start(server.links().clone(), self.paths.clone()).unwrap();
        self.server = Some(server);
    }

    /// What its agent does in a pass.
    fn told(&self, target: Option<&str>) -> CopyStatus {
        let settings = self.links.for_copy(target);
        let text = serde_json::to_vec(&settings).unwrap();
        trellis_files::ensure(&self.paths.settings, &text).unwrap();
        tell_copy(&self.paths.control, settings, PATIENCE).unwrap()
    }

    fn link(&self, target: &str) -> Address {
        let link = self.told(Some(target)).link.unwrap();
        link.parse().unwrap()
    }

    /// A target that looks for the copy at that address.
    fn volume(&self, address: Address, credentials: Credentials) -> Volume {
        let replica = self.identity.replica;
        let config = Config::majority([replica].into());
        Volume::start(VolumeSettings {
            credentials: Some(credentials),
            ..VolumeSettings::new(self.identity.volume, config, [(replica, address)].into())
        })
    }
}

async fn until<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "gave up: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn page(byte: u8) -> Vec<bytes::Bytes> {
    vec![bytes::Bytes::from(vec![byte; 4096])]
}

async fn ready(volume: &Volume) {
    let ready = tokio::time::timeout(PATIENCE, volume.ready()).await;
    assert_eq!(ready.map_err(|_| volume.troubles()).unwrap(), Ok(SIZE));
}

/// Waits until the target shows this, and answers what a person reads.
async fn shown(volume: &Volume, failure: &Failure) -> String {
    until(&format!("{failure:?}"), || {
        let troubles = volume.troubles();
        let found = troubles.values().find(|it| it.failure == *failure)?;
        let hold = link_hold(&found.failure)?;
        assert_eq!(hold.reason, HoldReason::LinkRefused);
        Some(hold.message)
    })
    .await
}

/// Waits until the copy shows this.
async fn noted(copy: &Copy, target: &str, words: &str) {
    until(words, || {
        let hold = copy.told(Some(target)).hold?;
        (hold.reason == HoldReason::LinkRefused && hold.message.contains(words)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_speak_with_certificates_that_the_home_has_signed() {
    // Fails if no certificate arrives, if the engine does not take it, if nothing listens at the node's own address, or
    // if a copy that starts again is looked for in vain.
    let mut home = Home::start(CERTIFICATE_LIFE);
    home.join(COPY).await;
    home.join(TARGET).await;
    let mut copy = Copy::serve(&home);
    let address = copy.link(TARGET);
    let Address::Tls { node, at } = &address else {
        panic!("{address}");
    };
    assert_eq!((node.as_str(), at.ip()), (COPY, COPY_IP));
    let volume = copy.volume(address.clone(), home.credentials(TARGET));
    ready(&volume).await;
    volume.write(0, page(1), true).await.unwrap();
    // The keeper starts it again, without the agent.
    copy.start();
    volume.write(4096, page(2), true).await.unwrap();
    assert!(volume.read(0, 4096).await.unwrap().concat() == [1; 4096]);
    assert_eq!(copy.link(TARGET), address);
    assert_eq!(copy.told(Some(TARGET)).hold, None);
    volume.stop().await;
    // On the node itself it is reached by its socket, at the same time.
    let near = Address::Unix(copy.paths.socket.clone());
    let volume = copy.volume(near, home.credentials(COPY));
    ready(&volume).await;
    assert!(volume.read(4096, 4096).await.unwrap().concat() == [2; 4096]);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_that_live_for_seconds_are_renewed_in_the_middle_of_io() {
    // Fails if a renewal needs a restart of anything, breaks a connection, or comes too late for the next one.
    let mut home = Home::start(Duration::from_secs(4));
    home.join(COPY).await;
    home.join(TARGET).await;
    let first = home.certificate(TARGET);
    let copy = Copy::serve(&home);
    let volume = copy.volume(copy.link(TARGET), home.credentials(TARGET));
    ready(&volume).await;
    let ends = Lifetime::of(&first).unwrap().until + Duration::from_secs(1);
    let mut writes = 0u64;
    while SystemTime::now() < ends {
        let byte = u8::try_from(writes % 251).unwrap();
        volume.write(0, page(byte), false).await.unwrap();
        writes += 1;
    }
    assert!(volume.troubles().is_empty());
    // Cut off and let in again: another handshake, after both first certificates have ended.
    copy.told(None);
    let found: NodeName = TARGET.parse().unwrap();
    let refused = Failure::RefusedUs(Refusal::OtherNode { found });
    shown(&volume, &refused).await;
    copy.told(Some(TARGET));
    volume.write(0, page(9), true).await.unwrap();
    assert_ne!(home.certificate(TARGET), first);
    println!("{writes} writes while the certificates were renewed");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_refused_is_told_on_both_sides() {
    // Fails if a peer of another home, of another node, or with an ended certificate gets in, or if a person on either
    // side cannot see why.
    let mut home = Home::start(Duration::from_secs(3));
    let mut other = Home::start(CERTIFICATE_LIFE);
    home.join(COPY).await;
    home.join("third").await;
    let keeping = home.join(TARGET).await;
    other.join(TARGET).await;
    let copy = Copy::serve(&home);
    let address = copy.link(TARGET);
    let volume = copy.volume(address.clone(), other.credentials(TARGET));
    // The target of the other home does not believe the copy either, and finds out first.
    let said = shown(&volume, &Failure::Refused(Refusal::OtherHome)).await;
    println!("{said}");
    noted(&copy, TARGET, "not signed by the authority of this home").await;
    volume.stop().await;
    let volume = copy.volume(address.clone(), home.credentials("third"));
    let found: NodeName = "third".parse().unwrap();
    let refusal = Refusal::OtherNode { found };
    let said = shown(&volume, &Failure::RefusedUs(refusal)).await;
    println!("{said}");
    noted(&copy, TARGET, "belongs to node third").await;
    volume.stop().await;
    // A node that does not renew its certificate.
    keeping.abort();
    let ends = Lifetime::of(&home.certificate(TARGET)).unwrap().until;
    let left = ends.duration_since(SystemTime::now()).unwrap_or_default();
    tokio::time::sleep(left + Duration::from_secs(1)).await;
    let volume = copy.volume(address, home.credentials(TARGET));
    let said = shown(&volume, &Failure::RefusedUs(Refusal::Expired)).await;
    println!("{said}");
    noted(&copy, TARGET, "has expired").await;
    volume.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_without_a_certificate_or_of_another_version_is_told_of() {
    // Fails if somebody without a certificate, or of an older or newer release, gets in, or nobody hears of it.
    let mut home = Home::start(CERTIFICATE_LIFE);
    home.join(COPY).await;
    home.join(TARGET).await;
    let copy = Copy::serve(&home);
    let Address::Tls { at, .. } = copy.link(TARGET) else {
        panic!("no link");
    };
    let nobody = tokio::task::spawn_blocking(move || speak(at, None, VERSION));
    assert!(nobody.await.unwrap().is_err());
    noted(&copy, TARGET, "no certificate was shown").await;
    for version in [VERSION - 1, VERSION + 1] {
        let own = home.certificate(TARGET);
        let spoken = tokio::task::spawn_blocking(move || speak(at, Some(&own), version));
        // It hears the version of the copy, and then nothing more.
        let heard = spoken.await.unwrap().unwrap();
        assert_eq!(heard[4..6], VERSION.to_le_bytes());
        let words = format!("the other side speaks version {version} of the protocol");
        noted(&copy, TARGET, &words).await;
    }
    // On the target's side the same reasons become the same sentences.
    let theirs = VERSION + 1;
    let ours = VERSION;
    for failure in [
        Failure::Refused(Refusal::Wire { theirs, ours }),
        Failure::RefusedUs(Refusal::Wire { theirs, ours }),
        Failure::RefusedUs(Refusal::NoCertificate),
        Failure::NoCredentials,
    ] {
        let hold = link_hold(&failure).unwrap();
        assert_eq!(hold.reason, HoldReason::LinkRefused);
        assert!(hold.message.contains(&failure.to_string()));
    }
    assert_eq!(link_hold(&Failure::Closed), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_authority_takes_over_without_a_gap() {
    // Fails if nodes do not believe both authorities for a while, change over before they need to, or do not change
    // over when the earlier one counts no longer.
    let mut home = Home::start(CERTIFICATE_LIFE);
    home.join(COPY).await;
    home.join(TARGET).await;
    let copy = Copy::serve(&home);
    let volume = copy.volume(copy.link(TARGET), home.credentials(TARGET));
    ready(&volume).await;
    let (first, earlier) = (home.certificate(TARGET), home.trusted(TARGET));
    let next = Authority::make(SystemTime::now()).unwrap();
    let (text, second) = (next.text(), next.certificate().to_owned());
    let both = format!("{second}{earlier}");
    home.change_authority(next, &earlier);
    for node in [COPY, TARGET] {
        until("both are believed", || {
            (home.trusted(node) == both).then_some(())
        })
        .await;
    }
    assert_eq!(home.certificate(TARGET), first);
    // A third node gets its certificate from the new one, and is known to the others.
    home.join("third").await;
    assert!(chains_to(&home.certificate("third"), &second));
    volume.write(0, page(1), true).await.unwrap();
    home.change_authority(Authority::read(&text).unwrap(), "");
    for node in [COPY, TARGET] {
        until("the node has changed over", || {
            chains_to(&home.certificate(node), &second).then_some(())
        })
        .await;
        assert_eq!(home.trusted(node), second);
    }
    volume.stop().await;
    ready(&copy.volume(copy.link(TARGET), home.credentials(TARGET))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_removed_loses_its_link() {
    // Fails if a removed node keeps its connection, gets another with its sound certificate, or another certificate.
    let mut home = Home::start(CERTIFICATE_LIFE);
    home.join(COPY).await;
    home.join(TARGET).await;
    let copy = Copy::serve(&home);
    copy.links.know(names(&[COPY, TARGET]));
    let volume = copy.volume(copy.link(TARGET), home.credentials(TARGET));
    ready(&volume).await;
    let nodes = Api::<Node>::all(home.api.client());
    nodes
        .delete(TARGET, &DeleteParams::default())
        .await
        .unwrap();
    copy.links.know(names(&[COPY]));
    copy.told(Some(TARGET));
    let found: NodeName = TARGET.parse().unwrap();
    let refusal = Refusal::OtherNode { found };
    shown(&volume, &Failure::RefusedUs(refusal)).await;
    noted(&copy, TARGET, "belongs to node target").await;
    assert!(!volume.status().available);
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_that_have_gone_leave_room_for_the_next() {
    // Fails if an agent that watched a copy and died takes up a place for ever.
    let mut home = Home::start(CERTIFICATE_LIFE);
    home.join(COPY).await;
    let copy = Copy::serve(&home);
    for _ in 0..32 {
        let mut stream = UnixStream::connect(&copy.paths.control).unwrap();
        send(&stream, &CopyRequest::Watch, &[]).unwrap();
        // The first status, or the end if there was no place.
        let _ = stream.read(&mut [0]).unwrap();
    }
    until("the copy answers the next agent", || {
        let settings = copy.links.for_copy(None);
        tell_copy(&copy.paths.control, settings, PATIENCE).ok()
    })
    .await;
}

/// Speaks to a copy in that version of the protocol, and answers what it says first.
fn speak(at: SocketAddr, own: Option<&str>, version: u16) -> std::io::Result<Vec<u8>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody));
    let config = match own {
        None => config.with_no_client_auth(),
        Some(text) => {
            let certificate = CertificateDer::from_pem_slice(text.as_bytes()).unwrap();
            let key = PrivateKeyDer::from_pem_slice(text.as_bytes()).unwrap();
            config
                .with_client_auth_cert(vec![certificate], key)
                .unwrap()
        }
    };
    let session = ClientConnection::new(Arc::new(config), at.ip().into()).unwrap();
    let socket = TcpStream::connect(at)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut stream = StreamOwned::new(session, socket);
    let mut first = BytesMut::new();
    wire::encode_knows(KNOWS_ALL, &mut first).unwrap();
    first[4..6].copy_from_slice(&version.to_le_bytes());
    stream.write_all(&first)?;
    let mut heard = vec![0; 8];
    stream.read_exact(&mut heard)?;
    Ok(heard)
}

/// Accepts every certificate: what the copy says to others is what is tested.
#[derive(Debug)]
struct Anybody;

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
        let provider = rustls::crypto::ring::default_provider();
        provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}
