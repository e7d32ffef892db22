//! `trellis ladder`: the size of every layer of a claim, as measured.

use k8s_openapi::jiff::Timestamp;
use trellis_control::view::View;

use super::changes;
use crate::claim_view::health::{made_by_hand, other_provisioner};
use crate::claim_view::ladder::{Ladder, ladder};
use crate::claim_view::{asks_for, goal, load};
use crate::cli::{Global, Ladder as Verb};
use crate::connect::connect;
use crate::output::{self, Table, UNKNOWN, age, bar, precise, precise_or_unknown, took};

/// Shows the ladder of a claim.
pub async fn run(global: &Global, verb: &Verb) -> anyhow::Result<()> {
    let service = connect(global).await?;
    changes::show(&service.client, &verb.output, || async {
        let view = load(&service, &verb.claim).await?;
        let ladder = ladder(&view);
        output::text(verb.output.output, &ladder, |_| {
            render(&view, &ladder, Timestamp::now(), output::colours())
        })
    })
    .await
}

fn render(view: &View, ladder: &Ladder, now: Timestamp, colours: bool) -> String {
    let want = goal(view);
    let mut text = format!(
        "claim {}/{} asks for {} and has {}\n",
        ladder.namespace,
        ladder.claim,
        asks_for(view, precise_or_unknown),
        precise_or_unknown(ladder.capacity),
    );
    if let Some(provisioner) = other_provisioner(view) {
        text.push_str(&format!(
            "it belongs to another provisioner, {provisioner}; nothing of it is measured here\n"
        ));
    } else if let Some(volume) = made_by_hand(view) {
        text.push_str(&format!(
            "it has the PersistentVolume {volume:?}, which was made by hand; nothing of it is measured here\n"
        ));
    } else if ladder.rungs.is_empty() {
        text.push_str("nothing has been measured yet\n");
    } else {
        let header = ["RUNG", "SIZE", "OF WANTED", "MEASURED", "TOOK", "STATE"];
        let mut table = Table::toned(&header, "STATE");
        for rung in &ladder.rungs {
            let measured = rung.observed_at.as_ref();
            let cells = vec![
                rung.title(),
                precise(rung.size),
                bar(rung.size, want),
                measured.map_or_else(|| UNKNOWN.to_owned(), |at| format!("{} ago", age(at, now))),
                rung.took_micros.map_or_else(|| UNKNOWN.to_owned(), took),
                rung.state_text(),
            ];
            table.row(cells, Some(rung.state.tone()));
        }
        text.push_str(&table.render(colours));
        for rung in &ladder.rungs {
            if let Some(note) = &rung.note {
                text.push_str(&format!("note on the {}: {note}\n", rung.rung));
            }
        }
    }
    for held in ladder.hold.iter().chain(&ladder.degraded) {
        let hold = &held.hold;
        text.push_str(&format!(
            "{}: {}\nwhat to do: {}\n",
            hold.reason, hold.message, held.action
        ));
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::claim_view::samples;

    fn rendered(view: &View) -> String {
        render(view, &ladder(view), samples::now(), false)
    }

    // Fails if a rung is missing, out of order, or shown with another size or state than was measured.
    #[test]
    fn a_mounted_claim_shows_every_rung() {
        insta::assert_snapshot!(rendered(&samples::mounted(2, 2)));
    }

    // Fails if a rung counts as risen before it was measured, or one above it as next.
    #[test]
    fn a_growth_under_way_shows_which_rung_is_next() {
        insta::assert_snapshot!(rendered(&samples::mounted(1, 2)));
    }

    // Fails if a growth that was refused looks as if it were under way.
    #[test]
    fn a_refused_growth_is_held_at_the_replica() {
        insta::assert_snapshot!(rendered(&samples::refused()));
    }

    // Fails if the filesystem of an idle volume is left out, or looks as if it were growing.
    #[test]
    fn an_idle_filesystem_grows_when_mounted() {
        insta::assert_snapshot!(rendered(&samples::idle()));
    }

    // Fails if a field of the documented structure is renamed or its form changes.
    #[test]
    fn the_structure_for_programs_is_stable() {
        insta::assert_json_snapshot!(ladder(&samples::refused()));
    }
}
