//! Finds the service that a verb talks to.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::json;

use crate::cli::Global;
use crate::exit::{Ended, from_service, remember_address};
use crate::up::{NODE_FILE, host_name};

/// A connection, and the namespace to look in.
pub struct Service {
    /// The client.
    pub client: Client,
    /// The namespace that was given, or that of the kubeconfig.
    pub namespace: String,
    /// The node that the data directory on this machine is of, if there is one.
    remembered_node: Option<String>,
}

/// Connects by `--kubeconfig`, then `KUBECONFIG`, then the data directory.
pub async fn connect(global: &Global) -> anyhow::Result<Service> {
    let (path, file) = kubeconfig(global)?;
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
    // A directory that cannot be read, or is not there, says nothing.
    let remembered = trellis_files::read_whole(&global.data.join(NODE_FILE), |_| true);
    Ok(Service {
        client,
        namespace,
        remembered_node: remembered.ok().flatten(),
    })
}

/// The kubeconfig that applies, and where it is.
fn kubeconfig(global: &Global) -> anyhow::Result<(PathBuf, Kubeconfig)> {
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
    Ok((path, file))
}

/// Where a service answers, and how a client knows it.
pub struct Cluster {
    /// `https://ADDRESS:PORT`.
    pub server: String,
    /// The certificate of the authority.
    pub ca_pem: String,
}

impl Cluster {
    /// Whether only this machine can reach it.
    pub fn is_on_loopback(&self) -> bool {
        let host = self.server.split("://").last().unwrap_or_default();
        let address = host.trim_end_matches('/').parse::<SocketAddr>();
        address.is_ok_and(|address| address.ip().is_loopback())
    }
}

/// The cluster of the kubeconfig's context.
pub fn cluster(global: &Global) -> anyhow::Result<Cluster> {
    let (path, file) = kubeconfig(global)?;
    let incomplete = || {
        format!(
            "{} does not say where the service is and how it is known",
            path.display()
        )
    };
    let context = file.current_context.as_deref();
    let mut contexts = file.contexts.iter();
    let context = contexts.find(|each| Some(each.name.as_str()) == context);
    let name = context.and_then(|each| Some(each.context.as_ref()?.cluster.as_str()));
    let mut clusters = file.clusters.iter();
    let cluster = clusters.find(|each| Some(each.name.as_str()) == name);
    let cluster = cluster.and_then(|each| each.cluster.as_ref());
    let cluster = cluster.with_context(incomplete)?;
    let server = cluster.server.clone().with_context(incomplete)?;
    let ca_pem = match (
        &cluster.certificate_authority_data,
        &cluster.certificate_authority,
    ) {
        (Some(data), _) => {
            let bytes: ByteString = serde_json::from_value(json!(data)).with_context(incomplete)?;
            bytes.0
        }
        (None, Some(file)) => {
            std::fs::read(file).with_context(|| format!("{file} cannot be read"))?
        }
        (None, None) => return Err(anyhow::anyhow!(incomplete())),
    };
    let ca_pem = String::from_utf8(ca_pem).with_context(incomplete)?;
    Ok(Cluster { server, ca_pem })
}

/// The node that this machine is: the only one there is, or the one that the data directory is of, or the one with this
/// machine's name.
pub async fn own_node(service: &Service) -> anyhow::Result<String> {
    let nodes = Api::<Node>::all(service.client.clone());
    let nodes = nodes
        .list(&ListParams::default())
        .await
        .map_err(|error| from_service(error, "the nodes"))?;
    let names: Vec<String> = nodes.iter().map(|node| node.name_any()).collect();
    match names.as_slice() {
        [only] => Ok(only.clone()),
        several => service
            .remembered_node
            .iter()
            .chain([&host_name()])
            .find(|name| several.contains(name))
            .cloned()
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
