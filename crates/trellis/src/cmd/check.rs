//! `trellis check`: checks the copies on a pool directory and changes nothing.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{anyhow, bail};
use kube::Api;
use kube::api::ListParams;
use serde::Serialize;
use trellis_api::about::About;
use trellis_api::kinds::Replica;
use trellis_engine::replica::{Finding, Report, Severity, check, check_data, survey};

use crate::cli::{Check, Global};
use crate::connect::connect;
use crate::exit::Ended;
use crate::load::list;
use crate::output::{self, Table, Tone};

/// The parts of a pool. One of them exists from the first moment on.
const PARTS: [&str; 2] = ["pool-id", "replicas"];

/// What was found, for programs.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Checked {
    directory: String,
    replicas: usize,
    damaged: bool,
    findings: Vec<Found>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Found {
    severity: &'static str,
    message: String,
}

/// Checks a pool's directory. It fails if something needs a person.
pub async fn run(global: &Global, verb: &Check) -> anyhow::Result<()> {
    let directory = verb.directory.display().to_string();
    require_pool(&verb.directory)?;
    let mut report = check(&verb.directory);
    if let Some(error) = report.findings.iter().find_map(not_permitted) {
        return Err(no_permission(&verb.directory, error));
    }
    if verb.read_data {
        let mut told = (String::new(), u64::MAX);
        check_data(&verb.directory, &mut report, &mut |copy, done, of| {
            let percent = done.get().saturating_mul(10) / of.get().max(1) * 10;
            if told != (copy.to_owned(), percent) {
                told = (copy.to_owned(), percent);
                output::say(&format!(
                    "{copy}: {percent} % of {} compared",
                    output::human(of)
                ));
            }
        });
    }
    let mut checked = checked(directory, &report);
    let unknown = unknown(global, &verb.directory).await;
    checked.findings.extend(unknown);
    let text = output::text(verb.output, &checked, |_| {
        render(&checked, output::colours())
    })?;
    output::print(&text)?;
    if checked.damaged {
        bail!(
            "{} has damage that does not heal by itself",
            checked.directory
        );
    }
    Ok(())
}

/// Refuses a directory that is not a pool: that nothing is wrong with it would mean nothing.
fn require_pool(directory: &Path) -> anyhow::Result<()> {
    let shown = directory.display();
    let names = match std::fs::read_dir(directory) {
        Ok(entries) => entries.flatten().map(|entry| entry.file_name()),
        Err(error) => {
            return Err(match error.kind() {
                ErrorKind::NotFound => {
                    Ended::NotFound(format!("there is no directory {shown}")).into()
                }
                ErrorKind::NotADirectory => {
                    Ended::NotFound(format!("{shown} is no directory, so it is no pool")).into()
                }
                ErrorKind::PermissionDenied => no_permission(directory, &error),
                _ => anyhow::Error::new(error).context(format!("{shown} cannot be read")),
            });
        }
    };
    if names
        .into_iter()
        .any(|name| PARTS.iter().any(|part| name == *part))
    {
        return Ok(());
    }
    let text = format!(
        "{shown} is no pool: it has neither {}; `trellis pool ls -o wide` shows where pools are",
        PARTS.join(" nor ")
    );
    Err(Ended::NotFound(text).into())
}

/// What the user may not read says nothing about its condition.
fn no_permission(directory: &Path, error: &dyn std::error::Error) -> anyhow::Error {
    anyhow!(
        "{} cannot be checked: permission denied ({error}); run this as root. Nothing was found out about its copies",
        directory.display()
    )
}

/// Why something could not be read, if this user may not.
fn not_permitted(finding: &Finding) -> Option<&(dyn std::error::Error + 'static)> {
    let Finding::Unusable { error } = finding else {
        return None;
    };
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(next) = cause {
        let io = next.downcast_ref::<std::io::Error>();
        if io.is_some_and(|io| io.kind() == ErrorKind::PermissionDenied) {
            return Some(error);
        }
        cause = next.source();
    }
    None
}

/// The copies that the service does not know. Without a service there is nobody to ask.
async fn unknown(global: &Global, directory: &Path) -> Vec<Found> {
    let found = |message: String| Found {
        severity: "unknown",
        message,
    };
    let Ok(survey) = survey(directory) else {
        return Vec::new();
    };
    let known = match known(global).await {
        Ok(known) => known,
        Err(_) if survey.copies.is_empty() => return Vec::new(),
        Err(error) => {
            let count = survey.copies.len();
            let message = format!(
                "no service could be asked whether it knows the {count} copies ({error:#})"
            );
            return vec![Found {
                severity: "note",
                message,
            }];
        }
    };
    let strangers = survey.copies.into_iter().filter(|copy| {
        let id = copy.identity.replica.to_string();
        !known.contains(&id)
    });
    strangers
        .map(|copy| {
            let about = copy.about.as_deref();
            let about: Option<About> = about.and_then(|text| serde_json::from_slice(text).ok());
            let claim = about.map(|about| format!("claim {}/{}", about.namespace, about.claim));
            found(format!(
                "{} holds {} of {} and is known to no object of the service; it is kept, and `trellis recover \
                 --from-pools` takes it in",
                copy.path.display(),
                output::human(copy.size),
                claim.unwrap_or_else(|| "a claim that it does not name".to_owned()),
            ))
        })
        .collect()
}

/// The identities of all copies that the service knows.
async fn known(global: &Global) -> anyhow::Result<HashSet<String>> {
    let service = connect(global).await?;
    let replicas = Api::<Replica>::all(service.client.clone());
    let replicas = list(replicas, &ListParams::default()).await?;
    Ok(replicas.iter().map(Replica::identity).collect())
}

fn checked(directory: String, report: &Report) -> Checked {
    let findings = report.findings.iter().map(|finding| Found {
        severity: match finding.severity() {
            Severity::Note => "note",
            Severity::Healable => "healable",
            Severity::Broken => "broken",
        },
        message: finding.to_string(),
    });
    Checked {
        directory,
        replicas: report.replicas,
        damaged: report.worst() == Some(Severity::Broken),
        findings: findings.collect(),
    }
}

fn render(checked: &Checked, colours: bool) -> String {
    let copies = if checked.replicas == 1 {
        "copy"
    } else {
        "copies"
    };
    let summary = format!(
        "{}: {} {copies} checked",
        checked.directory, checked.replicas
    );
    if checked.findings.is_empty() {
        return format!("{summary}, nothing wrong\n");
    }
    let mut table = Table::toned(&["SEVERITY", "FINDING"], "SEVERITY");
    for found in &checked.findings {
        let tone = match found.severity {
            "note" => Tone::Good,
            "healable" | "unknown" => Tone::Moving,
            _ => Tone::Bad,
        };
        table.row(
            vec![found.severity.to_owned(), found.message.clone()],
            Some(tone),
        );
    }
    format!("{summary}\n{}", table.render(colours))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    // Fails if something that is no pool passes for a sound one, or for a damaged one.
    #[test]
    fn what_is_no_pool_is_said_to_be_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        for none in [dir.path(), &file, &dir.path().join("missing")] {
            let error = require_pool(none).unwrap_err();
            let ended = error.downcast_ref::<Ended>().map(Ended::code);
            assert_eq!(ended, Some(4), "{error}");
        }
    }

    // Fails if an empty pool is reported as if something were wrong with it.
    #[test]
    fn an_empty_pool_is_sound() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("pool-id"), "").unwrap();
        require_pool(dir.path()).unwrap();
        let found = checked("pool".to_owned(), &check(dir.path()));
        assert_eq!(
            render(&found, false),
            "pool: 0 copies checked, nothing wrong\n"
        );
    }
}
