//! The alert rules that we hand out: Prometheus' own program takes them and plays cases to them, and they name no metric
//! that is not documented.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::Command;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn rules() -> PathBuf {
    Path::new(ROOT).join("examples/prometheus/alerts.yaml")
}

fn cases() -> PathBuf {
    Path::new(ROOT).join("crates/trellis/tests/alerts/cases.yaml")
}

fn promtool(arguments: &[&str], file: &Path) {
    let output = Command::new("promtool").args(arguments).arg(file).output();
    let output = output.expect("promtool is installed by `make setup`");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

// Fails if Prometheus would refuse the rules, or if an alert does not come, or comes for a volume that is well.
#[test]
fn the_alerts_fire_when_they_should() {
    promtool(&["check", "rules"], &rules());
    let directory = tempfile::tempdir().unwrap();
    std::fs::copy(rules(), directory.path().join("alerts.yaml")).unwrap();
    let played = directory.path().join("cases.yaml");
    std::fs::copy(cases(), &played).unwrap();
    promtool(&["test", "rules"], &played);
}

// Fails if there is an alert that no case expects: nobody would know whether it ever comes.
#[test]
fn every_alert_comes_in_some_case() {
    let text = std::fs::read_to_string(rules()).unwrap();
    let alerts = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    let alerts: Vec<&str> = alerts.collect();
    let played = std::fs::read_to_string(cases()).unwrap();
    assert!(alerts.len() >= 14, "{alerts:?}");
    for alert in alerts {
        // Only what a case expects has this label in single quotes.
        let expected = format!("- labels: '{{alertname=\"{alert}\"");
        assert!(played.contains(&expected), "no case for {alert}");
    }
}

/// The names of metrics in a text.
fn metrics(text: &str) -> Vec<String> {
    let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = text.split(|letter| !is_of_name(letter));
    let ours = |word: &&str| word.starts_with("trellis_") || word.starts_with("kubelet_volume_");
    words.filter(ours).map(str::to_owned).collect()
}

// Fails if an alert watches a metric that nobody serves, so that it could never come.
#[test]
fn every_metric_of_an_alert_is_documented() {
    let text = std::fs::read_to_string(rules()).unwrap();
    let page = std::fs::read_to_string(Path::new(ROOT).join("docs/metrics.md")).unwrap();
    let documented = metrics(&page);
    let watched = metrics(&text);
    assert!(watched.len() >= 15, "{watched:?}");
    for name in watched {
        assert!(documented.contains(&name), "{name} is not documented");
    }
}
