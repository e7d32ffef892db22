//! `trellis explain`: what is wrong with a claim, and what to do about it.

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use trellis_control::stored::StoredClaim;
use trellis_control::view::{Branch, Explanation, Held, Origin, RungView, State};

use super::changes;
use super::shortage::{self, Space};
use crate::cli::{Global, OneClaim};
use crate::connect::connect;
use crate::load::load;
use crate::output::{self, human, precise, precise_or_unknown};
use crate::words::{self, asks_for, branch_state, branch_title, rung_title, uses_behind};

/// Explains the state of a claim; a claim that is held gives the exit code of a hold.
pub async fn run(global: &Global, verb: &OneClaim) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let explain = || async {
        let look = load(&service, &verb.claim).await?;
        let space = shortage::measure(&service, &look).await;
        anyhow::Ok(explained(&look, &space, Timestamp::now()))
    };
    if verb.output.watch {
        return changes::show(&service.client, &verb.output, || async {
            answer(&explain().await?, verb)
        })
        .await;
    }
    let explanation = explain().await?;
    output::print(&answer(&explanation, verb)?)?;
    match explanation.state.fault() {
        Some(held) => output::end_held(held.hold.clone()),
        None => Ok(()),
    }
}

fn explained(look: &StoredClaim, space: &Space, now: Timestamp) -> Explanation {
    Explanation::of(look, &space.claim, &space.pools, now)
}

/// The explanation for programs.
#[derive(Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    explanation: &'a Explanation,
    /// What is full or gone below the claim, each in a sentence.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shortages: Vec<String>,
}

fn answer(explanation: &Explanation, verb: &OneClaim) -> anyhow::Result<String> {
    let shortages = explanation.shortages.iter().map(words::shortage);
    let answer = Answer {
        explanation,
        shortages: shortages.collect(),
    };
    output::text(verb.output.output, &answer, |_| {
        render(explanation, &answer.shortages)
    })
}

/// Lines like those of `zpool status`: a word, a colon, what it is.
fn render(explanation: &Explanation, shortages: &[String]) -> String {
    let head = &explanation.head;
    let mut lines = Lines::default();
    lines.add("claim", &format!("{}/{}", head.namespace, head.claim));
    lines.add("state", explanation.state.word());
    lines.add("asks for", &asks_for(head, precise_or_unknown));
    lines.add("has", &precise_or_unknown(head.capacity));
    if let Some(held) = &explanation.hold {
        lines.add_hold(held);
    }
    if let Some(lacks) = &explanation.copies {
        lines.add("copies", lacks);
    }
    lines.add_rungs(explanation);
    if let Some(usage) = &explanation.usage {
        let (used, available) = (human(usage.used), human(usage.available));
        lines.add("in use", &format!("{used}, {available} available"));
    }
    for shortage in shortages {
        lines.add("shortage", shortage);
    }
    if explanation.hold.is_none() {
        lines.add("verdict", &verdict(explanation));
    }
    lines.text
}

/// "All is well" is said only of what was measured.
fn verdict(explanation: &Explanation) -> String {
    match &explanation.head.origin {
        Origin::Other(provisioner) => {
            return format!(
                "It belongs to another provisioner, {provisioner}: Trellis neither serves, measures nor grows it. Ask there."
            );
        }
        Origin::ByHand(volume) => {
            return format!(
                "It has the PersistentVolume {volume:?}, which was made by hand: Trellis neither measures nor grows it."
            );
        }
        Origin::Ours => {}
    }
    let text = match explanation.state {
        State::Bound if !explanation.shortages.is_empty() => {
            "Every layer was measured at the size that is asked for, but there is a shortage."
        }
        State::Bound => "All is well: every layer was measured at the size that is asked for.",
        State::Growing => "A growth is under way and nothing holds it; see `trellis ladder`.",
        State::Pending => "Its volume is being made and nothing holds it.",
        State::Terminating => "It is being deleted and nothing holds it.",
        State::Held(_) | State::Degraded(_) | State::Foreign(_) | State::Lost => {
            "The volume that it was bound to no longer exists."
        }
    };
    text.to_owned()
}

#[derive(Default)]
struct Lines {
    text: String,
}

impl Lines {
    fn add(&mut self, word: &str, what: &str) {
        self.text.push_str(&format!("{word:>10}: {what}\n"));
    }

    fn add_hold(&mut self, held: &Held) {
        if let Some(place) = words::held_at(held) {
            self.add("held at", &place);
        }
        let code = held.hold.reason.code();
        self.add("code", code);
        self.add("why", held.hold.reason.sentence());
        if !held.hold.message.is_empty() {
            self.add("this case", &held.hold.message);
        }
        self.add("what to do", held.action);
        self.add("see", &format!("docs/holds.md#{}", code.to_lowercase()));
    }

    /// The trunk, and a line for each use.
    fn add_rungs(&mut self, explanation: &Explanation) {
        if explanation.trunk.is_empty() && explanation.branches.is_empty() {
            return;
        }
        if !explanation.trunk.is_empty() {
            self.add("measured", &sizes(&explanation.trunk));
        }
        for branch in &explanation.branches {
            self.add("use", &used(branch, explanation.hold.as_ref()));
        }
        let idle = explanation.idle.as_slice();
        match (explanation.branches.is_empty(), idle.is_empty()) {
            (true, true) => self.add("use", "nobody uses it"),
            (true, false) => self.add("use", &format!("nobody uses it; {}", sizes(idle))),
            (false, false) => self.add("at rest", &sizes(idle)),
            (false, true) => {}
        }
        if let Some(behind) = uses_behind(&explanation.branches) {
            self.add("uses", &behind);
        }
    }
}

/// One use in a line. What holds it is told in full unless the claim's hold already is that.
fn used(branch: &Branch, told: Option<&Held>) -> String {
    let mut text = branch_title(branch);
    if !branch.rungs.is_empty() {
        text.push_str(&format!(": {}", sizes(&branch.rungs)));
    }
    text.push_str(&format!("; {}", branch_state(branch)));
    if let Some(held) = branch.hold.as_ref().filter(|held| Some(*held) != told) {
        text.push_str(&format!(": {} {}", held.hold.message, held.action));
    }
    text
}

fn sizes(rungs: &[RungView]) -> String {
    let sizes = rungs
        .iter()
        .map(|rung| format!("{} {}", rung_title(rung), precise(rung.size)));
    sizes.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_control::view::scenario::{self, Scenario};

    fn text(scenario: Scenario) -> String {
        render(
            &explained(&scenario.stored(), &Space::default(), scenario::now()),
            &[],
        )
    }

    // Fails if a hold is explained without its rung, code, case or action.
    #[test]
    fn a_held_claim_is_explained_in_full() {
        insta::assert_snapshot!(text(Scenario::Refused));
    }

    // Fails if a claim that is well looks as if something were the matter.
    #[test]
    fn a_claim_that_is_well_is_said_to_be() {
        insta::assert_snapshot!(text(Scenario::OneUse));
    }

    // Fails if a claim that cannot be provisioned does not say why.
    #[test]
    fn a_pending_claim_says_what_it_waits_for() {
        insta::assert_snapshot!(text(Scenario::Pending));
    }

    // Fails if it is not said which use is held and that the other is done.
    #[test]
    fn of_two_uses_the_one_that_is_held_is_named() {
        insta::assert_snapshot!(text(Scenario::TwoUsesOneHeld));
    }

    // Fails if a volume that nobody uses does not say so, or hides its filesystem.
    #[test]
    fn an_unused_claim_says_that_nobody_uses_it() {
        insta::assert_snapshot!(text(Scenario::Unused));
    }
}
