//! TLS between nodes: who may speak to whom, and the connections themselves.
//!
//! ```text
//!   dialler (a volume)                                listener (a copy)
//!     TCP connect ────────────────────────────────────▶ accept, at most so many half-open
//!     TLS 1.3: "I expect the node of this address" ◀──▶ TLS 1.3: "I expect one of the allowed nodes"
//!     Knows (version and features) ────────────────────▶ checked
//!                      checked ◀──────────────────────── Knows
//!     messages ◀──────────────────────────────────────▶ messages
//! ```
//!
//! **Who proves what.** Every node has a certificate that the authority of its home has signed. Each side proves with
//! its private key that it is the node that its certificate names. The chain is checked with rustls-webpki. Then the
//! name is compared with what is expected: a volume dials an [`Address`](super::Address) that names the node, and a
//! copy has the set of nodes that may serve its volume. A node is revoked by taking its name out of that set. There
//! are no lists of revoked certificates.
//!
//! **A node's name** is the URI `trellis://node/NAME` in the certificate. A host name would do as well, until somebody
//! uses the certificate as one: any client that checks host names would then take a node's certificate for that of a web
//! server of that name, and any certificate that the authority signs for a server would be that of a node. Nobody
//! compares a URI with a host name.
//!
//! **No plain TCP.** [`Address`](super::Address) has no form for it, so a copy cannot be asked to listen without TLS by
//! a wrong flag. Tests and benchmarks use TLS as well.
//!
//! **No resumption.** A resumed session would not look at certificates again, and a removed node would come back with
//! its old ticket. Every connection is a full handshake. There are few of them.
//!
//! **Both sides learn the reason.** Who refuses knows it ([`Refusal`]), and tells the other side with a TLS alert or,
//! when TLS stands, with a last frame ([`Objection`](crate::wire::Objection)). After that it reads on for a moment
//! before it closes, because closing a socket with unread bytes would also discard the reason.
//!
//! **A connection that is cut** ends like any other that breaks. Nothing is concluded from an orderly end: what counts
//! was answered.
//!
//! [`NodeName`] is the name of a node, `credentials` has the files and their renewal, `verify` the check of a peer's
//! certificate, `stream` the records, `greet` the way from a socket to a connection, and `refusal` the reasons.

mod credentials;
mod greet;
mod refusal;
mod stream;
mod verify;

use std::sync::{Arc, LazyLock};

use rustls::crypto::{CryptoProvider, ring};

pub use credentials::{CredentialFault, Credentials};
pub(super) use greet::{Entered, dial, enter};
pub use refusal::{Refusal, Side};
pub(super) use stream::TlsStream;
pub use trellis_api::{NodeName, NodeNameError};

/// The primitives. AES with 128 bits comes first: it is the fastest one that the processor helps with, and breaking it
/// is as far out of reach as breaking the others.
static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            ring::cipher_suite::TLS13_AES_128_GCM_SHA256,
            ring::cipher_suite::TLS13_AES_256_GCM_SHA384,
            ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        ..ring::default_provider()
    })
});
