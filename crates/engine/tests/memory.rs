//! What a large volume costs its coordinator. A test binary of its own, so that nobody else's memory
//! is measured.
#![allow(clippy::unwrap_used)]

#[path = "common/puppet.rs"]
mod puppet;

use puppet::Stage;

/// Memory of this process, in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn an_idle_volume_of_a_tebibyte_takes_less_than_40_mib() {
    // Fails if something is kept for every region beside its stamp.
    let before = resident();
    let mut stage = Stage::serving(3, 1 << 40);
    stage.write(1, 0);
    stage.apply_all(0);
    stage.apply_all(1);
    stage.wait(1_000);
    let after = resident();
    println!("a volume of 1 TiB with 3 replicas: {} KiB", after - before);
    assert!(after - before < 40 << 10, "{} KiB", after - before);
}
