//! Copies that are replaced or let go of: at every moment as many hold everything as before, or as are asked for.

mod lost;

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

/// The directories of pools.
fn paths(service: &Service, pools: &[&str]) -> Vec<PathBuf> {
    let path = |pool: &&str| service.path(&format!("pool-{pool}"));
    pools.iter().map(path).collect()
}

/// Looks at the bytes on the pools again and again.
struct Watcher {
    least: Arc<AtomicUsize>,
    over: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watcher {
    fn start(service: &Service, pools: &[&str]) -> Watcher {
        let paths = paths(service, pools);
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

// Fails if a copy that is let go of takes its bytes with it while fewer others hold everything than are asked for.
#[test]
fn scaled_down_there_are_never_fewer_full_copies_than_asked_for() {
    for one_is_behind in [false, true] {
        let pools = ["a", "b", "c"];
        let service = service(&pools);
        let device = in_use(&service, "3", "2");
        let first = replicas(&service);
        let signal = |signal: Signal| {
            if one_is_behind {
                kill_process(copy_process(&service, &first[0]), signal).unwrap();
            }
        };
        signal(Signal::STOP);
        write_all(&device);
        let watcher = Watcher::start(&service, &pools);
        service.trellis(&["volume", "scale", "data", "2"]);
        // Long enough for a hasty hand: a copy that is let go of is gone after a fraction of a second.
        std::thread::sleep(Duration::from_secs(3));
        signal(Signal::CONT);
        service.wait("two copies are left, and whole", |service| {
            let two =
                replicas(service).len() == 2 && data_files(&paths(service, &pools)).len() == 2;
            (two && condition(&target(service), "RedundancyMet")).then_some(())
        });
        assert_eq!(watcher.least(), 2, "one is behind: {one_is_behind}");
        for file in data_files(&paths(&service, &pools)) {
            assert!(holds_everything(&file, false), "{}", file.display());
        }
        read_back(&device);
        service.trellis(&["umount", "data"]);
    }
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
