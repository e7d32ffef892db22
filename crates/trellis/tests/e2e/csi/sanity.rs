//! csi-sanity against a real service, again and again against one process.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::caller::{Caller, text};
use super::leftovers;

/// What volumes of one round are.
struct Round {
    /// `mount` or `block`.
    access: &'static str,
    filesystem: &'static str,
}

const ROUNDS: [Round; 3] = [
    Round {
        access: "mount",
        filesystem: "xfs",
    },
    Round {
        access: "block",
        filesystem: "xfs",
    },
    // It grows only while it is mounted by nobody if the capability is missing; csi-sanity grows it before it is staged.
    Round {
        access: "mount",
        filesystem: "ext4",
    },
];

// Fails if csi-sanity finds anything in any of its runs, or if a run leaves an object, a mount, a device or a path behind.
#[test]
#[ignore = "needs csi-sanity, a Go program: cargo xtask csi-sanity"]
fn csi_sanity_finds_nothing_and_nothing_is_left() {
    let program = std::env::var_os("TRELLIS_CSI_SANITY").expect("cargo xtask csi-sanity");
    let runs: u32 = std::env::var("TRELLIS_CSI_SANITY_RUNS")
        .unwrap_or_default()
        .parse()
        .unwrap_or(1);
    let caller = Caller::start(&[]);
    for round in &ROUNDS {
        for run in 1..=runs {
            let said = sanity(Path::new(&program), &caller, round);
            let summary = said.lines().filter(|line| line.contains(" Passed "));
            let summary: Vec<&str> = summary.collect();
            println!(
                "{} {} run {run}: {}",
                round.access,
                round.filesystem,
                summary.join(" ")
            );
            assert_eq!(leftovers(&caller), Vec::<String>::new());
            for path in ["sanity-target", "sanity-staging"] {
                assert!(!caller.service.path(path).exists(), "{path} was left");
            }
        }
    }
}

fn sanity(program: &Path, caller: &Caller, round: &Round) -> String {
    let file = |name: &str, content: String| -> PathBuf {
        let path = caller.service.path(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let parameters = file(
        "parameters.yaml",
        format!("csi.storage.k8s.io/fstype: {}\n", round.filesystem),
    );
    let mutable = file("mutable.yaml", "scrubInterval: \"12h\"\n".to_owned());
    let flag = |name: &str, value: &str| format!("--csi.{name}={value}");
    let output = Command::new(program)
        .arg(flag(
            "endpoint",
            &format!("unix://{}", text(&caller.endpoint())),
        ))
        .arg(flag(
            "mountdir",
            &text(&caller.service.path("sanity-target")),
        ))
        .arg(flag(
            "stagingdir",
            &text(&caller.service.path("sanity-staging")),
        ))
        .arg(flag("testvolumesize", "1073741824"))
        .arg(flag("testvolumeexpandsize", "2147483648"))
        .arg(flag("testvolumeaccesstype", round.access))
        .arg(flag("testvolumeparameters", &text(&parameters)))
        .arg(flag("testvolumemutableparameters", &text(&mutable)))
        .arg("--ginkgo.no-color")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    said
}
