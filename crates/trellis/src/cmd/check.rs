//! `trellis check`: looks at the copies on a pool directory and changes nothing.

use std::collections::HashSet;
use std::path::Path;

use anyhow::bail;
use kube::Api;
use kube::api::ListParams;
use serde::Serialize;
use trellis_api::about::About;
use trellis_api::kinds::Replica;
use trellis_engine::replica::{Report, Severity, check, check_data, survey};

use crate::claim_view;
use crate::cli::{Check, Global};
use crate::connect::connect;
use crate::output::{self, Table, Tone};

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
    let mut report = check(&verb.directory);
    if verb.read_data {
        let mut told = (String::new(), u64::MAX);
        check_data(&verb.directory, &mut report, &mut |copy, done, of| {
            let percent = done.get().saturating_mul(10) / of.get().max(1) * 10;
            if told != (copy.to_owned(), percent) {
                told = (copy.to_owned(), percent);
                eprintln!("{copy}: {percent} % of {} compared", output::human(of));
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
    let replicas = claim_view::list(replicas, &ListParams::default()).await?;
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

    // Fails if a directory that cannot be looked at passes for a sound pool.
    #[test]
    fn a_pool_that_is_not_there_is_damage() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        let found = checked("missing".to_owned(), &check(&missing));
        assert!(found.damaged);
        assert!(render(&found, false).contains("broken"));
    }

    // Fails if an empty pool is reported as if something were wrong with it.
    #[test]
    fn an_empty_pool_is_sound() {
        let dir = tempfile::tempdir().unwrap();
        let found = checked("pool".to_owned(), &check(dir.path()));
        assert_eq!(
            render(&found, false),
            "pool: 0 copies checked, nothing wrong\n"
        );
    }
}
