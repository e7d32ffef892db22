//! `trellis check`: looks at the copies on a pool directory and changes nothing.

use anyhow::bail;
use serde::Serialize;
use trellis_engine::replica::{Report, Severity, check};

use crate::cli::Check;
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
pub fn run(verb: &Check) -> anyhow::Result<()> {
    let directory = verb.directory.display().to_string();
    let checked = checked(directory, &check(&verb.directory));
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
            "healable" => Tone::Moving,
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
