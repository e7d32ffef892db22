//! The login phase: identity, authentication, negotiation.
//!
//! ```text
//!   first PDU ──► security (0) ──► operational (1) ──► full feature (3)
//!        │            │  ▲              │  ▲                ▲  ▲
//!        │            └──┘ CHAP         └──┘ more keys      │  │
//!        └────────────┴── both stages may be skipped, but ──┴──┘
//!                         never the proof where one is asked for
//! ```
//!
//! Any mistake ends the login with a status; nothing is repaired.

mod chap;
mod negotiate;
mod text;

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;

pub use chap::{Chap, Credentials};
pub use negotiate::{Params, Reply};
pub use text::{BadText, TextBuffer, TextWriter, parse as parse_text};

use crate::limits::{LOGIN_PDUS_MAX, NAME_BYTES_MAX};
use crate::pdu::header::LoginRequest;
use crate::pdu::{CONTINUE, FINAL, Pdu, opcode};
use crate::portal::{InitiatorPort, PORTAL_GROUP, Portal, Target};
use chap::Exchange;

/// Status-Class and Status-Detail of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// Status-Class.
    pub class: u8,
    /// Status-Detail.
    pub detail: u8,
}

const INITIATOR_ERROR: Refusal = Refusal {
    class: 2,
    detail: 0,
};
const NOT_AUTHENTICATED: Refusal = Refusal {
    class: 2,
    detail: 1,
};
const NOT_AUTHORIZED: Refusal = Refusal {
    class: 2,
    detail: 2,
};
const NOT_FOUND: Refusal = Refusal {
    class: 2,
    detail: 3,
};
const VERSION: Refusal = Refusal {
    class: 2,
    detail: 5,
};
const MISSING_PARAMETER: Refusal = Refusal {
    class: 2,
    detail: 7,
};
const CANNOT_INCLUDE: Refusal = Refusal {
    class: 2,
    detail: 8,
};
const SESSION_TYPE: Refusal = Refusal {
    class: 2,
    detail: 9,
};
const NO_SESSION: Refusal = Refusal {
    class: 2,
    detail: 10,
};
/// There is no room for another session.
pub const OUT_OF_RESOURCES: Refusal = Refusal {
    class: 3,
    detail: 2,
};

const SECURITY: u8 = 0;
const OPERATIONAL: u8 = 1;
const FULL_FEATURE: u8 = 3;

/// A login that has gone through.
#[derive(Debug)]
pub struct Accepted {
    /// Who.
    pub port: InitiatorPort,
    /// The target, `None` for discovery.
    pub target: Option<Arc<Target>>,
    /// What was agreed.
    pub params: Params,
}

/// What comes of a login PDU.
#[derive(Debug)]
pub enum Step {
    /// Answer with these flags and this text, and go on.
    Answer {
        /// The second byte of the response.
        flags: u8,
        /// The text.
        text: Bytes,
    },
    /// The login has gone through; the last answer has these flags and this text.
    Accepted {
        /// The second byte of the response.
        flags: u8,
        /// The text.
        text: Bytes,
        /// The result.
        accepted: Box<Accepted>,
    },
    /// The login is refused.
    Refused(Refusal),
}

#[derive(Debug)]
enum Proof {
    NotBegun,
    Chosen,
    Challenged(Exchange),
    Given,
}

#[derive(Debug)]
struct Identity {
    port: InitiatorPort,
    target: Option<Arc<Target>>,
    chap: Option<Chap>,
}

/// A login in progress.
#[derive(Debug)]
pub struct Login {
    portal: Arc<Portal>,
    isid: Option<[u8; 6]>,
    stage: u8,
    pdus: u32,
    text: TextBuffer,
    identity: Option<Identity>,
    proof: Proof,
    params: Params,
    seen: BTreeSet<String>,
    declared: bool,
}

impl Login {
    /// A login that has not begun.
    pub fn new(portal: Arc<Portal>) -> Self {
        Login {
            portal,
            isid: None,
            stage: SECURITY,
            pdus: 0,
            text: TextBuffer::default(),
            identity: None,
            proof: Proof::NotBegun,
            params: Params::default(),
            seen: BTreeSet::new(),
            declared: false,
        }
    }

    /// Take a PDU, which must be a login request.
    pub fn receive(&mut self, pdu: &Pdu) -> Step {
        debug_assert_eq!(pdu.opcode(), opcode::LOGIN);
        self.step(LoginRequest::from_wire(&pdu.header), &pdu.data)
            .unwrap_or_else(Step::Refused)
    }

    fn step(&mut self, request: &LoginRequest, data: &Bytes) -> Result<Step, Refusal> {
        let transit = request.flags & FINAL != 0;
        let more = request.flags & CONTINUE != 0;
        let stage = request.flags >> 2 & 3;
        let next = request.flags & 3;

        self.pdus += 1;
        if self.pdus > LOGIN_PDUS_MAX || (transit && more) {
            return Err(INITIATOR_ERROR);
        }
        match self.isid {
            None => self.begin(request, stage)?,
            Some(isid) if isid != request.isid || stage != self.stage => {
                return Err(INITIATOR_ERROR);
            }
            Some(_) => {}
        }
        if transit && (next <= stage || !matches!(next, OPERATIONAL | FULL_FEATURE)) {
            return Err(INITIATOR_ERROR);
        }
        self.text.push(data).map_err(|BadText| INITIATOR_ERROR)?;
        if more {
            return Ok(Step::Answer {
                flags: stage << 2,
                text: Bytes::new(),
            });
        }
        let pairs = self.text.take().map_err(|BadText| INITIATOR_ERROR)?;
        let mut reply = TextWriter::default();
        if self.identity.is_none() {
            self.identify(&pairs, &mut reply)?;
        }
        self.prove(&pairs, &mut reply)?;
        self.negotiate(&pairs, &mut reply)?;
        self.answer(transit, next, reply)
    }

    fn begin(&mut self, request: &LoginRequest, stage: u8) -> Result<(), Refusal> {
        if request.version_min > 0 {
            return Err(VERSION);
        }
        if request.tsih.get() != 0 {
            // A session has one connection; a lost one is replaced by a new session (ERL 0).
            let known = self.portal.has_session(request.tsih.get());
            return Err(if known { CANNOT_INCLUDE } else { NO_SESSION });
        }
        if stage > OPERATIONAL {
            return Err(INITIATOR_ERROR);
        }
        self.isid = Some(request.isid);
        self.stage = stage;
        Ok(())
    }

    /// The first text says who is there and what for.
    fn identify(
        &mut self,
        pairs: &[(String, String)],
        reply: &mut TextWriter,
    ) -> Result<(), Refusal> {
        let initiator = value(pairs, "InitiatorName").ok_or(MISSING_PARAMETER)?;
        if initiator.is_empty() || initiator.len() > NAME_BYTES_MAX {
            return Err(INITIATOR_ERROR);
        }
        // Names are compared in lower case (RFC 3722); what we keep has been folded.
        let name = initiator.to_ascii_lowercase();
        let port = InitiatorPort {
            name,
            isid: self.isid.unwrap_or_default(),
        };
        let identity = match value(pairs, "SessionType").unwrap_or("Normal") {
            "Discovery" => Identity {
                port,
                target: None,
                chap: self.portal.discovery_chap().cloned(),
            },
            "Normal" => {
                let wanted = value(pairs, "TargetName").ok_or(MISSING_PARAMETER)?;
                let target = self
                    .portal
                    .target(&wanted.to_ascii_lowercase())
                    .ok_or(NOT_FOUND)?;
                let access = target.access();
                if !access.admits(&port.name) {
                    return Err(NOT_AUTHORIZED);
                }
                reply.pair("TargetPortalGroupTag", &PORTAL_GROUP.to_string());
                Identity {
                    port,
                    target: Some(target),
                    chap: access.chap,
                }
            }
            _ => return Err(SESSION_TYPE),
        };
        self.identity = Some(identity);
        Ok(())
    }

    fn chap(&self) -> Option<&Chap> {
        self.identity
            .as_ref()
            .and_then(|identity| identity.chap.as_ref())
    }

    fn prove(&mut self, pairs: &[(String, String)], reply: &mut TextWriter) -> Result<(), Refusal> {
        if self.stage != SECURITY {
            let missing = self.chap().is_some() && !matches!(self.proof, Proof::Given);
            return if missing {
                Err(NOT_AUTHENTICATED)
            } else {
                Ok(())
            };
        }
        if let Some(methods) = value(pairs, "AuthMethod") {
            if !matches!(self.proof, Proof::NotBegun) {
                return Err(INITIATOR_ERROR);
            }
            let method = if self.chap().is_some() {
                "CHAP"
            } else {
                "None"
            };
            if !methods.split(',').any(|each| each == method) {
                return Err(NOT_AUTHENTICATED);
            }
            self.proof = if method == "CHAP" {
                Proof::Chosen
            } else {
                Proof::Given
            };
            reply.pair("AuthMethod", method);
        }
        match std::mem::replace(&mut self.proof, Proof::NotBegun) {
            Proof::Chosen => match value(pairs, "CHAP_A") {
                Some(algorithms) => {
                    let (exchange, pairs) =
                        Exchange::begin(algorithms).map_err(|_| NOT_AUTHENTICATED)?;
                    pairs.iter().for_each(|(key, value)| reply.pair(key, value));
                    self.proof = Proof::Challenged(exchange);
                }
                None => self.proof = Proof::Chosen,
            },
            Proof::Challenged(exchange) => {
                let chap = self.chap().ok_or(NOT_AUTHENTICATED)?;
                let find = |key: &str| value(pairs, key).map(str::to_owned);
                let answers = exchange.finish(chap, find).map_err(|_| NOT_AUTHENTICATED)?;
                answers
                    .iter()
                    .for_each(|(key, value)| reply.pair(key, value));
                self.proof = Proof::Given;
            }
            before => self.proof = before,
        }
        Ok(())
    }

    fn negotiate(
        &mut self,
        pairs: &[(String, String)],
        reply: &mut TextWriter,
    ) -> Result<(), Refusal> {
        for (key, value) in pairs {
            if key == "AuthMethod" || key.starts_with("CHAP_") {
                continue;
            }
            if !self.seen.insert(key.clone()) {
                return Err(INITIATOR_ERROR);
            }
            if let Reply::Value(answer) = self.params.negotiate(key, value) {
                reply.pair(key, &answer);
            }
        }
        if self.stage == OPERATIONAL && !self.declared {
            self.declared = true;
            Params::declarations()
                .iter()
                .for_each(|(key, value)| reply.pair(key, value));
        }
        Ok(())
    }

    fn answer(&mut self, transit: bool, next: u8, reply: TextWriter) -> Result<Step, Refusal> {
        let stage = self.stage;
        let proven = self.chap().is_none() || matches!(self.proof, Proof::Given);
        // While a proof is under way we stay; an initiator that never began one is refused.
        if !transit || (!proven && !matches!(self.proof, Proof::NotBegun)) {
            return Ok(Step::Answer {
                flags: stage << 2,
                text: reply.finish(),
            });
        }
        if !proven {
            return Err(NOT_AUTHENTICATED);
        }
        let flags = FINAL | stage << 2 | next;
        if next == OPERATIONAL {
            self.stage = OPERATIONAL;
            return Ok(Step::Answer {
                flags,
                text: reply.finish(),
            });
        }
        let identity = self.identity.take().ok_or(INITIATOR_ERROR)?;
        let accepted = Accepted {
            port: identity.port,
            target: identity.target,
            params: self.params.clone(),
        };
        Ok(Step::Accepted {
            flags,
            text: reply.finish(),
            accepted: Box::new(accepted),
        })
    }
}

fn value<'a>(pairs: &'a [(String, String)], key: &str) -> Option<&'a str> {
    pairs
        .iter()
        .find(|(each, _)| each == key)
        .map(|(_, value)| value.as_str())
}
