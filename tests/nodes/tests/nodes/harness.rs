//! The harness: what it promises to the tests that use it.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use trellis_nodes_tests::leftovers;
use trellis_nodes_tests::link::Weather;
use trellis_nodes_tests::machine::Machine;
use trellis_nodes_tests::network::Network;

/// How long to wait for what must come.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long to wait for what must not come. Longer waits would only make the test surer.
const SILENCE: Duration = Duration::from_millis(300);

/// A listener on a node.
fn listen(on: &Machine) -> TcpListener {
    let address = on.address();
    on.within(move || TcpListener::bind((address, 0)).unwrap())
        .unwrap()
}

fn connect(from: &Machine, to: SocketAddr, limit: Duration) -> std::io::Result<TcpStream> {
    from.within(move || TcpStream::connect_timeout(&to, limit))
        .unwrap()
}

/// Sends a byte there and waits for it to arrive.
fn arrives(sender: &mut TcpStream, receiver: &mut TcpStream, limit: Duration) -> bool {
    receiver.set_read_timeout(Some(limit)).unwrap();
    sender.write_all(b"x").unwrap();
    match receiver.read(&mut [0; 64]) {
        Ok(count) => count > 0,
        Err(error) => {
            assert!(matches!(
                error.kind(),
                ErrorKind::WouldBlock | ErrorKind::TimedOut
            ));
            false
        }
    }
}

fn pair(from: &Machine, to: &Machine) -> (TcpStream, TcpStream) {
    let listener = listen(to);
    let sender = connect(from, listener.local_addr().unwrap(), PATIENCE).unwrap();
    let (receiver, _) = listener.accept().unwrap();
    sender.set_nodelay(true).unwrap();
    (sender, receiver)
}

/// Waits until it is so.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "gave up waiting for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn nodes_reach_each_other_until_a_link_is_cut_and_again_when_it_is_healed() {
    // Fails if nodes are not connected, if a cut lets anything through or touches another node, or if it cannot be healed.
    let network = Network::new(&["a", "b", "c"]).unwrap();
    let [a, b, c] = network.machines() else {
        panic!("three nodes")
    };
    let (mut from_a, mut at_b) = pair(a, b);
    let (mut from_c, mut also_at_b) = pair(c, b);
    assert!(arrives(&mut from_a, &mut at_b, PATIENCE));
    a.cut().unwrap();
    assert!(!arrives(&mut from_a, &mut at_b, SILENCE));
    assert!(arrives(&mut from_c, &mut also_at_b, PATIENCE));
    let listener = listen(b);
    let there = listener.local_addr().unwrap();
    assert!(connect(a, there, SILENCE).is_err());
    a.heal().unwrap();
    // The connection has lived through it: what was sent meanwhile arrives now.
    at_b.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(at_b.read(&mut [0; 1]).unwrap(), 1);
    assert!(connect(a, there, PATIENCE).is_ok());
}

#[test]
fn a_path_is_cut_in_one_direction_alone() {
    // Fails if cutting the path from a to b also cuts the other direction, or the paths to c.
    let network = Network::new(&["a", "b", "c"]).unwrap();
    let [a, b, c] = network.machines() else {
        panic!("three nodes")
    };
    let ((mut at_a, mut at_b), (mut also_at_a, mut at_c)) = (pair(a, b), pair(a, c));
    network.cut_path(a, b).unwrap();
    assert!(!arrives(&mut at_a, &mut at_b, SILENCE));
    assert!(arrives(&mut at_b, &mut at_a, PATIENCE));
    assert!(arrives(&mut also_at_a, &mut at_c, PATIENCE));
    assert!(arrives(&mut at_c, &mut also_at_a, PATIENCE));
    network.heal_path(a, b).unwrap();
    at_b.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(at_b.read(&mut [0; 1]).unwrap(), 1);
}

#[test]
fn weather_delays_and_loses() {
    // Fails if a delay is not there or does not end, or if everything arrives although everything is to be lost.
    let network = Network::new(&["a", "b"]).unwrap();
    let [a, b] = network.machines() else {
        panic!("two nodes")
    };
    let delay = Duration::from_millis(100);
    let slow = Weather {
        delay,
        loss_percent: 0,
    };
    let (mut from_a, mut at_b) = pair(a, b);
    a.set_weather(slow).unwrap();
    let began = Instant::now();
    assert!(arrives(&mut from_a, &mut at_b, PATIENCE));
    // It can be later, but not sooner.
    assert!(began.elapsed() >= delay);
    a.set_weather(Weather {
        delay: Duration::ZERO,
        loss_percent: 100,
    })
    .unwrap();
    assert!(!arrives(&mut from_a, &mut at_b, SILENCE));
    // A cut holds in any weather, and outlives it.
    a.calm().unwrap();
    at_b.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(at_b.read(&mut [0; 1]).unwrap(), 1);
    a.cut().unwrap();
    a.set_weather(Weather::default()).unwrap();
    assert!(!arrives(&mut from_a, &mut at_b, SILENCE));
    a.calm().unwrap();
    assert!(!arrives(&mut from_a, &mut at_b, SILENCE));
    a.heal().unwrap();
    at_b.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(at_b.read(&mut [0; 1]).unwrap(), 1);
}

#[test]
fn much_data_crosses_a_slow_and_lossy_wire_whole() {
    // Fails if the wire changes, repeats or reorders what TCP sends so that it cannot be put together again.
    let network = Network::new(&["a", "b"]).unwrap();
    let [a, b] = network.machines() else {
        panic!("two nodes")
    };
    a.set_weather(Weather {
        delay: Duration::from_millis(2),
        loss_percent: 1,
    })
    .unwrap();
    let (mut sender, mut receiver) = pair(a, b);
    let bytes = (0..4_u32 << 20).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]);
    let sent: Vec<u8> = bytes.collect();
    let copy = sent.clone();
    let sending = std::thread::spawn(move || sender.write_all(&copy));
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut received = vec![0; sent.len()];
    receiver.read_exact(&mut received).unwrap();
    sending.join().unwrap().unwrap();
    assert!(sent == received);
}

#[test]
fn the_processes_of_a_node_are_frozen_and_killed_and_no_others() {
    // Fails if a child is missed, if a frozen process goes on, or if a process of another node is touched.
    let network = Network::new(&["a", "b"]).unwrap();
    let [a, b] = network.machines() else {
        panic!("two nodes")
    };
    let counts = |machine: &Machine| {
        let file = machine.directory().join("count");
        let script = format!(
            "while :; do echo . >> {}; sleep 0.01; done & wait",
            file.display()
        );
        let mut command = machine.command("sh");
        let child = command.args(["-c", &script]).spawn().unwrap();
        (child, file)
    };
    let ((mut of_a, at_a), (mut of_b, at_b)) = (counts(a), counts(b));
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
    let grows = |path: &Path| {
        let before = size(path);
        eventually("the count goes on", || size(path) > before);
    };
    grows(&at_a);
    assert!(a.processes().len() >= 2);
    a.freeze().unwrap();
    let frozen = size(&at_a);
    grows(&at_b);
    std::thread::sleep(SILENCE);
    assert_eq!(size(&at_a), frozen);
    a.thaw();
    grows(&at_a);
    a.freeze().unwrap();
    a.kill().unwrap();
    assert!(a.processes().is_empty());
    assert!(!of_a.wait().unwrap().success());
    grows(&at_b);
    b.kill().unwrap();
    of_b.wait().unwrap();
}

#[test]
fn each_node_has_a_disk_of_its_own() {
    // Fails if two nodes, or two disks of a node, share a filesystem, so that pools on them would count as one.
    use std::os::unix::fs::MetadataExt;
    let network = Network::new(&["a", "b"]).unwrap();
    let [a, b] = network.machines() else {
        panic!("two nodes")
    };
    let extra = a.disk("second", "16m").unwrap();
    let of = |path: &Path| std::fs::metadata(path).unwrap().dev();
    let mut disks = vec![
        of(a.directory()),
        of(b.directory()),
        of(&extra),
        of(&std::env::temp_dir()),
    ];
    disks.sort_unstable();
    disks.dedup();
    assert_eq!(disks.len(), 4);
}

/// All that a network with these names has left.
fn left(prefix: &str) -> Vec<String> {
    let named = |directory: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with(prefix)).collect()
    };
    let mut left = named(Path::new("/run/netns"));
    left.extend(named(&std::env::temp_dir()));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    left.extend(
        mounts
            .lines()
            .filter(|line| line.contains(prefix))
            .map(str::to_owned),
    );
    for device in std::fs::read_dir("/sys/block").unwrap().flatten() {
        let file = std::fs::read_to_string(device.path().join("loop/backing_file"));
        left.extend(file.ok().filter(|file| file.contains(prefix)));
    }
    left
}

/// Starts what a service could leave behind: a process, and a filesystem on a loop device.
fn litter(machine: &Machine) -> std::process::Child {
    let (image, point) = (
        machine.directory().join("image"),
        machine.directory().join("mnt"),
    );
    std::fs::create_dir(&point).unwrap();
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(16 << 20).unwrap();
    let run = |command: &mut Command| assert!(command.status().unwrap().success());
    run(Command::new("mkfs.ext4").arg("-q").arg(&image));
    run(Command::new("mount").arg(&image).arg(&point));
    let mut sleeper = machine.command("sleep");
    sleeper.arg("1000").current_dir(&point).stdin(Stdio::null());
    sleeper.spawn().unwrap()
}

/// The test below, for the process that it starts.
const NAME: &str = "harness::nothing_stays_after_a_network_a_panic_or_an_abort";
/// Set for that process, which aborts.
const ABORTS: &str = "TRELLIS_NODES_TEST_ABORTS";

#[test]
fn nothing_stays_after_a_network_a_panic_or_an_abort() {
    // Fails if a namespace, a mount, a loop device, a process or a directory is left in any of the three.
    if std::env::var_os(ABORTS).is_some() {
        let network = Network::new(&["aborted"]).unwrap();
        litter(&network.machines()[0]);
        std::process::abort();
    }
    let network = Network::new(&["a"]).unwrap();
    let prefix = network.machines()[0]
        .namespace()
        .trim_end_matches(".a")
        .to_owned();
    assert!(!left(&prefix).is_empty());
    let mut sleeper = litter(&network.machines()[0]);
    let panics = move || {
        let _network = network;
        panic!("as a test does that fails");
    };
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    assert!(!sleeper.wait().unwrap().success());
    assert_eq!(left(&prefix), Vec::<String>::new());

    // Another process of this test makes a network and is killed.
    let aborted = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", NAME])
        .env(ABORTS, "yes")
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(!aborted.success());
    // Another run of the tests may be faster, and then nothing is left for this one.
    for prefix in leftovers::sweep().unwrap() {
        assert_eq!(left(&prefix), Vec::<String>::new());
    }
    let rest = left(leftovers::PREFIX);
    assert!(
        rest.iter().all(|each| !each.contains("aborted")),
        "{rest:?}"
    );
}
