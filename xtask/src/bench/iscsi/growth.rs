//! Growth under load: how soon a session knows of it, and how it affects writes.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;

use super::server::{Sample, Server, parse};
use super::{Programs, WORK, copies, targets};

/// 4 KiB random writes at depth 32.
const LOAD: usize = 3;
/// The time around a growth that is looked at.
const WINDOW_SECONDS: f64 = 5.0;
const ROUNDS: u32 = 2;
const STEP_MIB: u64 = 64;

/// Loads our target with one copy and with three for some seconds, with and without a growth in the middle, in turns.
pub fn run(programs: &Programs, directory: &Path, size_mib: u64) -> anyhow::Result<()> {
    let backing_dir = targets::BackingDir::new(directory, size_mib)?;
    let one = targets::ours(programs, &backing_dir)?.context("no target of ours")?;
    let kind = if backing_dir.in_memory {
        "tmpfs"
    } else {
        "disk"
    };
    println!(
        "\ngrowth under load, {kind}: {}, {WINDOW_SECONDS} s around it",
        WORK[LOAD]
    );
    grow(programs, one, "one copy", size_mib)?;
    grow(
        programs,
        copies::start(programs, &backing_dir)?,
        copies::NAME,
        size_mib,
    )
}

fn grow(
    programs: &Programs,
    mut server: Server,
    name: &str,
    mut size_mib: u64,
) -> anyhow::Result<()> {
    for _ in 0..ROUNDS {
        let still = server.measure(programs, WORK[LOAD], WINDOW_SECONDS)?;
        let load = server
            .load(&programs.load, WORK[LOAD], WINDOW_SECONDS)
            .stdout(Stdio::piped())
            .spawn()
            .context("the load cannot be run")?;
        std::thread::sleep(Duration::from_secs_f64(WINDOW_SECONDS / 2.0));
        size_mib += STEP_MIB;
        let asked = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("a clock before 1970")?;
        let told = server.grow(size_mib);
        let output = load
            .wait_with_output()
            .context("the load cannot be waited for")?;
        told?;
        anyhow::ensure!(
            output.status.success(),
            "the load failed when the volume grew"
        );
        let grown = parse(&String::from_utf8_lossy(&output.stdout))?;
        let told = grown
            .grown
            .context("the session was not told of the growth")?;
        println!(
            "  {name}: request -> READ CAPACITY on the loaded session {:.2} ms; writes with the growth: {}; without: {}",
            told.saturating_sub(asked).as_secs_f64() * 1e3,
            words(&grown),
            words(&still)
        );
    }
    Ok(())
}

fn words(sample: &Sample) -> String {
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    format!(
        "{:.0}/s, p99.9 {:.2} ms, longest {:.2} ms",
        sample.a_second,
        millis(sample.p999),
        millis(sample.longest)
    )
}
