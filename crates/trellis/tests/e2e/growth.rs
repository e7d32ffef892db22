//! Growth: online, at 100 % full, many at once, replaced and called off.

use std::io::Write;

use crate::harness::{
    Service, assert_clean, checksum, class, filesystem_mib, loops_below, mounts_below, write_file,
};

fn grow_online(filesystem: &str) {
    let service = Service::start();
    service.apply(&class("tested", filesystem));
    service.claim("data", "tested", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 16 << 20, 42);
    for (request, mib) in [("400Mi", 400), ("1Gi", 1024), ("3Gi", 3072)] {
        service.trellis(&["grow", "data", request, "--wait"]);
        service.wait_size("data", request);
        assert_eq!(filesystem_mib(&path), mib, "{request}");
        assert_eq!(checksum(&path.join("file")), sum);
    }
    let data = service.data_file("data");
    service.trellis(&["umount", "data"]);
    assert_clean(filesystem, &data);
}

// Fails if a mounted xfs does not grow step by step, loses a byte, or is damaged by it.
#[test]
fn a_mounted_xfs_grows_step_by_step() {
    grow_online("xfs");
}

// Fails if a mounted btrfs does not grow step by step, loses a byte, or is damaged by it.
#[test]
fn a_mounted_btrfs_grows_step_by_step() {
    grow_online("btrfs");
}

fn grow_when_full(filesystem: &str) {
    let service = Service::start();
    service.apply(&class("tested", filesystem));
    service.claim("data", "tested", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 1 << 20, 9);
    let mut filler = std::fs::File::create(path.join("filler")).unwrap();
    let chunk = vec![0xa5u8; 1 << 20];
    while filler.write_all(&chunk).is_ok() {}
    let _ = filler.sync_all();
    assert!(
        std::fs::write(path.join("more"), &chunk).is_err(),
        "the filesystem is full"
    );
    let _ = std::fs::remove_file(path.join("more"));
    service.trellis(&["grow", "data", "640Mi", "--wait"]);
    std::fs::write(path.join("more"), &chunk).unwrap();
    assert_eq!(checksum(&path.join("file")), sum);
}

// Fails if an xfs without a free block cannot be grown, or not be written to afterwards.
#[test]
fn a_full_xfs_grows() {
    grow_when_full("xfs");
}

// Fails if a btrfs without a free block cannot be grown, or not be written to afterwards.
#[test]
fn a_full_btrfs_grows() {
    grow_when_full("btrfs");
}

fn grow_idle(filesystem: &str) {
    let service = Service::start();
    service.apply(&class("tested", filesystem));
    service.claim("data", "tested", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 1 << 20, 13);
    service.trellis(&["umount", "data"]);
    service.trellis(&["grow", "data", "640Mi", "--wait"]);
    service.wait_size("data", "640Mi");
    assert_clean(filesystem, &service.data_file("data"));
    assert!(mounts_below(&service.data()).is_empty());
    assert!(loops_below(&service.data()).is_empty());
    let path = service.mount("data");
    assert!(
        filesystem_mib(&path) == 640,
        "it had grown before it was mounted"
    );
    assert_eq!(checksum(&path.join("file")), sum);
}

// Fails if the xfs of a volume that nobody uses stays small, is damaged, or leaves a mount or device behind.
#[test]
fn an_idle_xfs_grows() {
    grow_idle("xfs");
}

// Fails if the btrfs of a volume that nobody uses stays small, is damaged, or leaves a mount or device behind.
#[test]
fn an_idle_btrfs_grows() {
    grow_idle("btrfs");
}

// Fails if a growth is not remembered with who, from, to and the time of each rung, or not after a crash.
#[test]
fn history_is_kept_and_survives_a_crash() {
    let mut service = Service::start();
    service.claim("data", "", "320Mi");
    service.mount("data");
    service.trellis(&["grow", "data", "400Mi", "--wait"]);
    service.kubectl(&[
        "patch",
        "pvc",
        "data",
        "-p",
        r#"{"spec":{"resources":{"requests":{"storage":"500Mi"}}}}"#,
    ]);
    service.wait_size("data", "500Mi");
    let remembers = |service: &Service| {
        let text = service.trellis(&["history", "data", "-o", "json"]);
        let records: serde_json::Value = serde_json::from_str(&text).unwrap();
        let records = records.as_array().cloned().unwrap_or_default();
        (records.len() == 2).then_some(records)
    };
    let records = service.wait("two growths are remembered", remembers);
    assert!(
        records[0]["by"]
            .as_str()
            .unwrap()
            .starts_with("trellis-cli"),
        "{}",
        records[0]
    );
    assert!(
        records[1]["by"].as_str().unwrap().starts_with("kubectl"),
        "{}",
        records[1]
    );
    for (record, from, to) in [
        (&records[0], "320Mi", "400Mi"),
        (&records[1], "400Mi", "500Mi"),
    ] {
        assert_eq!((&record["from"], &record["to"]), (&from.into(), &to.into()));
        assert_eq!(record["result"], "Succeeded");
        let rungs: Vec<&str> = record["rungs"]
            .as_array()
            .unwrap_or_else(|| panic!("no rungs: {record}"))
            .iter()
            .map(|rung| rung["rung"].as_str().unwrap())
            .collect();
        assert_eq!(
            rungs,
            ["replica", "device", "filesystem"],
            "the volume rung rises with its only replica"
        );
    }
    service.kill();
    service.up(&[]);
    assert!(remembers(&service).is_some());
}

// Fails if a second, larger request has to wait for the first, or the first one's size is what remains.
#[test]
fn a_larger_request_replaces_the_goal() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    for size in ["400Mi", "500Mi", "700Mi"] {
        service.trellis(&["grow", "data", size]);
    }
    service.wait_size("data", "700Mi");
    assert!(filesystem_mib(&path) == 700);
}

// Fails if growing many claims at once mixes their sizes up or leaves one behind.
#[test]
fn many_claims_grow_at_the_same_time() {
    let service = Service::start();
    let names: Vec<String> = (0..6).map(|index| format!("data-{index}")).collect();
    for name in &names {
        service.claim(name, "", "320Mi");
        service.mount(name);
    }
    for (index, name) in names.iter().enumerate() {
        let size = format!("{}Mi", 400 + index);
        service.trellis(&["grow", name, &size]);
    }
    for (index, name) in names.iter().enumerate() {
        service.wait_size(name, &format!("{}Mi", 400 + index));
    }
}

// Fails if a look at a volume that finds nothing new writes something, which would be looked at again.
#[test]
fn a_volume_at_rest_is_left_alone() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    service.claim("idle", "", "320Mi");
    service.mount("data");
    service.trellis(&["grow", "data", "400Mi", "--wait"]);
    let flushes = |service: &Service| {
        let stats: serde_json::Value =
            serde_json::from_str(&service.kubectl(&["get", "--raw", "/debug/store"])).unwrap();
        stats["flushes"].as_u64().unwrap()
    };
    service.wait("the service comes to rest", |service| {
        let before = flushes(service);
        std::thread::sleep(std::time::Duration::from_secs(3));
        (flushes(service) == before).then_some(())
    });
}
