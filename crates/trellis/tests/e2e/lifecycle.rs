//! The whole life of a claim, by the verbs and by kubectl.

use serde_json::Value;

use crate::harness::{
    Service, checksum, claim, class, filesystem_mib, loops_below, mounts_below, write_file,
};

// Fails if any link of the chain from manifest to mounted, grown and removed volume is broken.
#[test]
fn a_claim_lives_from_manifest_to_removal() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 8 << 20, 7);
    service.trellis(&["grow", "data", "+320Mi", "--wait"]);
    assert!(
        filesystem_mib(&path) == 640,
        "the mounted filesystem is larger"
    );
    service.wait_size("data", "640Mi");
    assert_eq!(checksum(&path.join("file")), sum);
    service.trellis(&["umount", "data"]);
    service.kubectl(&["delete", "pvc", "data", "--wait=true"]);
    service.wait("everything is gone", |service| {
        let none = [
            "pv",
            "volumes.trellis.dev",
            "replicas.trellis.dev",
            "attachments.trellis.dev",
        ];
        none.iter()
            .all(|kind| service.objects(kind).is_empty())
            .then_some(())
    });
    assert!(mounts_below(&service.data()).is_empty());
    assert!(loops_below(&service.data()).is_empty());
    assert_eq!(
        std::fs::read_dir(service.data().join("pools/default/replicas"))
            .unwrap()
            .count(),
        0
    );
}

// Fails if a mount does not outlive the service, or a service that comes back does not know its mounts.
#[test]
fn mounts_survive_a_kill_and_are_adopted() {
    let mut service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 4 << 20, 3);
    let device = service.object("pvc", "data")["spec"]["volumeName"]
        .as_str()
        .unwrap()
        .to_owned();
    let devices = loops_below(&service.data());
    service.kill();
    assert_eq!(
        checksum(&path.join("file")),
        sum,
        "the mount is there without the service"
    );
    service.up(&[]);
    service.trellis(&["grow", "data", "500Mi", "--wait"]);
    assert_eq!(
        service.object("pvc", "data")["spec"]["volumeName"],
        device.as_str()
    );
    assert_eq!(
        loops_below(&service.data()),
        devices,
        "the same device was adopted"
    );
    assert!(filesystem_mib(&path) == 500);
    assert_eq!(checksum(&path.join("file")), sum);
}

// Fails if a claim is provisioned although nothing uses it, or is not when something does, or does not say what helps.
#[test]
fn a_claim_may_wait_for_its_first_consumer() {
    let service = Service::start();
    let waiting = class("later", "xfs") + "volumeBindingMode: WaitForFirstConsumer\n";
    service.apply(&waiting);
    service.apply(&claim("data", "later", "320Mi"));
    let said = service.wait("the claim says that it waits", |service| {
        let text = service.trellis_any(&["explain", "data"]);
        text.contains("WaitingForConsumer").then_some(text)
    });
    // Pods do not run here, so that is what helps, and it does: see below.
    let advice = "what to do: Mount the claim with `trellis mount`.";
    assert!(said.contains(advice), "{said}");
    assert!(service.objects("volumes.trellis.dev").is_empty());
    let path = service.mount("data");
    assert!(filesystem_mib(&path) == 320);
    assert_eq!(service.object("pvc", "data")["status"]["phase"], "Bound");
}

// Fails if a kept volume is lost with its claim, or cannot be bound again with its data.
#[test]
fn a_retained_volume_outlives_its_claim_and_can_be_bound_again() {
    let service = Service::start();
    service.apply(&(class("keep", "xfs") + "reclaimPolicy: Retain\n"));
    service.claim("data", "keep", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 1 << 20, 11);
    service.trellis(&["umount", "data"]);
    let volume = service.object("pvc", "data")["spec"]["volumeName"]
        .as_str()
        .unwrap()
        .to_owned();
    service.kubectl(&["delete", "pvc", "data", "--wait=true"]);
    service.wait("the volume is released", |service| {
        (service.object("pv", &volume)["status"]["phase"] == "Released").then_some(())
    });
    service.kubectl(&[
        "patch",
        "pv",
        &volume,
        "--type=json",
        "-p",
        r#"[{"op":"remove","path":"/spec/claimRef"}]"#,
    ]);
    service.apply(&(claim("again", "keep", "320Mi") + &format!("  volumeName: {volume}\n")));
    service.wait_bound("again");
    let path = service.mount("again");
    assert_eq!(checksum(&path.join("file")), sum);
}

// Fails if what docs/operating.md says about freeing a retained volume frees nothing, or if deleting the persistent
// volume alone frees it.
#[test]
fn a_retained_volume_is_freed_as_the_documents_say() {
    let service = Service::start();
    service.apply(&(class("keep", "xfs") + "reclaimPolicy: Retain\n"));
    for name in ["freed", "kept"] {
        service.claim(name, "keep", "320Mi");
        let volume = service.object("pvc", name)["spec"]["volumeName"].clone();
        let (volume, data) = (volume.as_str().unwrap(), service.data_file(name));
        service.kubectl(&["delete", "pvc", name, "--wait=true"]);
        service.wait("the volume is released", |service| {
            (service.object("pv", volume)["status"]["phase"] == "Released").then_some(())
        });
        assert!(data.exists());
        if name == "freed" {
            let delete = r#"{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}"#;
            service.kubectl(&["patch", "pv", volume, "-p", delete]);
            service.wait("bytes and objects are gone", |service| {
                let objects =
                    ["pv", "volumes.trellis.dev"].map(|kind| service.object(kind, volume));
                (!data.exists() && objects.iter().all(Value::is_null)).then_some(())
            });
        } else {
            service.kubectl(&["delete", "pv", volume, "--wait=true"]);
            service.trellis(&["pool", "ls"]);
            assert!(data.exists(), "the bytes stay");
        }
    }
}

// Fails if a claim that is in use vanishes under its user, or stays when the use has ended.
#[test]
fn a_claim_in_use_is_deleted_only_when_the_use_ends() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    service.kubectl(&["delete", "pvc", "data", "--wait=false"]);
    assert!(
        write_file(&path.join("file"), 1 << 16, 5) != 0,
        "it can still be written to"
    );
    assert!(!service.object("pvc", "data").is_null());
    service.trellis(&["umount", path.to_str().unwrap()]);
    service.wait("the claim is gone", |service| {
        service.object("pvc", "data").is_null().then_some(())
    });
}

// Fails if a block volume gets a filesystem, or its device does not grow in place.
#[test]
fn a_block_volume_is_the_device_itself_and_grows() {
    let service = Service::start();
    service.apply(&(claim("disk", "", "64Mi") + "  volumeMode: Block\n"));
    service.wait_bound("disk");
    let path = service.path("disk-device");
    service.trellis(&["mount", "disk", path.to_str().unwrap()]);
    let size = |path: &std::path::Path| {
        trellis_node::sys::block::size(std::fs::File::open(path).unwrap())
            .unwrap()
            .get()
    };
    assert_eq!(size(&path), 64 << 20);
    service.trellis(&["grow", "disk", "96Mi", "--wait"]);
    assert_eq!(size(&path), 96 << 20);
    let bytes = std::fs::read(&path).unwrap();
    assert!(
        bytes.iter().all(|byte| *byte == 0),
        "nothing was written to it"
    );
}

// Fails if a read-only mount can be written to, or its filesystem is grown behind its back.
#[test]
fn a_read_only_mount_cannot_be_written_to_and_holds_growth() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.path("mnt-ro");
    service.trellis(&["mount", "data", path.to_str().unwrap(), "--read-only"]);
    assert!(std::fs::write(path.join("file"), "x").is_err());
    let output = service.try_trellis(&["grow", "data", "640Mi", "--wait", "--timeout", "20s"]);
    assert_eq!(
        output.status.code(),
        Some(3),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        service
            .trellis_any(&["explain", "data"])
            .contains("ReadOnly")
    );
    assert_eq!(
        service.object("pvc", "data")["status"]["capacity"]["storage"],
        "320Mi"
    );
    // Nobody uses it read-only any more, so nothing keeps it.
    service.trellis(&["umount", "data"]);
    service.wait_size("data", "640Mi");
    let path = service.mount("data");
    assert!(filesystem_mib(&path) == 640);
}

impl Service {
    /// Runs a verb whatever it answers, and all that it said.
    pub fn trellis_any(&self, arguments: &[&str]) -> String {
        let output = self.try_trellis(arguments);
        format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    }
}

// Fails if deleting one of our own objects by hand takes the bytes of a claim that is still there.
#[test]
fn deleting_our_objects_by_hand_does_not_touch_a_claims_bytes() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 1 << 20, 19);
    service.trellis(&["umount", "data"]);
    let volume = service.object("pvc", "data")["spec"]["volumeName"]
        .as_str()
        .unwrap()
        .to_owned();
    let replica = format!("{volume}-0");
    for (kind, name) in [
        ("replicas.trellis.dev", &replica),
        ("volumes.trellis.dev", &volume),
    ] {
        service.kubectl(&["delete", kind, name, "--wait=false"]);
    }
    let path = service.mount("data");
    assert_eq!(checksum(&path.join("file")), sum);
    service.trellis(&["umount", "data"]);
    service.kubectl(&["delete", "pvc", "data", "--wait=true"]);
    service.wait("everything is gone", |service| {
        let kinds = ["pv", "volumes.trellis.dev", "replicas.trellis.dev"];
        kinds
            .iter()
            .all(|kind| service.objects(kind).is_empty())
            .then_some(())
    });
}
