//! One scenario: its program, its output, its time limit.

use std::fs;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use trellis_guest_tests::protocol::{Answer, Ended, How, Order};

use crate::clean::Baseline;
use crate::system::{ENVIRONMENT, SCRATCH_DIR, load};
use crate::tell;

/// How much of the output goes into one message.
const CHUNK_BYTES: usize = 32 << 10;
/// How long the end of the output is waited for when everything that could write to it is dead.
const OUTPUT_LIMIT: Duration = Duration::from_secs(5);

/// Runs the program, sends what it prints, and makes the guest as it was before.
pub fn execute(order: &Order, to_host: &Mutex<fs::File>, baseline: &Baseline) -> Ended {
    let started = Instant::now();
    let dir = Path::new(SCRATCH_DIR).join(&order.name);
    let mut left = Vec::new();
    let how = attempt(order, to_host, baseline, &dir, &mut left)
        .unwrap_or_else(|error| How::NotStarted(error.to_string()));
    let took = started.elapsed();
    let fit = baseline.restore(&mut left);
    let _ = fs::remove_dir_all(&dir);
    Ended {
        how,
        took,
        left,
        fit,
    }
}

fn attempt(
    order: &Order,
    to_host: &Mutex<fs::File>,
    baseline: &Baseline,
    dir: &Path,
    left: &mut Vec<String>,
) -> io::Result<How> {
    for module in &order.modules {
        load(Path::new(module))?;
    }
    fs::create_dir_all(dir)?;
    let (output, input) = io::pipe()?;
    let mut command = Command::new(&order.program);
    command.args(&order.arguments).current_dir(dir);
    command.env_clear().envs(ENVIRONMENT).env("TMPDIR", dir);
    command.envs(order.environment.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(input.try_clone()?);
    command.stderr(input).process_group(0);
    let child = command.spawn()?;
    // The command holds the writing end of the pipe; its end must be the program's.
    drop(command);
    let leader = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let leader = leader.ok_or_else(|| io::Error::other("the program has no process id"))?;
    std::thread::scope(|scope| {
        let (done, is_done) = mpsc::channel();
        scope.spawn(move || {
            forward(output, to_host);
            let _ = done.send(());
        });
        let how = wait(leader, Instant::now() + order.limit);
        // What still runs after a timeout is no fault beside that.
        if how == How::TimedOut {
            let _ = rustix::process::kill_process_group(leader, Signal::KILL);
        } else {
            baseline.name_running(left);
        }
        // Whoever else holds the pipe ends now, and the output with it.
        baseline.kill_all();
        let _ = is_done.recv_timeout(OUTPUT_LIMIT);
        Ok(how)
    })
}

/// Waits for the program, and buries every orphan meanwhile.
fn wait(leader: Pid, deadline: Instant) -> How {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == leader => return how(status),
            Ok(Some(_)) => continue,
            _ => {}
        }
        if Instant::now() >= deadline {
            return How::TimedOut;
        }
        std::thread::sleep(crate::POLL);
    }
}

fn how(status: WaitStatus) -> How {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => How::Exited(code),
        (None, signal) => How::Signalled(signal.unwrap_or(0)),
    }
}

fn forward(mut output: io::PipeReader, to_host: &Mutex<fs::File>) {
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Ok(count @ 1..) = output.read(&mut chunk) {
        let text = String::from_utf8_lossy(&chunk[..count]).into_owned();
        if tell(to_host, &Answer::Said(text)).is_err() {
            return;
        }
    }
}
