//! Which nodes there are: a copy lets in no node that was removed.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};

use crate::machine::ThisMachine;

/// Tells the machine which nodes there are, whenever that changes, for ever.
pub async fn follow(client: Client, machine: Arc<ThisMachine>) {
    let nodes = Api::<Node>::all(client);
    let mut events = pin!(watcher(nodes, watcher::Config::default()).default_backoff());
    let (mut known, mut listed) = (BTreeSet::new(), BTreeSet::new());
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => listed = BTreeSet::new(),
            Ok(Event::InitApply(node)) => _ = stays(&node).map(|name| listed.insert(name)),
            Ok(Event::InitDone) => known = std::mem::take(&mut listed),
            Ok(Event::Apply(node)) => match stays(&node) {
                Some(name) => _ = known.insert(name),
                None => _ = known.remove(&node.name_any()),
            },
            Ok(Event::Delete(node)) => _ = known.remove(&node.name_any()),
            Err(error) => {
                tracing::debug!(%error, "the nodes cannot be watched; it is tried again");
                continue;
            }
        }
        // During a listing the former set counts.
        if listed.is_empty() && !known.is_empty() {
            let (machine, nodes) = (machine.clone(), known.clone());
            // Copies are asked, which takes a moment. A panic is logged where it happens.
            let _ = tokio::task::spawn_blocking(move || machine.know_nodes(nodes)).await;
        }
    }
}

/// The node's name, if it is to stay.
fn stays(node: &Node) -> Option<String> {
    let stays = node.metadata.deletion_timestamp.is_none();
    stays.then(|| node.name_any())
}
