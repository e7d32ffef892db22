//! `trellis df`: what every claim asked for, what it has, and how full it is.

use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use trellis_control::view::ClaimLine;

use super::{changes, measured};
use crate::cli::{Df, Global};
use crate::connect::{Service, connect};
use crate::load::{load, load_all};
use crate::output::{self, Table, UNKNOWN, age, human_or_unknown};
use crate::words::{asks_for, tone_of_state};

/// How many claims are measured at the same time.
const MEASURED_AT_ONCE: usize = 16;

/// Shows claims and how full they are.
pub async fn run(global: &Global, verb: &Df) -> anyhow::Result<()> {
    let service = connect(global).await?;
    changes::show(&service.client, &verb.output, || answer(&service, verb)).await
}

async fn answer(service: &Service, verb: &Df) -> anyhow::Result<String> {
    let namespace = (!verb.all_namespaces).then_some(service.namespace.as_str());
    let looks = match &verb.claim {
        Some(claim) if !verb.all_namespaces => vec![load(service, claim).await?],
        Some(claim) => {
            let mut looks = load_all(&service.client, None).await?;
            looks.retain(|look| {
                look.claim
                    .as_ref()
                    .is_some_and(|each| each.name_any() == *claim)
            });
            looks
        }
        None => load_all(&service.client, namespace).await?,
    };
    let timely = measured::timely();
    let lines = futures::stream::iter(&looks)
        .map(|look| async {
            let measured = measured::claim(&timely, look).await;
            ClaimLine::of(look, measured, Timestamp::now())
        })
        .buffered(MEASURED_AT_ONCE);
    let lines: Vec<ClaimLine> = lines.collect().await;
    output::text(verb.output.output, &lines, |wide| {
        if lines.is_empty() {
            return match namespace {
                Some(namespace) => format!("no claims in namespace {namespace}\n"),
                None => "no claims\n".to_owned(),
            };
        }
        let now = Timestamp::now();
        render(&lines, verb.all_namespaces, wide, now, output::colours())
    })
}

/// The age of the measurement: what could not be measured now may be from a while ago.
fn measured(line: &ClaimLine, now: Timestamp) -> Option<String> {
    if line.measured_now {
        return Some("now".to_owned());
    }
    let at = line.usage.as_ref()?.observed_at.as_ref()?;
    Some(format!("{} ago", age(at, now)))
}

fn render(
    lines: &[ClaimLine],
    namespaces: bool,
    wide: bool,
    now: Timestamp,
    colours: bool,
) -> String {
    let mut header = vec![
        "CLAIM",
        "REQUESTED",
        "SIZE",
        "USED",
        "AVAIL",
        "USE%",
        "MEASURED",
        "STATE",
        "PATH",
    ];
    if namespaces {
        header.insert(0, "NAMESPACE");
    }
    if wide {
        header.extend(["IUSED", "IFREE", "ON DISK"]);
        header.extend(["CLASS", "FILESYSTEM", "DEVICE", "POOL", "VOLUME"]);
    }
    let known = |text: Option<String>| {
        text.filter(|text| !text.is_empty())
            .unwrap_or_else(|| UNKNOWN.to_owned())
    };
    let mut table = Table::toned(&header, "STATE");
    for line in lines {
        let usage = line.usage.as_ref();
        let mut cells = vec![
            line.head.claim.clone(),
            asks_for(&line.head, human_or_unknown),
            human_or_unknown(line.head.capacity),
            human_or_unknown(usage.map(|usage| usage.used)),
            human_or_unknown(usage.map(|usage| usage.available)),
            known(line.use_percent.map(|percent| format!("{percent}%"))),
            known(measured(line, now)),
            line.state.to_string(),
            known(Some(line.paths.join(","))),
        ];
        if namespaces {
            cells.insert(0, line.head.namespace.clone());
        }
        if wide {
            cells.extend([
                known(usage.map(|usage| usage.inodes_used.to_string())),
                known(usage.map(|usage| usage.inodes_free.to_string())),
                human_or_unknown(line.allocated),
                known(line.class.clone()),
                known(line.filesystem.map(str::to_owned)),
                known(Some(line.devices.join(","))),
                known(Some(line.pools.join(","))),
                known(line.volume.clone()),
            ]);
        }
        table.row(cells, Some(tone_of_state(&line.state)));
    }
    table.render(colours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_control::view::ClaimNow;
    use trellis_control::view::scenario::Scenario;

    fn lines() -> Vec<ClaimLine> {
        let scenarios = [
            Scenario::OneUse,
            Scenario::Growing,
            Scenario::Refused,
            Scenario::UnusedBehind,
            Scenario::Pending,
        ];
        let line = |each: Scenario| ClaimLine::of(&each.stored(), ClaimNow::default(), now());
        scenarios.into_iter().map(line).collect()
    }

    /// Three minutes after the sample was measured.
    fn now() -> Timestamp {
        "2026-11-15T12:03:00Z".parse().expect("a time")
    }

    // Fails if a claim's state, sizes or usage are shown in the wrong column or not at all.
    #[test]
    fn every_state_has_its_line() {
        insta::assert_snapshot!(render(&lines(), false, false, now(), false));
    }

    // Fails if a wide column is lost.
    #[test]
    fn wide_shows_where_the_bytes_are() {
        insta::assert_snapshot!(render(&lines()[..1], true, true, now(), false));
    }
}
