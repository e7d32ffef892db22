//! `trellis explain`: what keeps a claim, and what to do about it.

use serde::Serialize;
use trellis_api::Bytes;
use trellis_control::view::View;

use super::changes;
use crate::claim_view::ladder::rungs;
use crate::claim_view::{Held, State, load, reported, requested};
use crate::cli::{Global, OneClaim};
use crate::connect::connect;
use crate::output::{self, precise, precise_or_unknown};

/// Explains the state of a claim; a claim that is held gives the exit code of a hold.
pub async fn run(global: &Global, verb: &OneClaim) -> anyhow::Result<()> {
    let service = connect(global).await?;
    if verb.output.watch {
        return changes::show(&service.client, &verb.output, || async {
            answer(&load(&service, &verb.claim).await?, verb)
        })
        .await;
    }
    let view = load(&service, &verb.claim).await?;
    output::print(&answer(&view, verb)?)?;
    match State::of(&view) {
        State::Held(held) => output::end_held(held.hold),
        _ => Ok(()),
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
}

fn answer(view: &View, verb: &OneClaim) -> anyhow::Result<String> {
    let state = State::of(view);
    let (word, hold) = match &state {
        State::Held(held) => ("Held".to_owned(), Some(held.clone())),
        other => (other.to_string(), None),
    };
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
        state: word,
        hold,
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
    lines.add("asks for", &precise_or_unknown(explanation.requested));
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
        return lines.text;
    }
    let measured: Vec<String> = rungs(view)
        .iter()
        .map(|rung| format!("{} {}", rung.title(), precise(rung.size)))
        .collect();
    if !measured.is_empty() {
        lines.add("measured", &measured.join(", "));
    }
    let verdict = match explanation.state.as_str() {
        "Bound" => "All is well: every layer was measured at the size that is asked for.",
        "Growing" => "A growth is under way and nothing holds it; see `trellis ladder`.",
        "Pending" => "Its volume is being made and nothing holds it.",
        "Terminating" => "It is being deleted and nothing holds it.",
        _ => "The volume that it was bound to no longer exists.",
    };
    lines.add("verdict", verdict);
    lines.text
}

#[derive(Default)]
struct Lines {
    text: String,
}

impl Lines {
    fn add(&mut self, word: &str, what: &str) {
        self.text.push_str(&format!("{word:>10}: {what}\n"));
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
        answer(view, &OneClaim { claim, output }).expect("a text needs no serializer")
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
