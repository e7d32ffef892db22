//! `iscsi-test-cu`, libiscsi's conformance suite: what it says, and what may be skipped.
//!
//! Its framework counts a skipped test as passed. Here skips are counted apart, and each must be in the
//! list of what we do not have, which `docs/iscsi.md` gives with reasons.
#![allow(dead_code, reason = "several tests share it, and each uses a part")]

use std::collections::BTreeMap;
use std::process::{Command, Output};

/// Suites, or single tests, that are skipped because we do not have the feature.
pub const NOT_SUPPORTED: &[&str] = &[
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
pub const SUITE_SKIPS: &[&str] = &[
    // It takes the refusal that it asks for as "not implemented".
    "ReportSupportedOpcodes.OneCommand",
    // Wants a volume that may not be written to: it has a run of its own below.
    "ReadOnly.ReadOnlySBC",
];

/// Skipped where a physical block is a logical block; they have a run of their own below.
pub const PHYSICAL_BLOCKS: &[&str] = &[
    "CompareAndWrite.InvalidDataOutSize",
    "WriteSame10.InvalidDataOutSize",
    "WriteSame10.UnmapUnaligned",
    "WriteSame16.InvalidDataOutSize",
    "WriteSame16.UnmapUnaligned",
];

/// Where physical blocks are larger, the suite asks for the status of one block and expects an answer that begins with
/// another one. The standard has the answer begin with the block that was asked for.
pub const WANTS_ANOTHER_BLOCK: &[&str] = &["GetLBAStatus.UnmapSingle"];

/// The suite sends 512 bytes for one block whatever the block size, and expects them to be written.
pub const WANTS_512_BYTES: &[&str] = &[
    "ProutReserve.AccessEA",
    "ProutReserve.AccessEAAR",
    "ProutReserve.AccessEARO",
    "ProutReserve.AccessWE",
    "ProutReserve.AccessWEAR",
    "ProutReserve.AccessWERO",
];

#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// The verdicts of a run in the suite's verbose form.
pub fn verdicts(output: &str) -> BTreeMap<String, Verdict> {
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

pub fn listed(name: &str, list: &[&str]) -> bool {
    list.iter().any(|each| {
        *each == name
            || name
                .split_once('.')
                .is_some_and(|(suite, _)| suite == *each)
    })
}

pub fn check_skips(verdicts: &BTreeMap<String, Verdict>, expected: &[&[&str]]) {
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

/// The command that runs a part of the suite, with two paths to the same unit.
pub fn command(part: &str, url: &str) -> Command {
    let mut command = Command::new("iscsi-test-cu");
    command.args(["--dataloss", "--allow-sanitize", "--verbose", "--test"]);
    command.args([part, url, url]);
    command
}

/// The verdicts of a run. Exactly the tests of `broken` may fail.
pub fn judge(output: &Output, broken: &[&str]) -> BTreeMap<String, Verdict> {
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
    verdicts
}
