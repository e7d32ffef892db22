//! Pools as they are: told apart by the filesystem below them, measured when asked, and let go of.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::harness::{Service, checksum, claim, said, write_file};
use crate::room::SmallPool;

/// What an administrator's call ends with when the service refuses.
const REFUSED: i32 = 5;
/// And when something is held.
const HELD: i32 = 3;

fn text(output: &Output) -> String {
    let all = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
    String::from_utf8_lossy(&all).into_owned()
}

fn refused(service: &Service, arguments: &[&str], why: &str) {
    let output = service.try_trellis(arguments);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(REFUSED), "{arguments:?}: {said}");
    assert!(said.contains(why), "{arguments:?}: {said}");
}

fn shown(service: &Service, claim: &str) -> String {
    text(&service.try_trellis(&["volume", "show", claim]))
}

fn add(service: &Service, name: &str, path: &Path) -> String {
    std::fs::create_dir_all(path).unwrap();
    let said = service.trellis(&["pool", "add", name, path.to_str().unwrap()]);
    service.wait("the pool is ready", |service| {
        (condition(service, name, "Ready")["status"] == "True").then_some(())
    });
    said
}

fn condition(service: &Service, pool: &str, kind: &str) -> Value {
    let pool = service.object("pools.trellis.dev", pool);
    let conditions = pool["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let found = conditions.find(|each| each["type"] == kind);
    found.cloned().unwrap_or_default()
}

/// Filesystems of their own with a pool each, by name.
fn disks(service: &Service, names: &[&str]) -> Vec<SmallPool> {
    let disk = |name: &&str| {
        let disk = SmallPool::mount(service.path(&format!("disk-{name}")), "600m");
        add(service, name, &disk.path);
        disk
    };
    names.iter().map(disk).collect()
}

fn class(name: &str, parameters: &[(&str, &str)]) -> String {
    let mut manifest = format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: {name}\nprovisioner: trellis.dev\nallowVolumeExpansion: true\nparameters:\n  csi.storage.k8s.io/fstype: ext4\n"
    );
    for (parameter, value) in parameters {
        manifest.push_str(&format!("  {parameter}: \"{value}\"\n"));
    }
    manifest
}

fn pools_of_copies(service: &Service) -> Vec<String> {
    let replicas = service.objects("replicas.trellis.dev");
    let pools = replicas.iter().map(|each| each["spec"]["pool"].as_str());
    let mut pools: Vec<String> = pools.flatten().map(str::to_owned).collect();
    pools.sort_unstable();
    pools
}

fn wait_explained(service: &Service, claim: &str, words: &[&str]) -> String {
    service.wait(&format!("{words:?} is told"), |service| {
        let said = text(&service.try_trellis(&["explain", claim]));
        words.iter().all(|word| said.contains(word)).then_some(said)
    })
}

// Fails if a directory becomes a pool that belongs to the system, to the service, to a volume or to another pool.
#[test]
fn a_directory_that_cannot_be_a_pool_is_refused_with_the_reason() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let mounted = service.mount("data");
    let inside = mounted.join("pool");
    std::fs::create_dir(&inside).unwrap();
    let data = service.data();
    let default = data.join("pools/default");
    let pool = service.path("pool");
    add(&service, "a", &pool);
    let nested = pool.join("deeper");
    std::fs::create_dir(&nested).unwrap();
    let linked = service.path("linked");
    std::os::unix::fs::symlink(&pool, &linked).unwrap();
    let cases: [(&Path, &str); 9] = [
        (Path::new("/"), "root of the whole system"),
        (Path::new("/proc"), "kernel's own data"),
        (&data, "data directory"),
        (&data.join("mounts"), "data directory"),
        (&default, "directory of pool \"default\" already"),
        (&linked, "directory of pool \"a\" already"),
        (&nested, "one inside the other"),
        (pool.parent().unwrap(), "data directory"),
        (&inside, "Trellis volume"),
    ];
    for (path, why) in cases {
        refused(
            &service,
            &["pool", "add", "bad", path.to_str().unwrap()],
            why,
        );
    }
    // One that comes past the verb is not used either.
    let manifest = format!(
        "apiVersion: trellis.dev/v1alpha1\nkind: Pool\nmetadata:\n  name: bad\nspec:\n  node: test-node\n  path: {}\n",
        nested.display()
    );
    service.apply(&manifest);
    service.wait("the object says so", |service| {
        (condition(service, "bad", "Ready")["reason"] == "PoolUnfit").then_some(())
    });
    let listed = service.trellis(&["pool", "ls"]);
    assert!(listed.contains("one inside the other"), "{listed}");
    assert_eq!(std::fs::read_dir(&nested).unwrap().count(), 0);
    service.trellis(&["pool", "rm", "bad"]);
    service.trellis(&["umount", "data"]);
}

// Fails if two pools on one filesystem promise its space twice.
#[test]
fn pools_on_one_filesystem_promise_its_space_once() {
    let service = Service::start();
    let disk = SmallPool::mount(service.path("disk"), "900m");
    add(&service, "a", &disk.path.join("a"));
    let noted = add(&service, "b", &disk.path.join("b"));
    assert!(noted.contains("on one filesystem with a"), "{noted}");
    service.apply(&class("on-a", &[("pools", "a")]));
    service.apply(&class("on-b", &[("pools", "b")]));
    service.claim("first", "on-a", "400Mi");
    service.claim("second", "on-b", "400Mi");
    service.apply(&claim("third", "on-b", "400Mi"));
    let told = wait_explained(&service, "third", &["NoSpaceInPool"]);
    assert!(told.contains("on one filesystem with a"), "{told}");
    let listed = service.trellis(&["pool", "ls", "-o", "json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let of_a = listed
        .as_array()
        .unwrap()
        .iter()
        .find(|it| it["name"] == "a");
    assert_eq!(of_a.unwrap()["sharesWith"], serde_json::json!(["b"]));
    service.kubectl(&["delete", "pvc", "first", "second", "third"]);
}

// Fails if two copies are kept on one filesystem unasked, if it is not said what helps, or if it is not shown where it
// was asked for.
#[test]
fn two_copies_are_on_one_filesystem_only_if_the_class_says_so() {
    let service = Service::start();
    let one = SmallPool::mount(service.path("one"), "900m");
    add(&service, "a", &one.path.join("a"));
    add(&service, "b", &one.path.join("b"));
    service.apply(&class("apart", &[("replicas", "2"), ("pools", "a,b,c")]));
    service.apply(&claim("data", "apart", "64Mi"));
    let told = wait_explained(&service, "data", &["DiskShared"]);
    assert!(told.contains("allowSharedDisk"), "{told}");
    assert!(told.contains("trellis pool add"), "{told}");
    // It goes on by itself when there is another disk.
    let other = SmallPool::mount(service.path("other"), "600m");
    add(&service, "c", &other.path);
    service.wait_bound("data");
    assert!(pools_of_copies(&service).contains(&"c".to_owned()));
    assert!(!shown(&service, "data").contains("warning"));
    // A third copy would need a third disk, or the owner's word.
    service.trellis(&["volume", "scale", "data", "3"]);
    service.wait("the hold is shown", |service| {
        let said = shown(service, "data");
        (said.contains("DiskShared") && said.contains("--allow-shared-disk")).then_some(())
    });
    assert_eq!(pools_of_copies(&service).len(), 2);
    service.trellis(&["volume", "scale", "data", "3", "--allow-shared-disk"]);
    service.wait("there are three, and it is shown", |service| {
        let warned = shown(service, "data").contains("warning: the copies on pools a, b");
        (warned && pools_of_copies(service).len() == 3).then_some(())
    });
    // A class may say so as well.
    let shared = [
        ("replicas", "2"),
        ("pools", "a,b"),
        ("allowSharedDisk", "true"),
    ];
    service.apply(&class("shared", &shared));
    service.claim("together", "shared", "64Mi");
    let said = shown(&service, "together");
    assert!(said.contains("warning: the copies on pools a, b"), "{said}");
    // What was allowed once and is not any more does not count.
    let volume = service.object("pvc", "together")["spec"]["volumeName"].clone();
    let volume = volume.as_str().unwrap();
    service.wait("redundancy is met", |service| {
        shown(service, "together")
            .contains("RedundancyMet yes")
            .then_some(())
    });
    let patch = r#"{"spec":{"allowSharedDisk":false}}"#;
    let arguments = [
        "patch",
        "volumes.trellis.dev",
        volume,
        "--type=merge",
        "-p",
        patch,
    ];
    service.kubectl(&arguments);
    service.wait("two copies count as one", |service| {
        let said = shown(service, "together");
        (said.contains("RedundancyMet NO") && said.contains("count as one")).then_some(())
    });
    service.kubectl(&["delete", "pvc", "data", "together"]);
    service.wait("the copies are gone", |service| {
        pools_of_copies(service).is_empty().then_some(())
    });
}

// Fails if a claim that waits for room does not go on at once when the filesystem below its pool has grown.
#[test]
fn a_pool_that_has_grown_is_measured_at_once() {
    // Nothing is looked at by itself.
    let service = Service::start_told(&["--resync-seconds", "3600"]);
    let disk = SmallPool::mount(service.path("disk"), "600m");
    add(&service, "small", &disk.path);
    service.apply(&class("small", &[("pools", "small")]));
    service.claim("data", "small", "400Mi");
    service.apply(&claim("more", "small", "400Mi"));
    wait_explained(&service, "more", &["NoSpaceInPool"]);
    disk.resize("1g");
    let said = service.trellis(&["pool", "grow", "small"]);
    assert!(said.contains("has 1Gi (600Mi before)"), "{said}");
    service.wait_bound("more");
    let again = service.trellis(&["pool", "grow", "small"]);
    assert!(again.contains("as before"), "{again}");
    let absent = service.try_trellis(&["pool", "grow", "nowhere"]);
    assert_eq!(absent.status.code(), Some(4), "{}", text(&absent));
    service.kubectl(&["delete", "pvc", "data", "more"]);
}

/// A claim of two copies in use on pools `a` and `b` of their own disks, with `c` free, and a file on it.
fn in_use(service: &Service) -> (Vec<SmallPool>, PathBuf, u32) {
    let disks = disks(service, &["a", "b"]);
    service.apply(&class("two", &[("replicas", "2"), ("pools", "a,b,c")]));
    service.claim("data", "two", "256Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 48 << 20, 7);
    (disks, path, sum)
}

// Fails if a pool goes with copies on it, if its copies do not move away, or if its directory is not let go of.
#[test]
fn a_pool_is_drained_while_its_volumes_are_in_use_and_then_let_go_of() {
    let mut service = Service::start_told(&["--resync-seconds", "3600"]);
    let (mut all, path, sum) = in_use(&service);
    refused(&service, &["pool", "rm", "a"], "claim default/data");
    refused(&service, &["pool", "rm", "a"], "--drain");
    // Without a place for the copy nothing moves, and it is said why.
    let held = service.try_trellis(&["pool", "rm", "a", "--drain", "--timeout", "60s"]);
    assert_eq!(held.status.code(), Some(HELD), "{}", text(&held));
    assert!(text(&held).contains("TooFewPools"), "{}", text(&held));
    assert_eq!(pools_of_copies(&service), ["a", "b"]);
    assert!(service.trellis(&["pool", "ls"]).contains("draining"));
    all.extend(disks(&service, &["c"]));
    // Interrupted at any time, and given again.
    let mut interrupted = service.start_trellis(&["pool", "rm", "a", "--drain"]);
    interrupted.kill().unwrap();
    interrupted.wait().unwrap();
    let said = service.trellis(&["pool", "rm", "a", "--drain"]);
    assert!(said.contains("is let go of"), "{said}");
    assert_eq!(pools_of_copies(&service), ["b", "c"]);
    assert_eq!(service.object("pools.trellis.dev", "a"), Value::Null);
    assert_eq!(checksum(&path.join("file")), sum);
    // Nobody has the directory open.
    let umount = Command::new("umount").arg(&all[0].path).output().unwrap();
    crate::harness::said(&umount, "unmounting the disk of the pool that is gone");
    assert!(
        service
            .trellis(&["volume", "show", "data"])
            .contains("RedundancyMet yes")
    );
    // A pool that was removed stays removed, also the first one, and an only copy does not move.
    service.claim("only", "", "320Mi");
    refused(
        &service,
        &["pool", "rm", "default", "--drain"],
        "default/only",
    );
    service.kubectl(&["delete", "pvc", "only"]);
    service.wait("the only copy is gone", |service| {
        (pools_of_copies(service).len() == 2).then_some(())
    });
    service.trellis(&["pool", "rm", "default", "--timeout", "60s"]);
    service.stop();
    service.up(&[]);
    assert_eq!(service.object("pools.trellis.dev", "default"), Value::Null);
    service.trellis(&["umount", "data"]);
}

// Fails if a pool that is deleted by hand goes before its copies, if it does not say what it waits for, or if it stays
// when they are gone.
#[test]
fn a_deleted_pool_waits_for_its_copies_and_says_so() {
    let service = Service::start_told(&["--resync-seconds", "3600"]);
    let pool = service.path("pool");
    add(&service, "a", &pool);
    service.apply(&(crate::harness::class("on-a", "xfs") + "  pools: a\n"));
    service.claim("data", "on-a", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 1 << 20, 3);
    service.kubectl(&["delete", "pools.trellis.dev", "a", "--wait=false"]);
    let waits = service.wait("it says what it waits for", |service| {
        let waits = condition(service, "a", "Removable");
        (waits["reason"] == "PoolInUse").then_some(waits)
    });
    let message = waits["message"].as_str().unwrap();
    assert!(message.contains("claim default/data"), "{message}");
    let listed = service.trellis(&["pool", "ls"]);
    assert!(
        listed.contains("leaving") && listed.contains("default/data"),
        "{listed}"
    );
    service.wait("an event says it too", |service| {
        let events = service.objects("events");
        let mut events = events
            .iter()
            .filter(|it| it["involvedObject"]["kind"] == "Pool");
        events
            .any(|event| event["reason"] == "PoolInUse")
            .then_some(())
    });
    // It is used as before, and gets no new copies.
    service.trellis(&["grow", "data", "352Mi", "--wait"]);
    assert_eq!(checksum(&path.join("file")), sum);
    service.apply(&claim("late", "on-a", "320Mi"));
    wait_explained(&service, "late", &["PoolNotFound"]);
    refused(
        &service,
        &["pool", "add", "a", pool.to_str().unwrap()],
        "being removed",
    );
    service.trellis(&["umount", "data"]);
    service.kubectl(&["delete", "pvc", "data", "late"]);
    service.wait("the pool is gone", |service| {
        (service.object("pools.trellis.dev", "a") == Value::Null).then_some(())
    });
    // The directory is free for somebody else, under another name.
    let checked = Command::new("flock")
        .args(["--nonblock", pool.join("lock").to_str().unwrap(), "true"])
        .output()
        .unwrap();
    said(&checked, "locking the pool that was let go of");
    add(&service, "b", &pool);
}
