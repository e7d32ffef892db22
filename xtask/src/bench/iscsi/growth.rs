//! Growth under load: how soon a session knows, and what writes notice of it.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;

use super::server::{Sample, parse};
use super::{Programs, WORK, targets};

/// 4 KiB random writes at depth 32.
const LOAD: usize = 3;
/// The time around a growth that is looked at.
const WINDOW_SECONDS: f64 = 5.0;
const ROUNDS: u32 = 3;
const STEP_MIB: u64 = 64;

/// Loads our target for some seconds, with and without a growth in the middle, in turns.
pub fn run(programs: &Programs, directory: &Path, size_mib: u64) -> anyhow::Result<()> {
    let place = targets::Place::new(directory, size_mib)?;
    let mut server = targets::ours(programs, &place)?.context("no target of ours")?;
    let kind = if place.in_memory { "tmpfs" } else { "disk" };
    println!(
        "\ngrowth under load, {kind}: {}, {WINDOW_SECONDS} s around it",
        WORK[LOAD]
    );
    let mut size = size_mib;
    for _ in 0..ROUNDS {
        let still = server.measure(programs, WORK[LOAD], WINDOW_SECONDS)?;
        let load = server
            .load(&programs.load, WORK[LOAD], WINDOW_SECONDS)
            .stdout(Stdio::piped())
            .spawn()
            .context("the load cannot be run")?;
        std::thread::sleep(Duration::from_secs_f64(WINDOW_SECONDS / 2.0));
        size += STEP_MIB;
        let asked = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("a clock before 1970")?;
        let input = server
            .input
            .as_mut()
            .context("a target that cannot be told")?;
        writeln!(input, "{size}").context("the target cannot be told to grow")?;
        let output = load
            .wait_with_output()
            .context("the load cannot be waited for")?;
        anyhow::ensure!(
            output.status.success(),
            "the load failed when the volume grew"
        );
        let grown = parse(&String::from_utf8_lossy(&output.stdout))?;
        let told = grown
            .grown
            .context("the session was not told of the growth")?;
        println!(
            "  growth -> READ CAPACITY on the loaded session {:.2} ms; writes with the growth: {}; without: {}",
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
