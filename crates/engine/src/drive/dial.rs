//! Connects to a copy, wherever it is.

use std::io;

use tokio::net::UnixStream;

use super::link::Stream;
use super::tls::{self, Credentials};
use super::{Address, Failure};

/// A connection that was made.
pub(super) struct Dialled {
    pub(super) stream: Stream,
    /// What the copy knows, if that was asked already.
    pub(super) knows: Option<u32>,
}

/// Connects to a copy. Over TLS that includes showing each other who one is and what one speaks.
pub(super) async fn dial(
    address: &Address,
    credentials: Option<&Credentials>,
) -> Result<Dialled, Failure> {
    match address {
        Address::Unix(path) => {
            let stream = UnixStream::connect(path).await;
            let stream = stream.map_err(|error: io::Error| Failure::Connect(error.kind()))?;
            Ok(Dialled {
                stream: Stream::Unix(stream),
                knows: None,
            })
        }
        Address::Tls { node, at } => {
            let credentials = credentials.ok_or(Failure::NoCredentials)?;
            let entered = tls::dial(*at, node, credentials).await?;
            Ok(Dialled {
                stream: Stream::Tls(Box::new(entered.stream)),
                knows: Some(entered.knows),
            })
        }
    }
}
