//! What initiators may do with a volume.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How initiators may use a volume by iSCSI. Every initiator must know the volume's secret.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct IscsiAccess {
    /// Where its target answers.
    #[serde(default)]
    pub portal: PortalAt,
    /// The names of the initiators that may log in; any, if it names none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub initiators: Vec<String>,
    /// Whether the target proves itself to initiators that ask for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mutual_chap: bool,
    /// Whether initiators may only read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

impl IscsiAccess {
    /// What a class says to ask for the same: its parameters and their values.
    pub fn parameters(&self) -> Vec<(&'static str, String)> {
        let mut said = Vec::new();
        if self.portal != PortalAt::default() {
            said.push(("iscsiPortal", self.portal.name().to_owned()));
        }
        if !self.initiators.is_empty() {
            said.push(("iscsiInitiators", self.initiators.join(",")));
        }
        let flags = [
            ("iscsiMutualChap", self.mutual_chap),
            ("iscsiReadOnly", self.read_only),
        ];
        let set = flags.into_iter().filter(|(_, is_set)| *is_set);
        said.extend(set.map(|(name, is_set)| (name, is_set.to_string())));
        said
    }

    /// Whether nothing else than usual is asked for.
    pub fn is_usual(&self) -> bool {
        *self == IscsiAccess::default()
    }
}

/// Where a target answers initiators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PortalAt {
    /// On loopback: programs on the target's node.
    #[default]
    Loopback,
    /// At the address of the target's node for links.
    Node,
}

impl PortalAt {
    /// Its word in objects and classes.
    pub const fn name(self) -> &'static str {
        match self {
            PortalAt::Loopback => "loopback",
            PortalAt::Node => "node",
        }
    }
}
