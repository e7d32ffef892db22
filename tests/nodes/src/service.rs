//! `trellis` on a node.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::error::{Context, Error, Result};
use crate::ip::run;
use crate::machine::Machine;
use crate::program::trellis;

/// Where the API listens.
pub const PORT: u16 = 6443;

/// A service that runs on a node. It ends with the node's processes.
pub struct Service {
    machine: Machine,
    child: Child,
    stays: bool,
}

impl Service {
    /// Starts `trellis up` on the node, with the API at its address, and waits until it is up.
    pub fn up(machine: &Machine, arguments: &[&str]) -> Result<Service> {
        let log = machine.directory().join("log");
        let stderr = File::create(&log).context("make", &log)?;
        let mut command = machine.command(trellis()?);
        command.arg("up").arg("--data").arg(machine.data());
        command.args(["--node", machine.name(), "--listen"]);
        command.arg(format!("{}:{PORT}", machine.address()));
        command.args(arguments).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(stderr);
        // A signal from the terminal is not for it.
        command.process_group(0);
        let spawned = command.spawn();
        let mut child = spawned.map_err(|source| Error::NoProgram {
            program: "nsenter".to_owned(),
            source,
        })?;
        let mut line = String::new();
        let stdout = child.stdout.take();
        // What cannot be read says nothing, which is looked at next.
        let _ = stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line));
        let service = Service {
            machine: machine.clone(),
            child,
            stays: false,
        };
        if line.contains("trellis is up") {
            return Ok(service);
        }
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        Err(Error::NotUp {
            node: machine.name().to_owned(),
            said: format!("{line}{said}"),
        })
    }

    /// The administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.machine.data().join("kubeconfig")
    }

    /// Lets a node join; its kubeconfig, in the node's directory.
    pub fn add(&self, node: &Machine) -> Result<PathBuf> {
        let path = node.directory().join("kubeconfig");
        let out = path.to_string_lossy();
        self.trellis(&["node", "add", node.name(), "--kubeconfig-out", &out])?;
        Ok(path)
    }

    /// Runs a verb, as the administrator on the service's node; what it printed.
    pub fn trellis(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.machine.command(trellis()?);
        command
            .args(arguments)
            .arg("--data")
            .arg(self.machine.data());
        run(&mut command)
    }

    /// Lets it run on when this process ends.
    pub fn leave(mut self) {
        self.stays = true;
    }

    /// The service's process.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        if std::thread::panicking() {
            let log = self.machine.directory().join("log");
            let said = std::fs::read_to_string(log).unwrap_or_default();
            eprintln!("the service on {} said: {said}", self.machine.name());
        }
        // It may have been killed with its node.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Machine {
    /// Stock kubectl on the node, with this kubeconfig and nothing else.
    pub fn kubectl(&self, kubeconfig: &Path, arguments: &[&str]) -> Command {
        let kubectl = std::env::var("KUBECTL").unwrap_or_else(|_| "kubectl".to_owned());
        let mut command = self.command(kubectl);
        command.args(arguments).env("KUBECONFIG", kubeconfig);
        command
    }
}
