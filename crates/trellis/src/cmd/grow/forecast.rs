//! The forecast of a growth as a table.

use std::collections::BTreeSet;

use trellis_control::view::{Forecast, Layer, Would};

use crate::output::{Table, Tone, precise, precise_or_unknown};

/// The forecast for a person.
pub fn render(forecast: &Forecast, colours: bool) -> String {
    let layers = &forecast.layers;
    let nodes: BTreeSet<&String> = layers.iter().filter_map(|it| it.node.as_ref()).collect();
    let mut table = Table::toned(&["LAYER", "FROM", "TO", "WOULD", "NOTE"], "WOULD");
    for layer in layers {
        let (would, tone) = would(layer);
        let node = layer.node.as_ref().filter(|_| nodes.len() > 1);
        let node = node.map(|node| format!(" on node {node}"));
        let cells = vec![
            layer.layer.clone() + &node.unwrap_or_default(),
            precise_or_unknown(layer.from),
            precise(layer.to),
            would,
            layer.note.clone().unwrap_or_default(),
        ];
        table.row(cells, Some(tone));
    }
    format!("{}nothing was changed\n", table.render(colours))
}

fn would(layer: &Layer) -> (String, Tone) {
    match (layer.would, &layer.hold) {
        (Would::Rise, _) => ("rise".to_owned(), Tone::Good),
        (Would::Stay, _) => ("stay".to_owned(), Tone::Good),
        (Would::Wait, _) => ("wait".to_owned(), Tone::Moving),
        (Would::BeHeld, Some(hold)) => (format!("be held {}", hold.reason), Tone::Bad),
        (Would::BeHeld, None) => ("be held".to_owned(), Tone::Bad),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use trellis_api::Bytes;
    use trellis_control::stored::now;
    use trellis_control::view::Stock;
    use trellis_control::view::scenario::{self, Scenario};

    fn rendered(scenario: Scenario, pool: Bytes) -> String {
        let look = scenario.stored();
        let stock = Stock {
            pools: vec![Arc::new(scenario::pool(pool, 100))],
            replicas: look.stored.replicas.clone(),
            volumes: look.stored.volume.iter().cloned().collect(),
        };
        let forecast = Forecast::of(&look, &stock, Bytes::gib(4), &now());
        render(&forecast, false)
    }

    // Fails if a layer that would rise is shown as anything else, or is left out.
    #[test]
    fn a_mounted_claim_with_room_would_rise() {
        insta::assert_snapshot!(rendered(Scenario::OneUse, Bytes::gib(10)));
    }

    // Fails if it is not shown which layer would be held, and that the others would wait for it.
    #[test]
    fn a_growth_beyond_the_pool_would_be_held() {
        insta::assert_snapshot!(rendered(Scenario::OneUse, Bytes::gib(3)));
    }

    // Fails if the layers of two nodes cannot be told apart, or a use that would be held makes the other one wait.
    #[test]
    fn the_layers_of_two_nodes_are_told_apart() {
        insta::assert_snapshot!(rendered(Scenario::TwoUsesOneHeld, Bytes::gib(10)));
    }
}
