//! What all connections share: the targets, their access rules, and the open sessions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use tokio::sync::mpsc;

use crate::error::{Disconnect, Error};
use crate::limits::{CONTROL_QUEUE, NAME_BYTES_MAX, UNITS_MAX};
use crate::login::Chap;
use crate::lun::Lun;
use crate::pool::{Memory, Pool};
use crate::scsi::Attention;
use crate::unit::Unit;

/// The target portal group that everything is in.
pub const PORTAL_GROUP: u16 = 1;

/// A lock that a panic elsewhere does not take away from the others.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who may log in to a target, and how they prove it.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// The initiators that may log in; `None` for all.
    pub initiators: Option<BTreeSet<String>>,
    /// The proof that is asked for.
    pub chap: Option<Chap>,
}

impl Access {
    /// Whether this initiator may log in and see the target.
    pub fn admits(&self, initiator: &str) -> bool {
        self.initiators
            .as_ref()
            .is_none_or(|names| names.contains(initiator))
    }
}

/// A target: a name with logical units.
#[derive(Debug)]
pub struct Target {
    name: String,
    access: RwLock<Access>,
    units: RwLock<BTreeMap<u16, Arc<Unit>>>,
}

impl Target {
    /// A target without logical units.
    ///
    /// # Errors
    /// The name is none that the protocol allows.
    pub fn new(name: &str, access: Access) -> Result<Arc<Self>, Error> {
        if !name_is_sane(name) {
            return Err(Error::Name);
        }
        Ok(Arc::new(Target {
            name: name.to_owned(),
            access: RwLock::new(access),
            units: RwLock::default(),
        }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Who may log in.
    pub fn access(&self) -> Access {
        self.access
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Change who may log in. Sessions that are open stay.
    pub fn set_access(&self, access: Access) {
        *self.access.write().unwrap_or_else(PoisonError::into_inner) = access;
    }

    /// Serve a volume under a number. Open sessions are told that the list has changed.
    ///
    /// # Errors
    /// The number is taken, there are too many, or the volume's block size cannot be served.
    pub fn add_unit(&self, number: u8, lun: Arc<dyn Lun>) -> Result<Arc<Unit>, Error> {
        let mut units = self.units.write().unwrap_or_else(PoisonError::into_inner);
        if units.contains_key(&u16::from(number)) {
            return Err(Error::UnitExists);
        }
        if units.len() == UNITS_MAX {
            return Err(Error::TooManyUnits);
        }
        let unit = Unit::new(lun)?;
        units
            .values()
            .for_each(|other| other.attend_all(Attention::ReportedLunsChanged));
        units.insert(u16::from(number), Arc::clone(&unit));
        Ok(unit)
    }

    /// Stop serving a volume. Commands that have begun are finished.
    pub fn remove_unit(&self, number: u8) -> Option<Arc<Unit>> {
        let mut units = self.units.write().unwrap_or_else(PoisonError::into_inner);
        let unit = units.remove(&u16::from(number))?;
        units
            .values()
            .for_each(|other| other.attend_all(Attention::ReportedLunsChanged));
        Some(unit)
    }

    /// The logical unit of this number.
    pub fn unit(&self, number: u16) -> Option<Arc<Unit>> {
        self.units
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&number)
            .cloned()
    }

    /// All logical units.
    pub fn units(&self) -> Vec<(u16, Arc<Unit>)> {
        let units = self.units.read().unwrap_or_else(PoisonError::into_inner);
        units
            .iter()
            .map(|(number, unit)| (*number, Arc::clone(unit)))
            .collect()
    }
}

/// Whether a name is one that the protocol allows.
pub fn name_is_sane(name: &str) -> bool {
    let format = ["iqn.", "eui.", "naa."]
        .iter()
        .any(|prefix| name.starts_with(prefix));
    let sane = |c: char| {
        c.is_ascii_lowercase() || c.is_ascii_digit() || "-.:".contains(c) || !c.is_ascii()
    };
    format && name.len() <= NAME_BYTES_MAX && name.chars().all(sane)
}

/// An initiator port: the initiator's end of a nexus. Persistent reservations belong to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InitiatorPort {
    /// The initiator's name.
    pub name: String,
    /// The part of the session's identity that the initiator chooses.
    pub isid: [u8; 6],
}

/// A session's end of a nexus, as logical units know it.
#[derive(Debug, Clone)]
pub struct Nexus {
    /// Never used twice while the process lives.
    pub id: u64,
    /// Who is at the other end.
    pub port: Arc<InitiatorPort>,
}

/// Something that is dropped when all that hold it are done.
pub type Hold = mpsc::Sender<Infallible>;
/// Ends (with `None`) when all holds are gone.
pub type Released = mpsc::Receiver<Infallible>;

/// What one session asks of another.
#[derive(Debug, Clone)]
pub enum Control {
    /// Abort all tasks, of one logical unit or of all; drop the hold when none is left.
    Abort {
        /// The logical unit's number, `None` for all.
        unit: Option<u16>,
        /// Only sessions of these ports, `None` for all.
        ports: Option<Vec<Arc<InitiatorPort>>>,
        /// What a session that loses tasks is told.
        attention: Option<Attention>,
        /// Held until it is done.
        hold: Hold,
    },
}

#[derive(Debug)]
struct Entry {
    id: u64,
    /// `None` for discovery sessions.
    target: Option<String>,
    port: Arc<InitiatorPort>,
    control: mpsc::Sender<Control>,
    /// Room for one: the first reason to end is the one that counts.
    close: mpsc::Sender<Disconnect>,
    /// Ends when the session's connection has let go of everything.
    gone: Option<Released>,
}

impl Entry {
    /// Tell the session to end; it may have been told before.
    fn end(&self, reason: Disconnect) {
        let _told_before = self.close.try_send(reason);
    }
}

#[derive(Debug, Default)]
struct Sessions {
    open: HashMap<u16, Entry>,
    last_tsih: u16,
    last_id: u64,
}

/// A session that has been let in. Dropping it takes the session off the books.
#[derive(Debug)]
pub struct SessionSeat {
    portal: Arc<Portal>,
    /// The session's handle on the wire.
    pub tsih: u16,
    /// Its end of the nexus.
    pub nexus: Nexus,
    /// The target, `None` for discovery.
    pub target: Option<Arc<Target>>,
    /// What other sessions ask.
    pub control: mpsc::Receiver<Control>,
    /// Says when the session has to end.
    pub close: mpsc::Receiver<Disconnect>,
    /// A session of the same initiator port that is being ended to make room for this one.
    pub replaced: Option<Released>,
    _gone: Hold,
}

impl SessionSeat {
    /// Take the session's place at its logical units. Call it when the session that it replaces is gone.
    pub fn join(&self) {
        for (_, unit) in self.target.iter().flat_map(|target| target.units()) {
            unit.join(&self.nexus);
        }
    }

    /// Ask all other sessions of this target.
    pub fn ask_others(&self, control: &Control) {
        self.portal.ask_others(
            self.target.as_ref().map(|target| target.name()),
            self.nexus.id,
            control,
        );
    }

    /// The names of the targets that an initiator may see.
    pub fn target_names(&self, initiator: &str) -> Vec<String> {
        self.portal.target_names(initiator)
    }

    /// End all sessions of this target, this one too.
    pub fn close_all(&self, reason: Disconnect) {
        let name = self.target.as_ref().map(|target| target.name().to_owned());
        self.portal
            .close_where(reason, |entry| entry.target == name);
    }
}

impl Drop for SessionSeat {
    fn drop(&mut self) {
        for (_, unit) in self.target.iter().flat_map(|target| target.units()) {
            unit.leave(&self.nexus);
        }
        lock(&self.portal.sessions).open.remove(&self.tsih);
    }
}

/// Why a session is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoSeat {
    /// There are as many sessions as there may be.
    Full,
}

/// The targets and the open sessions of one network address.
#[derive(Debug)]
pub struct Portal {
    targets: RwLock<BTreeMap<String, Arc<Target>>>,
    sessions: Mutex<Sessions>,
    discovery_chap: Option<Chap>,
    sessions_max: usize,
    pool: Arc<Pool>,
}

impl Portal {
    /// A portal without targets.
    pub fn new(sessions_max: usize, discovery_chap: Option<Chap>) -> Arc<Self> {
        Portal::with_memory(sessions_max, discovery_chap, None)
    }

    /// A portal without targets, whose volumes want the data of long writes in `memory`.
    pub fn with_memory(
        sessions_max: usize,
        discovery_chap: Option<Chap>,
        memory: Option<Arc<dyn Memory>>,
    ) -> Arc<Self> {
        Arc::new(Portal {
            targets: RwLock::default(),
            sessions: Mutex::default(),
            discovery_chap,
            sessions_max,
            pool: Arc::new(Pool::new(memory)),
        })
    }

    /// Buffers that its connections share.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Serve a target.
    ///
    /// # Errors
    /// There is one of that name.
    pub fn add_target(&self, target: Arc<Target>) -> Result<(), Error> {
        let mut targets = self.targets.write().unwrap_or_else(PoisonError::into_inner);
        if targets.contains_key(target.name()) {
            return Err(Error::TargetExists);
        }
        targets.insert(target.name().to_owned(), target);
        Ok(())
    }

    /// Stop serving a target and end its sessions.
    pub fn remove_target(&self, name: &str) -> Option<Arc<Target>> {
        let target = self
            .targets
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(name)?;
        self.close_where(Disconnect::Stopped, |entry| {
            entry.target.as_deref() == Some(name)
        });
        Some(target)
    }

    /// The target of this name.
    pub fn target(&self, name: &str) -> Option<Arc<Target>> {
        self.targets
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .cloned()
    }

    /// The names of the targets that an initiator may see.
    pub fn target_names(&self, initiator: &str) -> Vec<String> {
        let targets = self.targets.read().unwrap_or_else(PoisonError::into_inner);
        targets
            .values()
            .filter(|target| target.access().admits(initiator))
            .map(|target| target.name.clone())
            .collect()
    }

    /// The proof that discovery asks for.
    pub fn discovery_chap(&self) -> Option<&Chap> {
        self.discovery_chap.as_ref()
    }

    /// How many sessions are open.
    pub fn session_count(&self) -> usize {
        lock(&self.sessions).open.len()
    }

    /// Whether a session with this handle is open.
    pub fn has_session(&self, tsih: u16) -> bool {
        lock(&self.sessions).open.contains_key(&tsih)
    }

    /// End all sessions.
    pub fn close_all(&self, reason: Disconnect) {
        self.close_where(reason, |_| true);
    }

    /// Admit a session. One of the same initiator port at the same target is told to end.
    ///
    /// # Errors
    /// There are too many.
    pub fn enter(
        self: &Arc<Self>,
        port: InitiatorPort,
        target: Option<Arc<Target>>,
    ) -> Result<SessionSeat, NoSeat> {
        let mut sessions = lock(&self.sessions);
        let name = target.as_ref().map(|target| target.name().to_owned());
        // Two discovery sessions of one initiator do not disturb each other.
        let twin = sessions
            .open
            .iter_mut()
            .find(|(_, entry)| name.is_some() && entry.target == name && *entry.port == port);
        let replaced = twin.and_then(|(_, entry)| {
            entry.end(Disconnect::Reinstated);
            entry.gone.take()
        });
        if sessions.open.len() >= self.sessions_max && replaced.is_none() {
            return Err(NoSeat::Full);
        }
        let tsih = sessions.free_tsih().ok_or(NoSeat::Full)?;
        sessions.last_id += 1;
        let nexus = Nexus {
            id: sessions.last_id,
            port: Arc::new(port),
        };
        let (control_in, control) = mpsc::channel(CONTROL_QUEUE);
        let (close_in, close) = mpsc::channel(1);
        let (hold, gone) = mpsc::channel(1);
        let entry = Entry {
            id: nexus.id,
            target: name,
            port: Arc::clone(&nexus.port),
            control: control_in,
            close: close_in,
            gone: Some(gone),
        };
        sessions.open.insert(tsih, entry);
        Ok(SessionSeat {
            portal: Arc::clone(self),
            tsih,
            nexus,
            target,
            control,
            close,
            replaced,
            _gone: hold,
        })
    }

    fn ask_others(&self, target: Option<&str>, asker: u64, control: &Control) {
        for entry in lock(&self.sessions).open.values() {
            if entry.target.as_deref() == target
                && entry.id != asker
                && entry.control.try_send(control.clone()).is_err()
            {
                // It has not looked at its messages for a long time: it is not alive.
                entry.end(Disconnect::Silent);
            }
        }
    }

    fn close_where(&self, reason: Disconnect, which: impl Fn(&Entry) -> bool) {
        for entry in lock(&self.sessions)
            .open
            .values()
            .filter(|entry| which(entry))
        {
            entry.end(reason);
        }
    }
}

impl Sessions {
    /// A handle that no session has; zero means "new" on the wire.
    fn free_tsih(&mut self) -> Option<u16> {
        for _ in 0..=u16::MAX {
            self.last_tsih = self.last_tsih.wrapping_add(1);
            if self.last_tsih != 0 && !self.open.contains_key(&self.last_tsih) {
                return Some(self.last_tsih);
            }
        }
        None
    }
}
