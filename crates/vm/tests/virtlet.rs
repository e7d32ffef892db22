//! The pods of Virtlet's document on volumes, from their YAML to disks and seeds.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;

use serde_json::Value;
use trellis_api::Bytes;
use trellis_vm::flex::{DRIVER, FlexBacking, FlexVolume};
use trellis_vm::image::{ImagePlace, ImageReference};
use trellis_vm::names::{DiskBus, DiskRole, WantedDisk, arrange};
use trellis_vm::seed::{Annotations, RootSize};

fn pod(yaml: &str) -> Value {
    serde_saphyr::from_str(yaml).unwrap()
}

fn texts(value: &Value) -> BTreeMap<String, String> {
    let pairs = value.as_object().unwrap().iter();
    pairs
        .map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned()))
        .collect()
}

/// The disks of a pod: its root, its block volumes but the root, its flexvolumes, and the seed.
fn disks(pod: &Value) -> Vec<WantedDisk> {
    let disk = |role, volume: &str| WantedDisk {
        role,
        volume: volume.to_owned(),
    };
    let devices = pod["spec"]["containers"][0]["volumeDevices"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let (roots, blocks): (Vec<_>, Vec<_>) = devices
        .iter()
        .partition(|device| device["devicePath"] == "/");
    let root = roots
        .first()
        .map_or("root", |device| device["name"].as_str().unwrap());
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let flex = volumes
        .iter()
        .filter(|volume| volume["flexVolume"]["driver"] == DRIVER);
    let mut disks = vec![disk(DiskRole::Seed, "seed"), disk(DiskRole::Root, root)];
    disks.extend(
        blocks
            .iter()
            .map(|device| disk(DiskRole::Block, device["name"].as_str().unwrap())),
    );
    disks.extend(flex.map(|volume| disk(DiskRole::Flex, volume["name"].as_str().unwrap())));
    disks
}

const EPHEMERAL: &str = r#"
metadata:
  name: test-vm-pod
  annotations:
    kubernetes.io/target-runtime: virtlet.cloud
    VirtletRootVolumeSize: 4Gi
spec:
  containers:
    - name: test-vm
      image: download.cirros-cloud.net/0.3.5/cirros-0.3.5-x86_64-disk.img
  volumes:
  - name: vol1
    flexVolume:
      driver: "virtlet/flexvolume_driver"
      options:
        type: qcow2
        capacity: 1024MB
  - name: vol2
    flexVolume:
      driver: "virtlet/flexvolume_driver"
      options:
        type: qcow2
"#;

#[test]
fn a_pod_with_ephemeral_volumes_has_the_disks_that_the_document_promises() {
    // Fails if vol1 is not sdb, if the two volumes differ in size, or if the root is not 4 GiB.
    let pod = pod(EPHEMERAL);
    let annotations = Annotations::parse(&texts(&pod["metadata"]["annotations"])).unwrap();
    assert!(annotations.is_vm && annotations.ignored.is_empty());
    assert_eq!(
        annotations.root_size(Bytes::MIB),
        RootSize::Asked(Bytes::gib(4))
    );
    let image: ImageReference = pod["spec"]["containers"][0]["image"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    assert!(
        matches!(image.place, ImagePlace::Web(url) if url.host() == Some("download.cirros-cloud.net"))
    );
    for volume in pod["spec"]["volumes"].as_array().unwrap() {
        let flex = FlexVolume::parse(&texts(&volume["flexVolume"]["options"])).unwrap();
        let capacity = Bytes::new(1_024_000_000);
        assert_eq!(flex.backing, FlexBacking::Qcow2 { capacity });
    }
    for (bus, names) in [
        (DiskBus::Scsi, ["sda", "sdb", "sdc", "sr0"]),
        (DiskBus::Virtio, ["vda", "vdb", "vdc", "vdd"]),
    ] {
        let placed = arrange(bus, disks(&pod)).unwrap();
        let found: Vec<_> = placed.iter().map(|disk| disk.usual_name.as_str()).collect();
        assert_eq!(found, names);
        assert_eq!(placed[1].disk.volume, "vol1");
    }
}

const PERSISTENT: &str = r#"
metadata:
  name: cirros-vm
  annotations:
    kubernetes.io/target-runtime: virtlet.cloud
    VirtletDiskDriver: virtio
    VirtletCloudInitUserData: |
      mounts:
      - ["/dev/testpvc", "/mnt"]
spec:
  containers:
  - name: cirros-vm
    image: virtlet.cloud/cirros.example/disk.img
    volumeDevices:
    - devicePath: /dev/testpvc
      name: testpvc
    - devicePath: /
      name: rootpvc
  volumes:
  - name: testpvc
    persistentVolumeClaim:
      claimName: local-block-pvc
  - name: rootpvc
    persistentVolumeClaim:
      claimName: root-pvc
"#;

#[test]
fn a_pod_with_a_persistent_root_boots_from_it_whatever_the_order_of_its_devices() {
    // Fails if the device at / is not the first disk, or if the claim's name is not what the guest knows the disk by.
    let pod = pod(PERSISTENT);
    let annotations = Annotations::parse(&texts(&pod["metadata"]["annotations"])).unwrap();
    assert_eq!(annotations.disk_bus, DiskBus::Virtio);
    assert_eq!(annotations.user_data["mounts"][0][0], "/dev/testpvc");
    let placed = arrange(annotations.disk_bus, disks(&pod)).unwrap();
    let found: Vec<_> = placed
        .iter()
        .map(|disk| (disk.usual_name.as_str(), disk.serial.as_str()))
        .collect();
    assert_eq!(
        found,
        [("vda", "rootpvc"), ("vdb", "testpvc"), ("vdc", "seed")]
    );
}
