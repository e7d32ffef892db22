use trellis_api::Bytes;

use super::annotations;
use crate::names::DiskBus;
use crate::root::ChangedImage;
use crate::seed::{RootSize, SeedKind};

#[test]
fn every_annotation_of_virtlet_is_read() {
    // Fails if an annotation is overlooked, or one that means nothing here is not listed.
    let read = annotations(&[
        ("kubernetes.io/target-runtime", "virtlet.cloud"),
        ("VirtletDiskDriver", "virtio"),
        ("VirtletRootVolumeSize", "4Gi"),
        ("VirtletChown9pfsMounts", "true"),
        ("VirtletCloudInitImageType", "ConfigDrive"),
        ("VirtletCloudInitMetaData", "instance-id: foobar"),
        (
            "VirtletCloudInitUserData",
            "mounts:\n- [\"/dev/testpvc\", \"/mnt\"]\n",
        ),
        ("VirtletCloudInitUserDataOverwrite", "true"),
        ("VirtletCloudInitUserDataScript", "#!/bin/sh\necho hello\n"),
        ("VirtletCloudInitUserDataSource", "configmap/vm-user-data"),
        ("VirtletCloudInitUserDataSourceKey", "user-data"),
        ("VirtletCloudInitUserDataSourceEncoding", "base64"),
        (
            "VirtletSSHKeys",
            "ssh-rsa AAAA me@localhost\n\n ssh-rsa BBBB you@localhost",
        ),
        ("VirtletSSHKeySource", "secret/mysecret"),
        ("VirtletFilesFromDataSource", "secret/files"),
        ("VirtletSystemUUID", "53008994-44c0-4017-ad44-9c49758083da"),
        ("VirtletForceDHCPNetworkConfig", "true"),
        ("VirtletVCPUCount", "4"),
        ("VirtletCPUModel", "host-model"),
        ("VirtletLibvirtCPUSetting", "mode: custom"),
        ("VirtletFutureThing", "yes"),
        ("trellis.dev/root-image-changed", "replace"),
        ("trellis.dev/root-overwrite", "true"),
        ("example.com/other", "untouched"),
    ])
    .unwrap();
    assert!(read.is_vm && read.chown_shares && read.overwrite && read.force_dhcp && read.host_cpu);
    assert_eq!(
        (read.disk_bus, read.seed_kind, read.vcpus),
        (DiskBus::Virtio, SeedKind::ConfigDrive, 4)
    );
    assert_eq!(read.root_volume_size, Some(Bytes::gib(4)));
    assert_eq!(
        read.ssh_keys,
        ["ssh-rsa AAAA me@localhost", "ssh-rsa BBBB you@localhost"]
    );
    assert_eq!(read.ssh_key_source.unwrap().1, "authorized_keys");
    assert_eq!(read.root_rules.changed_image, ChangedImage::Replace);
    assert!(read.root_rules.overwrite_foreign && read.system_uuid.is_some());
    assert_eq!(
        read.user_data_source.unwrap().to_string(),
        "ConfigMap vm-user-data"
    );
    assert_eq!(
        read.ignored,
        ["VirtletFutureThing", "VirtletLibvirtCPUSetting"]
    );
    let none = annotations(&[]).unwrap();
    assert_eq!(
        (none.disk_bus, none.seed_kind, none.vcpus, none.is_vm),
        (DiskBus::Scsi, SeedKind::NoCloud, 1, false)
    );
}

#[test]
fn a_value_that_cannot_be_meant_is_an_error_that_says_what_can() {
    // Fails if a wrong value is taken for the default, as Virtlet did with sizes and booleans.
    let bad = [
        ("VirtletDiskDriver", "ide"),
        ("VirtletRootVolumeSize", "0"),
        ("VirtletRootVolumeSize", "-4Gi"),
        ("VirtletRootVolumeSize", "4GB"),
        ("VirtletChown9pfsMounts", "True"),
        ("VirtletCloudInitImageType", "floppy"),
        ("VirtletCloudInitUserData", "- a list"),
        ("VirtletCloudInitUserData", "a: ["),
        ("VirtletCloudInitUserDataSource", "deployment/x"),
        ("VirtletCloudInitUserDataSource", "secret/../other"),
        ("VirtletCloudInitUserDataSource", "secret/"),
        ("VirtletCloudInitUserDataSourceEncoding", "hex"),
        ("VirtletSSHKeySource", "secret/a/b/c"),
        ("VirtletSystemUUID", "no"),
        ("VirtletVCPUCount", "0"),
        ("VirtletVCPUCount", "256"),
        ("VirtletCPUModel", "z80"),
        ("trellis.dev/root-image-changed", "maybe"),
    ];
    for (name, value) in bad {
        let error = annotations(&[(name, value)]).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_root_size_below_the_image_is_said() {
    // Fails if a size is ignored in silence.
    let asked = annotations(&[("VirtletRootVolumeSize", "1Gi")]).unwrap();
    let less = RootSize::LessAsked {
        size: Bytes::gib(2),
        asked: Bytes::gib(1),
    };
    assert_eq!(asked.root_size(Bytes::gib(2)), less);
    assert_eq!(asked.root_size(Bytes::MIB), RootSize::Asked(Bytes::gib(1)));
    let none = annotations(&[]).unwrap();
    assert_eq!(none.root_size(Bytes::GIB), RootSize::OfImage(Bytes::GIB));
}
