//! How a verb ends, as its exit code tells.

use std::fmt;
use std::future::Future;
use std::sync::OnceLock;

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
    /// The user has stopped waiting.
    Interrupted(String),
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
            // The code that shells give to a program that SIGINT has ended.
            Ended::Interrupted(_) => 130,
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
            | Ended::TimedOut(text)
            | Ended::Interrupted(text) => out.write_str(text),
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
        other => unreachable(&other).into(),
    }
}

/// Nobody answers, or the answer makes no sense.
pub fn unreachable(error: &(dyn std::error::Error + 'static)) -> Ended {
    Ended::Unreachable(format!(
        "the service{} cannot be reached: {}; look whether it runs (`trellis up`), or name another one with --kubeconfig",
        address(),
        chain(error)
    ))
}

/// An error with its causes. Some libraries repeat the cause in their sentence, others say only that there is one.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let words = next.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        cause = next.source();
    }
    text
}

/// The request makes no sense, or not now.
pub fn refuse<T>(text: String) -> anyhow::Result<T> {
    Err(Ended::Refused(text).into())
}

/// The address of the service that this process talks to.
static ADDRESS: OnceLock<String> = OnceLock::new();

/// Remembers the address of the service.
pub fn remember_address(address: String) {
    let _ = ADDRESS.set(address);
}

/// The address of the service, for the middle of a sentence.
pub fn address() -> String {
    let known = ADDRESS.get().map(|address| format!(" at {address}"));
    known.unwrap_or_default()
}

/// Waits for something that goes on by itself. Ctrl-C ends the wait and says that the work goes on.
pub async fn unless_interrupted<T>(
    what_goes_on: &str,
    wait: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    tokio::select! {
        done = wait => done,
        interrupted = tokio::signal::ctrl_c() => {
            interrupted?;
            Err(Ended::Interrupted(format!("interrupted; {what_goes_on}")).into())
        }
    }
}
