//! libiscsi's conformance suite, `iscsi-test-cu`, against our target and a volume in memory. The binary's own tests run
//! it against a volume of three copies.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
mod suite;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use common::{MIB, TARGET};
use suite::{
    NOT_SUPPORTED, PHYSICAL_BLOCKS, SUITE_SKIPS, Verdict, WANTS_512_BYTES, WANTS_ANOTHER_BLOCK,
    check_skips, command, judge,
};
use trellis_iscsi::{Access, Lun, Server, ServerConfig, Target};
use trellis_test_luns::RamLun;

/// Runs a part of the suite against a volume; exactly the tests of `broken` may fail.
async fn run(part: &str, lun: Arc<dyn Lun>, broken: &[&str]) -> BTreeMap<String, Verdict> {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), ServerConfig::default()).unwrap();
    let target = Target::new(TARGET, Access::default()).unwrap();
    target.add_unit(0, lun).unwrap();
    server.portal().add_target(target).unwrap();
    let url = format!("iscsi://{}/{TARGET}/0", server.local_addr());
    let run = tokio::process::Command::from(command(part, &url))
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(170), run)
        .await
        .expect("the suite ends")
        .expect("the suite is installed");
    let verdicts = judge(&output, broken);
    server.stop().await;
    verdicts
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
    let lists = [
        NOT_SUPPORTED,
        SUITE_SKIPS,
        PHYSICAL_BLOCKS,
        WANTS_512_BYTES,
        WANTS_ANOTHER_BLOCK,
    ];
    for name in lists.into_iter().flatten() {
        assert!(
            page.contains(&format!("`{name}`")),
            "{name} is not in docs/iscsi.md"
        );
    }
}
