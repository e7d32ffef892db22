//! Where a replica is reached.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// Where a replica is reached: written as `unix:/PATH` or `tcp:HOST:PORT`, the host as a number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A socket in the filesystem.
    Unix(PathBuf),
    /// A TCP port. Port 0 lets the kernel choose one when it is listened on.
    Tcp(SocketAddr),
}

/// Text that is not an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an address is unix:/PATH or tcp:IP:PORT")]
pub struct AddressError;

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(out, "unix:{}", path.display()),
            Address::Tcp(address) => write!(out, "tcp:{address}"),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        match text.split_once(':') {
            Some(("unix", path)) if path.starts_with('/') => Ok(Address::Unix(path.into())),
            Some(("tcp", address)) => address.parse().map(Address::Tcp).map_err(|_| AddressError),
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
        for text in ["unix:/run/a b.sock", "tcp:127.0.0.1:4000", "tcp:[::1]:1"] {
            let address: Result<Address, _> = text.parse();
            assert_eq!(
                address.map(|address| address.to_string()),
                Ok(text.to_owned())
            );
        }
        for text in [
            "",
            "unix:relative",
            "tcp:localhost:1",
            "tcp:127.0.0.1",
            "/x",
        ] {
            assert_eq!(text.parse::<Address>(), Err(AddressError), "{text}");
        }
    }
}
