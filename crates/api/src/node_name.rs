//! Names of nodes, how a certificate holds one, and as which user a node asks the API.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The longest name that Kubernetes gives a node.
const LENGTH_MAX: usize = 253;

/// What comes before the name in a certificate.
const URI: &str = "trellis://node/";

/// What comes before the name in the user under which a node asks the API; as in Kubernetes.
const USER: &str = "system:node:";

/// The name of a node: 1 to 253 characters of a-z, 0-9, '-' and '.', with a letter or digit at both ends.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName(Arc<str>);

/// Text that is not the name of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the name of a node is 1 to {LENGTH_MAX} characters of a-z, 0-9, '-' and '.', with a letter or digit at both ends"
)]
pub struct NodeNameError;

impl NodeName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name as it stands in a certificate, as a URI among its alternative names.
    pub fn uri(&self) -> String {
        format!("{URI}{self}")
    }

    /// The only node that these URIs name.
    pub fn only_of<'a>(uris: impl Iterator<Item = &'a str>) -> Option<NodeName> {
        let mut names = uris.filter_map(|uri| uri.strip_prefix(URI));
        let name = names.next()?.parse().ok()?;
        names.next().is_none().then_some(name)
    }

    /// The user under which the node asks the API.
    pub fn user(&self) -> String {
        format!("{USER}{self}")
    }

    /// The node that asks the API under this name; none if it is no node.
    pub fn of_user(user: &str) -> Option<NodeName> {
        user.strip_prefix(USER)?.parse().ok()
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl FromStr for NodeName {
    type Err = NodeNameError;

    fn from_str(text: &str) -> Result<NodeName, NodeNameError> {
        let is_plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let bytes = text.as_bytes();
        let is_sound = bytes.len() <= LENGTH_MAX
            && bytes.first().is_some_and(is_plain)
            && bytes.last().is_some_and(is_plain)
            && bytes
                .iter()
                .all(|byte| is_plain(byte) || matches!(byte, b'-' | b'.'));
        is_sound.then(|| NodeName(text.into())).ok_or(NodeNameError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_names_one_node_or_none() {
        // Fails if a host name, another URI, a strange name or two names pass for a node.
        let only = |uris: &[&str]| NodeName::only_of(uris.iter().copied());
        let node: Result<NodeName, _> = "node-1.home".parse();
        assert_eq!(only(&["trellis://node/node-1.home"]), node.clone().ok());
        assert_eq!(
            only(&["spiffe://x/y", "trellis://node/node-1.home"]),
            node.ok()
        );
        for uris in [
            &[][..],
            &["node-1.home"],
            &["https://node-1.home"],
            &["trellis://node/"],
            &["trellis://node/A"],
            &["trellis://node/a/b"],
            &["trellis://node/a@b"],
            &["trellis://node/-a"],
            &["trellis://node/a", "trellis://node/b"],
        ] {
            assert_eq!(only(uris), None, "{uris:?}");
        }
    }

    #[test]
    fn only_the_user_of_a_node_is_a_node() {
        // Fails if an administrator or a strange name passes for a node.
        let node: Result<NodeName, _> = "node-1.home".parse();
        assert_eq!(NodeName::of_user("system:node:node-1.home"), node.ok());
        for user in [
            "node-1",
            "system:admin",
            "system:node:",
            "system:node:A",
            "xsystem:node:a",
        ] {
            assert_eq!(NodeName::of_user(user), None, "{user}");
        }
    }
}
