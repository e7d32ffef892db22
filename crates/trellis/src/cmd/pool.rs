//! `trellis pool`: the directories where volumes live.

mod remove;

pub use remove::remove;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use serde_json::json;
use trellis_api::kinds::{
    MEASURE_ANNOTATION, POOL_FINALIZER, Pool, PoolSpec, Replica, UnknownCopy,
};
use trellis_api::{Bytes, HoldReason};
use trellis_control::disks;
use trellis_control::ledger::Ledger;
use trellis_control::stored::now;
use trellis_control::view::PoolNow;
use trellis_node::ground::{self, OtherPool};

use super::{changes, measured};
use crate::cli::{Global, Output};
use crate::connect::{Service, connect, own_node};
use crate::exit::{Ended, from_service, refuse};
use crate::load;
use crate::output::{self, Table, Tone, UNKNOWN, age, human_or_unknown};

/// How often to look whether a pool has been measured.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// After how many looks to stop waiting for a pool that is not ready: at first, what it says may be from before.
const LOOKS_UNREADY_MAX: u32 = 30;

/// Shows the pools.
pub async fn list(global: &Global, how: &Output) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let client = &service.client;
    changes::show(client, how, || async {
        let all = ListParams::default();
        let (pools, replicas) = tokio::try_join!(
            load::list(Api::<Pool>::all(client.clone()), &all),
            load::list(Api::<Replica>::all(client.clone()), &all),
        )?;
        let ledger = Ledger::default();
        replicas
            .iter()
            .for_each(|replica| drop(ledger.note(None, Some(replica))));
        let asked_at = now();
        let (pools, gone) = measured_now(&service, pools).await;
        let line = |pool: &Arc<Pool>| {
            let mut line = Line::of(pool, &pools, &ledger);
            line.measured_now = line.observed_at.as_ref().is_some_and(|at| *at >= asked_at);
            if gone.contains(&line.name) {
                line.ready = false;
                line.message =
                    format!("{} is not there, or is not the pool that it was", line.path);
            }
            line
        };
        let lines: Vec<Line> = pools.iter().map(line).collect();
        output::text(how.output, &lines, |wide| {
            render(&lines, wide, Timestamp::now(), output::colours())
        })
    })
    .await
}

/// Measures the pools of this machine. Returns all pools, and the names of those that are gone.
async fn measured_now(service: &Service, pools: Vec<Pool>) -> (Vec<Arc<Pool>>, HashSet<String>) {
    // If we do not know which node this is, we measure nothing.
    let node = own_node(service).await.ok();
    let (timely, mut gone, mut all) = (measured::timely(), HashSet::new(), Vec::new());
    for mut pool in pools {
        let name = pool.name_any();
        if node.as_ref() == Some(&pool.spec.node) {
            match measured::pool(&timely, &name, &pool).await {
                PoolNow::Measured(capacity) => {
                    pool.status.get_or_insert_default().capacity = Some(capacity);
                }
                PoolNow::Gone => drop(gone.insert(name)),
                PoolNow::Unknown => {}
            }
        }
        all.push(Arc::new(pool));
    }
    (all, gone)
}

/// One pool, as programs read it; sizes are exact.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    name: String,
    node: String,
    path: String,
    overcommit_percent: u32,
    /// Size of the filesystem that holds the directory.
    size: Option<Bytes>,
    free: Option<Bytes>,
    /// Taken by replicas.
    allocated: Option<Bytes>,
    /// Promised to replicas.
    promised: Bytes,
    /// The most that may be promised, less what is promised on other pools of the same filesystem.
    limit: Option<Bytes>,
    /// The filesystem below, and the other pools on it.
    filesystem: Option<String>,
    shares_with: Vec<String>,
    observed_at: Option<MicroTime>,
    /// Whether it was measured for this answer; otherwise its node reported it earlier.
    measured_now: bool,
    ready: bool,
    /// It is to be emptied, or somebody has deleted it and it waits for its copies.
    draining: bool,
    leaving: bool,
    message: String,
    /// Copies on it that no object names.
    unknown: Vec<UnknownCopy>,
    unknown_count: u32,
}

impl Line {
    fn of(pool: &Pool, pools: &[Arc<Pool>], ledger: &Ledger) -> Line {
        let name = pool.name_any();
        let status = pool.status.clone().unwrap_or_default();
        let condition = |kind: &str| status.conditions.iter().find(|each| each.type_ == kind);
        let (ready, removable) = (condition("Ready"), condition("Removable"));
        let capacity = status.capacity.as_ref();
        let open = ledger.open();
        let promised = open.reserved_beside(&name, "");
        let of_all = disks::reserved_beside(pools, pool, &open, "");
        let limit = disks::capacity(pools, pool).map(|sizes| {
            let limit = sizes.promisable(pool.spec.overcommit_percent);
            limit.saturating_sub(of_all.saturating_sub(promised))
        });
        let sharing = disks::sharing(pools, pool);
        Line {
            promised,
            name,
            node: pool.spec.node.clone(),
            path: pool.spec.path.clone(),
            overcommit_percent: pool.spec.overcommit_percent,
            size: capacity.map(|sizes| sizes.total),
            free: capacity.map(|sizes| sizes.free),
            allocated: capacity.map(|sizes| sizes.allocated),
            limit,
            filesystem: status.filesystem.clone(),
            shares_with: sharing.iter().map(|other| other.name_any()).collect(),
            observed_at: capacity.map(|sizes| sizes.observed_at.clone()),
            measured_now: false,
            ready: ready.is_some_and(|each| each.status == "True"),
            draining: pool.spec.drain,
            leaving: pool.metadata.deletion_timestamp.is_some(),
            message: match (removable, ready) {
                (Some(removable), _) => removable.message.clone(),
                (None, Some(ready)) => ready.message.clone(),
                (None, None) => "it has not been measured yet".to_owned(),
            },
            unknown: status.unknown.clone(),
            unknown_count: status.unknown_count,
        }
    }

    /// Whether it can be used, in a word.
    fn state(&self) -> &'static str {
        match (self.leaving, self.draining, self.ready) {
            (true, _, _) => "leaving",
            (false, _, false) => "no",
            (false, true, true) => "draining",
            (false, false, true) => "yes",
        }
    }
}

fn render(lines: &[Line], wide: bool, now: Timestamp, colours: bool) -> String {
    if lines.is_empty() {
        return "there are no pools; add one with `trellis pool add NAME DIR`\n".to_owned();
    }
    let mut header = vec![
        "NAME", "NODE", "SIZE", "FREE", "MEASURED", "PROMISED", "LIMIT", "READY",
    ];
    if wide {
        header.extend([
            "PATH",
            "OVERCOMMIT",
            "ALLOCATED",
            "SHARES DISK WITH",
            "MESSAGE",
        ]);
    }
    let mut table = Table::toned(&header, "READY");
    for line in lines {
        let measured = match (line.measured_now, &line.observed_at) {
            (true, _) => Some("now".to_owned()),
            (false, at) => at.as_ref().map(|at| format!("{} ago", age(at, now))),
        };
        let cells = vec![
            line.name.clone(),
            line.node.clone(),
            human_or_unknown(line.size),
            human_or_unknown(line.free),
            measured.unwrap_or_else(|| UNKNOWN.to_owned()),
            output::human(line.promised),
            human_or_unknown(line.limit),
            line.state().to_owned(),
            line.path.clone(),
            format!("{}%", line.overcommit_percent),
            human_or_unknown(line.allocated),
            match line.shares_with.as_slice() {
                [] => UNKNOWN.to_owned(),
                others => others.join(","),
            },
            line.message.clone(),
        ];
        let tone = match line.state() {
            "yes" => Tone::Good,
            "no" => Tone::Bad,
            _ => Tone::Moving,
        };
        table.row(cells, Some(tone));
    }
    let mut text = table.render(colours);
    lines.iter().for_each(|line| text.push_str(&trouble(line)));
    lines
        .iter()
        .for_each(|line| text.push_str(&strangers(line)));
    text
}

/// Why a pool is not ready or not gone, in a line.
fn trouble(line: &Line) -> String {
    if line.message.is_empty() || line.state() == "yes" {
        return String::new();
    }
    format!("pool {}: {}\n", line.name, line.message)
}

/// The copies on a pool that nobody knows, one line each.
fn strangers(line: &Line) -> String {
    if line.unknown_count == 0 {
        return String::new();
    }
    let mut text = format!(
        "pool {} holds {} copies that no object names; they are kept, and `trellis recover --from-pools` takes them in:\n",
        line.name, line.unknown_count
    );
    for copy in &line.unknown {
        let claim = copy.claim.as_deref().unwrap_or("not said");
        let size = human_or_unknown(copy.size);
        text.push_str(&format!("  {} (claim {claim}, {size})\n", copy.name));
    }
    text
}

/// Adds a directory of this machine as a pool. An existing pool is measured again.
pub async fn add(
    global: &Global,
    name: &str,
    directory: &Path,
    overcommit: u32,
) -> anyhow::Result<()> {
    let path = directory
        .canonicalize()
        .with_context(|| format!("{} cannot be used as a pool", directory.display()))?;
    if !path.is_dir() {
        return refuse(format!(
            "{} is not a directory, so it cannot be a pool",
            path.display()
        ));
    }
    let path = path
        .to_str()
        .context("the directory's name is not UTF-8, which objects cannot hold")?;
    let service = connect(global).await?;
    let node = own_node(&service).await?;
    let what = format!("pool {name}");
    let pools = Api::<Pool>::all(service.client.clone());
    let spec = PoolSpec {
        node,
        path: path.to_owned(),
        overcommit_percent: overcommit,
        drain: false,
    };
    let there = pools
        .get_opt(name)
        .await
        .map_err(|error| from_service(error, &what))?;
    if let Some(there) = there {
        again(&pools, &there, &spec).await?;
        return output::print(&format!(
            "{what} is there already; it promises {overcommit}% now and is measured again\n"
        ));
    }
    let shared = require_fit(global, &service.client, &spec).await?;
    let mut pool = Pool::new(name, spec);
    pool.metadata.finalizers = Some(vec![POOL_FINALIZER.to_owned()]);
    pools
        .create(&PostParams::default(), &pool)
        .await
        .map_err(|error| from_service(error, &what))?;
    output::print(&format!("{what} added at {path}; see `trellis pool ls`\n"))?;
    if shared.is_empty() {
        return Ok(());
    }
    output::print(&format!(
        "note: it is on one filesystem with {}: they share its space, and two copies of a volume go there only if the \
         class says allowSharedDisk: \"true\"\n",
        shared.join(", ")
    ))
}

/// Refuses a directory that cannot be a pool. Returns the pools on the same filesystem.
async fn require_fit(
    global: &Global,
    client: &Client,
    spec: &PoolSpec,
) -> anyhow::Result<Vec<String>> {
    let pools = Api::<Pool>::all(client.clone());
    let pools = load::list(pools, &ListParams::default()).await?;
    let here = pools.iter().filter(|pool| pool.spec.node == spec.node);
    let others: Vec<OtherPool> = here
        .map(|pool| OtherPool {
            name: pool.name_any(),
            path: PathBuf::from(&pool.spec.path),
        })
        .collect();
    let path = Path::new(&spec.path);
    if let Err(unfit) = ground::require_fit(path, &global.data, &others)? {
        let text = format!("{}: {unfit}", HoldReason::PoolUnfit);
        return Err(Ended::Refused(text).into());
    }
    let filesystem = ground::filesystem_of(path)?;
    let shares = |pool: &&OtherPool| {
        ground::filesystem_of(&pool.path).is_ok_and(|other| other == filesystem)
    };
    let sharing = others.iter().filter(shares);
    Ok(sharing.map(|pool| pool.name.clone()).collect())
}

/// Measures an existing pool again and sets what it promises. A drain is cancelled.
async fn again(pools: &Api<Pool>, there: &Pool, spec: &PoolSpec) -> anyhow::Result<()> {
    let (name, what) = (there.name_any(), format!("pool {}", there.name_any()));
    if (&there.spec.node, &there.spec.path) != (&spec.node, &spec.path) {
        let text = format!(
            "{what} is {} of node {} already; add {} under another name",
            there.spec.path, there.spec.node, spec.path
        );
        return Err(Ended::Refused(text).into());
    }
    if there.metadata.deletion_timestamp.is_some() {
        let text = format!("{what} is being removed; add it again when it is gone");
        return Err(Ended::Refused(text).into());
    }
    let body = json!({
        "metadata": { "annotations": { MEASURE_ANNOTATION: now() } },
        "spec": { "overcommitPercent": spec.overcommit_percent, "drain": false },
    });
    let patched = pools
        .patch(&name, &PatchParams::default(), &Patch::Merge(&body))
        .await;
    patched
        .map(drop)
        .map_err(|error| from_service(error, &what))
}

/// Measures a pool at once, and says what has changed.
pub async fn grow(global: &Global, name: &str) -> anyhow::Result<()> {
    let timeout = global.patience();
    let service = connect(global).await?;
    let pools = Api::<Pool>::all(service.client.clone());
    let what = format!("pool {name}");
    let before = pools
        .get(name)
        .await
        .map_err(|error| from_service(error, &what))?;
    let asked = now();
    let body = json!({ "metadata": { "annotations": { MEASURE_ANNOTATION: asked } } });
    pools
        .patch(name, &PatchParams::default(), &Patch::Merge(&body))
        .await
        .map_err(|error| from_service(error, &what))?;
    let measured = tokio::time::timeout(timeout, measured(&pools, name, &asked)).await;
    let Ok(measured) = measured else {
        let text = format!("{what} was not measured within {timeout:?}; does its disk answer?");
        return Err(Ended::TimedOut(text).into());
    };
    let (total, free) = measured?;
    let before = before.status.and_then(|status| status.capacity);
    let change = match before.map(|capacity| capacity.total) {
        Some(before) if before != total => format!("{} before", output::precise(before)),
        _ => "as before".to_owned(),
    };
    output::print(&format!(
        "{what} has {} ({change}), {} of it free; whoever waits for room is looked at again\n",
        output::precise(total),
        output::precise(free)
    ))
}

/// Waits for a measurement that was made since `asked`, and returns the size and the free space.
async fn measured(
    pools: &Api<Pool>,
    name: &str,
    asked: &MicroTime,
) -> anyhow::Result<(Bytes, Bytes)> {
    let mut looks = 0u32;
    loop {
        let pool = pools.get(name).await;
        let pool = pool.map_err(|error| from_service(error, &format!("pool {name}")))?;
        let status = pool.status.unwrap_or_default();
        if let Some(sizes) = status.capacity.filter(|sizes| sizes.observed_at >= *asked) {
            return Ok((sizes.total, sizes.free));
        }
        let ready = status.conditions.iter().find(|each| each.type_ == "Ready");
        let is_unready = |each: &&Condition| each.status == "False" && looks >= LOOKS_UNREADY_MAX;
        if let Some(ready) = ready.filter(is_unready) {
            bail!("pool {name} cannot be measured: {}", ready.message);
        }
        looks = looks.saturating_add(1);
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_control::view::scenario;

    // Fails if what is promised or may be promised is not what the objects say.
    #[test]
    fn a_pool_shows_its_promises() {
        let ledger = Ledger::default();
        ledger.note(None, Some(&scenario::replica(3, Some(2))));
        let ready = Line::of(&scenario::pool(Bytes::gib(10), 150), &[], &ledger);
        let unmeasured = Line::of(
            &Pool::new("cold", scenario::pool(Bytes::ZERO, 100).spec),
            &[],
            &ledger,
        );
        insta::assert_snapshot!(render(&[ready, unmeasured], true, scenario::now(), false));
    }
}
