//! This node among others: where it is reached, with what it proves itself, and which nodes there are.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use trellis_api::kinds::PortalAt;
use trellis_api::{Hold, HoldReason};

use super::message::{CopySettings, LinkSettings, Proof};
use crate::credentials;

/// This node's links. Clones are the same links.
#[derive(Clone)]
pub struct Links {
    node: String,
    ip: Option<IpAddr>,
    credentials: PathBuf,
    /// The nodes that there are; none before that is known.
    nodes: Arc<RwLock<Option<BTreeSet<String>>>>,
}

impl Links {
    /// The links of a node. Without an address, nobody else reaches its copies.
    pub fn new(data: &Path, node: &str, ip: Option<IpAddr>) -> Links {
        Links {
            node: node.to_owned(),
            ip,
            credentials: credentials::of_node(data),
            nodes: Arc::default(),
        }
    }

    /// Sets the nodes that there are. Answers whether that is news.
    pub fn know(&self, nodes: BTreeSet<String>) -> bool {
        let mut known = self.nodes.write().unwrap_or_else(PoisonError::into_inner);
        let is_news = known.as_ref() != Some(&nodes);
        *known = Some(nodes);
        is_news
    }

    /// What a copy is told whose target runs on that node. A node that is not there any more is let in nowhere.
    pub(super) fn for_copy(&self, target_node: Option<&str>) -> CopySettings {
        let known = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
        let is_there = |node: &&str| known.as_ref().is_none_or(|known| known.contains(*node));
        let allowed = target_node.into_iter().chain([self.node.as_str()]);
        CopySettings {
            link: self.ip.map(|ip| LinkSettings {
                node: self.node.clone(),
                ip,
                credentials: self.credentials.clone(),
            }),
            allowed: allowed.filter(is_there).map(str::to_owned).collect(),
        }
    }

    /// Where the target of a volume answers initiators.
    pub(super) fn portal(&self, volume: &str, at: PortalAt) -> Result<IpAddr, Hold> {
        let missing = || {
            let message = format!(
                "Volume {volume} shall be served by iSCSI at the address of its node, and node {} has none.",
                self.node
            );
            Hold::new(HoldReason::LinkMissing, message)
        };
        match at {
            PortalAt::Loopback => Ok(Ipv4Addr::LOCALHOST.into()),
            PortalAt::Node => self.ip.ok_or_else(missing),
        }
    }

    /// What a target proves itself with.
    pub(super) fn proof(&self) -> Proof {
        Proof {
            node: self.node.clone(),
            credentials: self.credentials.clone(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
