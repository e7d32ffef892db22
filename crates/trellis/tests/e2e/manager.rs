//! The node's volume manager: the rules of kubelet's online growth, each by its name, and what a person or
//! the machine does behind the agent's back.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{
    Service, assert_clean, checksum, claim, class, filesystem_mib, loops_below, mounts_below, said,
    write_file,
};

/// So long that nothing in these tests comes from a resync.
const AN_HOUR: &[&str] = &["--resync-seconds", "3600"];

fn switched_off(name: &str) -> String {
    class(name, "xfs") + "  onlineGrowth: \"false\"\n"
}

fn conditions(service: &Service, claim: &str) -> String {
    service.object("pvc", claim)["status"]["conditions"].to_string()
}

fn size(service: &Service, claim: &str) -> String {
    let size = &service.object("pvc", claim)["status"]["capacity"]["storage"];
    size.as_str().unwrap_or_default().to_owned()
}

fn events_about(service: &Service, kind: &str, name: &str) -> String {
    let events = service.objects("events");
    let about = events.iter().filter(|event| {
        event["involvedObject"]["kind"] == kind && event["involvedObject"]["name"] == name
    });
    about
        .map(|event| format!("{} {}\n", event["reason"], event["message"]))
        .collect()
}

/// Waits until the first attachment of a claim is held for a reason.
fn wait_held(service: &Service, reason: &str) {
    service.wait(&format!("held as {reason}"), |service| {
        let attachments = service.objects("attachments.trellis.dev");
        let held = |each: &&serde_json::Value| each["status"]["hold"]["reason"] == reason;
        attachments.iter().find(held).map(drop)
    });
}

fn umount(path: &Path) {
    let output = Command::new("umount").arg(path).output().unwrap();
    said(&output, &format!("umount {}", path.display()));
}

fn asks(service: &Service, claim: &str, size: &str) {
    let body = format!(r#"{{"spec":{{"resources":{{"requests":{{"storage":"{size}"}}}}}}}}"#);
    service.kubectl(&["patch", "pvc", claim, "-p", &body]);
}

// Fails if growth comes from a timer: with a resync an hour away it would never come.
#[test]
fn growth_is_driven_by_events_alone() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    for (request, mib) in [("400Mi", 400), ("500Mi", 500)] {
        asks(&service, "data", request);
        service.wait_size("data", request);
        assert_eq!(filesystem_mib(&path), mib);
    }
}

// Fails if a mounted volume is not grown while it is mounted, or the claim is not finished by it.
#[test]
fn kubelet_rule_success_raises_the_claim_and_clears_its_conditions() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    service.mount("data");
    asks(&service, "data", "640Mi");
    service.wait_size("data", "640Mi");
    let object = service.object("pvc", "data");
    assert!(object["status"]["conditions"].is_null(), "{object}");
    assert!(object["status"]["allocatedResourceStatuses"].is_null());
    let volume = object["spec"]["volumeName"].as_str().unwrap().to_owned();
    service.wait("the persistent volume has the size", |service| {
        (service.object("pv", &volume)["spec"]["capacity"]["storage"] == "640Mi").then_some(())
    });
    service.wait("success is told", |service| {
        events_about(service, "PersistentVolumeClaim", "data")
            .contains("FileSystemResizeSuccessful")
            .then_some(())
    });
}

// Fails if the switch of a class does not keep a mounted filesystem from growing, or keeps an idle one.
#[test]
fn kubelet_rule_the_switch_of_the_class_turns_the_online_path_off() {
    let service = Service::start_told(AN_HOUR);
    service.apply(&switched_off("offline"));
    service.claim("data", "offline", "320Mi");
    let path = service.mount("data");
    asks(&service, "data", "640Mi");
    service.wait("it is said why it waits", |service| {
        let said = conditions(service, "data");
        (said.contains("FileSystemResizePending") && said.contains("OnlineGrowthOff")).then_some(())
    });
    assert_eq!(filesystem_mib(&path), 320);
    assert_eq!(size(&service, "data"), "320Mi");
    std::fs::write(path.join("file"), "it can be used as before").unwrap();
    service.trellis(&["umount", "data"]);
    service.wait_size("data", "640Mi");
    assert_clean("xfs", &service.data_file("data"));
}

// Fails if the switch of a node does not keep a mounted filesystem from growing.
#[test]
fn kubelet_rule_the_switch_of_the_node_turns_the_online_path_off() {
    let service = Service::start_told(&["--online-growth", "false", "--resync-seconds", "3600"]);
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    asks(&service, "data", "640Mi");
    service.wait("it is said why it waits", |service| {
        conditions(service, "data")
            .contains("OnlineGrowthOff")
            .then_some(())
    });
    assert_eq!(filesystem_mib(&path), 320);
}

// Fails if a block volume waits for a filesystem, or has a rung of one.
#[test]
fn kubelet_rule_block_mode_has_no_filesystem_rung() {
    let service = Service::start_told(AN_HOUR);
    service.apply(&(claim("disk", "", "64Mi") + "  volumeMode: Block\n"));
    service.wait_bound("disk");
    let path = service.path("device");
    service.trellis(&["mount", "disk", path.to_str().unwrap()]);
    asks(&service, "disk", "96Mi");
    service.wait_size("disk", "96Mi");
    let attachments = service.objects("attachments.trellis.dev");
    let rungs = attachments[0]["status"]["rungs"].as_array().unwrap();
    let names: Vec<&str> = rungs
        .iter()
        .filter_map(|rung| rung["rung"].as_str())
        .collect();
    assert_eq!(names, ["device"]);
}

// Fails if a reader alone makes the filesystem grow, is told a failure, or keeps a writer from growing it.
#[test]
fn kubelet_rule_a_read_only_consumer_never_causes_growth() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    let reader = service.path("reader");
    service.trellis(&["mount", "data", reader.to_str().unwrap(), "--read-only"]);
    asks(&service, "data", "640Mi");
    service.wait("it waits, without an error", |service| {
        let said = conditions(service, "data");
        (said.contains("FileSystemResizePending") && said.contains("ReadOnly")).then_some(())
    });
    assert!(!conditions(&service, "data").contains("NodeResizeError"));
    assert_eq!(filesystem_mib(&reader), 320);
    // A writer beside the reader is what lets it grow, for both.
    let writer = service.path("writer");
    service.trellis(&["mount", "data", writer.to_str().unwrap()]);
    service.wait_size("data", "640Mi");
    assert_eq!(filesystem_mib(&writer), 640);
    assert_eq!(filesystem_mib(&reader), 640);
    assert!(std::fs::write(reader.join("file"), "x").is_err());
}

// Fails if a volume that several use is grown more than once for one request.
#[test]
fn kubelet_rule_a_shared_volume_grows_once() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    let paths: Vec<PathBuf> = (0..3)
        .map(|index| service.path(&format!("m{index}")))
        .collect();
    for path in &paths {
        service.trellis(&["mount", "data", path.to_str().unwrap()]);
    }
    asks(&service, "data", "640Mi");
    service.wait_size("data", "640Mi");
    let raised: Vec<String> = service.wait("every use reports the growth", |service| {
        let attachments = service.objects("attachments.trellis.dev");
        let of_filesystem = |each: &serde_json::Value| {
            let rungs = each["status"]["rungs"].as_array()?.clone();
            let rung = rungs
                .into_iter()
                .find(|rung| rung["rung"] == "filesystem")?;
            rung["raised"]["at"].as_str().map(str::to_owned)
        };
        let raised: Vec<String> = attachments.iter().filter_map(of_filesystem).collect();
        (raised.len() == 3).then_some(raised)
    });
    assert!(
        raised.iter().all(|at| *at == raised[0]),
        "one growth, seen by all: {raised:?}"
    );
    for path in &paths {
        assert_eq!(filesystem_mib(path), 640);
    }
}

// Fails if a growth that fails is not told to the claim and to each pod that uses it, or is not tried again.
#[test]
fn kubelet_rule_a_failed_growth_is_told_to_the_claim_and_its_pods_and_tried_again() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    service.apply(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: user}\nspec:\n  containers: [{name: c, image: i}]\n  volumes: [{name: v, persistentVolumeClaim: {claimName: data}}]\n",
    );
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 1 << 20, 5);
    // An xfs that has shut itself down cannot grow.
    let shut = Command::new("xfs_io")
        .args(["-x", "-c", "shutdown"])
        .arg(&path)
        .output();
    said(&shut.unwrap(), "xfs_io shutdown");
    asks(&service, "data", "640Mi");
    wait_held(&service, "FilesystemDown");
    for (kind, name) in [("PersistentVolumeClaim", "data"), ("Pod", "user")] {
        service.wait(&format!("{kind} is told"), |service| {
            events_about(service, kind, name)
                .contains("FilesystemDown")
                .then_some(())
        });
    }
    assert_eq!(size(&service, "data"), "320Mi");
    // Mounted anew, its journal is replayed, the data is there, and the growth is done.
    service.trellis(&["umount", "data"]);
    let path = service.mount("data");
    service.wait_size("data", "640Mi");
    assert_eq!(checksum(&path.join("file")), sum);
}

// Fails if a mount that a person took away is put back behind their back, goes unseen, or if data is lost.
#[test]
fn a_mount_unmounted_by_hand_is_held_and_said() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 1 << 20, 3);
    umount(&path);
    wait_held(&service, "MountGone");
    assert!(!mounts_below(&path).contains(&path));
    service.trellis(&["umount", "data"]);
    let path = service.mount("data");
    assert_eq!(checksum(&path.join("file")), sum);
}

// Fails if a device that vanished is replaced unasked, goes unseen, or if data is lost.
#[test]
fn a_loop_device_that_vanished_is_held_and_said() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 1 << 20, 4);
    let device = loops_below(&service.data()).remove(0);
    for mount in mounts_below(&service.data()).iter().chain([&path]) {
        umount(mount);
    }
    let _ = Command::new("losetup").arg("-d").arg(&device).status();
    wait_held(&service, "DeviceGone");
    assert!(loops_below(&service.data()).is_empty());
    service.trellis(&["umount", "data"]);
    let path = service.mount("data");
    assert_eq!(checksum(&path.join("file")), sum);
}

// Fails if a volume whose file was cut off is made long again with zeros, formatted, or goes unseen.
#[test]
fn a_volume_that_shrank_is_held_and_left_alone() {
    let mut service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    service.mount("data");
    let data = service.data_file("data");
    let file = std::fs::OpenOptions::new().write(true).open(&data).unwrap();
    file.set_len(300 << 20).unwrap();
    asks(&service, "data", "640Mi");
    let held = |service: &Service| {
        let everything = [
            service.objects("attachments.trellis.dev"),
            service.objects("replicas.trellis.dev"),
        ];
        let text = serde_json::to_string(&everything).unwrap();
        (text.contains("DeviceShrunk") || text.contains("ReplicaDamaged")).then_some(())
    };
    service.wait("it is held", held);
    assert_eq!(std::fs::metadata(&data).unwrap().len(), 300 << 20);
    service.kill();
    service.up(&[]);
    service.wait("it is held after a restart", held);
    assert_eq!(std::fs::metadata(&data).unwrap().len(), 300 << 20);
}

/// Puts an xfs that was made elsewhere on the volume of a claim, as a restore would.
fn restore_xfs(service: &Service, claim: &str, options: &[&str]) {
    let image = service.path("image");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(320 << 20)
        .unwrap();
    let made = Command::new("mkfs.xfs")
        .arg("-q")
        .args(options)
        .arg(&image)
        .output();
    said(&made.unwrap(), "mkfs.xfs");
    let restored = Command::new("dd")
        .arg(format!("if={}", image.display()))
        .arg(format!("of={}", service.data_file(claim).display()))
        .args(["conv=notrunc,sparse", "bs=1M"])
        .output();
    said(&restored.unwrap(), "dd");
}

// Fails if a volume that came with a smaller filesystem, as a clone or a restored one does, stays so.
#[test]
fn a_restored_volume_is_grown_at_its_first_use() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "640Mi");
    restore_xfs(&service, "data", &[]);
    let path = service.mount("data");
    service.wait("it fills its volume", |_| {
        (filesystem_mib(&path) == 640).then_some(())
    });
}

// Fails if a filesystem with far too many groups for its size looks like any other.
#[test]
fn a_filesystem_that_has_outgrown_its_geometry_is_told_so_in_the_ladder() {
    let service = Service::start_told(AN_HOUR);
    let room = r#"{"spec":{"overcommitPercent":10000}}"#;
    service.kubectl(&[
        "patch",
        "pools.trellis.dev",
        "default",
        "--type=merge",
        "-p",
        room,
    ]);
    service.claim("data", "", "33Gi");
    let many_groups = ["--unsupported", "-d", "agsize=16m", "-l", "size=8m"];
    restore_xfs(&service, "data", &many_groups);
    let path = service.mount("data");
    service.wait("it fills its volume", |_| {
        (filesystem_mib(&path) == 33 << 10).then_some(())
    });
    service.wait("the ladder says it", |service| {
        service
            .trellis(&["ladder", "data"])
            .contains("allocation groups")
            .then_some(())
    });
}
