//! `trellis doctor`: what this machine's kernel and programs can do.

use std::path::Path;

use anyhow::bail;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde::Serialize;
use trellis_api::kinds::Pool;
use trellis_node::doctor::{Finding, FindingState, examine};

use crate::cli::{Doctor, Global};
use crate::connect::connect;
use crate::output::{self, Table, Tone};
use crate::serve::{KeeperRuns, Outliving, keeper_runs, tell_unserved};

/// What a claim of the default class cannot do without. A filesystem that the kernel does not list yet is loaded at the
/// first mount, so none is in this list.
const ESSENTIAL: [&str; 4] = ["kernel", "loop devices", "CAP_SYS_ADMIN", "mkfs.xfs"];

/// One finding, for programs.
#[derive(Serialize)]
struct Diagnosis {
    #[serde(flatten)]
    finding: Finding,
    essential: bool,
}

/// Looks at this machine. It fails if something is missing that every claim needs.
pub async fn run(global: &Global, verb: &Doctor) -> anyhow::Result<()> {
    let findings = examine().into_iter().chain([connections(&global.data)]);
    let findings = findings.chain(keeper(&global.data));
    let findings = findings.chain(unknown_copies(global).await);
    let diagnoses: Vec<Diagnosis> = findings.map(diagnosis).collect();
    let text = output::text(verb.output, &diagnoses, |_| {
        render(&diagnoses, output::colours())
    })?;
    output::print(&text)?;
    let missing = missing(&diagnoses);
    if !missing.is_empty() {
        bail!(
            "volumes cannot be used on this machine without: {}",
            missing.join(", ")
        );
    }
    Ok(())
}

/// Whether somebody waits for a volume that nobody serves.
fn connections(data: &Path) -> Finding {
    // The path as the service uses it, and as mounts show it.
    let data = data.canonicalize().unwrap_or_else(|_| data.to_owned());
    let (state, detail) = match tell_unserved(&data.join("run")) {
        Ok(unserved) if unserved.is_empty() => (FindingState::Present, "all are served".to_owned()),
        Ok(unserved) => (FindingState::Absent, unserved.join(" ")),
        Err(error) => (FindingState::Unknown, error.to_string()),
    };
    Finding {
        name: "servers of FUSE connections",
        state,
        detail,
        costs: "whoever uses the volume waits, and so does who asks about loop devices",
        remedy: "start trellis up: it serves the volume again, or ends the connection after a minute",
    }
}

/// Whether the keeper runs this program; nothing if there is no keeper.
fn keeper(data: &Path) -> Option<Finding> {
    let socket = Outliving::of(data).keeper_socket()?;
    let (state, detail) = match keeper_runs(&socket) {
        Ok(KeeperRuns::Same(build)) => (
            FindingState::Present,
            format!("it runs this build of version {}", build.version),
        ),
        Ok(KeeperRuns::Other {
            build,
            not_replaced,
        }) => {
            let why = not_replaced.as_deref().unwrap_or("it was not asked to yet");
            (
                FindingState::Absent,
                format!(
                    "it runs another build, of version {}, and was not replaced: {why}",
                    build.version
                ),
            )
        }
        Ok(KeeperRuns::Old) => (
            FindingState::Absent,
            "it runs an older build, which cannot replace itself".to_owned(),
        ),
        Err(error) => (FindingState::Unknown, error.to_string()),
    };
    Some(Finding {
        name: "the keeper's program",
        state,
        detail,
        costs: "what was changed in the keeper since; volumes are served all the same",
        remedy: "restart trellis up: it asks the keeper to run its program; or `trellis down --all`, which ends it",
    })
}

/// Whether the service knows every copy on its pools; nothing if there is no service to ask.
async fn unknown_copies(global: &Global) -> Option<Finding> {
    let service = connect(global).await.ok()?;
    let pools = Api::<Pool>::all(service.client.clone());
    let pools = pools.list(&ListParams::default()).await.ok()?;
    let unknown = pools.iter().filter_map(|pool| {
        let count = pool.status.as_ref()?.unknown_count;
        (count > 0).then(|| format!("{count} on pool {}", pool.name_any()))
    });
    let unknown: Vec<String> = unknown.collect();
    let all_known = unknown.is_empty();
    Some(Finding {
        name: "known copies",
        state: if all_known {
            FindingState::Present
        } else {
            FindingState::Absent
        },
        detail: if all_known {
            "every copy on the pools belongs to a volume that is stored".to_owned()
        } else {
            format!("copies that no object names: {}", unknown.join(", "))
        },
        costs: "the volumes of these copies; was the store lost, or restored from a backup?",
        remedy: "`trellis recover --from-pools`",
    })
}

fn diagnosis(finding: Finding) -> Diagnosis {
    let essential = ESSENTIAL.contains(&finding.name);
    Diagnosis { finding, essential }
}

fn missing(diagnoses: &[Diagnosis]) -> Vec<&'static str> {
    let absent = |each: &&Diagnosis| each.essential && each.finding.state == FindingState::Absent;
    diagnoses
        .iter()
        .filter(absent)
        .map(|each| each.finding.name)
        .collect()
}

fn render(diagnoses: &[Diagnosis], colours: bool) -> String {
    let mut table = Table::toned(&["WHAT", "STATE", "SEEN", "WITHOUT IT", "REMEDY"], "STATE");
    for each in diagnoses {
        let finding = &each.finding;
        let (state, tone) = match finding.state {
            FindingState::Present => ("ok", Tone::Good),
            FindingState::Unknown => ("unknown", Tone::Moving),
            FindingState::Absent if each.essential => ("MISSING", Tone::Bad),
            FindingState::Absent => ("absent", Tone::Moving),
        };
        let mut cells = vec![
            finding.name.to_owned(),
            state.to_owned(),
            finding.detail.clone(),
        ];
        // What is there needs neither a warning nor a remedy.
        if finding.state != FindingState::Present {
            cells.extend([finding.costs.to_owned(), finding.remedy.to_owned()]);
        }
        table.row(cells, Some(tone));
    }
    table.render(colours)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &'static str, state: FindingState) -> Diagnosis {
        diagnosis(Finding {
            name,
            state,
            detail: "seen".to_owned(),
            costs: "costs",
            remedy: "remedy",
        })
    }

    // Fails if something optional ends the verb with a failure, or something essential does not.
    #[test]
    fn only_what_is_essential_counts_as_missing() {
        let diagnoses = [
            found("FUSE", FindingState::Absent),
            found("kernel", FindingState::Unknown),
            found("mkfs.xfs", FindingState::Absent),
        ];
        assert_eq!(missing(&diagnoses), ["mkfs.xfs"]);
    }

    // Fails if a finding is renamed and the verb no longer knows that it is essential.
    #[test]
    fn everything_essential_is_looked_at() {
        let names: Vec<&str> = examine().iter().map(|finding| finding.name).collect();
        for name in ESSENTIAL {
            assert!(names.contains(&name), "{name} is not among {names:?}");
        }
    }
}
