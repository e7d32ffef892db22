//! What the nodes of a home prove themselves with, as files in the data directory.
//!
//! ```text
//!   DATA/pki/authority.pem           key and certificate of the home's authority, where the service keeps it
//!   DATA/pki/authority-earlier.pem   authorities from before, believed until they end
//!   DATA/pki/node/node.pem           this node's key and certificate, in one file, so that they always fit
//!   DATA/pki/node/ca.crt             whom this node believes
//! ```
//!
//! The processes of copies and targets read `DATA/pki/node` again before every handshake, so a renewed certificate
//! needs no restart.

mod authority;
mod node;
mod nodes;

use std::path::{Path, PathBuf};

pub use authority::open as open_authority;
pub use node::keep as keep_certificate;
pub use nodes::follow as follow_nodes;

/// Where everything about keys is.
fn directory(data: &Path) -> PathBuf {
    data.join("pki")
}

/// Where this node has its certificate.
pub fn of_node(data: &Path) -> PathBuf {
    directory(data).join("node")
}
