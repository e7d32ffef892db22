//! A service under measurement, and the ways to look at it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tempfile::TempDir;

/// How long the service may take to come to rest before it is called idle.
pub const SETTLES: Duration = Duration::from_secs(5);

/// A service in a temporary directory below the one that is measured.
pub struct Service {
    /// Its directory; the service's own is `data` in it.
    pub dir: TempDir,
    child: Child,
}

/// What the store says it has written.
#[derive(Clone, Debug)]
pub struct Written {
    /// Flushes.
    pub flushes: u64,
    /// Objects.
    pub writes: u64,
    /// Time in flushes.
    pub in_flushes: Duration,
    /// The last flushes, oldest first.
    pub recent: Vec<Flush>,
}

/// One flush.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
pub struct Flush {
    /// How many there were before it.
    pub number: u64,
    /// The last revision that it made durable.
    pub revision: u64,
}

impl Service {
    /// Starts it and waits until it is up.
    pub fn start(binary: &Path, below: &Path) -> anyhow::Result<Service> {
        Service::start_told(binary, below, &[])
    }

    /// Starts it with additional arguments and waits until it is up.
    pub fn start_told(binary: &Path, below: &Path, arguments: &[&str]) -> anyhow::Result<Service> {
        let dir = tempfile::Builder::new()
            .prefix("trellis-bench-")
            .tempdir_in(below)?;
        let mut child = Command::new(binary)
            .args(["up", "--node", "bench", "--data"])
            .arg(dir.path().join("data"))
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .context("the service cannot be started")?;
        let stdout = child.stdout.take().context("the service has no output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let service = Service { dir, child };
        anyhow::ensure!(
            line.contains("trellis is up"),
            "the service did not come up: {line}"
        );
        Ok(service)
    }

    /// A client over TLS, as any other program would have.
    pub async fn client(&self) -> anyhow::Result<Client> {
        let file = Kubeconfig::read_from(self.dir.path().join("data/kubeconfig"))?;
        let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        Ok(Client::try_from(config)?)
    }

    /// Runs a verb that must succeed.
    pub fn verb(&self, binary: &Path, arguments: &[&str]) -> anyhow::Result<()> {
        let output = Command::new(binary)
            .args(arguments)
            .arg("--data")
            .arg(self.dir.path().join("data"))
            .env_remove("KUBECONFIG")
            .output()?;
        anyhow::ensure!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    /// Its metrics, if it was told to serve them.
    pub fn metrics(&self) -> anyhow::Result<String> {
        let address = std::fs::read_to_string(self.dir.path().join("data/metrics"))?;
        let mut stream = TcpStream::connect(address.trim_end())?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// A path in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Processor time that the process has used.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let fields: Vec<&str> = text
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        let ticks = |index: usize| {
            fields
                .get(index)
                .and_then(|field| field.parse::<u64>().ok())
                .unwrap_or(0)
        };
        // A tick is a hundredth of a second wherever Linux runs.
        Ok(Duration::from_millis((ticks(11) + ticks(12)) * 10))
    }

    /// Lets it come to rest, then looks at it for so long: processor time in percent of a core.
    pub async fn idle_percent(&self, seconds: u64) -> anyhow::Result<f64> {
        tokio::time::sleep(SETTLES).await;
        let (cpu, at) = (self.cpu()?, Instant::now());
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        Ok((self.cpu()? - cpu).as_secs_f64() / at.elapsed().as_secs_f64() * 100.0)
    }

    /// Resident memory: the present and the highest, in MB.
    pub fn memory_mb(&self) -> anyhow::Result<(u64, u64)> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let field = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
                .unwrap_or(0)
                / 1000
        };
        Ok((field("VmRSS:"), field("VmHWM:")))
    }
}

/// What the store has written so far.
pub async fn written(client: &Client) -> anyhow::Result<Written> {
    let request = http::Request::get("/debug/store").body(Vec::new())?;
    let stats: serde_json::Value = client.request(request).await?;
    let field = |name: &str| {
        stats[name]
            .as_u64()
            .with_context(|| format!("no {name} in {stats}"))
    };
    Ok(Written {
        flushes: field("flushes")?,
        writes: field("writes")?,
        in_flushes: Duration::from_nanos(field("flushNs")?),
        recent: serde_json::from_value(stats["recent"].clone())?,
    })
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        sweep(self.dir.path());
        end_processes(&self.dir.path().join("data"));
        sweep(self.dir.path());
    }
}

/// Ends what serves volumes of several copies: these processes outlive the service, as they should. The keeper goes
/// first, because it would start the others again.
fn end_processes(data: &Path) {
    let volumes = std::fs::read_dir(data.join("run")).into_iter().flatten();
    let volumes = volumes.flatten().map(|volume| volume.path());
    let directories = std::iter::once(data.join("keeper")).chain(volumes);
    let files = directories.flat_map(|each| std::fs::read_dir(each).into_iter().flatten());
    for file in files.flatten() {
        let path = file.path();
        let pid = std::fs::read_to_string(&path).unwrap_or_default();
        if path.extension().is_some_and(|kind| kind == "lock") {
            let _ = Command::new("kill").arg("-9").arg(pid.trim()).status();
        }
    }
    std::thread::sleep(Duration::from_millis(200));
}

/// Unmounts and detaches whatever is left below `dir`.
pub fn sweep(dir: &Path) {
    let mounts = trellis_node::sys::mountinfo::read().unwrap_or_default();
    for mount in mounts
        .iter()
        .rev()
        .filter(|mount| mount.mount_point.starts_with(dir))
    {
        let _ = Command::new("umount").arg(&mount.mount_point).status();
    }
    for device in trellis_node::sys::loopdev::list().unwrap_or_default() {
        if device.backing_hint.starts_with(dir) {
            let _ = Command::new("losetup").arg("-d").arg(&device.path).status();
        }
    }
}
