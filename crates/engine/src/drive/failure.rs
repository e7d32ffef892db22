//! Why a copy is not reached, as its volume sees it.

use std::io;
use std::time::SystemTime;

use super::link::LinkError;
use super::tls::{NodeName, Refusal, Side};

/// Why a connection to a copy was not made, or has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Nobody could be connected to.
    #[error("nothing answers at its address: {0}")]
    Connect(io::ErrorKind),
    /// It did not answer in time.
    #[error("it did not answer in time")]
    Late,
    /// It is on another node, and this process has no credentials.
    #[error("it is on another node, and this process has no credentials to show; give it some")]
    NoCredentials,
    /// This side refused it.
    #[error("it was refused: {0}")]
    Refused(Refusal),
    /// It refused this side.
    #[error("it refused the connection: {0}")]
    RefusedUs(Refusal),
    /// It has closed the connection.
    #[error("it closed the connection")]
    Closed,
    /// The connection broke.
    #[error("the connection to it broke: {0}")]
    Broken(io::ErrorKind),
    /// It does not take what is sent to it.
    #[error("it does not read what is sent to it")]
    Choked,
}

/// A failure, and since when every attempt has ended like this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Why.
    pub failure: Failure,
    /// Since when.
    pub since: SystemTime,
}

impl Failure {
    /// What an error means. `own` is the node of this process, and `found` is what was wrong with the peer's
    /// certificate.
    pub(super) fn of(error: &LinkError, own: Option<&NodeName>, found: Option<Refusal>) -> Failure {
        match (Refusal::behind(error, own, found), error) {
            (Some((Side::Here, refusal)), _) => Failure::Refused(refusal),
            (Some((Side::There, refusal)), _) => Failure::RefusedUs(refusal),
            (None, LinkError::Io(error)) => Failure::Broken(error.kind()),
            (None, LinkError::Choked) => Failure::Choked,
            (None, _) => Failure::Closed,
        }
    }
}
