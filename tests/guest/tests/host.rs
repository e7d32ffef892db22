//! The scenarios that need no guest: those of the filesystems that this machine's kernel can grow.
#![allow(clippy::unwrap_used, missing_docs)]

use std::process::Command;

/// Filesystems that grow online without a capability beyond mounting. The guest does all of them.
const KINDS: [&str; 2] = ["xfs", "btrfs"];

fn scenario(what: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_guest-scenario"))
        .arg(what)
        .args(KINDS)
        .output()
        .unwrap();
    let (said, complained) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    print!("{said}");
    assert!(output.status.success(), "{}\n{complained}", output.status);
}

#[test]
fn every_use_grows_in_every_way() {
    // Fails if one way of growing a volume in one kind of use does not end at exactly the size, is not held
    // where it should be, loses a byte, or leaves a damaged filesystem.
    scenario("matrix-all");
}

#[test]
fn growth_under_load_disturbs_no_write() {
    // Fails if a growth makes a write or a read fail that goes on meanwhile, or changes what was written.
    scenario("load");
}
