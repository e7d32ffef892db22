//! Who asks: the administrator, a node, or somebody without proof.
//!
//! The administrator's token is a file ([`crate::pki`]). A node's token is stored as a hash alone, in a Secret that the
//! node's Node object owns. So the tokens survive restarts and are part of every backup, and a reader of the store or
//! of a backup cannot be a node with them.
//!
//! A token is `NODE.SECRET`, so that it is found by name. It counts as long as the Secret has its hash and the Node
//! object is there. Whoever deletes one of them, or puts another hash into the Secret, revokes it: from the next write
//! on, and open watches end ([`Revocation`]).

use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Node, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::watch::Receiver;

use crate::pki::{self, AccessError};
use crate::store::memory::{Id, Stored};
use crate::store::{CLOSED, Shared, Txn};

pub use trellis_api::kinds::NODE_LEASES_NAMESPACE;

/// Where the Secrets with the hashes of nodes' tokens are.
pub const NODE_TOKENS_NAMESPACE: &str = "kube-system";
/// The type of the Secrets that hold hashes of nodes' tokens.
pub const NODE_TOKEN_TYPE: &str = "trellis.dev/node-token";
/// The field of such a Secret with the SHA-256 of the token.
const HASH: &str = "sha256";
const SECRET_BYTES: usize = 32;
/// A longer token is nobody's, and is not even hashed.
const TOKEN_BYTES_MAX: usize = 512;

/// Somebody who can be allowed something.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum User {
    /// May do everything.
    Admin,
    /// The node of this name.
    Node(Arc<str>),
    /// Has shown no token.
    Anybody,
}

impl User {
    /// The name by which Kubernetes would know the user.
    pub fn name(&self) -> String {
        match self {
            User::Admin => "system:admin".to_owned(),
            User::Node(name) => format!("system:node:{name}"),
            User::Anybody => "system:anonymous".to_owned(),
        }
    }

    /// The groups that the user is in.
    pub fn groups(&self) -> &'static [&'static str] {
        match self {
            User::Admin => &["system:masters", "system:authenticated"],
            User::Node(_) => &["system:nodes", "system:authenticated"],
            User::Anybody => &["system:unauthenticated"],
        }
    }
}

/// A user, and the token that proves it if it can be revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub(crate) user: User,
    hash: Option<Hash>,
}

type Hash = [u8; 32];

impl Caller {
    /// This process, or whoever has the administrator's token.
    pub const ADMIN: Caller = Caller {
        user: User::Admin,
        hash: None,
    };
    /// Somebody without a token.
    pub const ANYBODY: Caller = Caller {
        user: User::Anybody,
        hash: None,
    };

    /// Somebody within this process, who needs no token.
    pub(crate) const fn of(user: User) -> Caller {
        Caller { user, hash: None }
    }

    /// The user.
    pub fn user(&self) -> &User {
        &self.user
    }

    /// The node whose token this is, if it is one that counts.
    pub(crate) fn with_node_token(shared: &Shared, shown: &[u8]) -> Option<Caller> {
        let text = std::str::from_utf8(shown).ok()?;
        let (node, _) = text.rsplit_once('.').filter(|(node, _)| !node.is_empty())?;
        if text.len() > TOKEN_BYTES_MAX {
            return None;
        }
        let caller = Caller {
            user: User::Node(node.into()),
            hash: Some(hash_of(text)),
        };
        caller.counts(shared).then_some(caller)
    }

    /// Whether the token still counts, as readers see the store.
    fn counts(&self, shared: &Shared) -> bool {
        if self.hash.is_none() {
            return true;
        }
        let state = shared.read();
        self.counts_by(|plural, namespace, name| {
            let kind = shared.kind_index(plural)?;
            state.get(&Id::new(kind, namespace, name)).cloned()
        })
    }

    /// Whether the token still counts, as a write sees the store.
    pub(crate) fn counts_within(&self, txn: &Txn<'_>) -> bool {
        self.counts_by(|plural, namespace, name| {
            let kind = txn.kind_index(plural)?;
            txn.get(&Id::new(kind, namespace, name)).cloned()
        })
    }

    fn counts_by(&self, stored: impl Fn(&str, &str, &str) -> Option<Arc<Stored>>) -> bool {
        let (User::Node(name), Some(hash)) = (&self.user, &self.hash) else {
            return true;
        };
        let Some(node) = stored("nodes", "", name).filter(|node| !node.deleting) else {
            return false;
        };
        let secret = stored("secrets", NODE_TOKENS_NAMESPACE, &secret_name(name));
        let is_of_node = |secret: &Arc<Stored>| {
            let mut owners = secret.owners.iter();
            !secret.deleting && owners.any(|owner| owner.uid == node.uid)
        };
        let secret = secret.filter(is_of_node).map(|secret| secret.value());
        secret.and_then(|secret| hash_in(&secret)) == Some(*hash)
    }
}

/// Tells an open watch when its caller's token no longer counts.
pub(crate) struct Revocation {
    caller: Caller,
    shared: Arc<Shared>,
    /// What may revoke it: changes of Secrets and of Nodes.
    signals: Vec<Receiver<u64>>,
}

impl Revocation {
    pub(crate) fn of(caller: &Caller, shared: &Arc<Shared>) -> Revocation {
        let kinds = match caller.hash {
            Some(_) => &["secrets", "nodes"][..],
            None => &[],
        };
        let kinds = kinds.iter().filter_map(|plural| shared.kind_index(plural));
        Revocation {
            caller: caller.clone(),
            shared: Arc::clone(shared),
            signals: kinds.map(|kind| shared.subscribe(kind)).collect(),
        }
    }

    /// Whether it has come.
    pub(crate) fn has_come(&self) -> bool {
        !self.caller.counts(&self.shared)
    }

    /// Waits until it comes.
    pub(crate) async fn comes(&mut self) {
        let [secrets, nodes] = self.signals.as_mut_slice() else {
            return std::future::pending().await;
        };
        loop {
            // Taken before the store is read: what comes after it wakes us again.
            let closed = [&mut *secrets, &mut *nodes].map(|each| *each.borrow_and_update());
            if !self.caller.counts(&self.shared) {
                return;
            }
            if closed.contains(&CLOSED) {
                return std::future::pending().await;
            }
            let changed = tokio::select! {
                changed = secrets.changed() => changed,
                changed = nodes.changed() => changed,
            };
            if changed.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

/// A new token of a node. Only its hash is ever stored.
pub struct NodeToken {
    node: String,
    text: String,
}

impl NodeToken {
    /// Makes a token that nobody can guess.
    pub fn make(node: &str) -> Result<NodeToken, AccessError> {
        let secret = pki::random::<SECRET_BYTES>()?;
        Ok(NodeToken {
            node: node.to_owned(),
            text: format!("{node}.{}", pki::hexadecimal(&secret)),
        })
    }

    /// The text that the node has to show.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The object that makes the token count; it goes with the Node.
    pub fn secret(&self, node: &Node) -> Secret {
        let mut secret = Secret {
            type_: Some(NODE_TOKEN_TYPE.to_owned()),
            ..Secret::default()
        };
        secret.metadata.name = Some(secret_name(&self.node));
        secret.metadata.namespace = Some(NODE_TOKENS_NAMESPACE.to_owned());
        secret.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.node.clone(),
            uid: node.metadata.uid.clone().unwrap_or_default(),
            ..OwnerReference::default()
        }]);
        let hash = ByteString(hash_of(&self.text).to_vec());
        secret.data = Some([(HASH.to_owned(), hash)].into());
        secret
    }
}

impl std::fmt::Debug for NodeToken {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "NodeToken({}..)", self.node)
    }
}

/// The name of the Secret with the hash of a node's token.
pub fn secret_name(node: &str) -> String {
    format!("node-token.{node}")
}

fn hash_of(token: &str) -> Hash {
    Sha256::digest(token.as_bytes()).into()
}

/// The hash in a stored Secret, if it is one of a node's token.
fn hash_in(secret: &Value) -> Option<Hash> {
    if secret.get("type")?.as_str()? != NODE_TOKEN_TYPE {
        return None;
    }
    let hash = secret.get("data")?.get(HASH)?.clone();
    let hash: ByteString = serde_json::from_value(hash).ok()?;
    hash.0.try_into().ok()
}
