//! The store lost, or older than the pools: no byte goes because something is unknown.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{Service, checksum, filesystem_mib, kill_processes, write_file};

/// For how long it is watched that nothing goes. What removed bytes because of an unknown uid did so within seconds.
const WATCHED: Duration = Duration::from_secs(10);

const FILE_BYTES: usize = 4 << 20;

/// The kinds that describe a claim and its bytes, in the order in which a person would save them.
const KINDS: [&str; 5] = [
    "pvc",
    "pv",
    "volumes.trellis.dev",
    "targets.trellis.dev",
    "replicas.trellis.dev",
];

/// What the server gives every object, which nobody can post.
fn without_server_fields(mut object: Value) -> Value {
    if let Some(meta) = object["metadata"].as_object_mut() {
        for field in [
            "uid",
            "resourceVersion",
            "creationTimestamp",
            "managedFields",
        ] {
            meta.remove(field);
        }
    }
    // A persistent volume that names a claim by its uid waits for that one for ever.
    if let Some(claim) = object["spec"]["claimRef"].as_object_mut() {
        claim.remove("uid");
        claim.remove("resourceVersion");
    }
    object
}

fn saved(service: &Service) -> Vec<Value> {
    let of_kind = |kind: &&str| service.objects(kind);
    let all = KINDS.iter().flat_map(of_kind);
    all.map(without_server_fields).collect()
}

fn post(service: &Service, objects: Vec<Value>) {
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
    let mut command = service.kubectl_command(&["create", "--validate=false", "-f", "-"]);
    command.stdin(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, list.to_string().as_bytes()).unwrap();
    drop(stdin);
    // A claim's class may be made by the service itself meanwhile; what is there already is refused.
    child.wait().unwrap();
}

fn assert_stays(what: &[PathBuf], sums: &[u32]) {
    let end = Instant::now() + WATCHED;
    while Instant::now() < end {
        for (file, sum) in what.iter().zip(sums) {
            assert!(file.exists(), "{} is gone", file.display());
            assert_eq!(checksum(file), *sum, "{} has changed", file.display());
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn data_files(pools: &[PathBuf]) -> Vec<PathBuf> {
    let replicas = pools.iter().map(|pool| pool.join("replicas"));
    let entries = replicas.flat_map(|replicas| std::fs::read_dir(replicas).into_iter().flatten());
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path().join("data"))
        .collect();
    files.sort();
    files
}

fn lose_store(service: &mut Service) {
    service.kill();
    std::fs::remove_file(service.data().join("store.redb")).unwrap();
    service.up(&[]);
}

fn class_of_two() -> &'static str {
    "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: two\nprovisioner: trellis.dev\n\
     allowVolumeExpansion: true\nparameters:\n  replicas: \"2\"\n  allowSharedDisk: \"true\"\n  pools: a,b\n  \
     whenBelowQuorum: fail\n  patience: 90s\n  whenFull: fail\n  scrubInterval: 48h\n  \
     iscsiReadOnly: \"true\"\n  iscsiInitiators: iqn.2026-11.dev.example:a\n\
     mountOptions: [noatime]\n"
}

fn add_pools(service: &Service, names: &[&str]) -> Vec<PathBuf> {
    let add = |name: &&str| {
        let path = service.path(&format!("pool-{name}"));
        std::fs::create_dir_all(&path).unwrap();
        service.trellis(&["pool", "add", name, path.to_str().unwrap()]);
        path
    };
    names.iter().map(add).collect()
}

/// A claim of one copy and one of two, with data, idle. Answers the pools' directories.
fn with_two_claims(service: &Service) -> Vec<PathBuf> {
    let mut pools = add_pools(service, &["a", "b"]);
    pools.push(service.data().join("pools/default"));
    service.apply(class_of_two());
    for (claim, class) in [("one", ""), ("two", "two")] {
        with_data(service, claim, class);
    }
    pools
}

/// A claim with a file in it, idle.
fn with_data(service: &Service, claim: &str, class: &str) {
    service.claim(claim, class, "320Mi");
    let path = service.mount(claim);
    write_file(&path.join("file"), FILE_BYTES, seed(claim));
    service.trellis(&["umount", claim]);
}

/// Mounts a claim, finds in it what was written, and leaves it mounted.
fn assert_has_data(service: &Service, claim: &str) -> PathBuf {
    let path = service.mount(claim);
    let expected = service.path("expected");
    let sum = write_file(&expected, FILE_BYTES, seed(claim));
    assert_eq!(checksum(&path.join("file")), sum, "claim {claim}");
    path
}

fn seed(claim: &str) -> u64 {
    claim.bytes().map(u64::from).sum()
}

fn posted_back(order: impl FnOnce(Vec<Value>) -> Vec<Value>) {
    let mut service = Service::start();
    let pools = with_two_claims(&service);
    let objects = saved(&service);
    let files = data_files(&pools);
    assert_eq!(files.len(), 3, "one copy and two copies");
    lose_store(&mut service);
    add_pools(&service, &["a", "b"]);
    let sums: Vec<u32> = files.iter().map(|file| checksum(file)).collect();
    post(&service, order(objects));
    assert_stays(&files, &sums);
}

// Fails if saved objects that are posted to a new store, whose uids are all others, take the bytes with them.
#[test]
fn objects_posted_back_after_the_store_was_lost_cost_no_byte() {
    posted_back(|objects| objects);
}

// Fails if the order of the objects matters: those above, whose absence means the most, come last.
#[test]
fn objects_posted_back_in_the_other_order_cost_no_byte() {
    posted_back(|objects| objects.into_iter().rev().collect());
}

/// Everything in a file reads as zeros from now on; its length stays.
fn empty(file: &Path) {
    let length = std::fs::metadata(file).unwrap().len().to_string();
    let mut command = std::process::Command::new("fallocate");
    let punched = command.args(["-p", "-o", "0", "-l", &length]).arg(file);
    assert!(punched.status().unwrap().success());
}

fn is_empty(file: &Path) -> bool {
    std::fs::read(file).unwrap().iter().all(|byte| *byte == 0)
}

// Fails if a claim that carried a filesystem and is found empty is silently formatted anew, whoever knows of it: the
// store, or only the copy itself.
#[test]
fn what_once_held_a_filesystem_is_never_formatted_anew() {
    let mut service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    write_file(&path.join("file"), 1 << 20, 5);
    service.trellis(&["umount", "data"]);
    let file = service.data_file("data");
    let about = std::fs::read(file.with_file_name("about.json")).unwrap();
    let about: Value = serde_json::from_slice(&about).unwrap();
    assert_eq!(about["claim"], "data");
    assert_eq!(about["namespace"], "default");
    assert_eq!(about["filesystem"], "xfs");
    assert_eq!(about["formatted"], true);
    empty(&file);
    let refused = |service: &Service| {
        let path = service.path("again");
        let arguments = ["mount", "data", path.to_str().unwrap(), "--timeout", "5s"];
        let output = service.try_trellis(&arguments);
        assert!(!output.status.success(), "an empty volume was mounted");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("FilesystemGone"), "{said}");
        assert!(is_empty(&file), "it was formatted");
    };
    refused(&service);
    // A store in which nothing says that it was formatted.
    let objects = saved(&service);
    service.try_trellis(&["umount", "data"]);
    lose_store(&mut service);
    post(&service, objects);
    service.wait_bound("data");
    let volume = service.objects("volumes.trellis.dev").remove(0);
    assert!(volume["status"]["formatted"].is_null());
    refused(&service);
}

fn unknown_count(service: &Service) -> u64 {
    let pools = service.objects("pools.trellis.dev");
    let counts = pools.iter().map(|pool| &pool["status"]["unknownCount"]);
    counts.filter_map(Value::as_u64).sum()
}

fn wait_unknown(service: &Service, count: u64) {
    service.wait(&format!("{count} copies are unknown"), |service| {
        (unknown_count(service) == count).then_some(())
    });
}

// Fails if a service beside pools full of copies is silent about them, or if they cannot be taken in again with all
// that was on them, of one copy and of several.
#[test]
fn a_lost_store_is_told_and_made_again_from_the_pools() {
    let mut service = Service::start();
    let pools = with_two_claims(&service);
    let spec_of_two = |service: &Service| {
        let volume = service.object("pvc", "two")["spec"]["volumeName"].clone();
        let mut volume = service.object("volumes.trellis.dev", volume.as_str().unwrap());
        let spec = volume["spec"].as_object_mut().unwrap();
        spec.remove("claim");
        spec.clone()
    };
    let asked_for = spec_of_two(&service);
    assert_eq!(asked_for["whenFull"], "fail");
    // Which pool a claim of the default class is on is not said.
    let check = |service: &Service| {
        let checked = pools.iter().map(|pool| pool.to_str().unwrap());
        let checked = checked.map(|pool| service.trellis(&["check", pool]));
        checked.collect::<String>()
    };
    assert!(!check(&service).contains("unknown"));
    lose_store(&mut service);
    add_pools(&service, &["a", "b"]);
    wait_unknown(&service, 3);
    let listed = service.trellis(&["pool", "ls"]);
    assert!(listed.contains("claim default/one"), "{listed}");
    assert!(listed.contains("claim default/two"), "{listed}");
    let checked = check(&service);
    assert!(checked.contains("claim default/one"), "{checked}");
    service.wait("an event tells of them", |service| {
        let events = service.objects("events");
        let mut reasons = events.iter().map(|event| &event["reason"]);
        reasons
            .any(|reason| reason == "UnknownCopies")
            .then_some(())
    });
    let examined = service.try_trellis(&["doctor"]);
    let examined = String::from_utf8_lossy(&examined.stdout).into_owned();
    assert!(examined.contains("recover --from-pools"), "{examined}");
    let would = service.trellis(&["recover", "--from-pools", "--dry-run"]);
    assert!(would.contains("would be taken in"), "{would}");
    assert!(service.objects("pvc").is_empty(), "nothing was changed");
    service.trellis(&["recover", "--from-pools"]);
    for claim in ["one", "two"] {
        service.wait_bound(claim);
        assert_has_data(&service, claim);
    }
    assert_eq!(spec_of_two(&service), asked_for);
    let class = service.object("sc", "two");
    for (parameter, value) in [
        ("whenBelowQuorum", "fail"),
        ("patience", "90s"),
        ("whenFull", "fail"),
        ("checksums", "true"),
        ("scrubInterval", "48h"),
        ("iscsiReadOnly", "true"),
        ("iscsiInitiators", "iqn.2026-11.dev.example:a"),
    ] {
        assert_eq!(class["parameters"][parameter], value, "{parameter}");
    }
    let mounts = trellis_node::sys::mountinfo::read().unwrap();
    let path = service.path("mnt-two");
    let mount = mounts.iter().find(|mount| mount.mount_point == path);
    let options = &mount.expect("it is mounted").options;
    assert!(options.contains("noatime"), "{options}");
    wait_unknown(&service, 0);
    service.trellis(&["grow", "one", "640Mi", "--wait"]);
    service.trellis(&["grow", "two", "640Mi", "--wait"]);
    for claim in ["one", "two"] {
        assert_eq!(filesystem_mib(&service.path(&format!("mnt-{claim}"))), 640);
        service.trellis(&["umount", claim]);
    }
    // They are volumes like others: the bytes of a claim that is deleted go with it. The class of the second was made
    // anew, and keeps its volumes.
    service.kubectl(&["delete", "pvc", "one", "two"]);
    service.wait("the bytes of one are gone", |_| {
        (data_files(&pools).len() == 2).then_some(())
    });
}

// Fails if a restored store that is older than the pools shrinks, deletes or hides what was grown or made since.
#[test]
fn a_restored_older_store_works_with_what_was_grown_and_made_since() {
    let mut service = Service::start();
    let pools = with_two_claims(&service);
    let file = service.path("backup.json");
    let backup = file.to_str().unwrap().to_owned();
    service.trellis(&["backup", &backup]);
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600, "it holds secrets");
    for claim in ["one", "two"] {
        service.trellis(&["grow", claim, "640Mi", "--wait"]);
    }
    with_data(&service, "new", "");
    let refused = service.try_trellis(&["restore", &backup]);
    assert_eq!(refused.status.code(), Some(5), "a service runs");
    service.stop();
    let said = service.trellis(&["restore", &backup]);
    assert!(said.contains("kept as"), "{said}");
    service.up(&[]);
    wait_unknown(&service, 1);
    for claim in ["one", "two"] {
        let path = assert_has_data(&service, claim);
        service.wait_size(claim, "640Mi");
        assert_eq!(filesystem_mib(&path), 640);
    }
    assert_eq!(data_files(&pools).len(), 4);
    service.trellis(&["recover", "--from-pools"]);
    service.wait_bound("new");
    assert_has_data(&service, "new");
}

// Fails if a restored store that knows a copy which was replaced since does not find its way: the volume has to wait,
// say so, and go on with all of its bytes when the copy that it does not know is taken in.
#[test]
fn a_restored_older_store_works_with_a_copy_that_was_replaced_since() {
    let mut service = Service::start();
    let pools = add_pools(&service, &["a", "b", "c"]);
    service.apply(&class_of_two().replace("a,b", "a,b,c"));
    service.claim("two", "two", "320Mi");
    service.wait_bound("two");
    let backup = service.path("backup.json").to_str().unwrap().to_owned();
    service.trellis(&["backup", &backup]);
    let before = data_files(&pools);
    let pool = pools.iter().position(|pool| before[0].starts_with(pool));
    let pool = ["a", "b", "c"][pool.unwrap()];
    service.trellis(&["volume", "replace", "two", pool]);
    service.wait("the old copy is gone", |_| {
        let now = data_files(&pools);
        (now.len() == 2 && now[0] != before[0]).then_some(())
    });
    // Nothing of this is on the copy that the restored store still knows.
    let path = service.mount("two");
    write_file(&path.join("file"), FILE_BYTES, seed("two"));
    service.trellis(&["umount", "two"]);
    service.stop();
    kill_processes(&service.data());
    service.trellis(&["restore", &backup]);
    service.up(&[]);
    wait_unknown(&service, 1);
    let files = data_files(&pools);
    service.trellis(&["recover", "--from-pools"]);
    assert_has_data(&service, "two");
    assert!(files.iter().all(|file| file.exists()), "{files:?}");
}

// Fails if a store that was saved while a claim was mounted, and is restored when it is not, makes the mount look done:
// it is brought back, with what was written since, and `mount` does not say so before it is there.
#[test]
fn what_was_mounted_when_the_store_was_saved_is_mounted_again() {
    let mut service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    let backup = service.path("backup.json").to_str().unwrap().to_owned();
    service.trellis(&["backup", &backup]);
    write_file(&path.join("file"), FILE_BYTES, seed("data"));
    service.trellis(&["umount", "data"]);
    service.stop();
    service.trellis(&["restore", &backup]);
    service.up(&[]);
    assert_has_data(&service, "data");
    let shown = service.trellis(&["explain", "data"]);
    assert!(shown.contains("All is well"), "{shown}");
    // One that is there already is not taken away because somebody asks for it again and does not get it.
    let again = path.to_str().unwrap();
    let refused = service.try_trellis(&["mount", "data", again, "--read-only"]);
    assert!(!refused.status.success());
    assert!(path.join("file").exists());
}

/// The files that a service makes once, beside its store.
fn small_files(service: &Service) -> Vec<PathBuf> {
    let data = service.data();
    let mut files: Vec<PathBuf> = ["node", "port", "kubeconfig"]
        .map(|name| data.join(name))
        .to_vec();
    let directories = std::fs::read_dir(data.join("run")).unwrap().flatten();
    let directories = directories.map(|entry| entry.path());
    for directory in directories.chain([data.join("pki")]) {
        let entries = std::fs::read_dir(directory).unwrap().flatten();
        let found = entries.map(|entry| entry.path());
        files.extend(found.filter(|path| path.metadata().is_ok_and(|found| found.is_file())));
    }
    files
}

// Fails if a file that a power loss has emptied keeps the service from starting, a volume from being served, or makes
// this node another one.
#[test]
fn files_that_a_power_loss_has_emptied_are_made_again() {
    let mut service = Service::start();
    with_two_claims(&service);
    service.stop();
    kill_processes(&service.data());
    let files = small_files(&service);
    assert!(files.iter().any(|file| file.ends_with("secret")));
    for file in &files {
        std::fs::write(file, "").unwrap();
    }
    service.forget_node();
    service.up(&[]);
    for claim in ["one", "two"] {
        assert_has_data(&service, claim);
    }
}
