//! libiscsi's conformance suite, `iscsi-test-cu`, against our target.
//!
//! Its framework counts a skipped test as passed. Here skips are counted apart, and each must be in the
//! list of what we do not have, which `docs/iscsi.md` gives with reasons.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use common::{MIB, TARGET};
use tokio::process::Command;
use trellis_iscsi::luns::RamLun;
use trellis_iscsi::{Access, Lun, Server, ServerConfig, Target};

/// Suites, or single tests, that are skipped because we do not have the feature.
const NOT_SUPPORTED: &[&str] = &[
    "ExtendedCopy",
    "PreventAllow",
    "ReadDefectData10",
    "ReadDefectData12",
    "ReceiveCopyResults",
    "Sanitize",
    "StartStopUnit.Simple",
    "WriteAtomic16",
];

/// Skipped by the suite itself whatever a target does, on an ordinary volume.
const SUITE_SKIPS: &[&str] = &[
    // It takes the refusal that it asks for as "not implemented".
    "ReportSupportedOpcodes.OneCommand",
    // Wants a volume that may not be written to: it has a run of its own below.
    "ReadOnly.ReadOnlySBC",
];

/// Skipped where a physical block is a logical block; they have a run of their own below.
const PHYSICAL_BLOCKS: &[&str] = &[
    "CompareAndWrite.InvalidDataOutSize",
    "WriteSame10.InvalidDataOutSize",
    "WriteSame10.UnmapUnaligned",
    "WriteSame16.InvalidDataOutSize",
    "WriteSame16.UnmapUnaligned",
];

/// The suite sends 512 bytes for one block whatever the block size, and expects them to be written.
const WANTS_512_BYTES: &[&str] = &[
    "ProutReserve.AccessEA",
    "ProutReserve.AccessEAAR",
    "ProutReserve.AccessEARO",
    "ProutReserve.AccessWE",
    "ProutReserve.AccessWEAR",
    "ProutReserve.AccessWERO",
];

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// The verdicts of a run in the suite's verbose form.
fn verdicts(output: &str) -> BTreeMap<String, Verdict> {
    let mut verdicts = BTreeMap::new();
    let (mut suite, mut test) = (String::new(), None::<String>);
    let mut said = String::new();
    let mut settle = |test: &mut Option<String>, said: &mut String| {
        if let Some(name) = test.take() {
            let verdict = if said.contains("[SKIPPED]") {
                Verdict::Skipped
            } else if said
                .lines()
                .any(|line| line.trim_start().starts_with("passed"))
            {
                Verdict::Passed
            } else {
                Verdict::Failed
            };
            verdicts.insert(name, verdict);
        }
        said.clear();
    };
    for line in output.lines() {
        if let Some(name) = line.strip_prefix("Suite: ") {
            settle(&mut test, &mut said);
            suite = name.trim().to_owned();
        } else if let Some((name, rest)) = line
            .strip_prefix("  Test: ")
            .and_then(|line| line.split_once(" ..."))
        {
            settle(&mut test, &mut said);
            test = Some(format!("{suite}.{name}"));
            said.push_str(rest);
            said.push('\n');
        } else if line.starts_with("Run Summary") {
            settle(&mut test, &mut said);
        } else {
            said.push_str(line);
            said.push('\n');
        }
    }
    verdicts
}

/// Run a part of the suite, with two paths, against a volume; exactly the tests of `broken` may fail.
async fn run(part: &str, lun: Arc<dyn Lun>, broken: &[&str]) -> BTreeMap<String, Verdict> {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), ServerConfig::default()).unwrap();
    let target = Target::new(TARGET, Access::default()).unwrap();
    target.add_unit(0, lun).unwrap();
    server.portal().add_target(target).unwrap();
    let url = format!("iscsi://{}/{TARGET}/0", server.local_addr());
    let run = Command::new("iscsi-test-cu")
        .args([
            "--dataloss",
            "--allow-sanitize",
            "--verbose",
            "--test",
            part,
            &url,
            &url,
        ])
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(170), run)
        .await
        .expect("the suite ends")
        .expect("the suite is installed");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let verdicts = verdicts(&text);
    let failed: Vec<_> = verdicts
        .iter()
        .filter(|(_, verdict)| **verdict == Verdict::Failed)
        .map(|(name, _)| name.as_str())
        .collect();
    assert!(
        failed == broken && output.status.success() == broken.is_empty(),
        "{failed:?}\n{text}"
    );
    server.stop().await;
    verdicts
}

fn listed(name: &str, list: &[&str]) -> bool {
    list.iter().any(|each| {
        *each == name
            || name
                .split_once('.')
                .is_some_and(|(suite, _)| suite == *each)
    })
}

fn check_skips(verdicts: &BTreeMap<String, Verdict>, expected: &[&[&str]]) {
    for (name, verdict) in verdicts {
        let expected = expected.iter().any(|list| listed(name, list));
        assert_eq!(
            *verdict == Verdict::Skipped,
            expected,
            "{name}: {verdict:?}"
        );
    }
    let count = |wanted: Verdict| {
        verdicts
            .values()
            .filter(|verdict| **verdict == wanted)
            .count()
    };
    println!(
        "{} tests: {} passed, {} failed as known, {} skipped",
        verdicts.len(),
        count(Verdict::Passed),
        count(Verdict::Failed),
        count(Verdict::Skipped)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_whole_suite_passes_with_512_byte_blocks() {
    // Fails if a test fails, or one is skipped that is not in the lists, or one is listed that is not skipped.
    let lun = RamLun::new("conformance-512", 64 * MIB, 512).with_physical_block_size(512);
    let verdicts = run("ALL", Arc::new(lun), &[]).await;
    assert_eq!(verdicts.len(), 230);
    check_skips(&verdicts, &[NOT_SUPPORTED, SUITE_SKIPS, PHYSICAL_BLOCKS]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_whole_suite_passes_with_4096_byte_blocks() {
    // Fails as the run above does, for volumes that speak in larger blocks.
    let lun = RamLun::new("conformance-4096", 128 * MIB, 4096);
    let verdicts = run("ALL", Arc::new(lun), WANTS_512_BYTES).await;
    assert_eq!(verdicts.len(), 230);
    check_skips(&verdicts, &[NOT_SUPPORTED, SUITE_SKIPS, PHYSICAL_BLOCKS]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_physical_blocks_pass_what_only_they_can_show() {
    // Fails if a test of the list is skipped again, or fails, on 512-byte blocks in 4096-byte physical ones.
    for suite in ["CompareAndWrite", "WriteSame10", "WriteSame16"] {
        let lun = Arc::new(RamLun::new("conformance-512e", 64 * MIB, 512));
        let verdicts = run(&format!("ALL.{suite}"), lun, &[]).await;
        check_skips(&verdicts, &[]);
        for name in PHYSICAL_BLOCKS
            .iter()
            .filter(|name| name.starts_with(&format!("{suite}.")))
        {
            assert_eq!(verdicts.get(*name), Some(&Verdict::Passed), "{name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_only_volume_passes_its_test() {
    // Fails if any writing command is not refused with DATA PROTECT on a read-only volume.
    let lun = Arc::new(RamLun::new("conformance-ro", 64 * MIB, 512));
    lun.set_read_only(true);
    let verdicts = run("ALL.ReadOnly", lun, &[]).await;
    assert_eq!(verdicts.get("ReadOnly.ReadOnlySBC"), Some(&Verdict::Passed));
}

#[test]
fn every_skip_has_its_reason_in_the_documentation() {
    // Fails if the lists above and the list that users read differ.
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/iscsi.md"))
        .unwrap();
    for name in [NOT_SUPPORTED, SUITE_SKIPS, PHYSICAL_BLOCKS, WANTS_512_BYTES]
        .into_iter()
        .flatten()
    {
        assert!(
            page.contains(&format!("`{name}`")),
            "{name} is not in docs/iscsi.md"
        );
    }
}
