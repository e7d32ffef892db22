//! How a verb ends, as its exit code tells.

use std::fmt;

use trellis_api::Hold;

/// Why a verb did not do what it was told. Anything else that goes wrong is a plain failure, code 1.
#[derive(Debug)]
pub enum Ended {
    /// The claim is held.
    Held(Hold),
    /// There is no such thing.
    NotFound(String),
    /// The service said no.
    Refused(String),
    /// The service cannot be reached.
    Unreachable(String),
    /// It was not done in time.
    TimedOut(String),
}

impl Ended {
    /// The exit code, as documented in `--help`.
    pub fn code(&self) -> u8 {
        match self {
            Ended::Held(_) => 3,
            Ended::NotFound(_) => 4,
            Ended::Refused(_) => 5,
            Ended::Unreachable(_) => 6,
            Ended::TimedOut(_) => 7,
        }
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::Held(hold) => {
                write!(
                    out,
                    "held: {}\n  {}\n  what to do: {}",
                    hold.reason,
                    hold.message,
                    hold.reason.action()
                )
            }
            Ended::NotFound(text)
            | Ended::Refused(text)
            | Ended::Unreachable(text)
            | Ended::TimedOut(text) => out.write_str(text),
        }
    }
}

impl std::error::Error for Ended {}

/// Turns an answer of the service into the way a verb ends: `what` names the object that was asked for.
pub fn from_service(error: kube::Error, what: &str) -> anyhow::Error {
    match error {
        kube::Error::Api(status) if status.code == 404 => {
            Ended::NotFound(format!("{what} does not exist")).into()
        }
        kube::Error::Api(status) if (400..500).contains(&status.code) => {
            Ended::Refused(format!("the service refused: {}", status.message)).into()
        }
        kube::Error::Api(status) => anyhow::anyhow!("the service failed: {}", status.message),
        other => Ended::Unreachable(format!("the service cannot be reached: {other}")).into(),
    }
}
