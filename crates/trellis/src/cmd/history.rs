//! `trellis history`: who grew a claim, when, from what to what, and how long each layer took.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use trellis_api::kinds::{GrowthRecord, GrowthResult, RecoveryRecord};

use super::changes;
use crate::cli::{Global, OneClaim};
use crate::connect::connect;
use crate::load::load;
use crate::output::{self, Table, Tone, UNKNOWN, precise, took};

/// Shows the growths of a claim that are over, newest last.
pub async fn run(global: &Global, verb: &OneClaim) -> anyhow::Result<()> {
    let service = connect(global).await?;
    changes::show(&service.client, &verb.output, || async {
        let look = load(&service, &verb.claim).await?;
        let status = look.stored.volume.and_then(|volume| volume.status.clone());
        let status = status.unwrap_or_default();
        let records = &status.growths;
        output::text(verb.output.output, records, |_| {
            let growths = render(&verb.claim, records, output::colours());
            growths + &recoveries(&status.recoveries)
        })
    })
    .await
}

fn render(claim: &str, records: &[GrowthRecord], colours: bool) -> String {
    if records.is_empty() {
        return format!("claim {claim} has not been grown yet\n");
    }
    let header = ["WHO", "WHEN", "FROM", "TO", "TOOK", "RUNGS", "RESULT"];
    let mut table = Table::toned(&header, "RESULT");
    for record in records {
        let rungs: Vec<String> = record
            .rungs
            .iter()
            .map(|time| format!("{} {}", time.rung, took(time.micros)))
            .collect();
        let (result, tone) = match record.result {
            GrowthResult::Succeeded => ("succeeded", Tone::Good),
            GrowthResult::Replaced => ("replaced", Tone::Moving),
            GrowthResult::Cancelled => ("cancelled", Tone::Moving),
        };
        let cells = vec![
            record.by.clone(),
            record
                .requested_at
                .0
                .strftime("%Y-%m-%d %H:%M:%SZ")
                .to_string(),
            precise(record.from),
            precise(record.to),
            took(micros_between(&record.requested_at, &record.finished_at)),
            if rungs.is_empty() {
                UNKNOWN.to_owned()
            } else {
                rungs.join(", ")
            },
            match record.behind.as_slice() {
                [] => result.to_owned(),
                pools => format!("{result}, behind: {}", pools.join(", ")),
            },
        ];
        table.row(cells, Some(tone));
    }
    table.render(colours)
}

/// A line for every time that copies were given up.
fn recoveries(records: &[RecoveryRecord]) -> String {
    let line = |record: &RecoveryRecord| {
        let recovery = &record.recovery;
        format!(
            "{} {} gave up {} and went on with {} copies (history {})\n",
            recovery.at.0.strftime("%Y-%m-%d %H:%M:%SZ"),
            recovery.by,
            recovery.given_up.len(),
            recovery.survivors.len(),
            recovery.lineage
        )
    };
    records.iter().map(line).collect()
}

/// If the clock was set back in between, there is no time to show.
fn micros_between(from: &MicroTime, to: &MicroTime) -> u64 {
    let micros =
        to.0.as_microsecond()
            .saturating_sub(from.0.as_microsecond());
    u64::try_from(micros).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_control::view::scenario;

    // Fails if a growth is shown without who, when, how long or how it ended.
    #[test]
    fn every_growth_is_told_with_its_times() {
        insta::assert_snapshot!(render("data", &scenario::growths(), false));
    }
}
