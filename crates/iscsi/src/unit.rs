//! A logical unit: a volume and what its nexuses share about it.
//!
//! Growth needs no call. Every command of every nexus first looks at the volume's size. The first one that sees a new
//! size leaves the unit attention "capacity data has changed" for every nexus, once. A nexus that joins later never
//! knew the old size and gets none.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use crate::error::Error;
use crate::limits::ATTENTIONS_MAX;
use crate::lun::{Identity, Lun};
use crate::portal::{InitiatorPort, Nexus, lock};
use crate::scsi::cdb::Command;
use crate::scsi::mode::{ModeChange, ModeState};
use crate::scsi::reserve::{Effects, Refused, Reservations};
use crate::scsi::{Attention, Sense};

#[derive(Debug)]
struct NexusState {
    port: Arc<InitiatorPort>,
    attentions: VecDeque<Attention>,
}

#[derive(Debug)]
struct State {
    size_seen: u64,
    nexuses: HashMap<u64, NexusState>,
    /// RESERVE(6): the nexus that holds it.
    reserved_by: Option<u64>,
    reservations: Reservations,
    software_write_protect: bool,
    descriptor_sense: bool,
}

/// What a command learns when it is let through.
#[derive(Debug, Clone, Copy)]
pub struct Admitted {
    /// Bytes of the volume, now.
    pub size: u64,
    /// An initiator has switched writing off.
    pub software_write_protect: bool,
    /// The format of sense data.
    pub descriptor_sense: bool,
}

/// Why a command is not let through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The nexus has something to be told first.
    Attention(Attention),
    /// Someone else has reserved the logical unit.
    Conflict,
}

/// A logical unit.
pub struct Unit {
    lun: Arc<dyn Lun>,
    identity: Identity,
    block_size: u32,
    state: Mutex<State>,
}

impl std::fmt::Debug for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unit")
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

impl Unit {
    pub(crate) fn new(lun: Arc<dyn Lun>) -> Result<Arc<Self>, Error> {
        let block_size = lun.block_size();
        if !matches!(block_size, 512 | 4096) {
            return Err(Error::BlockSize);
        }
        let state = State {
            size_seen: lun.size(),
            nexuses: HashMap::new(),
            reserved_by: None,
            reservations: Reservations::default(),
            software_write_protect: false,
            descriptor_sense: false,
        };
        Ok(Arc::new(Unit {
            identity: lun.identity(),
            block_size,
            lun,
            state: Mutex::new(state),
        }))
    }

    /// The volume.
    pub fn lun(&self) -> &Arc<dyn Lun> {
        &self.lun
    }

    /// Who it is.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Bytes of a block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// A nexus comes.
    pub(crate) fn join(&self, nexus: &Nexus) {
        let mut state = self.look();
        state
            .nexuses
            .entry(nexus.id)
            .or_insert_with(|| NexusState::new(nexus));
    }

    /// A nexus goes; what it held without persistence goes with it.
    pub(crate) fn leave(&self, nexus: &Nexus) {
        let mut state = lock(&self.state);
        state.nexuses.remove(&nexus.id);
        if state.reserved_by == Some(nexus.id) {
            state.reserved_by = None;
        }
    }

    /// The state, after a look at the size.
    fn look(&self) -> std::sync::MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        let size = self.lun.size();
        if size != state.size_seen {
            state.size_seen = size;
            state.attend(None, Attention::CapacityChanged);
        }
        state
    }

    /// Whether a command may run; `None` for one that cannot be parsed, which only an attention stops.
    ///
    /// # Errors
    /// See [`Stopped`]. An attention is told once: it is gone with this answer.
    pub(crate) fn admit(
        &self,
        nexus: &Nexus,
        command: Option<&Command>,
    ) -> Result<Admitted, Stopped> {
        let mut state = self.look();
        let state = &mut *state;
        if !command.is_some_and(Command::ignores_attention) {
            let own = state
                .nexuses
                .entry(nexus.id)
                .or_insert_with(|| NexusState::new(nexus));
            if let Some(attention) = own.attentions.pop_front() {
                return Err(Stopped::Attention(attention));
            }
        }
        if command.is_some_and(|command| state.conflicts(nexus, command)) {
            return Err(Stopped::Conflict);
        }
        Ok(Admitted {
            size: state.size_seen,
            software_write_protect: state.software_write_protect,
            descriptor_sense: state.descriptor_sense,
        })
    }

    /// The oldest attention of a nexus, for REQUEST SENSE.
    pub(crate) fn take_attention(&self, nexus: &Nexus) -> Option<Attention> {
        self.look()
            .nexuses
            .get_mut(&nexus.id)?
            .attentions
            .pop_front()
    }

    /// Leave an attention for every nexus.
    pub(crate) fn attend_all(&self, attention: Attention) {
        lock(&self.state).attend(None, attention);
    }

    /// Leave an attention for one nexus.
    pub(crate) fn attend(&self, nexus: &Nexus, attention: Attention) {
        if let Some(own) = lock(&self.state).nexuses.get_mut(&nexus.id) {
            own.attend(attention);
        }
    }

    /// The logical unit was reset: everything that initiators have set is gone, except persistent reservations.
    pub(crate) fn reset(&self) {
        let mut state = lock(&self.state);
        state.reserved_by = None;
        state.software_write_protect = false;
        state.descriptor_sense = false;
        state.attend(None, Attention::Reset);
    }

    /// RESERVE(6). A conflict with another holder has been found out before.
    pub(crate) fn reserve(&self, nexus: &Nexus) {
        lock(&self.state).reserved_by = Some(nexus.id);
    }

    /// RELEASE(6). Who does not hold it changes nothing.
    pub(crate) fn release(&self, nexus: &Nexus) {
        let mut state = lock(&self.state);
        if state.reserved_by == Some(nexus.id) {
            state.reserved_by = None;
        }
    }

    /// PERSISTENT RESERVE OUT. Answers the ports whose tasks have to be aborted.
    pub(crate) fn persistent_out(
        &self,
        nexus: &Nexus,
        (action, scope, kind): (u8, u8, u8),
        list: &[u8],
    ) -> Result<Vec<Arc<InitiatorPort>>, Refused> {
        let mut state = lock(&self.state);
        let Effects { attentions, aborts } =
            state
                .reservations
                .out(&nexus.port, action, scope, kind, list)?;
        for (port, attention) in attentions {
            for each in state.nexuses.values_mut().filter(|each| each.port == port) {
                each.attend(attention);
            }
        }
        Ok(aborts)
    }

    /// PERSISTENT RESERVE IN.
    pub(crate) fn persistent_in(&self, action: u8) -> Result<Vec<u8>, Sense> {
        lock(&self.state).reservations.report(action)
    }

    /// What the mode pages show.
    pub(crate) fn mode(&self) -> ModeState {
        let state = lock(&self.state);
        ModeState {
            write_protected: state.software_write_protect || self.lun.read_only(),
            volatile_cache: self.lun.volatile_cache(),
            software_write_protect: state.software_write_protect,
            descriptor_sense: state.descriptor_sense,
            blocks: self.lun.size() / u64::from(self.block_size),
            block_size: self.block_size,
        }
    }

    /// MODE SELECT; other nexuses are told.
    pub(crate) fn set_mode(&self, nexus: &Nexus, change: ModeChange) {
        let mut state = lock(&self.state);
        let before = (state.software_write_protect, state.descriptor_sense);
        if before != (change.software_write_protect, change.descriptor_sense) {
            state.software_write_protect = change.software_write_protect;
            state.descriptor_sense = change.descriptor_sense;
            state.attend(Some(nexus.id), Attention::ModeChanged);
        }
    }
}

impl NexusState {
    fn new(nexus: &Nexus) -> Self {
        NexusState {
            port: Arc::clone(&nexus.port),
            attentions: VecDeque::new(),
        }
    }

    fn attend(&mut self, attention: Attention) {
        if !self.attentions.contains(&attention) && self.attentions.len() < ATTENTIONS_MAX {
            self.attentions.push_back(attention);
        }
    }
}

impl State {
    fn attend(&mut self, but: Option<u64>, attention: Attention) {
        for (id, each) in &mut self.nexuses {
            if Some(*id) != but {
                each.attend(attention);
            }
        }
    }

    fn conflicts(&self, nexus: &Nexus, command: &Command) -> bool {
        let touch = command.touches();
        if let Some(holder) = self.reserved_by
            && holder != nexus.id
        {
            // Asking who is there is free, and RELEASE(6) of who holds nothing is done without effect.
            return !(command.ignores_attention() || matches!(command, Command::Release6));
        }
        self.reservations.conflicts(&nexus.port, touch)
    }
}
