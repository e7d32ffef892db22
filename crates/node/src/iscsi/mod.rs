//! Volumes that reach this machine over iSCSI, through the kernel's own initiator.
//!
//! [`attach`] logs in and returns the disk, [`rescan`] makes the kernel take a new size on the existing session, and
//! [`detach`] logs out. open-iscsi makes the session: `iscsiadm` passes the request to `iscsid`, which must be
//! running. The state is read from sysfs, never from the output of a program.
//!
//! Secrets go into open-iscsi's record of the target, a file that only root can read, and not through arguments, which
//! everybody can read. The record is removed with the session, and after a failed login.

mod record;
mod session;

use std::fmt;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use trellis_api::Bytes;

use crate::error::{Context, Error, Result};
use crate::exec::{Output, Program};
use crate::filesystem::Outcome;
use crate::holders;
use crate::sys::block::{self, DeviceNumber};

pub use session::{Session, sessions};

/// open-iscsi's program, which asks its daemon.
pub const ISCSIADM: Program = Program {
    name: "iscsiadm",
    package: "open-iscsi",
};
/// Where the kernel shows sessions and open-iscsi keeps its records.
const SYSFS: &str = "/sys";
const RECORDS: &str = "/etc/iscsi/nodes";
/// The portal group that records are made for: that of our own target, and of most others.
const PORTAL_GROUP: u16 = 1;
/// open-iscsi tries again by itself for two minutes before it gives a target up.
const LOGIN_LIMIT: Duration = Duration::from_secs(180);
const LOGOUT_LIMIT: Duration = Duration::from_secs(60);
const ASK_LIMIT: Duration = Duration::from_secs(30);
/// How long a disk may take to appear after the login, or to go after the logout.
const SETTLE_LIMIT: Duration = Duration::from_secs(30);
const SETTLE_PAUSE: Duration = Duration::from_millis(20);
/// open-iscsi keeps names and secrets in so many bytes, with a zero at the end.
const SETTING_BYTES_MAX: usize = 255;
const NAME_BYTES_MAX: usize = 223;

/// A target: its name, and where it answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The name, such as `iqn.2026-11.dev.trellis:volume`.
    pub name: String,
    /// The address.
    pub portal: SocketAddr,
}

/// A name and what proves it.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The name.
    pub user: String,
    /// The secret.
    pub secret: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Credentials")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

/// How a session is opened. What is not said is as `/etc/iscsi/iscsid.conf` has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Login {
    /// What we prove to the target.
    pub ours: Option<Credentials>,
    /// What the target has to prove to us. Asked only of a target that we prove ourselves to.
    pub theirs: Option<Credentials>,
    /// Whether headers and data carry checksums.
    pub digests: bool,
}

/// Why the initiator could not do what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The name cannot be one.
    #[error("the name is none that iSCSI allows; it begins with iqn., eui. or naa.")]
    Name,
    /// A user or secret cannot be given to open-iscsi.
    #[error(
        "a name or secret for CHAP is empty, longer than {SETTING_BYTES_MAX} bytes, or has spaces or \
         control characters; choose another"
    )]
    Credentials,
    /// Nobody answers.
    #[error("nobody answers at this address; check that the target runs and can be reached")]
    Unreachable,
    /// The target does not take our proof.
    #[error("the target does not take our proof; check our name and secret for CHAP on both sides")]
    Denied,
    /// The login failed for another reason. open-iscsi tells them apart only in the log of its daemon.
    #[error(
        "the login failed: the target refused it, or did not prove itself; check that it has this target, that it \
         allows this initiator, and its secret for CHAP on both sides; the log of iscsid has the reason"
    )]
    Refused,
    /// iscsid is not there.
    #[error("iscsid does not run; start it (`systemctl start iscsid`)")]
    NoDaemon,
    /// The kernel has no initiator.
    #[error("the kernel has no iSCSI initiator; load the module iscsi_tcp")]
    NoInitiator,
    /// The session is there and the disk is not.
    #[error("the session has no unit {unit}; check what the target serves")]
    NoDevice {
        /// The logical unit.
        unit: u64,
    },
    /// The session did not go.
    #[error("the session is still there after the logout; look at the log of iscsid")]
    StillThere,
}

impl Problem {
    /// What an exit status of iscsiadm means, where it says something of its own.
    fn of_status(code: i32) -> Option<Problem> {
        match code {
            4 | 8 | 11 => Some(Problem::Unreachable),
            5 | 19 => Some(Problem::Refused),
            12 => Some(Problem::NoInitiator),
            18 | 20 => Some(Problem::NoDaemon),
            24 => Some(Problem::Denied),
            _ => None,
        }
    }
}

/// A disk that a session shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Its device node.
    pub device: PathBuf,
    /// The number of the session.
    pub session: u32,
    /// Whether the session was there before.
    pub adopted: bool,
}

/// The targets that a portal shows to this machine. Nothing is recorded.
pub fn discover(portal: SocketAddr) -> Result<Vec<String>> {
    let nobody = Target {
        name: String::new(),
        portal,
    };
    let arguments = [
        "-m",
        "discovery",
        "-t",
        "sendtargets",
        "-o",
        "nonpersistent",
        "-p",
    ];
    let mut arguments = arguments.map(str::to_owned).to_vec();
    arguments.push(portal.to_string());
    let said = nobody.translated(ISCSIADM.run(&arguments, ASK_LIMIT))?;
    // Each line is `ADDRESS:PORT,GROUP NAME`.
    let names = said
        .stdout
        .lines()
        .filter_map(|line| line.split(' ').nth(1));
    Ok(names.map(str::to_owned).collect())
}

/// Logs in to a target, unless there is a session with it, and answers the disk of one of its units.
pub fn attach(target: &Target, login: &Login, unit: u64) -> Result<Attached> {
    target.check_name()?;
    let settings = record::settings(login).ok_or_else(|| target.error(Problem::Credentials))?;
    let mut session = target.session()?;
    // The target has moved to another address, where this session will never find it again.
    if session
        .as_ref()
        .is_some_and(|session| session.portal != target.portal)
    {
        detach(target)?;
        session = None;
    }
    let adopted = session.is_some();
    if !adopted && let Err(error) = target.log_in(&settings) {
        // It holds a secret, and nothing is left to use it for.
        let _ = target.forget();
        return Err(error);
    }
    let deadline = Instant::now() + SETTLE_LIMIT;
    loop {
        if let Some(session) = target.session()?
            && let Some(device) = session.device(unit)?
            && is_ready(&device)?
        {
            tracing::info!(target = target.name, session = session.id, device = %device.display(), "attached");
            return Ok(Attached {
                device,
                session: session.id,
                adopted,
            });
        }
        if Instant::now() >= deadline {
            return Err(target.error(Problem::NoDevice { unit }));
        }
        thread::sleep(SETTLE_PAUSE);
    }
}

/// The disk of one of a target's units, if there is a session with the target.
pub fn find(target: &Target, unit: u64) -> Result<Option<PathBuf>> {
    match target.session()? {
        Some(session) => session.device(unit),
        None => Ok(None),
    }
}

/// Has the kernel ask the target for the size of a disk, on the session that is there, and reads it back.
///
/// The kernel does not do so by itself: it tells user space that the target has announced a new size, and leaves
/// the rest to it.
pub fn rescan(device: &Path, wanted: Bytes) -> Result<Outcome> {
    let measure = || {
        let node = block::open(device).context("open", device)?;
        block::size(&node).context("read the size of", device)
    };
    let from = measure()?;
    if from >= wanted {
        return Ok(Outcome::Unchanged { size: from });
    }
    let number = number_of(device)?;
    let door = number.sysfs().join("device/rescan");
    fs::write(&door, "1").context("write to", &door)?;
    let to = measure()?;
    if to < wanted {
        return Err(Error::NotRaised {
            what: device.to_owned(),
            measured: to,
            wanted,
        });
    }
    Ok(Outcome::Raised { from, to })
}

/// Ends the session with a target and forgets the target. Answers whether there was a session.
///
/// A session with a disk that is mounted or otherwise claimed is [`Error::Busy`] and stays.
pub fn detach(target: &Target) -> Result<bool> {
    target.check_name()?;
    let Some(session) = target.session()? else {
        target.forget()?;
        return Ok(false);
    };
    let devices = session.devices()?;
    for device in &devices {
        refuse_claimed(device)?;
    }
    let there = Target {
        portal: session.portal,
        ..target.clone()
    };
    there.iscsiadm(&["--logout"], LOGOUT_LIMIT)?;
    let deadline = Instant::now() + SETTLE_LIMIT;
    while target.session()?.is_some() || devices.iter().any(|device| device.exists()) {
        if Instant::now() >= deadline {
            return Err(target.error(Problem::StillThere));
        }
        thread::sleep(SETTLE_PAUSE);
    }
    target.forget()?;
    Ok(true)
}

impl Target {
    /// The session with it, if there is one, wherever that was logged in.
    pub fn session(&self) -> Result<Option<Session>> {
        let found = sessions()?;
        let is_ours = |session: &Session| session.target.eq_ignore_ascii_case(&self.name);
        Ok(found.into_iter().find(is_ours))
    }

    fn log_in(&self, settings: &[record::Setting]) -> Result<()> {
        self.iscsiadm(&["-o", "new"], ASK_LIMIT)?;
        let path = self.record();
        let text = fs::read_to_string(&path).context("read", &path)?;
        // Only open-iscsi's programs read it, and none does while we have not asked for the login.
        fs::write(&path, record::with(&text, settings)).context("write", &path)?;
        self.iscsiadm(&["--login"], LOGIN_LIMIT).map(drop)
    }

    /// Removes open-iscsi's records of it, at whatever address.
    fn forget(&self) -> Result<()> {
        if !Path::new(RECORDS).join(&self.name).exists() {
            return Ok(());
        }
        let arguments = ["-m", "node", "-T", &self.name, "-o", "delete"].map(str::to_owned);
        self.translated(ISCSIADM.run(&arguments, ASK_LIMIT))
            .map(drop)
    }

    /// open-iscsi's record of it.
    fn record(&self) -> PathBuf {
        let (address, port) = (self.portal.ip(), self.portal.port());
        Path::new(RECORDS)
            .join(&self.name)
            .join(format!("{address},{port},{PORTAL_GROUP}"))
            .join("default")
    }

    fn iscsiadm(&self, what: &[&str], limit: Duration) -> Result<Output> {
        let portal = format!("{},{PORTAL_GROUP}", self.portal);
        let mut arguments = vec!["-m", "node", "-T", &self.name, "-p", &portal];
        arguments.extend(what);
        let arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
        self.translated(ISCSIADM.run(&arguments, limit))
    }

    /// The error of iscsiadm in our words, where we have some.
    fn translated(&self, ran: Result<Output>) -> Result<Output> {
        ran.map_err(|error| match &error {
            Error::ProgramFailed { status, .. } => {
                let problem = status.code().and_then(Problem::of_status);
                problem.map_or(error, |problem| self.error(problem))
            }
            _ => error,
        })
    }

    fn error(&self, problem: Problem) -> Error {
        Error::Initiator {
            target: self.name.clone(),
            portal: self.portal,
            problem,
        }
    }

    /// The name becomes a directory and an argument: it must be nothing but a name.
    fn check_name(&self) -> Result<()> {
        let begins = ["iqn.", "eui.", "naa."]
            .iter()
            .any(|format| self.name.starts_with(format));
        let plain = |c: char| c.is_alphanumeric() || "-.:".contains(c);
        if begins && self.name.len() <= NAME_BYTES_MAX && self.name.chars().all(plain) {
            Ok(())
        } else {
            Err(self.error(Problem::Name))
        }
    }
}

/// Whether the disk can be opened and has a size. Its node is there a moment before the disk is.
fn is_ready(device: &Path) -> Result<bool> {
    match block::open(device) {
        Ok(node) => {
            let size = block::size(&node).context("read the size of", device)?;
            Ok(size > Bytes::new(0))
        }
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::NOENT | Errno::NXIO | Errno::NODEV) => Ok(false),
            _ => Err(error).context("open", device),
        },
    }
}

fn number_of(device: &Path) -> Result<DeviceNumber> {
    let found = DeviceNumber::of_block_device(device).context("look at", device)?;
    let other = || io::Error::from(io::ErrorKind::InvalidInput);
    found.ok_or_else(other).context("find the disk at", device)
}

/// A logout removes the disk under its users.
fn refuse_claimed(device: &Path) -> Result<()> {
    match block::open_exclusive(device) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Err(Error::Busy {
            what: device.to_owned(),
            holders: holders::of_device(device, number_of(device)?),
            covered_by: None,
        }),
        other => other.map(drop).context("open", device),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_none_reaches_no_program_and_no_path() {
        // Fails if a name with a slash, a space or a line's end is given to iscsiadm or made a directory.
        let long = format!("iqn.{}", "a".repeat(NAME_BYTES_MAX));
        for name in ["", "-o", "iqn.a/../b", "iqn.a b", "iqn.a\nb", "disk", &long] {
            let target = Target {
                name: name.to_owned(),
                portal: "127.0.0.1:3260".parse().unwrap(),
            };
            for error in [
                attach(&target, &Login::default(), 0).unwrap_err(),
                detach(&target).unwrap_err(),
            ] {
                let is_name = matches!(
                    error,
                    Error::Initiator {
                        problem: Problem::Name,
                        ..
                    }
                );
                assert!(is_name, "{name:?}: {error}");
            }
        }
    }

    #[test]
    fn a_secret_is_not_shown() {
        // Fails if what is printed for a person who debugs has the secret in it.
        let login = Login {
            ours: Some(Credentials {
                user: "somebody".to_owned(),
                secret: "very-secret-word".to_owned(),
            }),
            ..Login::default()
        };
        let shown = format!("{login:?}");
        assert!(
            shown.contains("somebody") && !shown.contains("very-secret"),
            "{shown}"
        );
    }
}
