//! `trellis node add`: the token with which a machine joins.

use std::path::Path;

use anyhow::Context;
use k8s_openapi::api::core::v1::{Node, Secret};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;
use trellis_apiserver::kubeconfig;
use trellis_apiserver::users::{NODE_TOKENS_NAMESPACE, NodeToken, User, secret_name};

use crate::cli::Global;
use crate::connect::{Cluster, cluster, connect};
use crate::exit::{from_service, refuse};
use crate::output;

/// Makes a node and its token, and prints or writes the kubeconfig with which the node finds the service.
pub async fn add(
    global: &Global,
    name: &str,
    out: Option<&Path>,
    rotate: bool,
) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let cluster = cluster(global)?;
    let what = format!("node {name}");
    let secrets = Api::<Secret>::namespaced(service.client.clone(), NODE_TOKENS_NAMESPACE);
    let there = secrets
        .get_opt(&secret_name(name))
        .await
        .map_err(|error| from_service(error, &what))?;
    if there.is_some() && !rotate {
        return refuse(format!(
            "{what} has a token already; `trellis node add {name} --rotate` makes another one, and the old one no longer counts"
        ));
    }
    let node = made(&Api::all(service.client.clone()), name).await?;
    let token = NodeToken::make(name).context("no token can be made")?;
    store(&secrets, there, token.secret(&node))
        .await
        .map_err(|error| from_service(error, &what))?;
    let user = User::Node(name.into()).name();
    let text = kubeconfig::text(&cluster.server, &cluster.ca_pem, &user, token.text());
    if cluster.is_on_loopback() {
        output::say(&loopback(&cluster, name));
    }
    let Some(path) = out else {
        return output::print(&text);
    };
    trellis_files::ensure(path, text.as_bytes()).with_context(|| {
        format!(
            "the token of {what} counts, but {} cannot be written; make another one with --rotate",
            path.display()
        )
    })?;
    output::print(&format!(
        "{what} is added; {} lets it in, and whoever has that file is {what}\n",
        path.display()
    ))
}

/// The Node object, made if it is absent.
async fn made(nodes: &Api<Node>, name: &str) -> anyhow::Result<Node> {
    let what = format!("node {name}");
    let there = nodes
        .get_opt(name)
        .await
        .map_err(|error| from_service(error, &what))?;
    if let Some(there) = there {
        return Ok(there);
    }
    let node = json!({
        "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } },
    });
    let node: Node = serde_json::from_value(node)?;
    nodes
        .create(&PostParams::default(), &node)
        .await
        .map_err(|error| from_service(error, &what))
}

/// Makes the token count, and the one before it no longer.
async fn store(
    secrets: &Api<Secret>,
    there: Option<Secret>,
    mut secret: Secret,
) -> Result<(), kube::Error> {
    let params = PostParams::default();
    let Some(there) = there else {
        return secrets.create(&params, &secret).await.map(drop);
    };
    secret.metadata.resource_version = there.metadata.resource_version;
    let name = secret.metadata.name.clone().unwrap_or_default();
    secrets.replace(&name, &params, &secret).await.map(drop)
}

fn loopback(cluster: &Cluster, name: &str) -> String {
    format!(
        "note: the service answers at {} alone, which other machines cannot reach; start it with `trellis up --listen \
         ADDRESS:PORT`, then `trellis node add {name} --rotate`",
        cluster.server
    )
}
