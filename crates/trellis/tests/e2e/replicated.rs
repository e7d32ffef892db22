//! Claims of three copies, under a load that is checked: whatever dies or freezes, no write fails and none is lost.

mod deaths;
mod fenced;
mod initiators;
mod load;
mod portal;
mod rot;
mod together;
mod unserved;
mod upgrade;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{Service, claim, filesystem_mib, loops_below, mounts_below, write_file};
use load::Load;

const POOLS: [&str; 4] = ["a", "b", "c", "d"];

/// A service with pools, and a class of three copies.
fn service() -> Service {
    service_told(&[])
}

/// The same with more arguments.
fn service_told(arguments: &[&str]) -> Service {
    let service = Service::start_told(&[&["--resync-seconds", "3600"], arguments].concat());
    with_pools(&service);
    service
}

/// Adds the pools and the class.
fn with_pools(service: &Service) {
    for pool in POOLS {
        add_pool(service, pool);
    }
    service.apply(&class("three", "3"));
}

fn add_pool(service: &Service, name: &str) {
    let path = service.path(&format!("pool-{name}"));
    std::fs::create_dir_all(&path).unwrap();
    service.trellis(&["pool", "add", name, path.to_str().unwrap()]);
}

fn class(name: &str, replicas: &str) -> String {
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: {name}\nprovisioner: trellis.dev\nallowVolumeExpansion: true\nparameters:\n  replicas: \"{replicas}\"\n  allowSharedDisk: \"true\"\n  pools: a,b,c,d\n"
    )
}

/// A mounted claim of three copies.
fn mounted(service: &Service) -> PathBuf {
    service.claim("data", "three", "512Mi");
    service.mount("data")
}

fn run_dir(service: &Service) -> PathBuf {
    let volume = service.object("pvc", "data")["spec"]["volumeName"].clone();
    service.data().join("run").join(volume.as_str().unwrap())
}

/// The process of that name of the claim's volume.
fn process(service: &Service, name: &str) -> Pid {
    service.wait("a process has said its number", |service| {
        number(service, name)
    })
}

/// The number of the process of that name. At its start there is none for a moment.
fn number(service: &Service, name: &str) -> Option<Pid> {
    let lock = run_dir(service).join(format!("{name}.lock"));
    let text = std::fs::read_to_string(lock).unwrap();
    Pid::from_raw(text.trim().parse().ok()?)
}

/// The target that comes after another one, as soon as it has begun.
fn successor(service: &Service, of: Pid) -> Pid {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match number(service, "target") {
            Some(next) if next != of => return next,
            _ => assert!(Instant::now() < deadline, "the target is not replaced"),
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Sends a signal to the process of that name, or to its successor if it has just died.
fn signal(service: &Service, name: &str, signal: Signal) {
    service.wait("a process to signal", |service| {
        kill_process(process(service, name), signal).ok()
    });
}

fn target(service: &Service) -> Value {
    service.objects("targets.trellis.dev").remove(0)
}

fn is_true(target: &Value, kind: &str) -> bool {
    let conditions = target["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|each| each["type"] == kind && each["status"] == "True")
}

/// Waits until every copy holds everything and has the volume's size.
fn wait_whole(service: &Service) {
    service.wait("every copy is whole", |service| {
        let target = target(service);
        (is_true(&target, "RedundancyMet") && is_true(&target, "SizeConverged")).then_some(())
    });
}

fn copies_of(service: &Service, mib: u64) -> usize {
    let replicas = service.objects("replicas.trellis.dev");
    let size = format!("{mib}Mi");
    replicas
        .iter()
        .filter(|each| each["status"]["capacity"] == size.as_str())
        .count()
}

/// The data files of all copies are the same, byte for byte, when nothing uses them.
fn assert_equal_copies(service: &Service) {
    let replicas = service.objects("replicas.trellis.dev");
    let sums: Vec<u32> = replicas
        .iter()
        .map(|each| {
            let data = std::fs::read(each["status"]["path"].as_str().unwrap()).unwrap();
            crc32c::crc32c(&data)
        })
        .collect();
    assert!(
        sums.len() >= 2 && sums.windows(2).all(|two| two[0] == two[1]),
        "{sums:?}"
    );
}

/// Ends everything, and finds nothing left.
fn end(service: &Service, path: &Path) {
    wait_whole(service);
    service.trellis(&["umount", "data"]);
    assert_equal_copies(service);
    service.kubectl(&["delete", "pvc", "data"]);
    service.wait("everything is gone", |service| {
        service
            .objects("replicas.trellis.dev")
            .is_empty()
            .then_some(())
    });
    for pool in POOLS {
        let left = service.path(&format!("pool-{pool}/replicas"));
        let left = std::fs::read_dir(left).map(|entries| entries.count());
        assert_eq!(left.unwrap_or_default(), 0, "on pool {pool}");
    }
    assert!(
        !mounts_below(&service.data())
            .iter()
            .any(|each| each.starts_with(path))
    );
    assert!(loops_below(&service.data()).is_empty());
    service.wait("no process is left", |service| {
        let run = std::fs::read_dir(service.data().join("run")).unwrap();
        (run.count() == 0).then_some(())
    });
}

// Fails if the copies are not on pools of their own, the claim does not grow with all of them, or a byte differs.
#[test]
fn three_copies_grow_as_one() {
    let service = service();
    let path = mounted(&service);
    let pools: Vec<Value> = service
        .objects("replicas.trellis.dev")
        .iter()
        .map(|each| each["spec"]["pool"].clone())
        .collect();
    assert_eq!(pools.len(), 3);
    assert!(pools[0] != pools[1] && pools[1] != pools[2] && pools[0] != pools[2]);
    let load = Load::start(&path.join("load"));
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    assert_eq!(filesystem_mib(&path), 768);
    service.wait("all copies are raised", |service| {
        (copies_of(service, 768) == 3).then_some(())
    });
    load.finish("three copies, grown with all of them there");
    let attachment = service.objects("attachments.trellis.dev").remove(0);
    assert_eq!(attachment["status"]["via"], "fuse");
    end(&service, &path);
}

// Fails if one copy that does not answer keeps the growth or the writes, or is not brought up when it answers again.
#[test]
fn a_frozen_copy_keeps_nothing() {
    let service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    signal(&service, "1", Signal::STOP);
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    assert_eq!(filesystem_mib(&path), 768);
    assert!(copies_of(&service, 768) >= 2);
    signal(&service, "1", Signal::CONT);
    service.wait("the third is raised too", |service| {
        (copies_of(service, 768) == 3).then_some(())
    });
    load.finish("one of three copies frozen during a growth");
    end(&service, &path);
}

// Fails if a copy that is gone keeps the growth or the writes, or does not come back with what it missed: two growths
// and what was written meanwhile.
#[test]
fn a_copy_that_was_away_gets_what_it_missed() {
    let service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    let replicas = service.objects("replicas.trellis.dev");
    let one = replicas
        .iter()
        .find(|each| each["metadata"]["name"].as_str().unwrap().ends_with("-1"));
    let data = PathBuf::from(one.unwrap()["status"]["path"].as_str().unwrap());
    let (directory, aside) = (data.parent().unwrap(), service.path("aside"));
    // A copy whose directory is not there cannot be started again.
    std::fs::rename(directory, &aside).unwrap();
    signal(&service, "1", Signal::KILL);
    service.wait("the copy is told to be away", |service| {
        (!is_true(&target(service), "RedundancyMet")).then_some(())
    });
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    write_file(&path.join("between"), 64 << 20, 3);
    service.trellis(&["grow", "data", "1Gi", "--wait"]);
    assert_eq!(filesystem_mib(&path), 1024);
    std::fs::rename(&aside, directory).unwrap();
    // The agent tries again by itself, with pauses; somebody who looks after the pool says so.
    let pool = one.unwrap()["spec"]["pool"].as_str().unwrap().to_owned();
    add_pool(&service, &pool);
    wait_whole(&service);
    load.finish("one of three copies away for two growths");
    end(&service, &path);
}

// Fails if a target goes on as if it showed its file after somebody has unmounted it, so that the claim can never be
// used again.
#[test]
fn a_file_that_somebody_has_unmounted_is_mounted_again() {
    let service = service();
    service.claim("data", "three", "512Mi");
    let file = run_dir(&service).join("file");
    service.wait("the file is there", |_| {
        file.join("volume").exists().then_some(())
    });
    let first = process(&service, "target");
    let unmounted = std::process::Command::new("umount").arg(&file).status();
    assert!(unmounted.unwrap().success());
    successor(&service, first);
    let path = service.mount("data");
    write_file(&path.join("file"), 1 << 20, 7);
    end(&service, &path);
}

// Fails if the death of the target during a growth is seen by whoever writes, loses a write, or leaves the growth
// undone.
#[test]
fn the_target_dies_during_a_growth() {
    let service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    // At different moments: a growth takes some milliseconds, and so does asking for it.
    for (size, after_ms) in [("640Mi", 10), ("768Mi", 25), ("896Mi", 40), ("1Gi", 60)] {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(after_ms));
                signal(&service, "target", Signal::KILL);
            });
            service.trellis(&["grow", "data", size]);
        });
        service.wait_size("data", size);
    }
    assert_eq!(filesystem_mib(&path), 1024);
    load.finish("the target killed around four growths");
    end(&service, &path);
}

// Fails if a target that dies while it is being started, or while it gets the file of the one before it, is not
// replaced, or the next one does not get the file.
#[test]
fn the_target_dies_at_its_start_again_and_again() {
    let service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    let mut last = process(&service, "target");
    kill_process(last, Signal::KILL).unwrap();
    for after_ms in [0, 1, 3, 6, 10, 15] {
        last = successor(&service, last);
        std::thread::sleep(Duration::from_millis(after_ms));
        kill_process(last, Signal::KILL).unwrap();
    }
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    assert_eq!(filesystem_mib(&path), 768);
    load.finish("the target killed at its start, six times");
    end(&service, &path);
}

// Fails if a target that is frozen while nobody writes goes unseen, is not told of, or is not replaced; or if the frozen
// one is still there to wake.
#[test]
fn a_frozen_target_is_told_of_and_replaced() {
    let service = service_told(&["--silent-target-seconds", "6"]);
    let path = mounted(&service);
    let sum = write_file(&path.join("before"), 1 << 20, 7);
    let frozen = process(&service, "target");
    kill_process(frozen, Signal::STOP).unwrap();
    service.wait("it is told of", |service| {
        let target = serde_json::to_string(&target(service)).unwrap();
        target.contains("TargetSilent").then_some(())
    });
    let next = successor(&service, frozen);
    assert!(next != frozen);
    let gone = rustix::process::test_kill_process(frozen);
    assert_eq!(gone, Err(rustix::io::Errno::SRCH), "the frozen one is gone");
    write_file(&path.join("after"), 1 << 20, 8);
    assert_eq!(crate::harness::checksum(&path.join("before")), sum);
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    let target = serde_json::to_string(&target(&service)).unwrap();
    assert!(!target.contains("TargetSilent"), "{target}");
    end(&service, &path);
}

// Fails if whoever writes while the target freezes sees an error or loses a write, or if the frozen one can wake after
// another one has taken its place.
#[test]
fn a_target_that_freezes_under_load_is_replaced_and_never_wakes() {
    let service = service_told(&["--silent-target-seconds", "6"]);
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    let frozen = process(&service, "target");
    std::thread::sleep(Duration::from_millis(500));
    kill_process(frozen, Signal::STOP).unwrap();
    successor(&service, frozen);
    let woken = kill_process(frozen, Signal::CONT);
    assert_eq!(woken, Err(rustix::io::Errno::SRCH), "it was only frozen");
    // What it had taken and not answered is answered by the next one.
    std::thread::sleep(Duration::from_secs(2));
    load.finish("the target frozen under load, and replaced");
    end(&service, &path);
}

// Fails if the service's own death stops I/O, or a growth that it had begun is not finished by its successor.
#[test]
fn the_service_dies_and_io_goes_on() {
    let mut service = service();
    let path = mounted(&service);
    let before = process(&service, "target");
    let load = Load::start(&path.join("load"));
    service.trellis(&["grow", "data", "768Mi"]);
    service.kill();
    write_file(&path.join("meanwhile"), 4 << 20, 5);
    service.up(&[]);
    service.wait_size("data", "768Mi");
    assert_eq!(
        process(&service, "target"),
        before,
        "the target outlives the agent"
    );
    // The new service keeps the file alive as the old one did.
    signal(&service, "target", Signal::KILL);
    service.trellis(&["grow", "data", "1Gi", "--wait"]);
    load.finish("the service killed during a growth, then the target");
    end(&service, &path);
}

// Fails if a pool without room lets the growth through, or keeps the writes, or the growth does not go on by itself
// when it is lowered.
#[test]
fn a_pool_that_is_too_small_holds_the_growth_and_nothing_else() {
    let service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    service.trellis(&["grow", "data", "8Ti"]);
    service.wait("the reason is told", |service| {
        let said = service.try_trellis(&["explain", "data"]);
        String::from_utf8_lossy(&said.stdout)
            .contains("NoSpaceInPool")
            .then_some(())
    });
    assert_eq!(filesystem_mib(&path), 512);
    service.trellis(&["cancel", "data"]);
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    load.finish("a growth held for want of room");
    end(&service, &path);
}

// Fails if the larger of two growths in flight is lost.
#[test]
fn two_growths_in_flight_end_at_the_larger() {
    let service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    service.trellis(&["grow", "data", "640Mi"]);
    service.trellis(&["grow", "data", "1Gi"]);
    service.wait_size("data", "1Gi");
    assert_eq!(filesystem_mib(&path), 1024);
    load.finish("two growths in flight");
    end(&service, &path);
}

// Fails if copies cannot be added, replaced and let go of while the volume is in use, or one goes before another
// holds everything.
#[test]
fn copies_come_and_go_in_use() {
    let service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    write_file(&path.join("before"), 32 << 20, 9);
    let members = |service: &Service| {
        let target = target(service);
        target["status"]["members"]["replicas"]
            .as_array()
            .map_or(0, Vec::len)
    };
    service.trellis(&["volume", "scale", "data", "4"]);
    service.wait("a fourth copy counts", |service| {
        (members(service) == 4).then_some(())
    });
    wait_whole(&service);
    service.trellis(&["volume", "scale", "data", "2"]);
    service.wait("two copies are left", |service| {
        (service.objects("replicas.trellis.dev").len() == 2 && members(service) == 2).then_some(())
    });
    let replicas = service.objects("replicas.trellis.dev");
    let pool = replicas[0]["spec"]["pool"].as_str().unwrap().to_owned();
    service.trellis(&["volume", "replace", "data", &pool]);
    service.wait("the copy is on another pool", |service| {
        let replicas = service.objects("replicas.trellis.dev");
        let elsewhere = replicas
            .iter()
            .all(|each| each["spec"]["pool"] != pool.as_str());
        (replicas.len() == 2 && elsewhere).then_some(())
    });
    let shown = service.trellis(&["volume", "show", "data"]);
    assert!(shown.contains("2 of 2 copies must have a write"), "{shown}");
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    load.finish("copies added, let go of and replaced");
    end(&service, &path);
}

// Fails if a volume of several copies that nobody uses does not grow with its filesystem.
#[test]
fn an_idle_volume_of_several_copies_grows() {
    let service = service();
    let path = mounted(&service);
    let sum = write_file(&path.join("file"), 8 << 20, 2);
    service.trellis(&["umount", "data"]);
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    let again = service.mount("data");
    assert_eq!(filesystem_mib(&again), 768);
    assert_eq!(crate::harness::checksum(&again.join("file")), sum);
    end(&service, &again);
}

// Fails if copies are put on the same pool for want of pools, or it is not said what is missing.
#[test]
fn copies_without_pools_are_held() {
    let service = Service::start();
    add_pool(&service, "a");
    add_pool(&service, "b");
    service.apply(&class("three", "3"));
    service.apply(&claim("data", "three", "512Mi"));
    service.wait("the reason is told", |service| {
        let said = service.try_trellis(&["explain", "data"]);
        String::from_utf8_lossy(&said.stdout)
            .contains("TooFewPools")
            .then_some(())
    });
    add_pool(&service, "c");
    service.wait_bound("data");
}
