//! `trellis df`: what every claim asked for, what it has, and how full it is.

use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Serialize;
use trellis_api::kinds::Usage;
use trellis_api::{Bytes, Hold};
use trellis_control::view::View;

use super::measured::ClaimNow;
use super::{changes, measured};
use crate::claim_view::{State, asks_for, load, load_all, reported, requested};
use crate::cli::{Df, Global};
use crate::connect::{Service, connect};
use crate::output::{self, Table, Tone, UNKNOWN, age, human_or_unknown};

/// How many claims are measured at the same time.
const MEASURED_AT_ONCE: usize = 16;

/// Shows claims and how full they are.
pub async fn run(global: &Global, verb: &Df) -> anyhow::Result<()> {
    let service = connect(global).await?;
    changes::show(&service.client, &verb.output, || answer(&service, verb)).await
}

async fn answer(service: &Service, verb: &Df) -> anyhow::Result<String> {
    let namespace = (!verb.all_namespaces).then_some(service.namespace.as_str());
    let views = match &verb.claim {
        Some(claim) if !verb.all_namespaces => vec![load(service, claim).await?],
        Some(claim) => {
            let mut views = load_all(&service.client, None).await?;
            views.retain(|view| {
                view.claim
                    .as_ref()
                    .is_some_and(|each| each.name_any() == *claim)
            });
            views
        }
        None => load_all(&service.client, namespace).await?,
    };
    let timely = measured::timely();
    let lines = futures::stream::iter(&views)
        .map(|view| async { Line::of(view, measured::claim(&timely, view).await) })
        .buffered(MEASURED_AT_ONCE);
    let lines: Vec<Line> = lines.collect().await;
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

/// One claim, as programs read it; sizes are exact.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    namespace: String,
    claim: String,
    requested: Option<Bytes>,
    capacity: Option<Bytes>,
    usage: Option<Usage>,
    use_percent: Option<u64>,
    /// Whether the usage was measured for this answer; otherwise its node reported it earlier.
    measured_now: bool,
    /// The space that its copies on this machine take on their disks.
    allocated: Option<Bytes>,
    state: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hold: Option<Hold>,
    paths: Vec<String>,
    class: Option<String>,
    filesystem: Option<&'static str>,
    devices: Vec<String>,
    pools: Vec<String>,
    volume: Option<String>,
    /// The size that it asks for, in words.
    #[serde(skip)]
    asks_for: String,
    #[serde(skip)]
    tone: Option<Tone>,
}

impl Line {
    fn of(view: &View, now: ClaimNow) -> Line {
        let state = State::of(view);
        let claim = view.claim.as_deref();
        let spec = claim.and_then(|claim| claim.spec.as_ref());
        let measured_now = now.usage.is_some();
        // What was not measured now is shown as its node last reported it, with its age.
        let told = view.stored.attachments.iter();
        let mut told = told.filter_map(|each| each.status.as_ref()?.usage.clone());
        let usage = now.usage.or_else(|| told.next());
        let devices = view
            .stored
            .attachments
            .iter()
            .filter_map(|each| each.status.as_ref()?.device.clone());
        let mut devices: Vec<String> = devices.collect();
        devices.dedup();
        let volume = view.stored.volume.as_ref();
        Line {
            namespace: claim
                .and_then(|claim| claim.namespace())
                .unwrap_or_default(),
            claim: claim.map(|claim| claim.name_any()).unwrap_or_default(),
            requested: requested(view),
            capacity: reported(view),
            use_percent: usage.as_ref().map(use_percent),
            usage,
            measured_now,
            allocated: now.allocated,
            tone: Some(state.tone()),
            paths: view
                .stored
                .attachments
                .iter()
                .map(|each| each.spec.consumer.path().to_owned())
                .collect(),
            class: spec.and_then(|spec| spec.storage_class_name.clone()),
            filesystem: volume.and_then(|volume| Some(volume.spec.filesystem?.name())),
            devices,
            pools: view
                .stored
                .replicas
                .iter()
                .map(|each| each.spec.pool.clone())
                .collect(),
            volume: volume.map(|volume| volume.name_any()),
            state: state.word().to_owned(),
            hold: state.fault().map(|held| held.hold.clone()),
            asks_for: asks_for(view, human_or_unknown),
        }
    }

    fn state_text(&self) -> String {
        match &self.hold {
            Some(hold) => format!("{} {}", self.state, hold.reason),
            None => self.state.clone(),
        }
    }
}

/// As df does: of what a user can have, rounded up, so that a full volume never shows less than 100 %.
fn use_percent(usage: &Usage) -> u64 {
    let used = u128::from(usage.used.get());
    let all = used + u128::from(usage.available.get());
    let percent = (used * 100)
        .checked_div(all)
        .map_or(0, |_| (used * 100).div_ceil(all));
    u64::try_from(percent).unwrap_or_default()
}

/// The age of the measurement: what could not be measured now may be from a while ago.
fn measured(line: &Line, now: Timestamp) -> Option<String> {
    if line.measured_now {
        return Some("now".to_owned());
    }
    let at = line.usage.as_ref()?.observed_at.as_ref()?;
    Some(format!("{} ago", age(at, now)))
}

fn render(lines: &[Line], namespaces: bool, wide: bool, now: Timestamp, colours: bool) -> String {
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
            line.claim.clone(),
            line.asks_for.clone(),
            human_or_unknown(line.capacity),
            human_or_unknown(usage.map(|usage| usage.used)),
            human_or_unknown(usage.map(|usage| usage.available)),
            known(line.use_percent.map(|percent| format!("{percent}%"))),
            known(measured(line, now)),
            line.state_text(),
            known(Some(line.paths.join(","))),
        ];
        if namespaces {
            cells.insert(0, line.namespace.clone());
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
        table.row(cells, line.tone);
    }
    table.render(colours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim_view::samples;

    fn lines() -> Vec<Line> {
        let views = [
            samples::mounted(2, 2),
            samples::mounted(1, 2),
            samples::refused(),
            samples::idle(),
            samples::pending(),
        ];
        views
            .iter()
            .map(|view| Line::of(view, ClaimNow::default()))
            .collect()
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

    // Fails if a full volume shows less than 100 %, or an empty one divides by nothing.
    #[test]
    fn use_is_rounded_up() {
        let usage = |used, available| Usage {
            used: Bytes::new(used),
            available: Bytes::new(available),
            inodes_used: 0,
            inodes_free: 0,
            observed_at: None,
        };
        assert_eq!(use_percent(&usage(1, 999)), 1);
        assert_eq!(use_percent(&usage(999, 1)), 100);
        assert_eq!(use_percent(&usage(0, 0)), 0);
    }
}
