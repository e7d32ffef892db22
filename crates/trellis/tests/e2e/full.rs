//! Pools that somebody else has filled: what a volume of several copies has written goes on, what it has not waits or
//! fails, and the claim says so.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::FallocateFlags;
use serde_json::Value;

use crate::harness::{Service, checksum, claim, said, sweep, write_file};

const MIB: usize = 1 << 20;

/// A small ext4 of its own for a pool.
struct SmallPool {
    image: PathBuf,
    path: PathBuf,
}

impl SmallPool {
    fn mount(service: &Service, name: &str) -> SmallPool {
        let image = service.path(&format!("image-{name}"));
        let path = service.path(&format!("pool-{name}"));
        std::fs::create_dir_all(&path).unwrap();
        File::create(&image).unwrap().set_len(512 << 20).unwrap();
        let made = Command::new("mkfs.ext4")
            .args(["-q", "-F", "-m", "0"])
            .arg(&image)
            .output();
        said(&made.unwrap(), "making an ext4");
        let mounted = Command::new("mount")
            .args(["-o", "loop"])
            .arg(&image)
            .arg(&path)
            .output();
        said(&mounted.unwrap(), "mounting an ext4");
        service.trellis(&["pool", "add", name, path.to_str().unwrap()]);
        SmallPool { image, path }
    }

    /// Takes all space that there is.
    fn fill_up(&self) {
        let ballast = File::create(self.path.join("ballast")).unwrap();
        let mut at = 0;
        for piece in [16 << 20, 1 << 20, 4096] {
            let flags = FallocateFlags::empty();
            while rustix::fs::fallocate(&ballast, flags, at, piece).is_ok() {
                at += piece;
            }
            ballast.sync_all().unwrap();
        }
    }

    fn free_up(&self) {
        std::fs::remove_file(self.path.join("ballast")).unwrap();
    }
}

impl Drop for SmallPool {
    fn drop(&mut self) {
        sweep(&self.path);
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
        let _ = std::fs::remove_file(&self.image);
    }
}

// Fails if `explain` says that all is well of a claim whose users get "no space left": because its own filesystem is
// full, because the pool below its only copy is, or because that pool is gone.
#[test]
fn a_claim_with_nothing_left_is_not_said_to_be_well() {
    let service = Service::start_told(&["--resync-seconds", "3600"]);
    let pool = SmallPool::mount(&service, "b");
    service.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: small}\nprovisioner: trellis.dev\n\
         allowVolumeExpansion: true\nparameters: {pools: b}\n",
    );
    service.claim("data", "small", "320Mi");
    let path = service.mount("data");
    let explained = || service.trellis_any(&["explain", "data"]);
    let well = explained();
    assert!(
        well.contains("All is well") && well.contains("in use"),
        "{well}"
    );
    let mut file = File::create(path.join("file")).unwrap();
    let piece = vec![7_u8; MIB];
    while std::io::Write::write_all(&mut file, &piece).is_ok() {}
    while std::io::Write::write_all(&mut file, &piece[..512]).is_ok() {}
    drop(file);
    let full = explained();
    assert!(full.contains("filesystem is full"), "{full}");
    assert!(!full.contains("All is well"), "{full}");
    std::fs::remove_file(path.join("file")).unwrap();
    pool.fill_up();
    let full = explained();
    assert!(full.contains("Pool \"b\" is full"), "{full}");
    assert!(!full.contains("All is well"), "{full}");
    pool.free_up();
    service.trellis(&["umount", "data"]);
    let identity = pool.path.join("pool-id");
    let aside = pool.path.join("pool-id.aside");
    std::fs::rename(&identity, &aside).unwrap();
    let gone = explained();
    assert!(gone.contains("Pool \"b\" is gone"), "{gone}");
    assert!(!gone.contains("All is well"), "{gone}");
    std::fs::rename(&aside, &identity).unwrap();
    let well = explained();
    assert!(well.contains("All is well"), "{well}");
}

/// A service with a pool that has space and two that can be filled.
fn service() -> (Service, [SmallPool; 2]) {
    let service = Service::start_told(&["--resync-seconds", "3600"]);
    let path = service.path("pool-a");
    std::fs::create_dir_all(&path).unwrap();
    service.trellis(&["pool", "add", "a", path.to_str().unwrap()]);
    let small = ["b", "c"].map(|name| SmallPool::mount(&service, name));
    (service, small)
}

fn class(more: &str) -> String {
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: several\nprovisioner: trellis.dev\nparameters:\n  replicas: \"3\"\n  pools: a,b,c\n{more}"
    )
}

/// What the claim says of full pools.
fn full(service: &Service) -> Option<String> {
    let claim = service.object("pvc", "data");
    let conditions = claim["status"]["conditions"].as_array()?;
    let found = conditions.iter().find(|each| each["type"] == "PoolFull")?;
    found["message"].as_str().map(str::to_owned)
}

fn until_said_full(service: &Service) -> String {
    service.wait("the claim says that pools are full", |service| {
        full(service).filter(|it| it.contains("\"b\"") && it.contains("\"c\""))
    })
}

fn until_whole(service: &Service) {
    service.wait("all copies are whole, and nothing is full", |service| {
        let target = &service.objects("targets.trellis.dev")[0]["status"];
        let conditions = target["conditions"].as_array()?;
        let is_met = |each: &Value| each["type"] == "RedundancyMet" && each["status"] == "True";
        let is_full = |each: &Value| each["full"] == true;
        let whole = conditions.iter().any(is_met) && full(service).is_none();
        let none_is_full = !target["replicas"].as_array()?.iter().any(is_full);
        (whole && none_is_full).then_some(())
    });
}

/// Writes other bytes over a file, durably, and fails the test if that hangs.
fn overwrite(service: &Service, path: &Path, seed: u8) {
    let path = path.to_owned();
    let writer = std::thread::spawn(move || {
        let file = File::options().write(true).open(path).unwrap();
        let length = usize::try_from(file.metadata().unwrap().len()).unwrap();
        for at in (0..length).step_by(MIB) {
            let piece = vec![seed; MIB.min(length - at)];
            file.write_all_at(&piece, u64::try_from(at).unwrap())
                .unwrap();
            file.sync_all().unwrap();
        }
    });
    service.wait("what is there is overwritten", |_| {
        writer.is_finished().then_some(())
    });
    writer.join().unwrap();
}

fn assert_all(path: &Path, seed: u8) {
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == seed));
}

// Fails if two full pools of three stop what has its space, or the filesystem on it; if a write that needs space is
// not waited for, or does not go on; or if nobody is told.
#[test]
fn with_two_of_three_pools_full_overwriting_goes_on_and_new_data_waits_for_space() {
    let (service, small) = service();
    service.apply(&class(""));
    service.claim("data", "several", "320Mi");
    let path = service.mount("data");
    let old = path.join("old");
    write_file(&old, 16 * MIB, 1);
    rustix::fs::syncfs(File::open(&path).unwrap()).unwrap();
    for pool in &small {
        pool.fill_up();
    }
    let message = until_said_full(&service);
    assert!(message.contains("whenFull: wait"), "{message}");
    let explained = service.trellis_any(&["explain", "data"]);
    assert!(explained.contains("PoolFull"), "{explained}");
    let shown = service.trellis(&["volume", "show", "data"]);
    assert!(shown.contains("what to do: Free space"), "{shown}");
    overwrite(&service, &old, 2);

    let new = path.join("new");
    let writer = std::thread::spawn(move || write_file(&new, 24 * MIB, 3));
    for seed in 4..8 {
        overwrite(&service, &old, seed);
    }
    assert!(!writer.is_finished(), "there is no space for it");
    assert_all(&old, 7);
    let events = service.objects("events");
    let told = events.iter().filter(|each| each["reason"] == "PoolFull");
    assert!(told.count() <= 2, "it is told again and again: {events:?}");

    small[0].free_up();
    service.wait("the write goes on", |_| writer.is_finished().then_some(()));
    let written = writer.join().unwrap();
    small[1].free_up();
    until_whole(&service);
    assert_eq!(checksum(&path.join("new")), written);
    assert_all(&old, 7);
    overwrite(&service, &old, 9);
    service.trellis(&["umount", "data"]);
}

/// Writes a MiB past the cache.
fn write_at(device: &File, mib: u64, seed: u8) -> std::io::Result<()> {
    let mut memory = vec![seed; MIB + 4096];
    let start = memory.as_ptr().align_offset(4096);
    let piece = &mut memory[start..start + MIB];
    device.write_all_at(piece, mib << 20)
}

// Fails if a write that needs space waits although the class says that it fails, or takes anything else with it.
#[test]
fn with_two_of_three_pools_full_new_data_fails_if_the_class_says_so_and_overwriting_goes_on() {
    let (service, small) = service();
    service.apply(&class("  whenFull: fail\n"));
    let block = claim("data", "several", "128Mi");
    service.apply(&block.replace("spec:\n", "spec:\n  volumeMode: Block\n"));
    service.wait_bound("data");
    let path = service.mount("data");
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
    let device = File::options()
        .write(true)
        .custom_flags(direct)
        .open(&path)
        .unwrap();
    for mib in 0..8 {
        write_at(&device, mib, 1).unwrap();
    }
    for pool in &small {
        pool.fill_up();
    }
    let message = until_said_full(&service);
    assert!(message.contains("whenFull: fail"), "{message}");
    let refused = write_at(&device, 64, 1).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::StorageFull, "{refused}");
    for mib in 0..8 {
        write_at(&device, mib, 2).unwrap();
    }
    device.sync_all().unwrap();
    for pool in &small {
        pool.free_up();
    }
    until_whole(&service);
    write_at(&device, 64, 2).unwrap();
    drop(device);
    service.trellis(&["umount", "data"]);
}

/// The process of the copy on a pool.
fn copy_process(service: &Service, pool: &str) -> rustix::process::Pid {
    let replicas = service.objects("replicas.trellis.dev");
    let replica = replicas.iter().find(|each| each["spec"]["pool"] == pool);
    let (volume, name) = (
        replica.unwrap()["spec"]["volume"].as_str().unwrap(),
        replica.unwrap()["metadata"]["name"].as_str().unwrap(),
    );
    let lock = format!("{}.lock", &name[volume.len() + 1..]);
    let text = std::fs::read_to_string(service.data().join("run").join(volume).join(lock));
    rustix::process::Pid::from_raw(text.unwrap().trim().parse().unwrap()).unwrap()
}

/// How much of the copy on a pool is still to be repaired, as the target tells.
fn repair_left(service: &Service, pool: &str) -> Option<String> {
    let replicas = service.objects("replicas.trellis.dev");
    let replica = replicas.iter().find(|each| each["spec"]["pool"] == pool)?;
    let target = service.objects("targets.trellis.dev").remove(0);
    let seen = target["status"]["replicas"].as_array()?.clone();
    let seen = seen
        .into_iter()
        .find(|each| each["id"] == replica["metadata"]["uid"])?;
    let left = seen["repairLeft"].as_str().filter(|left| *left != "0");
    (seen["state"] == "Repairing").then(|| left.unwrap_or_default().to_owned())
}

// Fails if a copy that is behind and is not getting repaired passes for one that is well in any verb, or still looks bad
// when it was repaired.
#[test]
fn a_copy_that_does_not_repair_is_not_said_to_be_well() {
    use rustix::process::{Signal, kill_process};
    let (service, [pool, _other]) = service();
    service.apply(&class(""));
    service.claim("data", "several", "320Mi");
    let path = service.mount("data");
    // The copy on b misses much, and has no space for it when it is back.
    let frozen = copy_process(&service, "b");
    kill_process(frozen, Signal::STOP).unwrap();
    let sum = write_file(&path.join("file"), 64 * MIB, 1);
    pool.fill_up();
    kill_process(frozen, Signal::CONT).unwrap();
    let left = service.wait("the repair does not get on", |service| {
        let before = repair_left(service, "b")?;
        std::thread::sleep(std::time::Duration::from_secs(3));
        (repair_left(service, "b")? == before).then_some(before)
    });
    let explained = service.try_trellis(&["explain", "data"]);
    let text = String::from_utf8_lossy(&explained.stdout).into_owned();
    println!("{left} left");
    assert_eq!(explained.status.code(), Some(3), "{text}");
    assert!(!text.contains("All is well"), "{text}");
    assert!(text.contains("2 of 3 copies hold everything"), "{text}");
    let sentence = "the copy on pool \"b\" is Repairing (";
    assert!(text.contains(sentence), "{text}");
    let shown = service.trellis(&["volume", "show", "data"]);
    let line = shown.lines().find(|line| line.starts_with("b "));
    let line = line.unwrap_or_default();
    assert!(
        line.contains("Repairing") && line.contains(" of "),
        "{shown}"
    );
    assert!(shown.contains("RedundancyMet NO"), "{shown}");
    let df = service.trellis(&["df"]);
    assert!(
        df.contains("Held PoolFull") && !df.contains("Bound"),
        "{df}"
    );
    pool.free_up();
    until_whole(&service);
    service.wait("all is well", |service| {
        let text = service.trellis_any(&["explain", "data"]);
        text.contains("All is well").then_some(())
    });
    assert_eq!(checksum(&path.join("file")), sum);
    service.trellis(&["umount", "data"]);
}
