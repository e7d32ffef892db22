//! One node: its namespace, its directory, its processes.

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{Context, Error, Result};
use crate::ip::run;
use crate::leftovers::{self, NAMESPACES, directory};
use crate::link::{Link, Weather};
use crate::network::{address, switch};

/// How large the filesystem of a node's own directory may grow, in the words of tmpfs.
const DIRECTORY_SIZE: &str = "4g";
/// How long processes may take to stop.
const FREEZE_TIME_MAX: Duration = Duration::from_secs(10);

/// A node.
#[derive(Clone, Debug)]
pub struct Machine {
    name: String,
    namespace: String,
    address: Ipv4Addr,
    link: Arc<Link>,
    directory: PathBuf,
}

impl Machine {
    pub(crate) fn new(prefix: &str, name: &str, index: usize, subnet: u8) -> Machine {
        let namespace = format!("{prefix}.{name}");
        Machine {
            name: name.to_owned(),
            link: Arc::new(Link::new(&namespace, &switch(prefix), index)),
            namespace,
            address: address(subnet, index),
            directory: directory(prefix).join(name),
        }
    }

    /// Mounts the filesystem of the node's directory, so that a pool in it shares no disk with another node's.
    pub(crate) fn make_directory(&self) -> Result<()> {
        self.mount_tmpfs(&self.directory, DIRECTORY_SIZE)
    }

    fn mount_tmpfs(&self, path: &Path, size: &str) -> Result<()> {
        std::fs::create_dir(path).context("make", path)?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size},mode=0755")]);
        run(mount.arg(self.namespace.as_str()).arg(path)).map(drop)
    }

    /// A directory for a pool on a filesystem of its own, of a size such as `512m`.
    pub fn disk(&self, name: &str, size: &str) -> Result<PathBuf> {
        let path = self.directory.join(name);
        self.mount_tmpfs(&path, size)?;
        Ok(path)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its network namespace, as `ip netns` knows it.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// Cuts it off from all others. Nobody is told: packets vanish, as behind a switch that has failed.
    pub fn cut(&self) -> Result<()> {
        self.link.set_cut(true)
    }

    /// Joins it to the others again.
    pub fn heal(&self) -> Result<()> {
        self.link.set_cut(false)
    }

    /// Sets the weather on the way out of the node, in the place of what it was.
    pub fn set_weather(&self, weather: Weather) -> Result<()> {
        self.link.set_weather(weather)
    }

    /// Ends delay and loss. What is on its way is lost.
    pub fn calm(&self) -> Result<()> {
        self.link.calm()
    }

    /// Its address.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// A directory of its own, on a filesystem of its own.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The data directory of its service.
    pub fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    fn namespace_file(&self) -> PathBuf {
        Path::new(NAMESPACES).join(&self.namespace)
    }

    /// A program, to be started on the node.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.namespace_file().display()));
        command.arg(program.as_ref());
        command.env_remove("KUBECONFIG").env_remove("TRELLIS_DATA");
        command.env("HOME", &self.directory);
        command
    }

    /// Runs code of the test itself on the node: sockets that it makes belong to the node.
    pub fn within<T: Send>(&self, act: impl FnOnce() -> T + Send) -> Result<T> {
        let path = self.namespace_file();
        let namespace = File::open(&path).context("open", &path)?;
        let enter = move || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), kind)?;
            Ok::<T, rustix::io::Errno>(act())
        };
        let done = std::thread::scope(|scope| {
            let thread = scope.spawn(enter);
            thread.join()
        });
        match done {
            Ok(done) => done.map_err(std::io::Error::from).context("enter", &path),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// The processes that run on it.
    pub fn processes(&self) -> Vec<Pid> {
        leftovers::processes(&self.namespace)
    }

    /// Stops all its processes where they are, as if the machine had stopped. Its kernel goes on, and acknowledges what
    /// others send until buffers are full; cut the link as well for a machine that is dead to the others.
    pub fn freeze(&self) -> Result<()> {
        let deadline = Instant::now() + FREEZE_TIME_MAX;
        loop {
            let processes = self.processes();
            for pid in &processes {
                // It may have ended by itself.
                let _ = kill_process(*pid, Signal::STOP);
            }
            let running: Vec<Pid> = processes.into_iter().filter(is_running).collect();
            if running.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Error::Stubborn {
                    node: self.name.clone(),
                    pids: running
                        .iter()
                        .map(|pid| pid.as_raw_nonzero().get())
                        .collect(),
                    state: "running",
                });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets all its processes go on.
    pub fn thaw(&self) {
        for pid in self.processes() {
            // It may have been killed.
            let _ = kill_process(pid, Signal::CONT);
        }
    }

    /// Kills all its processes, and waits until they are gone. Mounts and loop devices stay, because the kernel does.
    pub fn kill(&self) -> Result<()> {
        leftovers::kill(&self.namespace)
    }
}

/// Whether a process is neither stopped nor ended. One that waits in the kernel for a volume, and was told to stop, does
/// nothing before it stops.
fn is_running(pid: &Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    let stat = stat.unwrap_or_default();
    let state = stat.rsplit(") ").next().unwrap_or_default();
    !state.is_empty() && !state.starts_with(['T', 't', 'Z', 'X', 'D'])
}
