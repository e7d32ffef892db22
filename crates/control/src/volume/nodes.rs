//! Which nodes are there, and since when the others are not.
//!
//! A node counts as lost when Kubernetes' condition `Ready` says that nothing is known of it (`Unknown`). In the embedded
//! home [`crate::health`] writes that, in a cluster Kubernetes does. A node without a Node object was removed.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

/// The condition by which nodes are known to be there.
pub const READY: &str = "Ready";
/// What it says of a node that is lost.
pub const UNKNOWN: &str = "Unknown";

/// All nodes.
#[derive(Clone, Debug, Default)]
pub struct Nodes(BTreeMap<String, Option<MicroTime>>);

impl Nodes {
    /// The nodes as they are stored.
    pub fn of(nodes: &[Arc<Node>]) -> Nodes {
        let node = |node: &Arc<Node>| (node.name_any(), lost_since(node));
        Nodes(nodes.iter().map(node).collect())
    }

    /// Nodes of these names, all of them there.
    #[cfg(test)]
    pub fn there(names: &[&str]) -> Nodes {
        Nodes(
            names
                .iter()
                .map(|name| ((*name).to_owned(), None))
                .collect(),
        )
    }

    /// The same with one that is lost.
    #[cfg(test)]
    pub fn without(mut self, name: &str, since: Timestamp) -> Nodes {
        self.0.insert(name.to_owned(), Some(MicroTime(since)));
        self
    }

    /// Since when a node is lost; none if it is there. One that was removed has always been.
    pub fn lost_since(&self, name: &str) -> Option<MicroTime> {
        match self.0.get(name) {
            Some(lost) => lost.clone(),
            None => Some(MicroTime(Timestamp::UNIX_EPOCH)),
        }
    }

    /// Whether there is such a node. Otherwise it was removed.
    pub fn is_known(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Whether a node is lost or removed.
    pub fn is_lost(&self, name: &str) -> bool {
        self.lost_since(name).is_some()
    }
}

/// Since when a node is lost, as its object says.
pub fn lost_since(node: &Node) -> Option<MicroTime> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|each| each.type_ == READY)?;
    let since = ready.last_transition_time.as_ref();
    let since = since.map_or(Timestamp::UNIX_EPOCH, |since| since.0);
    (ready.status == UNKNOWN).then_some(MicroTime(since))
}
