//! Copies that are replaced or let go of: at every moment as many hold everything as before, or as are asked for.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{Service, claim};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
/// What is written and must never be in fewer copies than is asked for.
const WRITTEN_MIB: usize = 96;

/// A service with pools of these names.
fn service(pools: &[&str]) -> Service {
    let service = Service::start_told(&["--resync-seconds", "3600"]);
    for pool in pools {
        add_pool(&service, pool);
    }
    service
}

fn add_pool(service: &Service, name: &str) {
    let path = service.path(&format!("pool-{name}"));
    std::fs::create_dir_all(&path).unwrap();
    service.trellis(&["pool", "add", name, path.to_str().unwrap()]);
}

fn class(replicas: &str, factor: &str, more: &str) -> String {
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: several\nprovisioner: trellis.dev\nallowVolumeExpansion: true\nparameters:\n  replicas: \"{replicas}\"\n  consistencyFactor: \"{factor}\"\n  allowSharedDisk: \"true\"\n  pools: a,b,c,d\n{more}"
    )
}

/// A block claim in use.
fn in_use(service: &Service, replicas: &str, factor: &str) -> PathBuf {
    service.apply(&class(replicas, factor, ""));
    let block = claim("data", "several", "128Mi");
    service.apply(&block.replace("spec:\n", "spec:\n  volumeMode: Block\n"));
    service.wait_bound("data");
    service.mount("data")
}

/// The bytes of one MiB, of which no two are the same.
fn pattern(index: usize) -> Vec<u8> {
    let blocks = MIB / BLOCK;
    (0..blocks)
        .flat_map(|block| block_pattern(index * blocks + block))
        .collect()
}

fn block_pattern(index: usize) -> Vec<u8> {
    let index = u64::try_from(index).unwrap();
    let mut state = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(BLOCK);
    while bytes.len() < BLOCK {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
}

/// Writes everything, durably.
fn write_all(device: &Path) {
    let mut device = File::options().write(true).open(device).unwrap();
    for index in 0..WRITTEN_MIB {
        device.write_all(&pattern(index)).unwrap();
    }
    device.sync_all().unwrap();
}

/// Whether a file holds everything. A `quick` look compares a block of each MiB.
fn holds_everything(file: &Path, quick: bool) -> bool {
    let Ok(file) = File::open(file) else {
        return false;
    };
    let mut found = vec![0; BLOCK];
    let last_of_mib = MIB / BLOCK;
    (1..=WRITTEN_MIB * last_of_mib)
        .filter(|count| !quick || count.is_multiple_of(last_of_mib))
        .all(|count| {
            let at = u64::try_from((count - 1) * BLOCK).unwrap();
            file.read_exact_at(&mut found, at).is_ok() && found == block_pattern(count - 1)
        })
}

/// Drops what the kernel remembers of a device, so that a read asks the volume.
fn read_back(device: &Path) {
    let mut file = File::open(device).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut found = vec![0; MIB];
    for index in 0..WRITTEN_MIB {
        file.read_exact(&mut found).unwrap();
        assert!(
            found == pattern(index),
            "MiB {index} is not what was written"
        );
    }
}

fn replicas(service: &Service) -> Vec<Value> {
    service.objects("replicas.trellis.dev")
}

fn name(replica: &Value) -> String {
    replica["metadata"]["name"].as_str().unwrap().to_owned()
}

fn pool(replica: &Value) -> String {
    replica["spec"]["pool"].as_str().unwrap().to_owned()
}

/// The data files of all copies on all pools of the service, whatever the objects say.
fn data_files(pools: &[PathBuf]) -> Vec<PathBuf> {
    let copies = |pool: &PathBuf| {
        std::fs::read_dir(pool.join("replicas"))
            .into_iter()
            .flatten()
    };
    let copies = pools.iter().flat_map(copies).flatten();
    // One that is being removed has another name already. The oldest come first: one that is not there any more
    // when it is looked at went before the next one is looked at.
    let copies = copies.filter(|copy| copy.file_name().to_string_lossy().starts_with("pvc-"));
    let mut copies: Vec<PathBuf> = copies.map(|copy| copy.path()).collect();
    copies.sort_by_key(|copy| copy.file_name().map(ToOwned::to_owned));
    copies.into_iter().map(|copy| copy.join("data")).collect()
}

/// Looks at the bytes on the pools again and again.
struct Watcher {
    least: Arc<AtomicUsize>,
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watcher {
    fn start(service: &Service, pools: &[&str]) -> Watcher {
        let paths: Vec<PathBuf> = pools
            .iter()
            .map(|pool| service.path(&format!("pool-{pool}")))
            .collect();
        let least = Arc::new(AtomicUsize::new(usize::MAX));
        let over = Arc::new(AtomicBool::new(false));
        let (least_seen, is_over) = (least.clone(), over.clone());
        let thread = std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                let files = data_files(&paths);
                let full = files.iter().filter(|file| holds_everything(file, true));
                least_seen.fetch_min(full.count(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        Watcher {
            least,
            over,
            thread: Some(thread),
        }
    }

    /// The fewest full copies that there were at any time.
    fn least(mut self) -> usize {
        self.end();
        self.least.load(Ordering::Relaxed)
    }

    fn end(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.end();
    }
}

/// The lock of a copy's process, which has its number.
fn copy_process(service: &Service, replica: &Value) -> Pid {
    let volume = replica["spec"]["volume"].as_str().unwrap();
    let number = name(replica)[volume.len() + 1..].to_owned();
    let lock = service
        .data()
        .join("run")
        .join(volume)
        .join(format!("{number}.lock"));
    service.wait("a process has said its number", |_| {
        let text = std::fs::read_to_string(&lock).ok()?;
        Pid::from_raw(text.trim().parse().ok()?)
    })
}

/// A disk that is lost: the process of its copy dies and finds nothing when it is started again.
struct LostDisk {
    pool: PathBuf,
    aside: PathBuf,
}

impl LostDisk {
    fn lose(service: &Service, replica: &Value) -> LostDisk {
        let lost = LostDisk {
            pool: service.path(&format!("pool-{}", pool(replica))),
            aside: service.path(&format!("lost-{}", pool(replica))),
        };
        std::fs::rename(&lost.pool, &lost.aside).unwrap();
        let _ = kill_process(copy_process(service, replica), Signal::KILL);
        lost
    }

    fn find_again(self, service: &Service, replica: &Value) {
        std::fs::rename(&self.aside, &self.pool).unwrap();
        add_pool(service, &pool(replica));
    }
}

fn target(service: &Service) -> Value {
    service.objects("targets.trellis.dev").remove(0)
}

fn condition(target: &Value, kind: &str) -> bool {
    let conditions = target["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|each| each["type"] == kind && each["status"] == "True")
}

fn state_of(target: &Value, replica: &Value) -> Option<String> {
    let seen = target["status"]["replicas"].as_array()?;
    let found = seen
        .iter()
        .find(|each| each["id"] == replica["metadata"]["uid"])?;
    Some(found["state"].as_str()?.to_owned())
}

fn counts(target: &Value, replica: &Value) -> bool {
    let members = target["status"]["members"]["replicas"].as_array();
    let mut members = members.into_iter().flatten();
    members.any(|id| *id == replica["metadata"]["uid"])
}

/// What every look at the objects found wrong: a copy that went out of the count before its successor was whole.
#[derive(Default)]
struct Looks {
    wrong: Mutex<Vec<String>>,
}

impl Looks {
    fn look(&self, service: &Service, old: &Value, asked: usize) -> (Value, Vec<Value>) {
        let target = target(service);
        let replicas = replicas(service);
        let new: Vec<&Value> = replicas
            .iter()
            .filter(|each| name(each) != name(old))
            .collect();
        let is_whole = |each: &&&Value| state_of(&target, each).as_deref() == Some("InSync");
        let whole = new.iter().filter(is_whole).count();
        if !counts(&target, old) && new.len() == asked && whole < asked {
            let seen = target["status"].to_string();
            self.wrong.lock().unwrap().push(seen);
        }
        (target, replicas)
    }
}

// Fails if the old copy is let go of, or its bytes, before the new one holds everything: the loss of the other disk
// would then be the loss of what was flushed.
#[test]
fn of_two_copies_the_one_that_is_replaced_stays_until_the_new_one_holds_everything() {
    let pools = ["a", "b", "c"];
    let service = service(&pools);
    let device = in_use(&service, "2", "2");
    write_all(&device);
    let first = replicas(&service);
    let (old, other) = (&first[0], &first[1]);
    let watcher = Watcher::start(&service, &pools);
    let looks = Looks::default();
    service.trellis(&["volume", "replace", "data", &pool(old)]);
    // The worst moment: the old copy's bytes have just gone.
    let old_data = PathBuf::from(old["status"]["path"].as_str().unwrap());
    service.wait("the old copy is gone", |service| {
        looks.look(service, old, 2);
        (!old_data.exists()).then_some(())
    });
    let least = watcher.least();
    let lost = LostDisk::lose(&service, other);
    assert_eq!(least, 2, "so few copies held everything at some time");
    let after = service.wait("the new copy has its object", |service| {
        replicas(service)
            .into_iter()
            .find(|each| name(each) != name(old) && name(each) != name(other))
    });
    let new_data = PathBuf::from(after["status"]["path"].as_str().unwrap());
    assert!(
        holds_everything(&new_data, false),
        "the new copy lacks what was flushed"
    );
    lost.find_again(&service, other);
    service.wait("both copies are whole", |service| {
        let (target, replicas) = looks.look(service, old, 2);
        (condition(&target, "RedundancyMet") && replicas.len() == 2).then_some(())
    });
    read_back(&device);
    assert_eq!(*looks.wrong.lock().unwrap(), Vec::<String>::new());
    service.trellis(&["umount", "data"]);
}

// Fails if a quorum that holds everything is taken for enough, while one of the others is behind: then the loss of
// one more disk is a loss of data.
#[test]
fn of_three_copies_with_one_behind_the_one_that_is_replaced_stays() {
    let pools = ["a", "b", "c", "d"];
    let service = service(&pools);
    let device = in_use(&service, "3", "1");
    let first = replicas(&service);
    let (old, behind, other) = (&first[0], &first[1], &first[2]);
    kill_process(copy_process(&service, behind), Signal::STOP).unwrap();
    write_all(&device);
    let looks = Looks::default();
    let watcher = Watcher::start(&service, &pools);
    service.kubectl(&["delete", "replicas.trellis.dev", &name(old), "--wait=false"]);
    service.wait("the new copy holds everything", |service| {
        let (target, replicas) = looks.look(service, old, 3);
        let is_new = |each: &&Value| first.iter().all(|known| name(known) != name(each));
        let new = replicas.iter().find(is_new)?;
        (state_of(&target, new).as_deref() == Some("InSync")).then_some(())
    });
    let seen = target(&service);
    assert!(
        counts(&seen, old),
        "two others hold everything, and three are asked for"
    );
    assert!(!condition(&seen, "RedundancyMet"));
    let shown = service.trellis(&["volume", "show", "data"]);
    assert!(shown.contains("Leaving"), "{shown}");
    // The worst moment: one more disk is gone, and one is behind.
    let lost = LostDisk::lose(&service, other);
    read_back(&device);
    lost.find_again(&service, other);
    kill_process(copy_process(&service, behind), Signal::CONT).unwrap();
    service.wait(
        "three copies are whole and the old one is gone",
        |service| {
            let (target, replicas) = looks.look(service, old, 3);
            (condition(&target, "RedundancyMet") && replicas.len() == 3).then_some(())
        },
    );
    let least = watcher.least();
    assert!(least >= 1, "nobody held everything at some time");
    assert_eq!(*looks.wrong.lock().unwrap(), Vec::<String>::new());
    read_back(&device);
    service.trellis(&["umount", "data"]);
}

// Fails if a copy goes for want of a place for another one, or nobody is told what it waits for.
#[test]
fn without_a_pool_for_the_new_copy_the_old_one_stays_and_it_is_said_why() {
    let pools = ["a", "b"];
    let service = service(&pools);
    let device = in_use(&service, "2", "2");
    write_all(&device);
    let first = replicas(&service);
    let old = &first[0];
    let watcher = Watcher::start(&service, &pools);
    service.trellis(&["volume", "replace", "data", &pool(old)]);
    service.wait("the reason is told", |service| {
        let said = service.try_trellis(&["volume", "show", "data"]);
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        (said.contains("TooFewPools") && said.contains("Leaving")).then_some(())
    });
    let explained = service.try_trellis(&["explain", "data"]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    assert!(explained.contains("TooFewPools"), "{explained}");
    service.wait("the claim says so", |service| {
        let claim = service.object("pvc", "data")["status"]["conditions"].to_string();
        claim.contains("TooFewPools").then_some(())
    });
    assert_eq!(watcher.least(), 2);
    // It goes on by itself when there is a pool.
    add_pool(&service, "c");
    service.wait("the copy was replaced", |service| {
        let replicas = replicas(service);
        let elsewhere = replicas.iter().all(|each| name(each) != name(old));
        (elsewhere && replicas.len() == 2).then_some(())
    });
    service.wait("the claim complains no more", |service| {
        let claim = service.object("pvc", "data")["status"]["conditions"].to_string();
        (!claim.contains("TooFewPools")).then_some(())
    });
    service.trellis(&["umount", "data"]);
}

// Fails if a request below quorum fails although the class says that it waits, if it is not served when enough copies
// are back, or if nobody looks for these.
#[test]
fn below_quorum_io_waits_and_goes_on_when_the_disks_are_back() {
    let pools = ["a", "b", "c"];
    let service = service(&pools);
    // A request is asked anew after a second: one that lasts for several has outlived every limit that there is.
    service.apply(&class("3", "2", "  patience: 1s\n"));
    service.claim("data", "several", "512Mi");
    let path = service.mount("data");
    let first = crate::harness::write_file(&path.join("before"), 8 << 20, 1);
    let copies = replicas(&service);
    let lost: Vec<LostDisk> = copies[..2]
        .iter()
        .map(|copy| LostDisk::lose(&service, copy))
        .collect();
    service.wait("it is said that too few are there", |service| {
        (!condition(&target(service), "Available")).then_some(())
    });
    let file = path.join("meanwhile");
    let writer = std::thread::spawn(move || crate::harness::write_file(&file, 8 << 20, 2));
    std::thread::sleep(Duration::from_secs(6));
    assert!(!writer.is_finished(), "nothing can be durable now");
    for lost in lost {
        std::fs::rename(&lost.aside, &lost.pool).unwrap();
    }
    service.wait("the write goes on", |_| writer.is_finished().then_some(()));
    let second = writer.join().unwrap();
    service.wait("all copies are whole", |service| {
        condition(&target(service), "RedundancyMet").then_some(())
    });
    assert_eq!(crate::harness::checksum(&path.join("before")), first);
    assert_eq!(crate::harness::checksum(&path.join("meanwhile")), second);
    service.trellis(&["umount", "data"]);
}

// Fails if a request below quorum waits although the class says that it fails, or the volume does not serve again.
#[test]
fn below_quorum_io_fails_after_its_patience_if_the_class_says_so() {
    let pools = ["a", "b"];
    let service = service(&pools);
    service.apply(&class(
        "2",
        "2",
        "  whenBelowQuorum: fail\n  patience: 2s\n",
    ));
    let block = claim("data", "several", "128Mi");
    service.apply(&block.replace("spec:\n", "spec:\n  volumeMode: Block\n"));
    service.wait_bound("data");
    let path = service.mount("data");
    write_all(&path);
    let copies = replicas(&service);
    let lost = LostDisk::lose(&service, &copies[0]);
    service.wait("it is said that too few are there", |service| {
        (!condition(&target(service), "Available")).then_some(())
    });
    let mut device = File::options().write(true).open(&path).unwrap();
    let written = device
        .write_all(&pattern(0))
        .and_then(|()| device.sync_all());
    assert!(written.is_err(), "it was acknowledged by one of two");
    std::fs::rename(&lost.aside, &lost.pool).unwrap();
    service.wait("it serves again", |service| {
        condition(&target(service), "RedundancyMet").then_some(())
    });
    write_all(&path);
    read_back(&path);
    drop(device);
    service.trellis(&["umount", "data"]);
}

fn said(output: &std::process::Output) -> String {
    let (out, error) = (&output.stdout, &output.stderr);
    format!(
        "{}{}",
        String::from_utf8_lossy(out),
        String::from_utf8_lossy(error)
    )
}

/// Waits until the claim is not served, which is when a recovery is asked for.
fn wait_unavailable(service: &Service) {
    service.wait("it is said that too few are there", |service| {
        (!condition(&target(service), "Available")).then_some(())
    });
}

fn wait_served_by(service: &Service, copies: usize) {
    service.wait("the volume is served again by new copies too", |service| {
        let target = target(service);
        let whole = condition(&target, "Available") && condition(&target, "RedundancyMet");
        let members = target["status"]["members"]["replicas"].as_array()?;
        (whole && members.len() == copies).then_some(())
    });
}

// Fails if a volume of two copies is lost with one of them for good, if verbs that can do nothing say that they did,
// or if what was given up does harm when it comes back.
#[test]
fn of_two_copies_one_is_lost_for_good_and_the_volume_goes_on() {
    let pools = ["a", "b", "c"];
    let service = service(&pools[..2]);
    let device = in_use(&service, "2", "2");
    write_all(&device);
    let first = replicas(&service);
    let lost = LostDisk::lose(&service, &first[0]);
    let gone = pool(&first[0]);
    wait_unavailable(&service);
    for verb in [
        vec!["volume", "scale", "data", "1"],
        vec!["volume", "scale", "data", "2", "--consistency", "1"],
        vec!["volume", "replace", "data", &gone],
    ] {
        let output = service.try_trellis(&verb);
        assert_eq!(output.status.code(), Some(3), "{verb:?} {}", said(&output));
        assert!(
            said(&output).contains("TooFewReplicas"),
            "{}",
            said(&output)
        );
    }
    let shown = service.try_trellis(&["volume", "recover", "data"]);
    assert_eq!(shown.status.code(), Some(3), "{}", said(&shown));
    assert!(
        said(&shown).contains("no write that was acknowledged is lost"),
        "{}",
        said(&shown)
    );
    assert!(
        said(&shown).contains(&format!("--accept-loss {gone}")),
        "{}",
        said(&shown)
    );
    let other = service.try_trellis(&["volume", "recover", "data", "--accept-loss", "elsewhere"]);
    assert_eq!(other.status.code(), Some(4), "{}", said(&other));
    service.trellis(&["volume", "recover", "data", "--accept-loss", &gone]);
    service.wait("the volume is served", |service| {
        condition(&target(service), "Available").then_some(())
    });
    read_back(&device);
    let seen = target(&service);
    assert!(
        !condition(&seen, "RedundancyMet"),
        "one of two copies is there"
    );
    service.wait("it is in the history", |service| {
        let volume = service.objects("volumes.trellis.dev").remove(0);
        let records = volume["status"]["recoveries"].as_array()?.clone();
        (records[0]["recovery"]["lineage"] == seen["status"]["lineage"]).then_some(())
    });
    let history = service.trellis(&["history", "data"]);
    assert!(
        history.contains("gave up 1 and went on with 1"),
        "{history}"
    );
    service.wait("there is an event", |service| {
        let events = service.objects("events");
        let mut events = events.iter();
        events
            .any(|each| each["reason"] == "VolumeRecovered")
            .then_some(())
    });
    // The new copy is made when there is a pool for it; the old one comes back meanwhile.
    std::fs::rename(&lost.aside, &lost.pool).unwrap();
    add_pool(&service, "c");
    wait_served_by(&service, 2);
    read_back(&device);
    // Its pool is as good as any other again, and may have the new copy.
    service.wait("what was given up is gone", |service| {
        let copies = replicas(service);
        let is_old = |each: &Value| each["metadata"]["uid"] == first[0]["metadata"]["uid"];
        (copies.len() == 2 && !copies.iter().any(is_old)).then_some(())
    });
    write_all(&device);
    service.trellis(&["umount", "data"]);
}

// Fails if a volume of three copies is lost with two of them, if it goes on without the operator's word, or if the two
// that were given up bring their history back as the majority that they once were.
#[test]
fn of_three_copies_two_are_lost_for_good_and_have_no_vote_when_they_return() {
    let pools = ["a", "b", "c", "d"];
    let mut service = service(&pools[..3]);
    let device = in_use(&service, "3", "2");
    write_all(&device);
    let first = replicas(&service);
    let lost: Vec<LostDisk> = first[..2]
        .iter()
        .map(|copy| LostDisk::lose(&service, copy))
        .collect();
    let (one, two) = (pool(&first[0]), pool(&first[1]));
    wait_unavailable(&service);
    let shown = service.try_trellis(&["volume", "recover", "data"]);
    assert!(said(&shown).contains("MAY BE LOST"), "{}", said(&shown));
    let half = service.try_trellis(&["volume", "recover", "data", "--accept-loss", &one]);
    assert_eq!(half.status.code(), Some(5), "{}", said(&half));
    let both = ["--accept-loss", &one, "--accept-loss", &two];
    service.trellis(&[&["volume", "recover", "data"][..], &both].concat());
    service.wait("the volume is served", |service| {
        condition(&target(service), "Available").then_some(())
    });
    read_back(&device);
    // Something is written that those who were given up do not have, and all of them return at a start.
    let mut file = File::options().write(true).open(&device).unwrap();
    file.write_all(&pattern(WRITTEN_MIB)).unwrap();
    file.sync_all().unwrap();
    drop(file);
    service.trellis(&["umount", "data"]);
    service.kill();
    for lost in &lost {
        std::fs::rename(&lost.aside, &lost.pool).unwrap();
    }
    // The target begins anew, and they are a majority of the copies that there once were.
    let run = service
        .data()
        .join("run")
        .join(first[0]["spec"]["volume"].as_str().unwrap());
    let lock = std::fs::read_to_string(run.join("target.lock")).unwrap();
    let target_process = Pid::from_raw(lock.trim().parse().unwrap()).unwrap();
    kill_process(target_process, Signal::KILL).unwrap();
    service.up(&[]);
    let device = service.mount("data");
    let mut found = vec![0; MIB];
    File::open(&device).unwrap().read_exact(&mut found).unwrap();
    assert!(found == pattern(WRITTEN_MIB), "what was given up is served");
    add_pool(&service, "d");
    wait_served_by(&service, 3);
    service.wait("what was given up is gone", |service| {
        (replicas(service).len() == 3).then_some(())
    });
    service.trellis(&["umount", "data"]);
}

// Fails if a death of the service in a recovery leaves it half done, or a step of it is not covered.
#[test]
fn a_recovery_survives_a_death_of_the_service_at_every_step() {
    let steps = trellis_api::step::Step::ALL
        .iter()
        .filter(|step| step.is_of_recovery());
    for step in steps {
        let pools = ["a", "b", "c"];
        let mut service = service(&pools);
        let device = in_use(&service, "2", "2");
        write_all(&device);
        let first = replicas(&service);
        service.stop();
        service.up(&[("TRELLIS_CRASH_AT", step.name())]);
        let _lost = LostDisk::lose(&service, &first[0]);
        wait_unavailable(&service);
        service.trellis(&[
            "volume",
            "recover",
            "data",
            "--accept-loss",
            &pool(&first[0]),
        ]);
        let deadline = std::time::Instant::now() + crate::harness::PATIENCE;
        while !service.has_crashed() {
            assert!(
                std::time::Instant::now() < deadline,
                "{step:?} is not reached"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        service.up(&[]);
        wait_served_by(&service, 2);
        read_back(&device);
        service.wait("it is recorded once", |service| {
            let volume = service.objects("volumes.trellis.dev").remove(0);
            (volume["status"]["recoveries"].as_array()?.len() == 1).then_some(())
        });
        service.trellis(&["umount", "data"]);
    }
}
