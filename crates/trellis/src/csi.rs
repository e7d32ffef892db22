//! The CSI driver in this process: its socket, the kubelet's, and this machine behind the driver's trait.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use kube::Client;
use tokio::task::JoinSet;
use trellis_api::{Hold, HoldReason};
use trellis_control::node::machine::Consumers;
use trellis_csi::host::{Host, Measured, Shown};
use trellis_csi::serve::{self, NodeRole, Roles};
use trellis_csi::socket;
use trellis_node::sys::block::{self, DeviceNumber};
use trellis_node::volume;

use crate::cli::KubeletArgs;
use crate::machine::{ThisMachine, node_hold};

/// Where a kubelet looks for plugins, below its own directory.
const REGISTRY: &str = "plugins_registry";
/// The name of our socket there.
const REGISTRATION_SOCKET: &str = "trellis.dev-reg.sock";

/// A node and its machine, as the driver serves it.
pub struct OwnNode {
    /// Its name.
    pub name: String,
    /// Its machine.
    pub machine: Arc<ThisMachine>,
    /// The kubelet on it.
    pub kubelet: KubeletArgs,
}

/// Serves the driver at `endpoint`, in tasks of their own. The sockets are there when the call returns.
pub async fn start(
    endpoint: &Path,
    client: Client,
    controller: bool,
    node: Option<OwnNode>,
    tasks: &mut JoinSet<()>,
) -> anyhow::Result<()> {
    let socket = socket::listen(endpoint)
        .await
        .context("the CSI driver cannot be served")?;
    let registry = node.as_ref().and_then(|node| node.kubelet.registry());
    let node = node.map(|node| NodeRole {
        name: node.name,
        host: node.machine,
        below: node.kubelet.kubelet_dir,
    });
    let roles = Roles { controller, node };
    tasks.spawn(async move {
        report(serve::serve(socket, client, roles, std::future::pending()).await);
    });
    if let Some(registry) = registry {
        let path = registry.join(REGISTRATION_SOCKET);
        let socket = socket::listen(&path)
            .await
            .context("the CSI driver cannot be registered")?;
        let endpoint = endpoint.to_owned();
        tasks.spawn(async move {
            report(serve::register(socket, endpoint, std::future::pending()).await);
        });
    }
    Ok(())
}

/// Removes the names of the sockets when the service stops, so that nobody takes the driver for one that answers.
pub fn forget(endpoint: Option<&Path>, kubelet: Option<&KubeletArgs>) {
    let registered = kubelet.and_then(KubeletArgs::registry);
    let registered = registered.map(|registry| registry.join(REGISTRATION_SOCKET));
    for path in endpoint.map(Path::to_owned).into_iter().chain(registered) {
        // A name that stays is replaced at the next start.
        let _ = std::fs::remove_file(path);
    }
}

/// Serving ends only when it has failed; the service then ends with it.
fn report(served: Result<(), trellis_csi::Error>) {
    if let Err(error) = served {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "the CSI driver has ended"
        );
    }
}

impl KubeletArgs {
    /// The directory in which the kubelet looks for plugins, if there is a kubelet.
    fn registry(&self) -> Option<PathBuf> {
        let usual = || Some(self.kubelet_dir.as_ref()?.join(REGISTRY));
        self.registration_dir.clone().or_else(usual)
    }
}

impl Host for ThisMachine {
    fn boot_id(&self) -> String {
        Consumers::boot_id(self)
    }

    fn show(&self, what: Shown<'_>, target: &Path, read_only: bool) -> Result<(), Hold> {
        let source = match what {
            Shown::Filesystem(staging) => volume::Source::Filesystem { staging },
            Shown::Device(device) => volume::Source::Block { device },
        };
        let shown = volume::publish(source, target, read_only);
        shown.map(drop).map_err(node_hold)
    }

    fn hide(&self, target: &Path, device: Option<&Path>) -> Result<(), Hold> {
        let number = device.map(DeviceNumber::of_block_device).transpose();
        let number = number.map_err(|error| {
            let message = format!("The volume's device cannot be looked at: {error}.");
            Hold::new(HoldReason::DeviceGone, message)
        })?;
        let hidden = volume::unpublish(target, number.flatten());
        hidden.map(drop).map_err(node_hold)
    }

    fn shown_at(&self, device: &Path) -> Result<Vec<PathBuf>, Hold> {
        let mut paths = volume::shown_at(device).map_err(node_hold)?;
        paths.retain(|path| !path.starts_with(self.mounts()));
        Ok(paths)
    }

    fn real(&self, path: &Path) -> PathBuf {
        let parent = path.parent().and_then(|parent| parent.canonicalize().ok());
        match (parent, path.file_name()) {
            (Some(parent), Some(name)) => parent.join(name),
            _ => path.to_owned(),
        }
    }

    fn measure(&self, path: &Path) -> Result<Measured, Hold> {
        let is_device = DeviceNumber::of_block_device(path).ok().flatten().is_some();
        if is_device {
            let refused = |error: std::io::Error| {
                let message = format!("{} cannot be measured: {error}.", path.display());
                Hold::new(HoldReason::KernelRefused, message)
            };
            let device = block::open(path).map_err(refused)?;
            let size = block::size(&device).map_err(|errno| refused(errno.into()))?;
            return Ok(Measured::Device(size));
        }
        let usage = volume::usage(path).map_err(node_hold)?;
        Ok(Measured::Filesystem {
            total: usage.bytes_total,
            used: usage.bytes_used,
            available: usage.bytes_available,
            inodes: usage.inodes_total,
            inodes_used: usage.inodes_used,
            inodes_free: usage.inodes_available,
        })
    }
}
