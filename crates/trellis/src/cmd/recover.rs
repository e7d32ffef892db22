//! `trellis recover --from-pools`: makes objects for copies that no object names, from what the copies say.
//!
//! Nothing on a pool is changed. A volume comes back with the identities that its copies carry, so that the new objects
//! find the bytes. A copy that no longer counts, or an older duplicate of another, is left where it is.

mod make;
mod plan;

use std::path::{Path, PathBuf};

use anyhow::Context;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde::Serialize;
use trellis_api::kinds::{Pool, Replica, Volume};
use trellis_engine::replica::survey;

use self::plan::{Found, Known, Lost, Plan};
use crate::cli::{Global, Recover};
use crate::connect::{connect, own_node};
use crate::exit::Ended;
use crate::load::list;
use crate::output::{self, Table, Tone};

/// One line of what was or would be done.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    volume: String,
    claim: String,
    copies: Vec<String>,
    size: String,
    /// `taken in`, `would be taken in` or `left alone`.
    result: &'static str,
    note: String,
}

/// Takes in the copies that no object names.
pub async fn run(global: &Global, verb: &Recover) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let client = &service.client;
    let all = ListParams::default();
    let node = own_node(&service).await?;
    let (pools, replicas, volumes, claims, classes) = tokio::try_join!(
        list(Api::<Pool>::all(client.clone()), &all),
        list(Api::<Replica>::all(client.clone()), &all),
        list(Api::<Volume>::all(client.clone()), &all),
        list(Api::<PersistentVolumeClaim>::all(client.clone()), &all),
        list(Api::<StorageClass>::all(client.clone()), &all),
    )?;
    let pools = chosen(&pools, &node, &verb.directories)?;
    let mut found = Vec::new();
    let mut left = Vec::new();
    for pool in &pools {
        let path = PathBuf::from(&pool.spec.path);
        let survey = survey(&path).with_context(|| {
            format!(
                "pool {} at {} cannot be read",
                pool.name_any(),
                path.display()
            )
        })?;
        let name = pool.name_any();
        let of_pool = |copy| Found {
            pool: name.clone(),
            node: pool.spec.node.clone(),
            copy,
        };
        found.extend(survey.copies.into_iter().map(of_pool));
        let unusable = survey.unusable.into_iter();
        left.extend(unusable.map(|(copy, error)| (format!("{copy} on pool {name}"), error)));
    }
    let known = Known {
        replicas: &replicas,
        volumes: &volumes,
        claims: &claims,
        classes: &classes,
    };
    let (plans, passed_over) = plan::plan(found, &known, verb.suffix.as_deref());
    let mut lines: Vec<Line> = Vec::new();
    let mut failed = false;
    for plan in &plans {
        let (result, note) = match plan {
            Plan::Take(_) if verb.dry_run => ("would be taken in", plan.note()),
            Plan::Take(lost) => match make::make(client, lost, &classes).await {
                Ok(()) => ("taken in", plan.note()),
                Err(error) => {
                    failed = true;
                    ("left alone", format!("{error:#}"))
                }
            },
            Plan::Leave(..) => {
                failed = true;
                ("left alone", plan.note())
            }
        };
        lines.push(line(plan.lost(), result, note));
    }
    for (copy, why) in passed_over {
        lines.push(stray(copy, why));
    }
    for (copy, error) in left {
        lines.push(stray(copy, error.to_string()));
    }
    let text = output::text(verb.output, &lines, |_| render(&lines, output::colours()))?;
    output::print(&text)?;
    if failed {
        let text = "not every volume could be taken in; the table says why".to_owned();
        return Err(Ended::Refused(text).into());
    }
    Ok(())
}

/// The pools to look at: those that were named, or all of this node.
fn chosen(pools: &[Pool], node: &str, named: &[PathBuf]) -> anyhow::Result<Vec<Pool>> {
    let own = || pools.iter().filter(|pool| pool.spec.node == node);
    if named.is_empty() {
        return Ok(own().cloned().collect());
    }
    let of_path = |directory: &PathBuf| {
        let path = directory
            .canonicalize()
            .with_context(|| format!("{} cannot be read", directory.display()))?;
        let found = own().find(|pool| Path::new(&pool.spec.path) == path);
        let text = || {
            let path = path.display();
            format!(
                "{path} is no pool of this service; add it first with `trellis pool add NAME {path}`"
            )
        };
        found.cloned().ok_or_else(|| Ended::NotFound(text()).into())
    };
    named.iter().map(of_path).collect()
}

fn line(lost: &Lost, result: &'static str, note: String) -> Line {
    let copies = lost.copies.iter();
    Line {
        volume: lost.name.clone(),
        claim: format!("{}/{}", lost.about.namespace, lost.claim),
        copies: copies
            .map(|each| format!("{} on {}", each.copy.name, each.pool))
            .collect(),
        size: output::human(lost.size()),
        result,
        note,
    }
}

fn stray(copy: String, note: String) -> Line {
    Line {
        volume: String::new(),
        claim: String::new(),
        copies: vec![copy],
        size: String::new(),
        result: "left alone",
        note,
    }
}

fn render(lines: &[Line], colours: bool) -> String {
    if lines.is_empty() {
        return "every copy on the pools belongs to a volume that is stored\n".to_owned();
    }
    let mut table = Table::toned(&["CLAIM", "SIZE", "COPIES", "RESULT", "NOTE"], "RESULT");
    for line in lines {
        let tone = match line.result {
            "taken in" => Tone::Good,
            "left alone" => Tone::Bad,
            _ => Tone::Moving,
        };
        let cells = vec![
            line.claim.clone(),
            line.size.clone(),
            line.copies.join(", "),
            line.result.to_owned(),
            line.note.clone(),
        ];
        table.row(cells, Some(tone));
    }
    table.render(colours)
}
