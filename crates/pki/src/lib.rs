//! The home's authority, and the certificates by which its nodes know each other.
//!
//! ```text
//!   node                               the store                         whoever has the authority
//!     makes a key ─── CertificateSigningRequest ───────────────────────▶ sign(): certificate or Refused
//!     key and certificate in one file ◀─────────── status.certificate ◀──┘
//! ```
//!
//! Everything here is a function of values: no file, no clock and no network. The private key of a node never leaves
//! the node, and that of the authority never leaves whoever signs.
//!
//! **Who gets a certificate.** Only the node itself: the API says who is asking, and that user must be the node that
//! the request names ([`sign`]). What the certificate holds is decided here and not copied from the request: one URI
//! `trellis://node/NAME`, for both sides of a connection, never an authority of its own.
//!
//! **Another authority.** Certificates of the one before are believed until that one ends: it is published next to the
//! new one ([`trusted`]). So nothing has to change at one moment.

mod authority;
mod certificate;
mod sign;

pub use authority::{Authority, AuthorityFault, trusted};
pub use certificate::{CertificateFault, Lifetime, NodeKey, chains_to};
pub use sign::{Asked, Home, KeyId, Refused, sign};

/// The signer that a request names to get a node's certificate.
pub const SIGNER: &str = "trellis.dev/node";

/// What a certificate is asked for: both sides of a connection, and nothing else.
pub const USAGES: [&str; 3] = ["digital signature", "client auth", "server auth"];
