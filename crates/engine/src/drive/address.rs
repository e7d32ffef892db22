//! Where a replica is reached.
//!
//! There is no address for TCP without TLS, and none for TLS without a node. So nobody can listen or connect without
//! knowing who the other side has to be ([`tls`](super::tls)).

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use super::NodeName;

/// Where a replica is reached: written as `unix:/PATH` or `tls:NODE@IP:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A socket in the filesystem.
    Unix(PathBuf),
    /// A TCP port of a node, with TLS.
    Tls {
        /// The node. Who dials expects its certificate; who listens has it.
        node: NodeName,
        /// The port. 0 lets the kernel choose one when it is listened on.
        at: SocketAddr,
    },
}

/// Text that is not an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an address is unix:/PATH or tls:NODE@IP:PORT")]
pub struct AddressError;

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(out, "unix:{}", path.display()),
            Address::Tls { node, at } => write!(out, "tls:{node}@{at}"),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        match text.split_once(':') {
            Some(("unix", path)) if path.starts_with('/') => Ok(Address::Unix(path.into())),
            Some(("tls", rest)) => {
                let (node, at) = rest.split_once('@').ok_or(AddressError)?;
                Ok(Address::Tls {
                    node: node.parse().map_err(|_| AddressError)?,
                    at: at.parse().map_err(|_| AddressError)?,
                })
            }
            _ => Err(AddressError),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_is_written() {
        // Fails if what one process prints is not what another one understands.
        for text in [
            "unix:/run/a b.sock",
            "tls:node-1@127.0.0.1:4000",
            "tls:a.b@[::1]:1",
        ] {
            let address: Result<Address, _> = text.parse();
            assert_eq!(
                address.map(|address| address.to_string()),
                Ok(text.to_owned())
            );
        }
        for text in [
            "",
            "unix:relative",
            "tcp:127.0.0.1:4000",
            "tls:127.0.0.1:4000",
            "tls:@127.0.0.1:4000",
            "tls:Node@127.0.0.1:4000",
            "tls:a@localhost:1",
            "tls:a@127.0.0.1",
            "/x",
        ] {
            assert_eq!(text.parse::<Address>(), Err(AddressError), "{text}");
        }
    }
}
