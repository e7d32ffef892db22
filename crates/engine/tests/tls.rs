//! Copies on other nodes: what works over TLS, what goes on while certificates and nodes change, and what strangers and
//! broken lines cannot do. `tls_refused` has those who are refused, and `faults` the failures of copies.
#![allow(clippy::unwrap_used)]

#[path = "common/cluster.rs"]
mod cluster;
#[path = "common/load.rs"]
mod load;
#[path = "common/nodes.rs"]
mod nodes;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cluster::{Cluster, is_whole, pki, until};
use load::Model;
use nodes::{Copy, page, ready, shown};
use pki::{Home, Valid, ahead, name};
use trellis_engine::drive::{Address, Credentials, Failure, Refusal, Side, Volume, survey};

const MIB: u64 = 1 << 20;

const COPY: &str = "copy";
const TARGET: &str = "target";

#[tokio::test(flavor = "multi_thread")]
async fn three_copies_on_other_nodes_hold_what_was_written_while_the_volume_grows() {
    // Fails if an I/O fails, a byte is lost or mixed up between records, or a copy is left behind.
    let cluster = Cluster::start_tls(3, 64 * MIB);
    let volume = Volume::start(cluster.settings());
    assert_eq!(volume.ready().await, Ok(64 * MIB));
    let model = Arc::new(Model::default());
    let mut load = load::start(&volume, &model, 32, None);
    tokio::time::sleep(Duration::from_millis(500)).await;
    model.longest();
    for to in [65 * MIB, 128 * MIB, 129 * MIB + 4096] {
        assert_eq!(volume.grow(to).await, Ok(to));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    println!("longest write {:?} of {}", model.longest(), model.writes());
    load::finish(&model, &mut load).await;
    load::check_all(&volume, &model).await;
    // Requests of every length, so that pieces end anywhere in a record.
    for (at, blocks) in (66..).step_by(6).zip([1, 3, 4, 5, 63, 64, 65, 255, 1024]) {
        let at = at * MIB;
        let pages = (0..blocks).map(|page| load::content(at / 4096 + page, 7));
        let data = bytes::Bytes::from(pages.collect::<Vec<_>>().concat());
        volume.write(at, vec![data.clone()], false).await.unwrap();
        let read = volume.read(at, blocks * 4096).await.unwrap().concat();
        assert!(read == data, "{blocks} blocks");
    }
    until(&volume, "everything in sync", is_whole).await;
    untroubled(&volume).await;
    volume.flush().await.unwrap();
    cluster.assert_same(129 * MIB + 4096);
    // Nothing of it went through shared memory.
    for replica in &cluster.replicas {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", replica.pid())).unwrap();
        assert!(!maps.contains("memfd:trellis-writes"));
    }
    let limit = Duration::from_secs(10);
    let found = survey(
        cluster.volume,
        cluster.addresses(),
        cluster.credentials(),
        limit,
    )
    .await;
    assert!(found.len() == 3 && found.values().all(Result::is_ok));
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_without_a_restart_and_connections_outlive_the_old_ones() {
    // Fails if a renewed certificate needs a restart of either side, if the end of an old one ends what it began, or
    // if files in the middle of a renewal are used.
    let (dir, home) = (tempfile::tempdir().unwrap(), Home::new());
    let soon = ahead(4);
    let short = |node: &str| {
        let pair = home.sign_node(node, Valid::Until(soon));
        Credentials::read(&home.write(dir.path(), node, &pair)).unwrap()
    };
    let (of_copy, of_target) = (short(COPY), short(TARGET));
    let copy = Copy::serve(&of_copy, &[TARGET]);
    let first = copy.volume(&of_target);
    ready(&first).await;
    first.write(0, page(1), false).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    // The connection goes on, and a new one is not made.
    first.write(0, page(2), false).await.unwrap();
    assert!(first.troubles().is_empty());
    let late = copy.volume(&of_target);
    shown(&late, &Failure::Refused(Refusal::Expired)).await;
    // A new key, and not the certificate for it.
    let renewed = home.sign_node(COPY, Valid::Always);
    let half = pki::Pair {
        certificate: home.sign_node(COPY, Valid::Always).certificate,
        key: renewed.key.clone(),
    };
    home.write(dir.path(), COPY, &half);
    copy.noted(Side::There, &Refusal::Expired);
    home.write(dir.path(), COPY, &renewed);
    shown(&late, &Failure::RefusedUs(Refusal::Expired)).await;
    first.write(0, page(3), false).await.unwrap();
    late.stop().await;
    home.write(dir.path(), TARGET, &home.sign_node(TARGET, Valid::Always));
    let second = copy.volume(&of_target);
    ready(&second).await;
    assert!(second.read(0, 4096).await.unwrap().concat() == [3; 4096]);
    // The home gets another authority: for a while both are known.
    let next = Home::new();
    let both = format!("{}{}", home.certificate(), next.certificate());
    for node in [COPY, TARGET] {
        next.write(dir.path(), node, &next.sign_node(node, Valid::Always));
        std::fs::write(dir.path().join(node).join("ca.crt"), &both).unwrap();
    }
    second.stop().await;
    ready(&copy.volume(&of_target)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_removed_is_cut_off_and_one_that_is_added_gets_in() {
    // Fails if a revoked node keeps its connection, or gets another one with its sound certificate.
    let (dir, home) = (tempfile::tempdir().unwrap(), Home::new());
    let target = home.credentials(dir.path(), TARGET);
    let copy = Copy::serve(&home.credentials(dir.path(), COPY), &[TARGET]);
    let volume = copy.volume(&target);
    ready(&volume).await;
    assert!(copy.server.refusals().is_empty());
    let began = Instant::now();
    copy.server.allow(BTreeSet::from([name("other")]));
    let found = name(TARGET);
    let refusal = Refusal::OtherNode { found };
    shown(&volume, &Failure::RefusedUs(refusal.clone())).await;
    println!("cut off and refused again after {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(3));
    copy.noted(Side::Here, &refusal);
    assert!(!volume.status().available);
    copy.server.allow(BTreeSet::from([name(TARGET)]));
    volume.write(0, page(1), true).await.unwrap();
    untroubled(&volume).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_that_hold_connections_open_keep_nobody_out() {
    // Fails if half-open connections pile up, outlive their time, or stop the volume or the next one.
    let (dir, home) = (tempfile::tempdir().unwrap(), Home::new());
    let target = home.credentials(dir.path(), TARGET);
    let copy = Copy::serve(&home.credentials(dir.path(), COPY), &[TARGET]);
    let first = copy.volume(&target);
    ready(&first).await;
    let model = Arc::new(Model::default());
    let mut load = load::start(&first, &model, 4, None);
    let before = resident_kib();
    let mut silent = Vec::new();
    for index in 0..600 {
        let mut stream = TcpStream::connect(copy.at()).unwrap();
        // Silence, the start of a hello, or a long record that never ends.
        match index % 3 {
            0 => {}
            1 => stream.write_all(&[22, 3, 1, 2, 0, 1]).unwrap(),
            _ => drop(stream.write_all(&[&[22, 3, 1, 0x40, 0][..], &[1; 16000]].concat())),
        }
        silent.push(stream);
    }
    println!("{} KiB more", resident_kib().saturating_sub(before));
    assert!(resident_kib().saturating_sub(before) < 64 << 10);
    let writes = model.writes();
    let began = Instant::now();
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    // Ours, those that are half-open, and what the test has besides.
    assert!(descriptors < 600 + 32 + 80, "{descriptors}");
    load::finish(&model, &mut load).await;
    load::check_all(&first, &model).await;
    assert!(model.writes() >= writes);
    let second = copy.volume(&target);
    ready(&second).await;
    println!("another volume got in after {:?}", began.elapsed());
    copy.noted(Side::Here, &Refusal::Crowded);
    copy.noted(Side::Here, &Refusal::Late);
    for stream in &mut silent {
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        // An alert, the end, or a reset.
        while stream.read(&mut [0; 64]).unwrap_or(0) > 0 {}
    }
    assert!(began.elapsed() < Duration::from_secs(15));
    assert!(copy.server.refusals().len() <= 32);
    second.write(0, page(1), true).await.unwrap();
}

/// Waits until the volume shows no failure.
async fn untroubled(volume: &Volume) {
    let began = Instant::now();
    while !volume.troubles().is_empty() {
        let troubles = volume.troubles();
        assert!(began.elapsed() < Duration::from_secs(5), "{troubles:#?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.unwrap().parse().unwrap()
}

/// What a line does to what it carries.
#[derive(Clone, Copy)]
enum Harm {
    /// It is cut.
    Cut,
    /// One bit changes.
    Flip,
}

/// A line that harms every connection after some bytes, each after others.
struct Line {
    at: SocketAddr,
    harmed: Arc<AtomicU64>,
}

impl Line {
    fn to(copy: SocketAddr, harm: Harm) -> Line {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let harmed = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&harmed);
        std::thread::spawn(move || {
            for (index, stream) in listener.incoming().map_while(Result::ok).enumerate() {
                let Ok(onward) = TcpStream::connect(copy) else {
                    return;
                };
                // In the handshake, in the first messages, and among the writes, on the way there and on the way back.
                let after = [300, 5_000, 70_000, 400_000][index % 4] + 37 * index;
                let there = (index / 4).is_multiple_of(2);
                let back = (onward.try_clone().unwrap(), stream.try_clone().unwrap());
                let limit = |is_harmed: bool| is_harmed.then_some(after);
                carry((stream, onward), limit(there), harm, &count);
                carry(back, limit(!there), harm, &count);
            }
        });
        Line { at, harmed }
    }
}

/// Carries bytes from one socket to another, and harms them after so many.
fn carry(
    (mut from, mut to): (TcpStream, TcpStream),
    after: Option<usize>,
    harm: Harm,
    harmed: &Arc<AtomicU64>,
) {
    let harmed = Arc::clone(harmed);
    std::thread::spawn(move || {
        let mut left = after;
        let mut buffer = [0; 8192];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            let mut bytes = &mut buffer[..read];
            if let Some(at) = left.filter(|left| *left < read) {
                harmed.fetch_add(1, Ordering::Relaxed);
                left = None;
                match harm {
                    Harm::Flip => bytes[at] ^= 0x10,
                    Harm::Cut => bytes = &mut bytes[..at],
                }
            }
            left = left.map(|left| left - read);
            let is_cut = bytes.len() < read;
            if to.write_all(bytes).is_err() || is_cut {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    });
}

async fn through_harm(harm: Harm) -> (Copy, Volume) {
    let (dir, home) = (tempfile::tempdir().unwrap(), Home::new());
    let copy = Copy::serve(&home.credentials(dir.path(), COPY), &[TARGET]);
    let line = Line::to(copy.at(), harm);
    let address = Address::Tls {
        node: name(COPY),
        at: line.at,
    };
    let volume = copy.volume_at(address, &home.credentials(dir.path(), TARGET));
    ready(&volume).await;
    let model = Arc::new(Model::default());
    let mut load = load::start(&volume, &model, 8, None);
    let began = Instant::now();
    while line.harmed.load(Ordering::Relaxed) < 16 {
        assert!(began.elapsed() < Duration::from_secs(60), "no connections");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    load::finish(&model, &mut load).await;
    println!("{} writes in {:?}", model.writes(), began.elapsed());
    load::check_all(&volume, &model).await;
    volume.flush().await.unwrap();
    (copy, volume)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_is_cut_in_the_middle_of_a_record_costs_its_connection_and_nothing_else() {
    // Fails if a part of a record is believed, if a write is lost or done twice in between, or if the volume does not
    // come back.
    through_harm(Harm::Cut).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bit_that_changes_on_the_way_is_never_believed() {
    // Fails if changed bytes reach a disk or a client, or if nobody says that they came.
    let (copy, _volume) = through_harm(Harm::Flip).await;
    copy.noted(Side::Here, &Refusal::Nonsense);
}

#[test]
fn a_copy_listens_for_other_nodes_only_with_the_credentials_of_its_own() {
    // Fails if a copy can be started on the network without TLS, or under a name that it cannot prove.
    use trellis_engine::Error;
    use trellis_engine::drive::{CredentialFault, ReplicaServer, ReplicaSettings};
    use trellis_engine::replica::{Identity, Pool, Provisioning};
    let (dir, home) = (tempfile::tempdir().unwrap(), Home::new());
    let identity = Identity {
        volume: uuid::Uuid::new_v4(),
        replica: uuid::Uuid::new_v4(),
    };
    let size = trellis_api::Bytes::new(MIB);
    let pool = Pool::open(dir.path()).unwrap();
    pool.create("r", identity, size, Provisioning::Thin)
        .unwrap();
    let settings = || ReplicaSettings {
        path: dir.path().join("replicas/r"),
        pool: None,
        identity,
        provisioning: Provisioning::Thin,
        checksums: true,
    };
    let listen: Address = "tls:copy@127.0.0.1:0".parse().unwrap();
    assert!(matches!(
        ReplicaServer::start(settings(), &listen),
        Err(Error::CredentialsAbsent { .. })
    ));
    let other = home.credentials(dir.path(), "other");
    assert!(matches!(
        ReplicaServer::start_tls(settings(), &listen, &other, BTreeSet::new()),
        Err(Error::CredentialsForeign { .. })
    ));
    let fault_of = |uris: &[String], key: Option<&str>| {
        let mut pair = home.sign(uris, Valid::Always);
        if let Some(key) = key {
            pair.key = key.to_owned();
        }
        match Credentials::read(&home.write(dir.path(), "bad", &pair)) {
            Err(Error::CredentialsBad { fault, .. }) => fault,
            other => panic!("{other:?}"),
        }
    };
    let uri = [name(COPY).uri()];
    let others = home.sign_node(COPY, Valid::Always).key;
    assert_eq!(fault_of(&[], None), CredentialFault::NoName);
    assert_eq!(fault_of(&uri, Some("nothing")), CredentialFault::NoKey);
    assert_eq!(fault_of(&uri, Some(&others)), CredentialFault::OtherKey);
    assert!(matches!(
        Credentials::read(&dir.path().join("nowhere")),
        Err(Error::Io { .. })
    ));
}
