//! Initiators that use a volume of three copies by iSCSI, with its own secret, as anybody would.

use std::process::Command;

use serde_json::Value;

use super::{assert_equal_copies, run_dir, service, target};
use crate::harness::{Service, claim};

#[path = "../../../../iscsi/tests/suite/mod.rs"]
mod suite;

/// A unit, as initiators find it.
struct Unit {
    url: String,
    secret: String,
}

/// That of a new block claim of three copies.
fn unit(service: &Service) -> Unit {
    let block = claim("data", "three", "512Mi").replace("spec:\n", "spec:\n  volumeMode: Block\n");
    service.apply(&block);
    service.wait_bound("data");
    let status = target(service)["status"].clone();
    let (iqn, portal) = (
        status["iqn"].as_str().unwrap(),
        status["portal"].as_str().unwrap(),
    );
    let volume = run_dir(service);
    let secret = std::fs::read_to_string(volume.join("secret")).unwrap();
    let user = volume.file_name().unwrap().to_str().unwrap();
    let url = format!("iscsi://{user}%{secret}@{portal}/{iqn}/0");
    Unit { url, secret }
}

/// Runs one of QEMU's programs.
fn qemu(program: &str, arguments: &[&str]) -> std::process::Output {
    let output = Command::new(program).args(arguments).output();
    output.expect("QEMU is installed by `make setup`")
}

// Fails if an initiator cannot use the volume that pods use, gets in without its secret, or does not see that it grew.
#[test]
fn qemu_uses_the_copies_by_iscsi() {
    let service = service();
    let Unit { url, secret } = unit(&service);
    let write = [
        "-f",
        "raw",
        "-c",
        "write -P 0x5a 4M 1M",
        "-c",
        "flush",
        &url,
    ];
    let output = qemu("qemu-io", &write);
    assert!(output.status.success(), "{output:?}");

    let size = |url: &str| {
        let output = qemu("qemu-img", &["info", "--output=json", "-f", "raw", url]);
        let info: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        info["virtual-size"].as_u64().map(|bytes| bytes >> 20)
    };
    assert_eq!(size(&url), Some(512));
    service.trellis(&["grow", "data", "640Mi", "--wait"]);
    assert_eq!(size(&url), Some(640));
    let read = [
        "-f",
        "raw",
        "-c",
        "read -P 0x5a 4M 1M",
        "-c",
        "read -P 0 600M 1M",
        &url,
    ];
    let output = qemu("qemu-io", &read);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && !said.contains("failed"),
        "{output:?}"
    );

    let stranger = url.replace(&secret, "000000000000000000000000");
    assert_eq!(size(&stranger), None, "nobody gets in without the secret");
    assert_equal_copies(&service);
}

// Fails if the unit that users get does not do what the one in memory does: a test of the whole suite fails whose own
// fault that is not, or one is skipped that is not in the lists of `docs/iscsi.md`, or the copies differ after it.
#[test]
fn the_whole_conformance_suite_passes_on_three_copies() {
    let service = service();
    let Unit { url, .. } = unit(&service);
    let output = suite::command("ALL", &url).output();
    let output = output.expect("the suite is installed by `make setup`");
    let verdicts = suite::judge(&output, suite::WANTS_ANOTHER_BLOCK);
    assert_eq!(verdicts.len(), 230);
    suite::check_skips(&verdicts, &[suite::NOT_SUPPORTED, suite::SUITE_SKIPS]);
    assert_equal_copies(&service);
}

/// The MiB that have data, as QEMU finds them by GET LBA STATUS.
fn data_mib(url: &str) -> Vec<(u64, u64)> {
    let output = qemu("qemu-img", &["map", "--output=json", "-f", "raw", url]);
    assert!(output.status.success(), "{output:?}");
    let map: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let with_data = map.iter().filter(|each| each["data"] == true);
    with_data
        .map(|each| {
            let bytes = |field: &str| each[field].as_u64().unwrap();
            (bytes("start") >> 20, bytes("length") >> 20)
        })
        .collect()
}

// Fails if an initiator that asks which blocks have space is told anything but what the copies have: before and after a
// write, after space was given back, and while a copy is away.
#[test]
fn an_initiator_sees_which_blocks_have_space() {
    let service = service();
    let Unit { url, .. } = unit(&service);
    assert_eq!(data_mib(&url), []);
    let run = |command: &str| {
        let output = qemu(
            "qemu-io",
            &["-f", "raw", "-d", "unmap", "-c", command, &url],
        );
        let said = String::from_utf8_lossy(&output.stdout);
        let is_done = output.status.success() && !said.contains("failed");
        assert!(is_done, "{output:?}");
    };
    run("write -P 0x5a 4M 2M");
    run("write -P 0x5a 200M 1M");
    assert_eq!(data_mib(&url), [(4, 2), (200, 1)]);
    run("discard 5M 1M");
    assert_eq!(data_mib(&url), [(4, 1), (200, 1)]);
    super::signal(&service, "1", rustix::process::Signal::STOP);
    run("write -P 0x5a 300M 1M");
    assert_eq!(data_mib(&url), [(4, 1), (200, 1), (300, 1)]);
    super::signal(&service, "1", rustix::process::Signal::CONT);
}
