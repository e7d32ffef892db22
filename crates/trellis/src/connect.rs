//! Finds the service that a verb talks to.

use std::path::PathBuf;

use anyhow::Context;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt};

use crate::cli::Global;
use crate::exit::{Ended, from_service, remember_address};
use crate::up::{NODE_FILE, host_name};

/// A connection, and the namespace to look in.
pub struct Service {
    /// The client.
    pub client: Client,
    /// The namespace that was given, or that of the kubeconfig.
    pub namespace: String,
    /// The data directory of the service on this machine.
    data: PathBuf,
}

/// Connects by `--kubeconfig`, then `KUBECONFIG`, then the data directory.
pub async fn connect(global: &Global) -> anyhow::Result<Service> {
    let path = kubeconfig_path(global);
    if !path.exists() {
        let text = format!(
            "there is no service: {} does not exist; start one with `trellis up`, or name its kubeconfig with --kubeconfig",
            path.display()
        );
        return Err(Ended::Unreachable(text).into());
    }
    let file = Kubeconfig::read_from(&path)
        .with_context(|| format!("{} cannot be read", path.display()))?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("{} is not a valid kubeconfig", path.display()))?;
    remember_address(
        config
            .cluster_url
            .to_string()
            .trim_end_matches('/')
            .to_owned(),
    );
    let namespace = global
        .namespace
        .clone()
        .unwrap_or_else(|| config.default_namespace.clone());
    let client =
        Client::try_from(config).context("no connection can be made from the kubeconfig")?;
    Ok(Service {
        client,
        namespace,
        data: global.data.clone(),
    })
}

/// The node that this machine is: the only one there is, or the one that the service on this machine has been, or the
/// one with this machine's name.
pub async fn own_node(service: &Service) -> anyhow::Result<String> {
    let nodes = Api::<Node>::all(service.client.clone());
    let nodes = nodes
        .list(&ListParams::default())
        .await
        .map_err(|error| from_service(error, "the nodes"))?;
    let names: Vec<String> = nodes.iter().map(|node| node.name_any()).collect();
    let memory = service.data.join(NODE_FILE);
    let remembered = trellis_files::read_whole(&memory, |_| true);
    let remembered = remembered.ok().flatten();
    match names.as_slice() {
        [only] => Ok(only.clone()),
        several => remembered
            .into_iter()
            .chain([host_name()])
            .find(|name| several.contains(name))
            .with_context(|| {
                format!(
                    "this machine ({}) is none of the nodes {}",
                    host_name(),
                    several.join(", ")
                )
            }),
    }
}

/// The kubeconfig that applies. `KUBECONFIG` may name several files; the first that exists counts.
fn kubeconfig_path(global: &Global) -> PathBuf {
    if let Some(path) = &global.kubeconfig {
        return path.clone();
    }
    let named = std::env::var_os("KUBECONFIG");
    let named = named.iter().flat_map(|paths| std::env::split_paths(paths));
    let mut named = named.filter(|path| !path.as_os_str().is_empty());
    named
        .find(|path| path.exists())
        .unwrap_or_else(|| global.data.join("kubeconfig"))
}
