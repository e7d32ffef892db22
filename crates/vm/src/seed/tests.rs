#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use proptest::prelude::*;

use super::*;
use crate::flex::FlexPartition;
use crate::names::Serial;

pub(super) fn annotations(pairs: &[(&str, &str)]) -> Result<Annotations, SeedError> {
    let owned = pairs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Annotations::parse(&owned.collect())
}

mod parsed;

fn object(pairs: &[(&str, &str)]) -> ObjectData {
    let owned = pairs.iter();
    owned
        .map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec()))
        .collect()
}

fn input<'a>(annotations: &'a Annotations) -> SeedInput<'a> {
    SeedInput {
        pod: "ubuntu-vm",
        namespace: "default",
        annotations,
        user_data_source: None,
        ssh_key_source: None,
        files_source: None,
        volumes: &[],
        environment: &[],
        devices: &[],
        mounts: &[],
        network: None,
        persistent_root: false,
    }
}

fn files(input: &SeedInput<'_>) -> BTreeMap<String, String> {
    let told = Told::new(input).unwrap();
    let files = match input.annotations.seed_kind {
        SeedKind::NoCloud => told.nocloud(),
        SeedKind::ConfigDrive => told.configdrive(),
    };
    files
        .into_iter()
        .map(|file| (file.path, String::from_utf8(file.bytes).unwrap()))
        .collect()
}

/// The user data as cloud-init reads it.
fn read_user_data(input: &SeedInput<'_>) -> Value {
    let files = files(input);
    let text = files["user-data"].strip_prefix(HEADER).unwrap().to_owned();
    yaml::read(&text, "the test").unwrap()
}

fn volume(mount_path: &str, key: &str, mode: u32, text: &str) -> FileVolume {
    let file = VolumeFile {
        key: key.to_owned(),
        mode,
        bytes: text.as_bytes().to_vec(),
    };
    FileVolume {
        mount_path: mount_path.to_owned(),
        files: vec![file],
    }
}

fn device(path: &str, volume: &str) -> BlockDevice {
    BlockDevice {
        device_path: path.to_owned(),
        serial: Serial::of(volume),
    }
}

#[test]
fn user_data_is_the_source_then_the_annotation_then_what_is_generated() {
    // Fails if lists are not appended in that order, or if overwriting keeps something of the source.
    let own = "users: [{name: second}]\nwrite_files: [{path: /b}]\nlocale: de";
    let source = object(&[
        ("users", "[{name: first}]"),
        ("write_files", "- path: /a\n"),
        ("locale", "en"),
    ]);
    let named = ("VirtletCloudInitUserDataSource", "configmap/c");
    let volumes = [volume("/etc/foobar", "key", 0o640, "text")];
    let merged = annotations(&[named, ("VirtletCloudInitUserData", own)]).unwrap();
    let mut input = input(&merged);
    input.user_data_source = Some(&source);
    input.volumes = &volumes;
    let data = read_user_data(&input);
    assert_eq!(
        data["users"],
        json!([{"name": "first"}, {"name": "second"}])
    );
    assert_eq!(data["locale"], "de");
    let paths: Vec<_> = data["write_files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| file["path"].clone())
        .collect();
    assert_eq!(paths, ["/a", "/b", "/etc/foobar/key"]);
    let written = &data["write_files"][2];
    assert_eq!(
        written,
        &json!({"path": "/etc/foobar/key", "permissions": "0640", "encoding": "b64", "content": "dGV4dA=="})
    );
    let over = ("VirtletCloudInitUserDataOverwrite", "true");
    let overwritten = annotations(&[named, ("VirtletCloudInitUserData", own), over]).unwrap();
    input.annotations = &overwritten;
    let data = read_user_data(&input);
    assert_eq!(data["users"], json!([{"name": "second"}]));
    input.user_data_source = None;
    assert!(matches!(Told::new(&input), Err(SeedError::NoObject { .. })));
}

#[test]
fn a_script_stays_as_it_is_and_secrets_are_delivered_all_the_same() {
    // Fails (Virtlet's defect) if a script makes Secrets disappear, or if the script is changed on its way.
    let script = "#!/bin/sh\n@virtlet-mount-script@\necho done\n";
    let pairs = [
        ("VirtletCloudInitUserDataScript", script),
        ("VirtletCloudInitUserData", "a: 1"),
    ];
    let volumes = [volume("/etc/baz", "token", 0o400, "hush")];
    let devices = [device("/dev/testpvc", "testpvc")];
    for kind in ["nocloud", "configdrive"] {
        let pairs = [&pairs[..], &[("VirtletCloudInitImageType", kind)]].concat();
        let annotations = annotations(&pairs).unwrap();
        let mut input = input(&annotations);
        input.volumes = &volumes;
        input.devices = &devices;
        let files = files(&input);
        let (user, vendor) = if kind == "nocloud" {
            (&files["user-data"], files["vendor-data"].clone())
        } else {
            let json: Value =
                serde_json::from_str(&files["openstack/latest/vendor_data.json"]).unwrap();
            (
                &files["openstack/latest/user_data"],
                json["cloud-init"].as_str().unwrap().to_owned(),
            )
        };
        assert!(
            user.starts_with("#!/bin/sh\n#!/bin/sh\nfind_disk") && user.ends_with("\necho done\n"),
            "{user}"
        );
        let vendor = yaml::read(vendor.strip_prefix(HEADER).unwrap(), "the test").unwrap();
        assert_eq!(vendor["write_files"][0]["path"], "/etc/baz/token");
        assert_eq!(vendor["write_files"][0]["permissions"], "0400");
        assert!(Seed::build(&input).unwrap().user_data_replaced);
    }
}

#[test]
fn a_key_of_a_source_can_be_the_whole_of_the_user_data() {
    // Fails if base64 is not decoded, if a missing key is taken for nothing, or if cloud-config there loses the Secrets.
    let whole = "#cloud-config\nwrite_files:\n- path: /a\n";
    let source = object(&[
        ("all", &STANDARD.encode(whole)),
        ("bad", "%"),
        ("script", "IyEvYmluL3NoCg=="),
    ]);
    let volumes = [volume("/etc/baz", "token", 0o400, "hush")];
    let with_key = |key: &str| {
        let encoding = ("VirtletCloudInitUserDataSourceEncoding", "base64");
        let pairs = [
            ("VirtletCloudInitUserDataSource", "secret/s"),
            ("VirtletCloudInitUserDataSourceKey", key),
            encoding,
        ];
        annotations(&pairs).unwrap()
    };
    let (all, script) = (with_key("all"), with_key("script"));
    let mut input = input(&all);
    input.user_data_source = Some(&source);
    input.volumes = &volumes;
    let data = read_user_data(&input);
    assert_eq!(
        (
            &data["write_files"][0]["path"],
            &data["write_files"][1]["path"]
        ),
        (&json!("/a"), &json!("/etc/baz/token"))
    );
    input.annotations = &script;
    assert_eq!(files(&input)["user-data"], "#!/bin/sh\n");
    for (key, expected) in [("bad", "is not base64"), ("absent", "has no key")] {
        let annotations = with_key(key);
        let input = SeedInput {
            annotations: &annotations,
            ..input.clone()
        };
        let error = Told::new(&input).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn mounts_of_block_volumes_get_a_path_that_is_there_in_time() {
    // Fails if the example of Virtlet's document mounts a link that does not exist yet, or if another entry is changed.
    let own = "mounts:\n- [\"/dev/testpvc\", \"/mnt\"]\n- [testpvc, /srv]\n- [\"/dev/sdz\", \"/z\"]\n- odd\n";
    let devices = [device("/dev/testpvc", "testpvc")];
    let mounts = [DiskMount {
        serial: Serial::of("vol1"),
        partition: FlexPartition::Number(1),
        path: "/var/lib/docker".to_owned(),
    }];
    for (driver, prefix) in [("scsi", "scsi-0QEMU_QEMU_HARDDISK_"), ("virtio", "virtio-")] {
        let annotations = annotations(&[
            ("VirtletCloudInitUserData", own),
            ("VirtletDiskDriver", driver),
        ])
        .unwrap();
        let mut input = input(&annotations);
        input.devices = &devices;
        input.mounts = &mounts;
        let data = read_user_data(&input);
        let stable = |serial: &str| format!("/dev/disk/by-id/{prefix}{serial}");
        let expected = json!([
            [stable("testpvc"), "/mnt"],
            [stable("testpvc"), "/srv"],
            ["/dev/sdz", "/z"],
            "odd",
            [stable("vol1-part1"), "/var/lib/docker"],
        ]);
        assert_eq!(data["mounts"], expected);
        assert_eq!(
            data["runcmd"],
            json!([["/bin/sh", "/etc/cloud/symlink-devs.sh"]])
        );
    }
}

#[test]
fn the_scripts_find_disks_by_their_serials() {
    // Fails if a shell does not run the script, if a SCSI disk's page is misread, or if a link leads to another disk.
    let devices = [
        device("/dev/testpvc", "testpvc"),
        device("/srv/data", "data-2"),
        device("/dev/absent", "absent"),
    ];
    let scripts = Scripts::new(DiskBus::Scsi, &devices, &[]).unwrap();
    let root = tempfile::tempdir().unwrap();
    let at = |path: &str| root.path().join(path);
    for (disk, serial) in [("sda", "root"), ("sdb", "data-2"), ("sdc", "other")] {
        fs::create_dir_all(at(&format!("sys/block/{disk}/device"))).unwrap();
        let page = [
            &[0, 0x80, 0, u8::try_from(serial.len()).unwrap()],
            serial.as_bytes(),
            b"  \0",
        ]
        .concat();
        fs::write(at(&format!("sys/block/{disk}/device/vpd_pg80")), page).unwrap();
    }
    fs::create_dir_all(at("sys/block/vdb")).unwrap();
    fs::write(at("sys/block/vdb/serial"), "testpvc").unwrap();
    let script = String::from_utf8(
        scripts
            .files
            .iter()
            .find(|file| file.path == guest::LINK_SCRIPT)
            .unwrap()
            .bytes
            .clone(),
    )
    .unwrap();
    let here = root.path().to_str().unwrap();
    let script = script
        .replace("/sys/block", &format!("{here}/sys/block"))
        .replace("'/", &format!("'{here}/"))
        .replace("command -v udevadm", "false");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
    let link = |path: &str| fs::read_link(at(path)).ok();
    assert_eq!(link("dev/testpvc").as_deref(), Some(Path::new("/dev/vdb")));
    assert_eq!(link("srv/data").as_deref(), Some(Path::new("/dev/sdb")));
    assert_eq!(link("dev/absent"), None);
    let rules = String::from_utf8(scripts.files[0].bytes.clone()).unwrap();
    assert!(
        rules.contains("ENV{ID_SERIAL}==\"0QEMU_QEMU_HARDDISK_testpvc\", SYMLINK+=\"testpvc\""),
        "{rules}"
    );
    assert!(!rules.contains("srv"), "{rules}");
}

#[test]
fn a_path_cannot_smuggle_anything_into_a_script() {
    // Fails if a quote, a space or a line break of a pod reaches a shell or udev.
    let paths = [
        "/dev/a\"b",
        "/dev/a b",
        "/dev/$(x)",
        "/dev/a\nb",
        "/dev/../etc/passwd",
        "dev/a",
        "/",
        "/dev/a/",
        "/dev/'x'",
    ];
    for path in paths {
        let refused = Scripts::new(DiskBus::Scsi, &[device(path, "v")], &[]);
        assert!(
            matches!(refused, Err(SeedError::BadDevicePath { .. })),
            "{path:?}"
        );
    }
    let mount = |path: &str| DiskMount {
        serial: Serial::of("v"),
        partition: FlexPartition::Whole,
        path: path.to_owned(),
    };
    assert!(Scripts::new(DiskBus::Scsi, &[], &[mount("/a\nb")]).is_err());
    let quoted = Scripts::new(DiskBus::Scsi, &[], &[mount("/it's")]).unwrap();
    assert!(quoted.inline.contains("'/it'\\''s'"));
}

#[test]
fn hostile_keys_are_refused() {
    // Fails if a key of a ConfigMap can name a file outside its mount.
    let long = "x".repeat(256);
    let keys = [
        "../shadow",
        "/etc/shadow",
        "a/../../b",
        "..",
        ".",
        "",
        "a//b",
        "a\0b",
        "a\nb",
        "..data",
        &long,
    ];
    for key in keys {
        let volumes = [
            volume("/etc/foobar", key, 0o644, ""),
            volume("/etc/other", "b", 0o644, ""),
        ];
        let mut volumes = volumes.to_vec();
        volumes[0].files.push(VolumeFile {
            key: "fine".to_owned(),
            mode: 0o644,
            bytes: Vec::new(),
        });
        let error = files::guest_files(&volumes).err().unwrap();
        assert!(
            matches!(error, SeedError::BadKey { .. }),
            "{key:?}: {error}"
        );
    }
    for path in ["etc", "/etc/../x", "/a\0", ""] {
        let error = files::guest_files(&[volume(path, "k", 0o644, "")])
            .err()
            .unwrap();
        assert!(
            matches!(error, SeedError::BadPath { .. }),
            "{path:?}: {error}"
        );
    }
    let none = annotations(&[]).unwrap();
    let twice = [
        volume("/etc/a", "b/c", 0o644, ""),
        volume("/etc/a/b", "c", 0o644, ""),
    ];
    let mut input = input(&none);
    input.volumes = &twice;
    assert!(matches!(Told::new(&input), Err(SeedError::SamePath { .. })));
}

/// A volume as the kubelet makes it.
fn kubelet_volume(directory: &Path) {
    let data = directory.join("..2026_11_18");
    fs::create_dir_all(data.join("sub")).unwrap();
    fs::write(data.join("key"), "one").unwrap();
    fs::set_permissions(data.join("key"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::write(data.join("sub/deep"), "two").unwrap();
    symlink("..2026_11_18", directory.join("..data")).unwrap();
    symlink("..data/key", directory.join("key")).unwrap();
    symlink("..data/sub", directory.join("sub")).unwrap();
}

#[test]
fn a_volume_of_the_kubelet_gives_each_key_once_with_its_mode() {
    // Fails (Virtlet's defect) if a key is written three times, loses its mode, or if a link leads out of the volume; or if
    // a log shows what is in it.
    let directory = tempfile::tempdir().unwrap();
    kubelet_volume(directory.path());
    let found = FileVolume::read(directory.path(), "/etc/foobar").unwrap();
    assert!(!format!("{found:?}").contains("111, 110, 101"), "{found:?}");
    let seen: Vec<_> = found
        .files
        .iter()
        .map(|file| (file.key.as_str(), file.mode, file.bytes.as_slice()))
        .collect();
    assert_eq!(
        seen,
        [
            ("key", 0o640, b"one".as_slice()),
            ("sub/deep", 0o644, b"two")
        ]
    );
    let single = FileVolume::read(&directory.path().join("key"), "/etc/one").unwrap();
    assert_eq!(files::guest_files(&[single]).unwrap()[0].path, "/etc/one");
    symlink("/etc/passwd", directory.path().join("leak")).unwrap();
    let refused = FileVolume::read(directory.path(), "/etc/foobar").unwrap_err();
    assert!(matches!(refused, SeedError::LeadsOut { .. }), "{refused}");
    assert!(FileVolume::read(&directory.path().join("nothing"), "/x").is_err());
}

#[test]
fn a_volume_that_is_too_large_for_cloud_init_is_refused() {
    // Fails if a sparse terabyte or very many keys are read into memory.
    let directory = tempfile::tempdir().unwrap();
    let file = fs::File::create(directory.path().join("huge")).unwrap();
    file.set_len(1 << 40).unwrap();
    let refused = FileVolume::read(directory.path(), "/x").unwrap_err();
    assert_eq!(refused, SeedError::TooManyFiles);
}

#[test]
fn files_of_a_data_source_land_where_they_say() {
    // Fails if the default encoding is not base64, or a file without a path is left out in silence.
    let data = object(&[
        ("k", "aGk=\n"),
        ("k_path", "/opt/k"),
        ("p", "plain"),
        ("p_path", "/opt/p"),
        ("p_encoding", "plain"),
    ]);
    let found = files::injected(&data, "Secret files").unwrap();
    let seen: Vec<_> = found
        .iter()
        .map(|file| (file.path.as_str(), file.bytes.as_slice()))
        .collect();
    assert_eq!(seen, [("/opt/k", b"hi".as_slice()), ("/opt/p", b"plain")]);
    let bad = [
        object(&[("k", "aGk=")]),
        object(&[("k", "%"), ("k_path", "/a")]),
        object(&[("k", ""), ("k_path", "/a/../b")]),
        object(&[("k", ""), ("k_path", "/a"), ("k_encoding", "hex")]),
    ];
    for data in bad {
        assert!(files::injected(&data, "Secret files").is_err(), "{data:?}");
    }
}

#[test]
fn meta_data_names_the_pod_and_its_keys() {
    // Fails if the pod cannot override a field, if the order of keys changes, or if ConfigDrive lacks its own fields.
    let source = object(&[("authorized_keys", "ssh-rsa FROM source\n")]);
    let pairs = [
        ("VirtletSSHKeySource", "secret/s"),
        ("VirtletSSHKeys", "ssh-rsa OWN me"),
        ("VirtletCloudInitMetaData", "instance-id: foobar"),
    ];
    let nocloud = annotations(&pairs).unwrap();
    let mut input = input(&nocloud);
    input.ssh_key_source = Some(&source);
    let read = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    let found = read(&files(&input)["meta-data"]);
    let keys = json!(["ssh-rsa FROM source", "ssh-rsa OWN me"]);
    assert_eq!(
        found,
        json!({"instance-id": "foobar", "local-hostname": "ubuntu-vm", "public-keys": keys})
    );
    let drive = annotations(
        &[
            &pairs[..],
            &[
                ("VirtletCloudInitImageType", "configdrive"),
                ("VirtletCloudInitUserDataOverwrite", "true"),
            ],
        ]
        .concat(),
    )
    .unwrap();
    input.annotations = &drive;
    let found = read(&files(&input)["openstack/latest/meta_data.json"]);
    assert_eq!(
        (&found["uuid"], &found["hostname"]),
        (&json!("foobar"), &json!("ubuntu-vm"))
    );
    assert_eq!(found["public_keys"], json!({"key-0": "ssh-rsa OWN me"}));
}

#[test]
fn addresses_are_told_unless_the_root_is_kept_or_dhcp_is_asked_for() {
    // Fails if a kept root gets an address that belongs to another pod, or a gateway goes to the wrong family.
    let network = GuestNetwork {
        interfaces: vec![GuestInterface {
            name: "eth0".to_owned(),
            mac: "42:a4:a6:22:80:2e".to_owned(),
            mtu: Some(1450),
            addresses: vec![
                ("10.1.90.5".parse().unwrap(), 24),
                ("fd00::5".parse().unwrap(), 64),
            ],
            gateway: Some("10.1.90.1".parse().unwrap()),
        }],
        nameservers: vec!["10.0.0.10".parse().unwrap()],
        search: vec!["svc.cluster.local".to_owned()],
    };
    let none = annotations(&[]).unwrap();
    let mut input = input(&none);
    input.network = Some(&network);
    let text = files(&input)["network-config"].clone();
    let subnets = json!([{"type": "static", "address": "10.1.90.5/24", "gateway": "10.1.90.1"}, {"type": "static", "address": "fd00::5/64"}]);
    let expected = json!({"version": 1, "config": [
        {"type": "physical", "name": "eth0", "mac_address": "42:a4:a6:22:80:2e", "mtu": 1450, "subnets": subnets},
        {"type": "nameserver", "address": ["10.0.0.10"], "search": ["svc.cluster.local"]},
    ]});
    assert_eq!(yaml::read(&text, "the test").unwrap(), expected);
    let drive = network.to_configdrive();
    assert_eq!(drive["networks"][0]["netmask"], "255.255.255.0");
    assert_eq!(drive["networks"][1]["netmask"], "ffff:ffff:ffff:ffff::");
    assert_eq!(drive["networks"][1].get("routes"), None);
    input.persistent_root = true;
    assert!(!files(&input).contains_key("network-config"));
    let dhcp = annotations(&[("VirtletForceDHCPNetworkConfig", "true")]).unwrap();
    input.persistent_root = false;
    input.annotations = &dhcp;
    assert!(!files(&input).contains_key("network-config"));
}

#[test]
fn variables_are_lines_and_nothing_else() {
    // Fails if a value can add a variable of its own.
    let none = annotations(&[]).unwrap();
    let mut input = input(&none);
    let fine = [("A".to_owned(), "b = c".to_owned())];
    input.environment = &fine;
    let data = read_user_data(&input);
    assert_eq!(
        data["write_files"][0]["content"],
        STANDARD.encode("A=b = c\n")
    );
    for (name, value) in [("A", "1\nB=2"), ("A=B", "1"), ("", "1"), ("A\n", "1")] {
        let bad = [(name.to_owned(), value.to_owned())];
        let input = SeedInput {
            environment: &bad,
            ..input.clone()
        };
        assert!(
            matches!(Told::new(&input), Err(SeedError::BadVariable { .. })),
            "{name:?} {value:?}"
        );
    }
}

proptest! {
    // Fails if any text in an annotation makes the parser panic, or a seed from it cannot be built.
    #[test]
    fn any_annotation_is_read_or_refused(name in prop::sample::select(vec![
        "VirtletCloudInitUserData", "VirtletCloudInitMetaData", "VirtletSSHKeys", "VirtletRootVolumeSize",
        "VirtletCloudInitUserDataScript", "VirtletSSHKeySource", "VirtletSystemUUID", "VirtletVCPUCount",
    ]), value in any::<String>()) {
        if let Ok(read) = annotations(&[(name, &value)]) {
            let input = input(&read);
            if input.annotations.ssh_key_source.is_none() {
                prop_assert!(Seed::build(&input).is_ok());
            }
        }
    }
}
