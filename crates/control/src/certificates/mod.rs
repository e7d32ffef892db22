//! The nodes of a home, and what they prove themselves with to each other.
//!
//! Whoever holds the authority's key publishes its certificate ([`publish`]) and signs what nodes ask for
//! ([`Signer`]): in the embedded home the service, with the key in a file; in a cluster the elected controller, with
//! the key in a Secret ([`from_secret`]). The decision is [`trellis_pki::sign`], a pure function; here it gets its
//! facts from the store.
//!
//! A node is revoked by removing its Node object. It gets no further certificate, and copies no longer accept the one
//! that it has: they are told which nodes there are.

mod authority;
mod signer;

pub use authority::{EARLIER_ENTRY, SecretError, ensure_namespace, from_secret, publish};
pub use signer::{CERTIFICATE_LIFE, Signer};
