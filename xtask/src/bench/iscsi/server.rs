//! A running target: a process with an address, and what it costs.

use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use anyhow::Context;

use super::copies::Copies;
use super::{Programs, Work};

/// The kernel counts processor time in these, whatever its own clock is.
const TICKS_A_SECOND: f64 = 100.0;

/// What a target is to the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// What is measured.
    Ours,
    /// What it is measured against.
    Peer,
    /// What could be reached at most: no data is stored or fetched.
    Limit,
    /// Ours, with three copies that have no sums of their blocks.
    Unsummed,
    /// Ours, with three copies.
    Copies,
    /// Somebody's addition.
    Extra,
}

/// What keeps a target alive, and ends it when dropped.
pub enum Life {
    /// A process of its own.
    Process(Child),
    /// The service, with a volume of several copies.
    Copies(Box<Copies>),
}

impl Drop for Life {
    fn drop(&mut self) {
        if let Life::Process(process) = self {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A target that runs. It ends with this.
pub struct Server {
    pub name: String,
    pub role: Role,
    pub address: String,
    pub target: String,
    pub lun: String,
    /// The user and the secret that it wants to be proven.
    pub proof: Option<(String, String)>,
    life: Life,
    /// What tells one of our own to grow, and by its end to stop.
    input: Option<ChildStdin>,
}

/// What one load on one target has shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    pub a_second: f64,
    pub p50: Duration,
    pub p99: Duration,
    pub p999: Duration,
    pub longest: Duration,
    /// Processor time of the target for each operation.
    pub cpu: Duration,
    /// When the load had been answered the new size, since 1970.
    pub grown: Option<Duration>,
}

impl Server {
    /// A target that was started by other means.
    pub fn of(
        name: &str,
        role: Role,
        life: Life,
        address: String,
        target: &str,
        lun: u32,
    ) -> Server {
        Server {
            name: name.to_owned(),
            role,
            address,
            target: target.to_owned(),
            lun: lun.to_string(),
            proof: None,
            life,
            input: None,
        }
    }

    /// Starts a target that prints its URL and serves until its standard input ends.
    pub fn speaking(name: &str, role: Role, command: &mut Command) -> anyhow::Result<Server> {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{name} cannot be started"))?;
        let input = process.stdin.take();
        let output = process.stdout.take().context("no standard output")?;
        let mut url = String::new();
        let read = std::io::BufReader::new(output).read_line(&mut url);
        let parts = url.trim().strip_prefix("iscsi://").and_then(|rest| {
            let (address, rest) = rest.split_once('/')?;
            let (target, lun) = rest.rsplit_once('/')?;
            Some([address, target, lun].map(str::to_owned))
        });
        let mut server = Server {
            name: name.to_owned(),
            role,
            address: String::new(),
            target: String::new(),
            lun: String::new(),
            proof: None,
            life: Life::Process(process),
            input,
        };
        read.with_context(|| format!("{name} said nothing"))?;
        let [address, target, lun] =
            parts.with_context(|| format!("{name} printed no URL but {url:?}"))?;
        (server.address, server.target, server.lun) = (address, target, lun);
        Ok(server)
    }

    /// Lets a load work on it, and answers what was seen.
    pub fn measure(&self, programs: &Programs, work: Work, seconds: f64) -> anyhow::Result<Sample> {
        let before = self.cpu()?;
        let output = self
            .load(&programs.load, work, seconds)
            .output()
            .context("the load cannot be run")?;
        let after = self.cpu()?;
        anyhow::ensure!(
            output.status.success(),
            "the load failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let mut sample = parse(&String::from_utf8_lossy(&output.stdout))?;
        let operations = sample.a_second * seconds;
        sample.cpu = after.saturating_sub(before).div_f64(operations.max(1.0));
        Ok(sample)
    }

    /// The load, not yet started.
    pub fn load(&self, program: &Path, work: Work, seconds: f64) -> Command {
        let mut command = Command::new(program);
        command
            .args([&self.address, &self.target, &self.lun])
            .arg(if work.write { "write" } else { "read" })
            .arg(if work.random { "random" } else { "sequential" })
            .args([
                work.block.to_string(),
                work.depth.to_string(),
                seconds.to_string(),
            ]);
        if let Some((user, secret)) = &self.proof {
            command.env("ISCSI_USER", user).env("ISCSI_SECRET", secret);
        }
        command
    }

    /// Tells one of our own to grow.
    pub fn grow(&mut self, mib: u64) -> anyhow::Result<()> {
        if let Life::Copies(copies) = &self.life {
            return copies.grow(mib);
        }
        let input = self
            .input
            .as_mut()
            .context("a target that cannot be told")?;
        writeln!(input, "{mib}").context("the target cannot be told to grow")
    }

    fn pids(&self) -> anyhow::Result<Vec<u32>> {
        match &self.life {
            Life::Process(process) => Ok(vec![process.id()]),
            Life::Copies(copies) => copies.pids(),
        }
    }

    /// The processor time that all of its processes have used.
    fn cpu(&self) -> anyhow::Result<Duration> {
        let mut ticks = 0.0;
        for pid in self.pids()? {
            let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .with_context(|| format!("{} has ended", self.name))?;
            // The name before the last bracket may hold anything.
            let fields = text.rsplit(')').next().unwrap_or_default();
            ticks += fields
                .split_whitespace()
                .skip(11)
                .take(2)
                .filter_map(|word| word.parse::<f64>().ok())
                .sum::<f64>();
        }
        Ok(Duration::from_secs_f64(ticks / TICKS_A_SECOND))
    }

    /// The most memory that each of its processes has had, in MiB: of the target first, then of its copies.
    pub fn memory_mib(&self) -> Option<Vec<u64>> {
        let most = |pid: u32| -> Option<u64> {
            let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
            let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
            Some(kib >> 10)
        };
        self.pids().ok()?.into_iter().map(most).collect()
    }
}

/// Takes apart what the load printed.
pub fn parse(text: &str) -> anyhow::Result<Sample> {
    let number = |name: &str| -> Option<u64> {
        let mut words = text.split_whitespace();
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
    };
    let time = |name: &str| number(name).map(Duration::from_nanos);
    let (operations, took) = number("operations")
        .zip(time("nanoseconds"))
        .context("the load printed no result")?;
    let operations = f64::from(u32::try_from(operations).context("more operations than can be")?);
    Ok(Sample {
        a_second: operations / took.as_secs_f64(),
        p50: time("p50_ns").unwrap_or_default(),
        p99: time("p99_ns").unwrap_or_default(),
        p999: time("p999_ns").unwrap_or_default(),
        longest: time("longest_ns").unwrap_or_default(),
        cpu: Duration::ZERO,
        grown: time("grown_ns"),
    })
}
