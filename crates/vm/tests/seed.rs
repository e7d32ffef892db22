//! Seeds as other programs read them.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use trellis_vm::names::Serial;
use trellis_vm::seed::{
    Annotations, BlockDevice, FileVolume, GuestInterface, GuestNetwork, Seed, SeedInput, VolumeFile,
};

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {output:?}"
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn build(kind: &str, secret_bytes: usize) -> Seed {
    let pairs = [
        ("VirtletCloudInitImageType", kind),
        ("VirtletCloudInitUserDataScript", "#!/bin/sh\necho hello\n"),
        ("VirtletSSHKeys", "ssh-rsa AAAA me"),
    ];
    let pairs: BTreeMap<String, String> = pairs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    let annotations = Annotations::parse(&pairs).unwrap();
    let volumes = [FileVolume {
        mount_path: "/etc/baz".to_owned(),
        files: vec![VolumeFile {
            key: "token".to_owned(),
            mode: 0o400,
            bytes: vec![b'x'; secret_bytes],
        }],
    }];
    let devices = [BlockDevice {
        device_path: "/dev/testpvc".to_owned(),
        serial: Serial::of("testpvc"),
    }];
    let network = GuestNetwork {
        interfaces: vec![GuestInterface {
            name: "eth0".to_owned(),
            mac: "42:a4:a6:22:80:2e".to_owned(),
            mtu: None,
            addresses: Vec::new(),
            gateway: None,
        }],
        ..GuestNetwork::default()
    };
    let input = SeedInput {
        pod: "vm",
        namespace: "default",
        annotations: &annotations,
        user_data_source: None,
        ssh_key_source: None,
        files_source: None,
        volumes: &volumes,
        environment: &[],
        devices: &devices,
        mounts: &[],
        network: Some(&network),
        persistent_root: false,
    };
    Seed::build(&input).unwrap()
}

/// The files that a reader shows, by the names that it shows.
fn listed(image: &Path, names: &str) -> Vec<String> {
    let text = run("isoinfo", &["-i", image.to_str().unwrap(), names, "-f"]);
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn other_programs_find_every_file_by_its_name() {
    // Fails if the label, a Rock Ridge or Joliet name, a mode or a byte is not what blkid, isoinfo and xorriso expect.
    let expected: [(&str, &str, &[&str]); 2] = [
        (
            "nocloud",
            "cidata",
            &[
                "/meta-data",
                "/network-config",
                "/user-data",
                "/vendor-data",
            ],
        ),
        (
            "configdrive",
            "config-2",
            &[
                "/openstack",
                "/openstack/latest",
                "/openstack/latest/meta_data.json",
                "/openstack/latest/network_data.json",
                "/openstack/latest/user_data",
                "/openstack/latest/vendor_data.json",
            ],
        ),
    ];
    for (kind, label, paths) in expected {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("seed.iso");
        // More than a sector, and not a whole number of them.
        std::fs::write(&image, build(kind, 5001).image).unwrap();
        let path = image.to_str().unwrap();
        assert_eq!(
            run("blkid", &["-p", "-s", "LABEL", "-o", "value", path]).trim(),
            label
        );
        assert_eq!(
            run("blkid", &["-p", "-s", "TYPE", "-o", "value", path]).trim(),
            "iso9660"
        );
        assert_eq!(listed(&image, "-R"), paths);
        assert_eq!(listed(&image, "-J"), paths);
        let user = paths.iter().find(|path| path.contains("user")).unwrap();
        for names in ["-R", "-J"] {
            let text = run("isoinfo", &["-i", path, names, "-x", user]);
            assert_eq!(text, "#!/bin/sh\necho hello\n", "{names}");
        }
        let out = directory.path().join("out");
        let out = out.to_str().unwrap();
        run(
            "xorriso",
            &[
                "-report_about",
                "WARNING",
                "-abort_on",
                "WARNING",
                "-osirrox",
                "on",
                "-indev",
                path,
                "-extract",
                "/",
                out,
            ],
        );
        let vendor = paths.iter().find(|path| path.contains("vendor")).unwrap();
        let bytes = std::fs::read_to_string(format!("{out}{vendor}")).unwrap();
        let token = "eHh4eHh4".repeat(100);
        assert!(bytes.contains(&token) && bytes.contains("/etc/baz/token"));
        let listing = run("isoinfo", &["-i", path, "-R", "-l"]);
        assert!(listing.contains("-r--r--r--   1    0    0"), "{listing}");
    }
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    // Fails if a time, a random number or the order of a hash map gets into a seed.
    assert_eq!(build("nocloud", 100).image, build("nocloud", 100).image);
    assert_ne!(build("nocloud", 100).image, build("nocloud", 101).image);
}

#[test]
fn python_reads_what_cloud_init_would_read() {
    // Fails if PyYAML, which is what cloud-init uses, reads the generated user data as something else.
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("seed.iso");
    std::fs::write(&image, build("nocloud", 10).image).unwrap();
    let text = run(
        "isoinfo",
        &["-i", image.to_str().unwrap(), "-R", "-x", "/vendor-data"],
    );
    let file = directory.path().join("vendor-data");
    std::fs::write(&file, text).unwrap();
    let program = "import sys, yaml, base64; d = yaml.safe_load(open(sys.argv[1])); f = d['write_files'][0]; print(f['path'], f['permissions'], base64.b64decode(f['content']).decode(), d['runcmd'])";
    let said = run("/usr/bin/python3", &["-c", program, file.to_str().unwrap()]);
    assert_eq!(
        said,
        "/etc/baz/token 0400 xxxxxxxxxx [['/bin/sh', '/etc/cloud/symlink-devs.sh']]\n"
    );
}
