//! `trellis explain`: what is wrong with a claim, and what to do about it.

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use trellis_api::Bytes;
use trellis_api::kinds::Usage;
use trellis_control::view::View;

use super::changes;
use super::shortage::{self, Space};
use crate::claim_view::health::{degraded, made_by_hand, other_provisioner};
use crate::claim_view::ladder::rungs;
use crate::claim_view::{Held, State, asks_for, load, reported, requested};
use crate::cli::{Global, OneClaim};
use crate::connect::connect;
use crate::output::{self, human, precise, precise_or_unknown};

/// Explains the state of a claim; a claim that is held gives the exit code of a hold.
pub async fn run(global: &Global, verb: &OneClaim) -> anyhow::Result<()> {
    let service = connect(global).await?;
    if verb.output.watch {
        return changes::show(&service.client, &verb.output, || async {
            let view = load(&service, &verb.claim).await?;
            answer(&view, &shortage::look(&service, &view).await, verb)
        })
        .await;
    }
    let view = load(&service, &verb.claim).await?;
    let space = shortage::look(&service, &view).await;
    output::print(&answer(&view, &space, verb)?)?;
    match State::of(&view).fault() {
        Some(held) => output::end_held(held.hold.clone()),
        None => Ok(()),
    }
}

/// The explanation for programs.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Explanation {
    claim: String,
    namespace: String,
    requested: Option<Bytes>,
    capacity: Option<Bytes>,
    state: String,
    hold: Option<Held>,
    /// Who serves it, if that is another provisioner.
    #[serde(skip_serializing_if = "Option::is_none")]
    provisioner: Option<String>,
    /// What its copies lack besides that.
    #[serde(skip_serializing_if = "Option::is_none")]
    copies: Option<String>,
    /// How full its filesystem is, if it is mounted on this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    /// What is full or gone below it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shortages: Vec<String>,
}

fn answer(view: &View, space: &Space, verb: &OneClaim) -> anyhow::Result<String> {
    let state = State::of(view);
    let lacks = degraded(view, Timestamp::now()).map(|hold| hold.message);
    let is_said = matches!(state, State::Degraded(_));
    let metadata = view
        .claim
        .as_ref()
        .map(|claim| claim.metadata.clone())
        .unwrap_or_default();
    let explanation = Explanation {
        claim: metadata.name.unwrap_or_default(),
        namespace: metadata.namespace.unwrap_or_default(),
        requested: requested(view),
        capacity: reported(view),
        state: state.word().to_owned(),
        hold: state.fault().cloned(),
        provisioner: other_provisioner(view),
        copies: lacks.filter(|_| !is_said),
        usage: space.usage.clone(),
        shortages: space.shortages.clone(),
    };
    output::text(verb.output.output, &explanation, |_| {
        render(view, &explanation)
    })
}

/// Lines like those of `zpool status`: a word, a colon, what it is.
fn render(view: &View, explanation: &Explanation) -> String {
    let mut lines = Lines::default();
    lines.add(
        "claim",
        &format!("{}/{}", explanation.namespace, explanation.claim),
    );
    lines.add("state", &explanation.state);
    lines.add("asks for", &asks_for(view, precise_or_unknown));
    lines.add("has", &precise_or_unknown(explanation.capacity));
    if let Some(held) = &explanation.hold {
        if let Some(rung) = held.rung {
            lines.add("held at", &format!("the {rung}"));
        }
        let code = held.hold.reason.code();
        lines.add("code", code);
        lines.add("why", held.hold.reason.sentence());
        if !held.hold.message.is_empty() {
            lines.add("this case", &held.hold.message);
        }
        lines.add("what to do", held.action);
        lines.add("see", &format!("docs/holds.md#{}", code.to_lowercase()));
        if let Some(lacks) = &explanation.copies {
            lines.add("copies", lacks);
        }
        lines.add_shortages(explanation);
        return lines.text;
    }
    if let Some(lacks) = &explanation.copies {
        lines.add("copies", lacks);
    }
    let measured: Vec<String> = rungs(view)
        .iter()
        .map(|rung| format!("{} {}", rung.title(), precise(rung.size)))
        .collect();
    if !measured.is_empty() {
        lines.add("measured", &measured.join(", "));
    }
    if let Some(usage) = &explanation.usage {
        let (used, available) = (human(usage.used), human(usage.available));
        lines.add("in use", &format!("{used}, {available} available"));
    }
    lines.add_shortages(explanation);
    lines.add("verdict", &verdict(view, explanation));
    lines.text
}

/// "All is well" is said only of what was measured.
fn verdict(view: &View, explanation: &Explanation) -> String {
    if let Some(provisioner) = &explanation.provisioner {
        return format!(
            "It belongs to another provisioner, {provisioner}: Trellis neither serves, measures nor grows it. Ask there."
        );
    }
    if let Some(volume) = made_by_hand(view) {
        return format!(
            "It has the PersistentVolume {volume:?}, which was made by hand: Trellis neither measures nor grows it."
        );
    }
    let text = match explanation.state.as_str() {
        "Bound" if !explanation.shortages.is_empty() => {
            "Every layer was measured at the size that is asked for, but there is a shortage."
        }
        "Bound" => "All is well: every layer was measured at the size that is asked for.",
        "Growing" => "A growth is under way and nothing holds it; see `trellis ladder`.",
        "Pending" => "Its volume is being made and nothing holds it.",
        "Terminating" => "It is being deleted and nothing holds it.",
        _ => "The volume that it was bound to no longer exists.",
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

    fn add_shortages(&mut self, explanation: &Explanation) {
        for shortage in &explanation.shortages {
            self.add("shortage", shortage);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim_view::samples;
    use crate::cli::Output;

    fn explained(view: &View) -> String {
        let output = Output {
            output: None,
            watch: false,
        };
        let claim = "data".to_owned();
        let space = Space::default();
        answer(view, &space, &OneClaim { claim, output }).expect("a text needs no serializer")
    }

    // Fails if a hold is explained without its rung, code, case or action.
    #[test]
    fn a_held_claim_is_explained_in_full() {
        insta::assert_snapshot!(explained(&samples::refused()));
    }

    // Fails if a claim that is well looks as if something were the matter.
    #[test]
    fn a_claim_that_is_well_is_said_to_be() {
        insta::assert_snapshot!(explained(&samples::mounted(2, 2)));
    }

    // Fails if a claim that cannot be provisioned does not say why.
    #[test]
    fn a_pending_claim_says_what_it_waits_for() {
        insta::assert_snapshot!(explained(&samples::pending()));
    }
}
