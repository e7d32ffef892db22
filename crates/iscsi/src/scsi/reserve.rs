//! Persistent reservations (SPC-4), as a state without I/O.
//!
//! They last as long as the target: persistence across a power loss is not offered (PTPL_C is 0).

use std::sync::Arc;

use super::cdb::Touch;
use super::sense::{Attention, Sense};
use crate::limits::REGISTRATIONS_MAX;
use crate::portal::InitiatorPort;

/// The kinds of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of SPC-4, table 80")]
pub enum Kind {
    WriteExclusive = 1,
    ExclusiveAccess = 3,
    WriteExclusiveRegistrantsOnly = 5,
    ExclusiveAccessRegistrantsOnly = 6,
    WriteExclusiveAllRegistrants = 7,
    ExclusiveAccessAllRegistrants = 8,
}

impl Kind {
    fn from_code(code: u8) -> Option<Kind> {
        Some(match code {
            1 => Kind::WriteExclusive,
            3 => Kind::ExclusiveAccess,
            5 => Kind::WriteExclusiveRegistrantsOnly,
            6 => Kind::ExclusiveAccessRegistrantsOnly,
            7 => Kind::WriteExclusiveAllRegistrants,
            8 => Kind::ExclusiveAccessAllRegistrants,
            _ => return None,
        })
    }

    fn code(self) -> u8 {
        match self {
            Kind::WriteExclusive => 1,
            Kind::ExclusiveAccess => 3,
            Kind::WriteExclusiveRegistrantsOnly => 5,
            Kind::ExclusiveAccessRegistrantsOnly => 6,
            Kind::WriteExclusiveAllRegistrants => 7,
            Kind::ExclusiveAccessAllRegistrants => 8,
        }
    }

    fn all_registrants(self) -> bool {
        matches!(
            self,
            Kind::WriteExclusiveAllRegistrants | Kind::ExclusiveAccessAllRegistrants
        )
    }

    fn admits_registrants(self) -> bool {
        !matches!(self, Kind::WriteExclusive | Kind::ExclusiveAccess)
    }

    fn forbids_reading(self) -> bool {
        matches!(
            self,
            Kind::ExclusiveAccess
                | Kind::ExclusiveAccessRegistrantsOnly
                | Kind::ExclusiveAccessAllRegistrants
        )
    }
}

#[derive(Debug, Clone)]
struct Registrant {
    port: Arc<InitiatorPort>,
    key: u64,
}

#[derive(Debug, Clone)]
struct Reservation {
    kind: Kind,
    /// `None` where all registrants hold it.
    holder: Option<Arc<InitiatorPort>>,
}

/// Registrations and the reservation of one logical unit.
#[derive(Debug, Default)]
pub struct Reservations {
    generation: u32,
    registrants: Vec<Registrant>,
    reservation: Option<Reservation>,
}

/// Why a PERSISTENT RESERVE OUT is not done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The status RESERVATION CONFLICT.
    Conflict,
    /// CHECK CONDITION.
    Sense(Sense),
}

/// What others have to be told, and whose tasks are to be aborted.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Unit attentions.
    pub attentions: Vec<(Arc<InitiatorPort>, Attention)>,
    /// Initiator ports that lost their registration in a PREEMPT AND ABORT.
    pub aborts: Vec<Arc<InitiatorPort>>,
}

/// The parameter list of PERSISTENT RESERVE OUT.
#[derive(Debug, Clone, Copy)]
struct Keys {
    key: u64,
    action_key: u64,
}

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;
const REGISTER_AND_IGNORE: u8 = 6;

fn keys(list: &[u8]) -> Result<Keys, Sense> {
    let list: &[u8; 24] = list.try_into().map_err(|_| Sense::PARAMETER_LENGTH)?;
    let word = |at: usize| {
        list[at..at + 8]
            .iter()
            .fold(0, |word: u64, byte| word << 8 | u64::from(*byte))
    };
    // SPEC_I_PT and APTPL are not supported; ALL_TG_PT changes nothing, there is one port.
    if list[20] & 0x09 != 0 {
        return Err(Sense::INVALID_PARAMETER);
    }
    Ok(Keys {
        key: word(0),
        action_key: word(8),
    })
}

impl Reservations {
    /// Whether nobody has registered.
    pub fn is_empty(&self) -> bool {
        self.registrants.is_empty()
    }

    /// Whether a command of this kind, from this port, has to be refused.
    pub fn conflicts(&self, port: &InitiatorPort, touch: Touch) -> bool {
        let Some(reservation) = &self.reservation else {
            return touch == Touch::Classic && !self.registrants.is_empty();
        };
        match touch {
            Touch::Nothing | Touch::Persistent => false,
            Touch::Classic => true,
            Touch::Reads if !reservation.kind.forbids_reading() => false,
            Touch::Reads | Touch::Writes => {
                let registered = self.key_of(port).is_some();
                let holds = reservation
                    .holder
                    .as_deref()
                    .is_some_and(|holder| holder == port);
                !(holds || (registered && reservation.kind.admits_registrants()))
            }
        }
    }

    fn key_of(&self, port: &InitiatorPort) -> Option<u64> {
        self.registrants
            .iter()
            .find(|each| *each.port == *port)
            .map(|each| each.key)
    }

    fn holds(&self, port: &InitiatorPort) -> bool {
        self.reservation
            .as_ref()
            .is_some_and(|reservation| match &reservation.holder {
                Some(holder) => **holder == *port,
                None => self.key_of(port).is_some(),
            })
    }

    /// PERSISTENT RESERVE OUT.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn out(
        &mut self,
        port: &Arc<InitiatorPort>,
        action: u8,
        scope: u8,
        kind: u8,
        list: &[u8],
    ) -> Result<Effects, Refused> {
        let keys = keys(list).map_err(Refused::Sense)?;
        let invalid = Refused::Sense(Sense::INVALID_FIELD_IN_CDB);
        if !matches!(action, REGISTER | REGISTER_AND_IGNORE) {
            if action > REGISTER_AND_IGNORE {
                return Err(invalid);
            }
            if self.key_of(port) != Some(keys.key) {
                return Err(Refused::Conflict);
            }
        }
        let kind_of = || {
            if scope == 0 {
                Kind::from_code(kind).ok_or(invalid)
            } else {
                Err(invalid)
            }
        };
        match action {
            REGISTER => self.register(port, Some(keys.key), keys.action_key),
            REGISTER_AND_IGNORE => self.register(port, None, keys.action_key),
            RESERVE => self.reserve(port, kind_of()?),
            RELEASE => self.release(port, kind_of()?),
            CLEAR => Ok(self.clear(port)),
            PREEMPT => self.preempt(port, kind_of()?, keys.action_key, false),
            PREEMPT_AND_ABORT => self.preempt(port, kind_of()?, keys.action_key, true),
            _ => Err(invalid),
        }
    }

    fn register(
        &mut self,
        port: &Arc<InitiatorPort>,
        claimed: Option<u64>,
        new: u64,
    ) -> Result<Effects, Refused> {
        let current = self.key_of(port);
        if claimed.is_some_and(|key| key != current.unwrap_or(0)) {
            return Err(Refused::Conflict);
        }
        match (current, new) {
            (None, 0) => return Ok(Effects::default()),
            (None, _) if self.registrants.len() == REGISTRATIONS_MAX => {
                return Err(Refused::Sense(Sense::NO_REGISTRATION_ROOM));
            }
            (None, _) => self.registrants.push(Registrant {
                port: Arc::clone(port),
                key: new,
            }),
            (Some(_), 0) => {
                self.generation = self.generation.wrapping_add(1);
                return Ok(self.unregister(port));
            }
            (Some(_), _) => {
                self.registrants
                    .iter_mut()
                    .filter(|each| each.port == *port)
                    .for_each(|each| each.key = new);
            }
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(Effects::default())
    }

    fn unregister(&mut self, port: &Arc<InitiatorPort>) -> Effects {
        let held = self.holds(port);
        self.registrants.retain(|each| each.port != *port);
        let gone = match &self.reservation {
            Some(reservation) if reservation.kind.all_registrants() => self.registrants.is_empty(),
            Some(_) => held,
            None => false,
        };
        if !gone {
            return Effects::default();
        }
        self.end_reservation(port)
    }

    /// Drop the reservation; where registrants shared it, they are told.
    fn end_reservation(&mut self, by: &Arc<InitiatorPort>) -> Effects {
        let shared = self
            .reservation
            .take()
            .is_some_and(|reservation| reservation.kind.admits_registrants());
        let told = self
            .registrants
            .iter()
            .filter(|each| shared && each.port != *by);
        let attentions = told
            .map(|each| (Arc::clone(&each.port), Attention::ReservationsReleased))
            .collect();
        Effects {
            attentions,
            aborts: Vec::new(),
        }
    }

    fn reserve(&mut self, port: &Arc<InitiatorPort>, kind: Kind) -> Result<Effects, Refused> {
        if let Some(reservation) = &self.reservation {
            let same = self.holds(port) && reservation.kind == kind;
            return if same {
                Ok(Effects::default())
            } else {
                Err(Refused::Conflict)
            };
        }
        self.take_reservation(port, kind);
        Ok(Effects::default())
    }

    fn take_reservation(&mut self, port: &Arc<InitiatorPort>, kind: Kind) {
        let holder = (!kind.all_registrants()).then(|| Arc::clone(port));
        self.reservation = Some(Reservation { kind, holder });
    }

    fn release(&mut self, port: &Arc<InitiatorPort>, kind: Kind) -> Result<Effects, Refused> {
        if !self.holds(port) {
            return Ok(Effects::default());
        }
        if self
            .reservation
            .as_ref()
            .is_some_and(|reservation| reservation.kind != kind)
        {
            return Err(Refused::Sense(Sense::INVALID_RELEASE));
        }
        Ok(self.end_reservation(port))
    }

    fn clear(&mut self, port: &Arc<InitiatorPort>) -> Effects {
        self.generation = self.generation.wrapping_add(1);
        self.reservation = None;
        let told = self.registrants.drain(..).filter(|each| each.port != *port);
        let attentions = told
            .map(|each| (each.port, Attention::ReservationsPreempted))
            .collect();
        Effects {
            attentions,
            aborts: Vec::new(),
        }
    }

    fn preempt(
        &mut self,
        port: &Arc<InitiatorPort>,
        kind: Kind,
        victim: u64,
        abort: bool,
    ) -> Result<Effects, Refused> {
        let shared_by_all = self
            .reservation
            .as_ref()
            .is_some_and(|reservation| reservation.kind.all_registrants());
        let holder_key = self
            .reservation
            .as_ref()
            .and_then(|reservation| reservation.holder.as_ref())
            .and_then(|p| self.key_of(p));
        let everybody = shared_by_all && victim == 0;
        if victim == 0 && !everybody {
            return Err(Refused::Sense(Sense::INVALID_PARAMETER));
        }
        let takes = everybody || holder_key == Some(victim);
        let hit = |each: &Registrant| everybody || each.key == victim;
        if !self.registrants.iter().any(hit) {
            return Err(Refused::Conflict);
        }
        self.generation = self.generation.wrapping_add(1);
        let removed: Vec<_> = self
            .registrants
            .iter()
            .filter(|each| hit(each) && each.port != *port)
            .map(|each| Arc::clone(&each.port))
            .collect();
        self.registrants
            .retain(|each| !removed.contains(&each.port));
        let mut effects = Effects::default();
        if takes {
            let changed = self
                .reservation
                .as_ref()
                .is_some_and(|r| r.kind != kind && r.kind.admits_registrants());
            let told = self
                .registrants
                .iter()
                .filter(|each| changed && each.port != *port);
            effects
                .attentions
                .extend(told.map(|each| (Arc::clone(&each.port), Attention::ReservationsReleased)));
            self.take_reservation(port, kind);
        }
        effects.attentions.extend(
            removed
                .iter()
                .map(|each| (Arc::clone(each), Attention::RegistrationsPreempted)),
        );
        if abort {
            effects.aborts = removed;
        }
        Ok(effects)
    }

    /// PERSISTENT RESERVE IN.
    ///
    /// # Errors
    /// There is no such service action.
    pub fn report(&self, action: u8) -> Result<Vec<u8>, Sense> {
        match action {
            0 => {
                let keys = self
                    .registrants
                    .iter()
                    .flat_map(|each| each.key.to_be_bytes())
                    .collect();
                Ok(self.framed(keys))
            }
            1 => Ok(self.framed(
                self.reservation
                    .as_ref()
                    .map(|each| self.describe(each))
                    .unwrap_or_default(),
            )),
            // ATP_C is not claimed; the type mask is valid: all six kinds.
            2 => Ok(vec![0, 8, 0, 0x80, 0xea, 0x01, 0, 0]),
            3 => Ok(self.framed(self.full_status())),
            _ => Err(Sense::INVALID_FIELD_IN_CDB),
        }
    }

    fn framed(&self, body: Vec<u8>) -> Vec<u8> {
        let mut data = self.generation.to_be_bytes().to_vec();
        data.extend_from_slice(&u32::try_from(body.len()).unwrap_or(0).to_be_bytes());
        data.extend_from_slice(&body);
        data
    }

    fn describe(&self, reservation: &Reservation) -> Vec<u8> {
        let key = reservation
            .holder
            .as_ref()
            .and_then(|holder| self.key_of(holder))
            .unwrap_or(0);
        let mut data = key.to_be_bytes().to_vec();
        data.extend_from_slice(&[0, 0, 0, 0, 0, reservation.kind.code(), 0, 0]);
        data
    }

    fn full_status(&self) -> Vec<u8> {
        let mut data = Vec::new();
        for each in &self.registrants {
            let held = self.reservation.as_ref().filter(|_| self.holds(&each.port));
            let id = transport_id(&each.port);
            data.extend_from_slice(&each.key.to_be_bytes());
            data.extend_from_slice(&[0, 0, 0, 0]);
            data.extend_from_slice(&[
                u8::from(held.is_some()),
                held.map_or(0, |r| r.kind.code()),
                0,
                0,
                0,
                0,
                0,
                1,
            ]);
            data.extend_from_slice(&u32::try_from(id.len()).unwrap_or(0).to_be_bytes());
            data.extend_from_slice(&id);
        }
        data
    }
}

/// The TransportID of an initiator port: its name and the session's part of its identity.
fn transport_id(port: &InitiatorPort) -> Vec<u8> {
    let isid = port
        .isid
        .iter()
        .fold(0, |word: u64, byte| word << 8 | u64::from(*byte));
    let mut name = format!("{},i,0x{isid:012x}", port.name).into_bytes();
    name.resize((name.len() + 1).next_multiple_of(4), 0);
    let [high, low] = u16::try_from(name.len()).unwrap_or(0).to_be_bytes();
    let mut id = vec![0x45, 0, high, low];
    id.extend_from_slice(&name);
    id
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn port(name: &str) -> Arc<InitiatorPort> {
        Arc::new(InitiatorPort {
            name: name.to_owned(),
            isid: [0; 6],
        })
    }

    fn list(key: u64, action_key: u64) -> Vec<u8> {
        let mut list = key.to_be_bytes().to_vec();
        list.extend_from_slice(&action_key.to_be_bytes());
        list.extend_from_slice(&[0; 8]);
        list
    }

    fn two() -> (Reservations, Arc<InitiatorPort>, Arc<InitiatorPort>) {
        let (a, b) = (port("iqn.a"), port("iqn.b"));
        let mut state = Reservations::default();
        state.out(&a, REGISTER, 0, 0, &list(0, 1)).unwrap();
        state.out(&b, REGISTER, 0, 0, &list(0, 2)).unwrap();
        (state, a, b)
    }

    #[test]
    fn each_kind_keeps_out_whom_it_should() {
        // Fails if a kind lets a stranger write, keeps a registrant out that it admits, or the reverse.
        let stranger = port("iqn.c");
        for (code, registrant_reads, registrant_writes, stranger_reads) in [
            (1, true, false, true),
            (3, false, false, false),
            (5, true, true, true),
            (6, true, true, false),
            (7, true, true, true),
            (8, true, true, false),
        ] {
            let (mut state, a, b) = two();
            state.out(&a, RESERVE, 0, code, &list(1, 0)).unwrap();
            assert!(!state.conflicts(&a, Touch::Writes), "holder, kind {code}");
            assert_eq!(
                !state.conflicts(&b, Touch::Reads),
                registrant_reads,
                "registrant reads, kind {code}"
            );
            assert_eq!(
                !state.conflicts(&b, Touch::Writes),
                registrant_writes,
                "registrant writes, kind {code}"
            );
            assert_eq!(
                !state.conflicts(&stranger, Touch::Reads),
                stranger_reads,
                "stranger reads, kind {code}"
            );
            assert!(
                state.conflicts(&stranger, Touch::Writes),
                "stranger writes, kind {code}"
            );
            assert!(!state.conflicts(&stranger, Touch::Nothing));
            assert!(state.conflicts(&a, Touch::Classic));
        }
    }

    #[test]
    fn a_preempted_holder_is_told_and_loses_its_hold() {
        // Fails if the reservation stays with the old holder, or it is not told, or its tasks live on.
        let (mut state, a, b) = two();
        state.out(&a, RESERVE, 0, 1, &list(1, 0)).unwrap();
        assert_eq!(
            state.out(&b, RESERVE, 0, 1, &list(2, 0)),
            Err(Refused::Conflict)
        );
        let effects = state.out(&b, PREEMPT_AND_ABORT, 0, 3, &list(2, 1)).unwrap();
        assert_eq!(
            effects.attentions,
            [(Arc::clone(&a), Attention::RegistrationsPreempted)]
        );
        assert_eq!(effects.aborts, [Arc::clone(&a)]);
        assert!(state.conflicts(&a, Touch::Reads));
        assert!(!state.conflicts(&b, Touch::Writes));
        assert_eq!(state.report(0).unwrap()[4..8], 8u32.to_be_bytes());
    }

    #[test]
    fn a_reservation_of_all_registrants_ends_with_the_last() {
        // Fails if the reservation outlives its registrants or dies with the first.
        let (mut state, a, b) = two();
        state.out(&a, RESERVE, 0, 7, &list(1, 0)).unwrap();
        state.out(&a, REGISTER, 0, 0, &list(1, 0)).unwrap();
        assert!(state.conflicts(&a, Touch::Writes));
        assert!(!state.conflicts(&b, Touch::Writes));
        state
            .out(&b, REGISTER_AND_IGNORE, 0, 0, &list(99, 0))
            .unwrap();
        assert!(!state.conflicts(&a, Touch::Writes));
        assert!(state.is_empty());
    }

    #[test]
    fn keys_must_be_right() {
        // Fails if a wrong key is let through, or a bad list or type is taken.
        let (mut state, a, _) = two();
        assert_eq!(
            state.out(&a, RESERVE, 0, 1, &list(7, 0)),
            Err(Refused::Conflict)
        );
        assert_eq!(
            state.out(&a, REGISTER, 0, 0, &list(7, 8)),
            Err(Refused::Conflict)
        );
        assert_eq!(
            state.out(&a, RESERVE, 0, 2, &list(1, 0)),
            Err(Refused::Sense(Sense::INVALID_FIELD_IN_CDB))
        );
        assert_eq!(
            state.out(&a, RESERVE, 0, 1, &[0; 23]),
            Err(Refused::Sense(Sense::PARAMETER_LENGTH))
        );
        state.out(&a, RESERVE, 0, 1, &list(1, 0)).unwrap();
        assert_eq!(
            state.out(&a, RELEASE, 0, 3, &list(1, 0)),
            Err(Refused::Sense(Sense::INVALID_RELEASE))
        );
    }

    #[test]
    fn registrations_are_bounded() {
        // Fails if initiators can make the list grow without end.
        let mut state = Reservations::default();
        for n in 0..REGISTRATIONS_MAX {
            state
                .out(&port(&format!("iqn.{n}")), REGISTER, 0, 0, &list(0, 1))
                .unwrap();
        }
        let full = state.out(&port("iqn.more"), REGISTER, 0, 0, &list(0, 1));
        assert_eq!(full, Err(Refused::Sense(Sense::NO_REGISTRATION_ROOM)));
    }
}
