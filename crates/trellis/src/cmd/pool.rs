//! `trellis pool`: the directories where volumes live.

use std::path::Path;

use anyhow::{Context, bail};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde::Serialize;
use serde_json::json;
use trellis_api::Bytes;
use trellis_api::kinds::{Pool, PoolSpec, Replica, UnknownCopy};
use trellis_control::ledger::Ledger;
use trellis_control::view::now;

use super::changes;
use crate::claim_view;
use crate::cli::{Global, Output};
use crate::connect::{connect, own_node};
use crate::exit::{Ended, from_service};
use crate::output::{self, Table, Tone, UNKNOWN, age, human_or_unknown};

/// A change of this annotation makes the pool's node measure it again.
const MEASURE: &str = "trellis.dev/measure";

/// Shows the pools.
pub async fn list(global: &Global, how: &Output) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let client = &service.client;
    changes::show(client, how, || async {
        let all = ListParams::default();
        let (pools, replicas) = tokio::try_join!(
            claim_view::list(Api::<Pool>::all(client.clone()), &all),
            claim_view::list(Api::<Replica>::all(client.clone()), &all),
        )?;
        let ledger = Ledger::default();
        replicas
            .iter()
            .for_each(|replica| drop(ledger.note(None, Some(replica))));
        let lines: Vec<Line> = pools.iter().map(|pool| Line::of(pool, &ledger)).collect();
        output::text(how.output, &lines, |wide| {
            render(&lines, wide, Timestamp::now(), output::colours())
        })
    })
    .await
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
    /// The most that may be promised.
    limit: Option<Bytes>,
    observed_at: Option<MicroTime>,
    ready: bool,
    message: String,
    /// Copies on it that no object names.
    unknown: Vec<UnknownCopy>,
    unknown_count: u32,
}

impl Line {
    fn of(pool: &Pool, ledger: &Ledger) -> Line {
        let name = pool.name_any();
        let status = pool.status.clone().unwrap_or_default();
        let ready = status.conditions.iter().find(|each| each.type_ == "Ready");
        let capacity = status.capacity.as_ref();
        Line {
            promised: ledger.open().reserved_beside(&name, ""),
            name,
            node: pool.spec.node.clone(),
            path: pool.spec.path.clone(),
            overcommit_percent: pool.spec.overcommit_percent,
            size: capacity.map(|sizes| sizes.total),
            free: capacity.map(|sizes| sizes.free),
            allocated: capacity.map(|sizes| sizes.allocated),
            limit: capacity.map(|sizes| sizes.promisable(pool.spec.overcommit_percent)),
            observed_at: capacity.map(|sizes| sizes.observed_at.clone()),
            ready: ready.is_some_and(|each| each.status == "True"),
            message: match ready {
                Some(ready) => ready.message.clone(),
                None => "it has not been measured yet".to_owned(),
            },
            unknown: status.unknown.clone(),
            unknown_count: status.unknown_count,
        }
    }
}

fn render(lines: &[Line], wide: bool, now: Timestamp, colours: bool) -> String {
    if lines.is_empty() {
        return "there are no pools; add one with `trellis pool add NAME DIR`\n".to_owned();
    }
    let mut header = vec!["NAME", "NODE", "SIZE", "FREE", "PROMISED", "LIMIT", "READY"];
    if wide {
        header.extend(["PATH", "OVERCOMMIT", "ALLOCATED", "MEASURED", "MESSAGE"]);
    }
    let mut table = Table::toned(&header, "READY");
    for line in lines {
        let measured = line
            .observed_at
            .as_ref()
            .map(|at| format!("{} ago", age(at, now)));
        let cells = vec![
            line.name.clone(),
            line.node.clone(),
            human_or_unknown(line.size),
            human_or_unknown(line.free),
            output::human(line.promised),
            human_or_unknown(line.limit),
            if line.ready { "yes" } else { "no" }.to_owned(),
            line.path.clone(),
            format!("{}%", line.overcommit_percent),
            human_or_unknown(line.allocated),
            measured.unwrap_or_else(|| UNKNOWN.to_owned()),
            line.message.clone(),
        ];
        table.row(cells, Some(if line.ready { Tone::Good } else { Tone::Bad }));
    }
    let mut text = table.render(colours);
    lines
        .iter()
        .for_each(|line| text.push_str(&strangers(line)));
    text
}

/// What a pool holds that nobody knows, in a line for each copy.
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

/// Adds a directory of this machine as a pool. One that is there already is measured again.
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
        bail!(
            "{} is not a directory, so it cannot be a pool",
            path.display()
        );
    }
    let path = path
        .to_str()
        .context("the directory's name is not UTF-8, which objects cannot hold")?;
    let service = connect(global).await?;
    let node = own_node(&service.client).await?;
    let what = format!("pool {name}");
    let pools = Api::<Pool>::all(service.client.clone());
    let spec = PoolSpec {
        node,
        path: path.to_owned(),
        overcommit_percent: overcommit,
    };
    match pools
        .create(&PostParams::default(), &Pool::new(name, spec.clone()))
        .await
    {
        Ok(_) => return output::print(&format!("{what} added at {path}; see `trellis pool ls`\n")),
        Err(kube::Error::Api(answer)) if answer.is_already_exists() => {}
        Err(error) => return Err(from_service(error, &what)),
    }
    let there = pools
        .get(name)
        .await
        .map_err(|error| from_service(error, &what))?;
    if (&there.spec.node, &there.spec.path) != (&spec.node, &spec.path) {
        let text = format!(
            "{what} is {} of node {} already; add {path} under another name",
            there.spec.path, there.spec.node
        );
        return Err(Ended::Refused(text).into());
    }
    let body = json!({
        "metadata": { "annotations": { MEASURE: now() } },
        "spec": { "overcommitPercent": overcommit },
    });
    let patched = pools
        .patch(name, &PatchParams::default(), &Patch::Merge(&body))
        .await;
    patched.map_err(|error| from_service(error, &what))?;
    output::print(&format!(
        "{what} is there already; it promises {overcommit}% now and is measured again\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim_view::samples;

    // Fails if what is promised or may be promised is not what the objects say.
    #[test]
    fn a_pool_shows_its_promises() {
        let ledger = Ledger::default();
        ledger.note(None, Some(&samples::replica(3, Some(2))));
        let ready = Line::of(&samples::pool(Bytes::gib(10), 150), &ledger);
        let unmeasured = Line::of(
            &Pool::new("cold", samples::pool(Bytes::ZERO, 100).spec),
            &ledger,
        );
        insta::assert_snapshot!(render(&[ready, unmeasured], true, samples::now(), false));
    }
}
