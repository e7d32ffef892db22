//! `trellis up`: everything on one machine, in one process.

use std::collections::HashSet;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use trellis_api::NodeName;
use trellis_api::kinds::{Pool, Replica};
use trellis_apiserver::pki::Pki;
use trellis_apiserver::users::User;
use trellis_apiserver::{EmbeddedApi, kubeconfig, listen};
use trellis_control::bootstrap::bootstrap;
use trellis_control::certificates::Signer;
use trellis_control::claim::finish::Claims;
use trellis_control::node::LOST_AFTER;
use trellis_control::node::machine::Machine;
use trellis_control::run;
use trellis_control::world::World;
use trellis_engine::replica::survey;
use trellis_node::volume::lock_holder;

use crate::agent;
use crate::cli::{Global, Up};
use crate::credentials;
use crate::csi::{self, OwnNode};
use crate::metrics::{self, Sources};
use crate::serve::Links;

/// How long a predecessor that was killed may take until it is gone.
const PREDECESSOR_ENDS: Duration = Duration::from_secs(60);

/// The file in the data directory that says which node it is of.
pub const NODE_FILE: &str = "node";

/// The file in the data directory that says where metrics are.
const METRICS_FILE: &str = "metrics";

/// Runs until it is told to stop. Mounts stay when it stops, and are adopted when it starts again.
pub async fn run(global: &Global, up: &Up) -> anyhow::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be heard")?;
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be heard")?;
    let data = agent::prepare(&global.data)?;
    // The store comes first: a second service on the same directory fails at it.
    let api = open_store(&data).await?;
    require_reachable(up.listen)?;
    let pki = Pki::open(&data, up.listen.map(|address| address.ip()))?;
    let listener = bind(up.listen, &data).await?;
    let address = listener
        .local_addr()
        .context("the listener has no address")?;
    let metrics = bind_metrics(up.metrics, &data).await?;
    let node = node_name(up.node.as_deref(), &data, &api).await?;
    let scrapers = metrics
        .as_ref()
        .map(TcpListener::local_addr)
        .transpose()
        .context("the listener for metrics has no address")?;
    let mut controllers = start(&api, &data, &node, up, metrics).await?;
    let path = data.join("kubeconfig");
    kubeconfig::write(
        &path,
        &format!("https://{address}"),
        &pki.ca_pem,
        &pki.token,
    )?;
    let mut said = format!(
        "trellis is up on node {node}; export KUBECONFIG={}\n",
        path.display()
    );
    if let Some(scrapers) = scrapers {
        said.push_str(&format!("metrics are at http://{scrapers}/metrics\n"));
    }
    if let Some(warning) = strangers(&api).await {
        tracing::error!("{warning}");
        said.push_str(&format!("{warning}\n"));
    }
    // Whoever started the service may not read this; that is no reason not to run.
    let _ = std::io::stdout().write_all(said.as_bytes());
    let mut failed = false;
    let stopped = async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            // None of the controllers ends by itself: if one does, that is a bug of ours.
            _ = controllers.join_next() => failed = true,
        }
        // The agent stops where it is: whatever it leaves half done is found again at the next start.
        controllers.abort_all();
    };
    listen::serve(listener, &pki, api, stopped).await;
    forget_metrics(&data)?;
    csi::forget(up.csi_endpoint.as_deref(), Some(&up.kubelet));
    anyhow::ensure!(
        !failed,
        "a controller has failed; this is a bug, and a restart goes on from where it was"
    );
    Ok(())
}

/// What to say if the pools have copies that no object names: most likely the store was lost, and a service that starts
/// empty and silent would look as if there had never been anything.
async fn strangers(api: &EmbeddedApi) -> Option<String> {
    let client = api.client();
    let all = ListParams::default();
    let pools = kube::Api::<Pool>::all(client.clone())
        .list(&all)
        .await
        .ok()?;
    let replicas = kube::Api::<Replica>::all(client).list(&all).await.ok()?;
    let known: HashSet<String> = replicas.iter().map(Replica::identity).collect();
    let paths = pools.items.into_iter().map(|pool| pool.spec.path);
    let count = tokio::task::spawn_blocking(move || {
        let surveys = paths.filter_map(|path| survey(Path::new(&path)).ok());
        let copies = surveys.flat_map(|survey| survey.copies);
        copies
            .filter(|copy| !known.contains(&copy.identity.replica.to_string()))
            .count()
    });
    let count = count.await.ok().filter(|count| *count > 0)?;
    let why = if replicas.items.is_empty() {
        "the store is empty"
    } else {
        "the store is older than they are, or was lost"
    };
    Some(format!(
        "WARNING: {count} copies on the pools belong to no volume that is stored ({why}); they are kept: see `trellis pool \
         ls`, and take them in with `trellis recover --from-pools`"
    ))
}

/// Opens the store. A predecessor that was killed may still wait in the kernel for one of its volumes, so we wait for
/// it: the keeper restarts the volume's target, or, if the keeper was killed too, the volume answers with errors.
async fn open_store(data: &Path) -> anyhow::Result<EmbeddedApi> {
    let path = data.join("store.redb");
    let deadline = tokio::time::Instant::now() + PREDECESSOR_ENDS;
    loop {
        // This is checked first: if the process is gone after that, the store can be opened.
        let is_held_by_the_dead = lock_holder(&path).is_some_and(is_dead);
        let opened = EmbeddedApi::open(&path);
        if opened.is_ok() || tokio::time::Instant::now() >= deadline || !is_held_by_the_dead {
            return Ok(opened?);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Whether the process has been killed and only the kernel still keeps it.
fn is_dead(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default();
    state.trim_start().starts_with(['Z', 'X'])
}

/// The first objects, then the controllers and the agent.
async fn start(
    api: &EmbeddedApi,
    data: &Path,
    node: &str,
    up: &Up,
    metrics: Option<TcpListener>,
) -> anyhow::Result<tokio::task::JoinSet<()>> {
    let started = Timestamp::now();
    let pool = data.join("pools/default");
    trellis_files::make_directory(&pool)
        .with_context(|| format!("{} cannot be made", pool.display()))?;
    bootstrap(&api.client(), &agent::defaults(node, &pool))
        .await
        .context("the first objects cannot be stored")?;
    let links = Links::new(data, node, up.link_address);
    let machine = agent::machine(data, links, &up.agent)?;
    let world = Arc::new(World::waiting(up.waits.waits()));
    let mut tasks = run::start(
        api.client(),
        world.clone(),
        agent::settings(node, &up.agent, LOST_AFTER),
        Machine::of(machine.clone()),
        Arc::new(Claims(world.clone())),
    )
    .await;
    start_credentials(api, data, node, up, &mut tasks)?;
    tasks.spawn(credentials::follow_nodes(api.client(), machine.clone()));
    agent::attend(&world, api.client(), node, &machine, &mut tasks)?;
    if let Some(endpoint) = &up.csi_endpoint {
        let own = OwnNode {
            name: node.to_owned(),
            machine: machine.clone(),
            kubelet: up.kubelet.clone(),
        };
        csi::start(endpoint, api.client(), true, Some(own), &mut tasks).await?;
    }
    if let Some(listener) = metrics {
        let sources = Sources::new(world, node.to_owned(), api.clone(), machine, started);
        tasks.spawn(metrics::serve(listener, Arc::new(sources)));
    }
    Ok(tasks)
}

/// Signs for the nodes of the home, and gets this node its certificate the way that every node does. Nobody waits for
/// either.
fn start_credentials(
    api: &EmbeddedApi,
    data: &Path,
    node: &str,
    up: &Up,
    tasks: &mut tokio::task::JoinSet<()>,
) -> anyhow::Result<()> {
    let (authority, earlier) = credentials::open_authority(data)?;
    let signer = Signer::new(api.client(), authority, earlier, up.certificate_life);
    tasks.spawn(signer.run());
    let node: NodeName = node
        .parse()
        .with_context(|| format!("this node cannot be called {node:?}"))?;
    let client = api.client_as(User::Node(node.as_str().into()));
    tasks.spawn(credentials::keep_certificate(client, node, data.to_owned()));
    Ok(())
}

/// Listens for scrapers if asked to. The address is in the data directory while the service runs, because the kernel
/// may have chosen the port.
async fn bind_metrics(
    address: Option<SocketAddr>,
    data: &Path,
) -> anyhow::Result<Option<TcpListener>> {
    forget_metrics(data)?;
    let Some(address) = address else {
        return Ok(None);
    };
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("{address} cannot be listened on for metrics"))?;
    let address = listener
        .local_addr()
        .context("the listener for metrics has no address")?;
    let told = data.join(METRICS_FILE);
    trellis_files::ensure(&told, format!("{address}\n").as_bytes())
        .with_context(|| format!("{} cannot be written", told.display()))?;
    Ok(Some(listener))
}

fn forget_metrics(data: &Path) -> anyhow::Result<()> {
    let told = data.join(METRICS_FILE);
    match std::fs::remove_file(&told) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{} cannot be removed", told.display()))
        }
        _ => Ok(()),
    }
}

/// This node's name: the given one, or the one of the last run, or the host's name. Pools, replicas and attachments
/// carry it, so it does not change with the host's name. If the file that remembers it is lost, the stored pools still
/// know it.
async fn node_name(told: Option<&str>, data: &Path, api: &EmbeddedApi) -> anyhow::Result<String> {
    let memory = data.join(NODE_FILE);
    let last = trellis_files::read_whole(&memory, |_| true)
        .with_context(|| format!("{} cannot be read", memory.display()))?;
    let known = match last {
        Some(last) => vec![last],
        None => nodes_of_pools(api).await?,
    };
    let name = match (told, known.as_slice()) {
        (Some(told), known) if known.is_empty() || known.iter().any(|each| each == told) => {
            told.to_owned()
        }
        (Some(_), [last]) => bail!(
            "this service has been node {last:?}, and its pools and volumes carry that name; start it without --node, \
             or with --node {last}"
        ),
        (None, []) => host_name(),
        (None, [last]) => last.clone(),
        (_, several) => bail!(
            "{} is lost, and the pools that are stored are of several nodes; say which one this is with --node: {}",
            memory.display(),
            several.join(", ")
        ),
    };
    trellis_files::ensure(&memory, name.as_bytes())
        .with_context(|| format!("{} cannot be written", memory.display()))?;
    Ok(name)
}

/// The nodes whose pools are stored.
async fn nodes_of_pools(api: &EmbeddedApi) -> anyhow::Result<Vec<String>> {
    let pools = kube::Api::<Pool>::all(api.client());
    let pools = pools.list(&ListParams::default()).await;
    let pools = pools.context("the stored pools cannot be listed")?.items;
    let mut nodes: Vec<String> = pools.into_iter().map(|pool| pool.spec.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    Ok(nodes)
}

/// Refuses an address that means every address: the kubeconfigs and the certificate name the one that clients use.
fn require_reachable(address: Option<SocketAddr>) -> anyhow::Result<()> {
    if let Some(address) = address.filter(|address| address.ip().is_unspecified()) {
        bail!(
            "{address} is no address that a client could use; give the one by which other machines reach this one, such \
             as --listen 192.0.2.1:{}",
            address.port()
        );
    }
    Ok(())
}

/// Listens at the given address. Without one, it takes the port of the last run, so that kubeconfigs and watches
/// survive a restart, or a free one if that is taken.
async fn bind(address: Option<SocketAddr>, data: &Path) -> anyhow::Result<TcpListener> {
    if let Some(address) = address {
        return TcpListener::bind(address)
            .await
            .with_context(|| format!("{address} cannot be listened on"));
    }
    let memory = data.join("port");
    let last = trellis_files::read_whole(&memory, |text| text.parse::<u16>().is_ok())
        .with_context(|| format!("{} cannot be read", memory.display()))?;
    let last = last.and_then(|text| text.parse().ok());
    let listener = match last {
        Some(port) => match listen::bind(port).await {
            Ok(listener) => listener,
            Err(_) => listen::bind(0)
                .await
                .context("no port on loopback can be listened on")?,
        },
        None => listen::bind(0)
            .await
            .context("no port on loopback can be listened on")?,
    };
    let port = listener
        .local_addr()
        .context("the listener has no address")?
        .port();
    trellis_files::ensure(&memory, port.to_string().as_bytes())
        .with_context(|| format!("{} cannot be written", memory.display()))?;
    Ok(listener)
}

/// This machine's name.
pub fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a living process is taken for a dead one.
    #[test]
    fn this_process_is_not_dead() {
        assert!(!is_dead(std::process::id()));
    }
}
