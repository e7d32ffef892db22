//! What a user sees while a claim grows: bars on a terminal, a line for every raise in a pipe.

use std::collections::{HashMap, HashSet};
use std::io::IsTerminal;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use trellis_api::{Bytes, Rung};
use trellis_control::view::{RungState, RungView};

use crate::cli::Format;
use crate::output::{self, precise, took};
use crate::words::{rung_state, rung_title};

/// Every rung has its own bar, named by the rung and the pool or node where it is.
type Key = (String, Option<String>);

/// The longest bar.
const BAR_COLUMNS_MAX: u16 = 30;
/// What a line has besides its bar: the name of the rung, its size, and its state.
const COLUMNS_BESIDE: u16 = 48;

/// Shows rungs rise.
pub struct Screen {
    before: HashMap<Key, Bytes>,
    way: Way,
}

enum Way {
    /// Only the final answer is printed.
    Silent,
    /// A line for every raise.
    Lines,
    /// A bar for every rung.
    Bars {
        all: MultiProgress,
        bars: HashMap<Key, ProgressBar>,
    },
}

impl Screen {
    /// A screen that knows the sizes before the growth.
    pub fn new(format: Option<Format>, rungs: &[RungView]) -> Screen {
        let way = match format {
            Some(Format::Json | Format::Yaml) => Way::Silent,
            _ if output::terminal() && std::io::stderr().is_terminal() => Way::Bars {
                all: MultiProgress::new(),
                bars: HashMap::new(),
            },
            _ => Way::Lines,
        };
        let before = rungs.iter().map(|rung| (key(rung), rung.size)).collect();
        Screen { before, way }
    }

    /// Shows the rungs as they are now, on their way to `goal`.
    pub fn show(&mut self, rungs: &[RungView], goal: Bytes) {
        match &mut self.way {
            Way::Silent => {}
            Way::Lines => {
                for line in raised(&mut self.before, rungs) {
                    // A reader that is gone ends the verb; nothing else can be done about a failure here.
                    let _ = output::print(&line);
                }
            }
            Way::Bars { all, bars } => {
                for rung in rungs {
                    let from = *self.before.entry(key(rung)).or_insert(rung.size);
                    let bar = bars
                        .entry(key(rung))
                        .or_insert_with(|| all.add(new_bar(rung)));
                    draw(bar, rung, from, goal);
                }
            }
        }
    }

    /// Leaves the bars as they are.
    pub fn end(&mut self) {
        if let Way::Bars { bars, .. } = &self.way {
            bars.values().for_each(ProgressBar::abandon);
        }
    }
}

fn key(rung: &RungView) -> Key {
    (rung_title(rung), rung.node.clone())
}

/// A line for every rung that is larger than when it was last shown, lowest first. If news of a rung comes before news
/// of the rung below, it waits for that. A use that is held keeps nothing of the others back.
fn raised(before: &mut HashMap<Key, Bytes>, rungs: &[RungView]) -> Vec<String> {
    let is_of_use = |rung: &RungView| rung.rung > Rung::Volume;
    let uses = rungs.iter().filter(|rung| is_of_use(rung));
    let nodes: HashSet<Option<&String>> = uses.map(|rung| rung.node.as_ref()).collect();
    let mut lines = Vec::new();
    let mut kept: HashSet<Option<&String>> = HashSet::new();
    for rung in rungs {
        let node = rung.node.as_ref();
        if is_of_use(rung) && kept.contains(&node) {
            continue;
        }
        let known = before.insert(key(rung), rung.size);
        if known.is_some_and(|size| rung.size > size) {
            let time = rung
                .took_micros
                .map(|micros| format!(" {}", took(micros)))
                .unwrap_or_default();
            let place = node.filter(|_| is_of_use(rung) && nodes.len() > 1);
            let place = place.map(|node| format!(" on node {node}"));
            let name = rung.rung.to_string() + &place.unwrap_or_default();
            lines.push(format!("{name} {}{time}\n", precise(rung.size)));
        }
        match rung.state {
            RungState::Ok => {}
            _ if is_of_use(rung) => drop(kept.insert(node)),
            _ => break,
        }
    }
    lines
}

fn new_bar(rung: &RungView) -> ProgressBar {
    let columns = rustix::termios::tcgetwinsize(std::io::stderr()).map_or(80, |size| size.ws_col);
    let width = columns
        .saturating_sub(COLUMNS_BESIDE)
        .clamp(4, BAR_COLUMNS_MAX);
    let template = format!("{{prefix:>24}} [{{bar:{width}}}] {{wide_msg}}");
    let style = ProgressStyle::with_template(&template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("##-");
    // It shows nothing before it has its place among the others: anything it drew by itself would stay on the screen.
    let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::hidden());
    bar.with_style(style).with_prefix(rung_title(rung))
}

/// The bar runs from the old size to the goal. A rung that has all that it can have is at the end, although its last
/// blocks may be missing.
fn draw(bar: &ProgressBar, rung: &RungView, from: Bytes, goal: Bytes) {
    let way = goal.saturating_sub(from).get().max(1);
    let gone = match rung.state {
        RungState::Ok => way,
        _ => rung.size.saturating_sub(from).get().min(way),
    };
    bar.set_length(way);
    bar.set_position(gone);
    let time = rung
        .took_micros
        .filter(|_| rung.size > from)
        .map(|micros| format!(" in {}", took(micros)));
    let state = match rung.state {
        RungState::Ok => time.unwrap_or_default(),
        _ => format!(" {}", rung_state(rung)),
    };
    bar.set_message(format!("{}{state}", precise(rung.size)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_control::view::rungs;
    use trellis_control::view::scenario::{self, Scenario};

    fn seen(scenario: Scenario) -> Vec<RungView> {
        rungs(&scenario.stored(), scenario::now())
    }

    // Fails if a raise is told twice, not at all, or for a rung that did not move.
    #[test]
    fn every_raise_is_told_once() {
        let (old, new) = (seen(Scenario::Growing), seen(Scenario::OneUse));
        let mut before = old.iter().map(|rung| (key(rung), rung.size)).collect();
        assert!(raised(&mut before, &old).is_empty());
        let lines = raised(&mut before, &new);
        assert_eq!(lines[0], "replica 2Gi 1.2 ms\n");
        assert_eq!(lines.len(), new.len());
        assert!(raised(&mut before, &new).is_empty());
    }

    // Fails if a use that is held hides the raises of another one, or they cannot be told apart.
    #[test]
    fn a_use_that_is_held_hides_no_raise_of_another() {
        let mut rungs = seen(Scenario::TwoUsesOneHeld);
        // The node of the held use comes first.
        rungs.rotate_right(2);
        let small = |rung: &RungView| (key(rung), Bytes::gib(1));
        let mut before = rungs.iter().map(small).collect();
        let lines = raised(&mut before, &rungs);
        assert!(
            lines.contains(&"filesystem on node n1 2047Mi 8.3 ms\n".to_owned()),
            "{lines:?}"
        );
    }
}
