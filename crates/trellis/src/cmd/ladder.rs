//! `trellis ladder`: the size of every layer of a claim, as measured: the trunk, then a branch for each use.

use std::collections::BTreeSet;

use k8s_openapi::jiff::Timestamp;
use trellis_control::view::{Held, Ladder, Origin, RungView};

use super::changes;
use crate::cli::{Global, Ladder as Verb};
use crate::connect::connect;
use crate::load::load;
use crate::output::{self, Table, UNKNOWN, age, bar, precise, precise_or_unknown, took};
use crate::words::{
    asks_for, branch_state, branch_title, rung_state, rung_title, tone_of_branch, tone_of_rung,
    uses_behind,
};

/// Shows the ladder of a claim.
pub async fn run(global: &Global, verb: &Verb) -> anyhow::Result<()> {
    let service = connect(global).await?;
    changes::show(&service.client, &verb.output, || async {
        let now = Timestamp::now();
        let ladder = Ladder::of(&load(&service, &verb.claim).await?, now);
        output::text(verb.output.output, &ladder, |_| {
            render(&ladder, now, output::colours())
        })
    })
    .await
}

fn render(ladder: &Ladder, now: Timestamp, colours: bool) -> String {
    let head = &ladder.head;
    let mut text = format!(
        "claim {}/{} asks for {} and has {}\n",
        head.namespace,
        head.claim,
        asks_for(head, precise_or_unknown),
        precise_or_unknown(head.capacity),
    );
    match &head.origin {
        Origin::Other(provisioner) => text.push_str(&format!(
            "it belongs to another provisioner, {provisioner}; nothing of it is measured here\n"
        )),
        Origin::ByHand(volume) => text.push_str(&format!(
            "it has the PersistentVolume {volume:?}, which was made by hand; nothing of it is measured here\n"
        )),
        Origin::Ours if ladder.trunk.is_empty() && ladder.branches.is_empty() => {
            text.push_str("nothing has been measured yet\n");
        }
        Origin::Ours => text.push_str(&drawn(ladder, now, colours)),
    }
    for rung in &ladder.rungs {
        if let Some(note) = &rung.note {
            text.push_str(&format!("note on the {}: {note}\n", rung.rung));
        }
    }
    text.push_str(&holds(ladder));
    text
}

/// Trunk and branches, in one table.
fn drawn(ladder: &Ladder, now: Timestamp, colours: bool) -> String {
    let header = ["RUNG", "SIZE", "OF WANTED", "MEASURED", "TOOK", "STATE"];
    let mut table = Table::toned(&header, "STATE");
    let is_spread = is_on_several_nodes(ladder);
    let row = |table: &mut Table, title: String, rung: &RungView| {
        let measured = rung.observed_at.as_ref();
        let cells = vec![
            title,
            precise(rung.size),
            bar(rung.size, ladder.head.goal),
            measured.map_or_else(|| UNKNOWN.to_owned(), |at| format!("{} ago", age(at, now))),
            rung.took_micros.map_or_else(|| UNKNOWN.to_owned(), took),
            rung_state(rung),
        ];
        table.row(cells, Some(tone_of_rung(rung.state)));
    };
    for rung in &ladder.trunk {
        let word = if rung.pool.is_some() { "of" } else { "on" };
        let node = rung.node.as_ref().filter(|_| is_spread);
        let node = node.map(|node| format!(" {word} node {node}"));
        let title = rung_title(rung) + &node.unwrap_or_default();
        row(&mut table, title, rung);
    }
    for branch in &ladder.branches {
        let state = (branch_state(branch), tone_of_branch(branch.state));
        table.heading(branch_title(branch), Some(state));
        for rung in &branch.rungs {
            row(&mut table, format!("  {}", rung_title(rung)), rung);
        }
    }
    if ladder.branches.is_empty() {
        table.heading("nobody uses it".to_owned(), None);
    } else if ladder.idle.is_some() {
        table.heading("nothing is attached".to_owned(), None);
    }
    if let Some(rung) = &ladder.idle {
        row(&mut table, format!("  {}", rung_title(rung)), rung);
    }
    table.render(colours)
}

/// Whether it has to be said where the trunk is: it is not all on the one node that uses the volume.
fn is_on_several_nodes(ladder: &Ladder) -> bool {
    let trunk = ladder.trunk.iter().filter_map(|rung| rung.node.as_ref());
    let uses = ladder.branches.iter().map(|branch| &branch.node);
    let nodes: BTreeSet<&String> = trunk.chain(uses).collect();
    nodes.len() > 1
}

/// What holds the claim, what its copies lack, and what holds uses besides.
fn holds(ladder: &Ladder) -> String {
    let mut text = String::new();
    let several = uses_behind(&ladder.branches);
    text.extend(several.iter().map(|line| format!("{line}\n")));
    let of_uses = ladder.branches.iter().filter_map(|branch| {
        let held = branch.hold.as_ref()?;
        (Some(held) != ladder.hold.as_ref()).then_some(held)
    });
    let all = ladder.hold.iter().chain(of_uses).chain(&ladder.degraded);
    for held in all {
        let place = several.as_ref().and_then(|_| place_of(held));
        text.push_str(&format!(
            "{}{}: {}\nwhat to do: {}\n",
            place.unwrap_or_default(),
            held.hold.reason,
            held.hold.message,
            held.action
        ));
    }
    text
}

/// Which of several uses is held.
fn place_of(held: &Held) -> Option<String> {
    let (path, node) = held.path.as_ref().zip(held.node.as_ref())?;
    Some(format!("{path} on node {node}: "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_control::view::scenario::{self, Scenario};

    fn rendered(scenario: Scenario) -> String {
        let ladder = Ladder::of(&scenario.stored(), scenario::now());
        render(&ladder, scenario::now(), false)
    }

    // Fails if a rung is missing, out of order, or shown with another size or state than was measured.
    #[test]
    fn a_mounted_claim_shows_every_rung() {
        insta::assert_snapshot!(rendered(Scenario::OneUse));
    }

    // Fails if a rung counts as risen before it was measured, or one above it as next.
    #[test]
    fn a_growth_under_way_shows_which_rung_is_next() {
        insta::assert_snapshot!(rendered(Scenario::Growing));
    }

    // Fails if a growth that was refused looks as if it were under way.
    #[test]
    fn a_refused_growth_is_held_at_the_replica() {
        insta::assert_snapshot!(rendered(Scenario::Refused));
    }

    // Fails if the filesystem of an idle volume is left out, looks as if it were growing, or if it is not said that
    // nobody uses the volume.
    #[test]
    fn an_idle_filesystem_grows_when_mounted() {
        insta::assert_snapshot!(rendered(Scenario::UnusedBehind));
    }

    // Fails if the trunk is drawn for each use, a use is left out, or the one that is held hides that the other is done.
    #[test]
    fn two_uses_are_two_branches() {
        insta::assert_snapshot!(rendered(Scenario::TwoUsesOneHeld));
    }

    // Fails if a use that waits for its turn is not shown, or looks as if it had rungs.
    #[test]
    fn a_use_that_waits_is_a_branch_without_rungs() {
        insta::assert_snapshot!(rendered(Scenario::OneUseWaits));
    }

    // Fails if it is not said on which nodes the copies are, or since when one of them is silent.
    #[test]
    fn copies_on_other_nodes_say_where_they_are() {
        insta::assert_snapshot!(rendered(Scenario::OneCopySilent));
    }

    // Fails if a field of the documented structure is renamed or its form changes.
    #[test]
    fn the_structure_for_programs_is_stable() {
        let of = |scenario: Scenario| Ladder::of(&scenario.stored(), scenario::now());
        insta::assert_json_snapshot!(of(Scenario::Refused));
        insta::assert_json_snapshot!("two_uses_for_programs", of(Scenario::TwoUsesOneHeld));
    }
}
