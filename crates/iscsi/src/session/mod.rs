//! A connection, without I/O: PDUs go in, PDUs come out, and slow work is handed out as futures.
//!
//! ```text
//!            ┌──────────── login ────────────┐      ┌─ an older session of the
//!   accept ─►│ login PDUs, CHAP, negotiation ├─►────┤  same port lets go first
//!            └───────────────┬───────────────┘      └────────┬───────────
//!                 refused ◄──┘                                ▼
//!            ┌──────────────────────── full feature ───────────────────────┐
//!            │ command ─► window ─► data ─► queue ─► volume ─► status      │
//!            │ task management, text, NOPs, logout beside it               │
//!            └──────────────────────────────┬──────────────────────────────┘
//!                                           ▼  logout, silence, breach, reset
//! ```
//!
//! The owner (the driver, or a test) calls [`Connection::decode`] and [`Connection::receive`] with what
//! comes in, writes [`Connection::outbox`], runs the futures of [`Connection::take_running`] and hands
//! their results to [`Connection::complete`], and calls [`Connection::tick`] at [`Connection::deadline`].
//! An `Err` means: write what is in the outbox, then close.

mod full;
mod manage;
mod reply;
mod task;
mod text;
mod transfer;
mod window;

use std::collections::VecDeque;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};

use crate::error::{Breach, Disconnect};
use crate::limits::RECV_SEGMENT_BYTES_MAX;
use crate::login::{Accepted, Login, OUT_OF_RESOURCES, Refusal, Step};
use crate::pdu::header::{LoginRequest, LoginResponse};
use crate::pdu::{Decoder, Outbox, Pdu, opcode};
use crate::portal::{Control, Portal, SessionSeat};
use crate::scsi::Outcome;
use full::Full;
use window::Window;

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// A login, from the connection to the full-feature phase.
    pub login: Duration,
    /// Silence after which the peer is pinged.
    pub ping_after: Duration,
    /// How long the peer may take to answer a ping.
    pub ping_answer: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Times {
            login: Duration::from_secs(15),
            ping_after: Duration::from_secs(15),
            ping_answer: Duration::from_secs(30),
        }
    }
}

/// What a future of [`Connection::take_running`] brings.
#[derive(Debug)]
pub enum Completion {
    /// A command is over.
    Command {
        /// The initiator's tag.
        itt: u32,
        /// What became of it.
        outcome: Outcome,
    },
    /// A task management function is over.
    Managed {
        /// The initiator's tag.
        itt: u32,
        /// Whether all sessions of the target have to end now.
        cold: bool,
    },
    /// The session that this one replaces is gone.
    Entered,
}

/// Something that takes time.
pub type Work = Pin<Box<dyn Future<Output = Completion> + Send>>;

enum Phase {
    Login(Box<Login>),
    Entering(Box<Entering>),
    Full(Box<Full>),
}

/// A login that waits for the session that it replaces.
struct Entering {
    request: LoginRequest,
    flags: u8,
    text: Bytes,
    accepted: Box<Accepted>,
    seat: SessionSeat,
}

/// What does not depend on the phase.
struct Line {
    out: Outbox,
    window: Window,
    stat_sn: u32,
    running: VecDeque<Work>,
}

impl Line {
    /// StatSN for a response that carries status; it counts.
    fn next_stat_sn(&mut self) -> u32 {
        let stat_sn = self.stat_sn;
        self.stat_sn = self.stat_sn.wrapping_add(1);
        stat_sn
    }
}

/// One connection.
pub struct Connection {
    portal: Arc<Portal>,
    local: SocketAddr,
    times: Times,
    decoder: Decoder,
    line: Line,
    phase: Phase,
    heard: Instant,
    pinged: Option<Instant>,
    born: Instant,
}

impl Connection {
    /// A connection that has just been made to `local`.
    pub fn new(portal: Arc<Portal>, local: SocketAddr, times: Times, now: Instant) -> Self {
        let login = Box::new(Login::new(Arc::clone(&portal)));
        let decoder = Decoder::new(Arc::clone(portal.pool()));
        Connection {
            portal,
            local,
            times,
            decoder,
            line: Line {
                out: Outbox::default(),
                window: Window::default(),
                stat_sn: 1,
                running: VecDeque::new(),
            },
            phase: Phase::Login(login),
            heard: now,
            pinged: None,
            born: now,
        }
    }

    /// The next PDU in what was read.
    ///
    /// # Errors
    /// The stream cannot be followed any more.
    pub fn decode(&mut self, input: &mut BytesMut) -> Result<Option<Pdu>, Disconnect> {
        let decoded = self.decoder.decode(input);
        if decoded == Err(Disconnect::DataDigest)
            && let Phase::Full(full) = &mut self.phase
            && let Some(header) = self.decoder.spoilt()
        {
            full.reject(&mut self.line, crate::pdu::reject::DATA_DIGEST, header);
        }
        decoded
    }

    /// Where the next bytes from the peer belong, if not into the input of [`Connection::decode`]. Report them with
    /// [`Connection::filled`].
    pub fn room(&mut self) -> Option<&mut [u8]> {
        self.decoder.room()
    }

    /// So much was put into [`Connection::room`].
    pub fn filled(&mut self, len: usize) {
        self.decoder.filled(len);
    }

    /// How much should be read into the input at a time.
    pub fn read_bytes(&self) -> usize {
        self.decoder.read_bytes()
    }

    /// Something was heard from the peer.
    pub fn heard(&mut self, now: Instant) {
        self.heard = now;
        self.pinged = None;
    }

    /// A PDU has come.
    ///
    /// # Errors
    /// The connection has to end, after the outbox has been written.
    pub fn receive(&mut self, pdu: Pdu) -> Result<(), Disconnect> {
        match &mut self.phase {
            Phase::Login(_) if pdu.opcode() == opcode::LOGIN => self.login(&pdu),
            Phase::Login(_) | Phase::Entering(_) => Err(Disconnect::Protocol(Breach::NotALogin)),
            Phase::Full(full) => full.receive(&mut self.line, pdu),
        }
    }

    /// Start what can be started. Call it when commands have come or the outbox has been written.
    pub fn pump(&mut self) {
        if let Phase::Full(full) = &mut self.phase {
            full.pump(&mut self.line);
        }
    }

    /// What is to be written.
    pub fn outbox(&mut self) -> &mut Outbox {
        &mut self.line.out
    }

    /// Something that takes time and has not been handed out yet.
    pub fn take_running(&mut self) -> Option<Work> {
        self.line.running.pop_front()
    }

    /// A future has finished.
    ///
    /// # Errors
    /// The connection has to end, after the outbox has been written.
    pub fn complete(&mut self, completion: Completion) -> Result<(), Disconnect> {
        match (completion, &mut self.phase) {
            (Completion::Entered, Phase::Entering(_)) => {
                let born = Box::new(Login::new(Arc::clone(&self.portal)));
                if let Phase::Entering(entering) =
                    std::mem::replace(&mut self.phase, Phase::Login(born))
                {
                    self.enter(*entering);
                }
                Ok(())
            }
            (Completion::Command { itt, outcome }, Phase::Full(full)) => {
                full.finish(&mut self.line, itt, outcome);
                full.pump(&mut self.line);
                Ok(())
            }
            (Completion::Managed { itt, cold }, Phase::Full(full)) => {
                full.managed(&mut self.line, itt, cold)
            }
            _ => Ok(()),
        }
    }

    /// Another session asks something.
    pub fn control(&mut self, control: &Control) {
        if let Phase::Full(full) = &mut self.phase {
            full.control(&mut self.line, control);
            full.pump(&mut self.line);
        }
    }

    /// The next message of another session or of the portal.
    ///
    /// # Errors
    /// The session has to end.
    pub fn poll_control(&mut self, cx: &mut Context<'_>) -> Poll<Result<Control, Disconnect>> {
        let seat = match &mut self.phase {
            Phase::Login(_) => return Poll::Pending,
            Phase::Entering(entering) => &mut entering.seat,
            Phase::Full(full) => &mut full.seat,
        };
        if let Poll::Ready(Some(reason)) = seat.close.poll_recv(cx) {
            return Poll::Ready(Err(reason));
        }
        match seat.control.poll_recv(cx) {
            Poll::Ready(Some(control)) => Poll::Ready(Ok(control)),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }

    /// Whether the login is over.
    pub fn logged_in(&self) -> bool {
        matches!(self.phase, Phase::Full(_))
    }

    /// Ask the initiator to log out, which it should do within `grace`.
    pub fn request_logout(&mut self, grace: Duration) {
        if let Phase::Full(full) = &mut self.phase {
            full.request_logout(&mut self.line, grace);
        }
    }

    /// When [`Connection::tick`] wants to be called.
    pub fn deadline(&self) -> Instant {
        match (&self.phase, self.pinged) {
            (Phase::Full(_), Some(pinged)) => pinged + self.times.ping_answer,
            (Phase::Full(_), None) => self.heard + self.times.ping_after,
            _ => self.born + self.times.login,
        }
    }

    /// Time has passed.
    ///
    /// # Errors
    /// The peer is silent, or took too long to log in.
    pub fn tick(&mut self, now: Instant) -> Result<(), Disconnect> {
        if now < self.deadline() {
            return Ok(());
        }
        let Phase::Full(full) = &mut self.phase else {
            return Err(Disconnect::LoginTimeout);
        };
        if self.pinged.is_some() {
            return Err(Disconnect::Silent);
        }
        full.ping(&mut self.line);
        self.pinged = Some(now);
        Ok(())
    }

    fn login(&mut self, pdu: &Pdu) -> Result<(), Disconnect> {
        let Phase::Login(login) = &mut self.phase else {
            return Err(Disconnect::Protocol(Breach::LoginTwice));
        };
        let request = *LoginRequest::from_wire(&pdu.header);
        if self.line.window.expected() != request.cmd_sn.get() {
            self.line.window = Window::new(request.cmd_sn.get());
        }
        match login.receive(pdu) {
            Step::Answer { flags, text } => {
                self.login_response(&request, 0, flags, text, None);
                Ok(())
            }
            Step::Refused(refusal) => Err(self.refuse(&request, refusal)),
            Step::Accepted {
                flags,
                text,
                accepted,
            } => {
                let Ok(mut seat) = self
                    .portal
                    .enter(accepted.port.clone(), accepted.target.clone())
                else {
                    return Err(self.refuse(&request, OUT_OF_RESOURCES));
                };
                let replaced = seat.replaced.take();
                let entering = Entering {
                    request,
                    flags,
                    text,
                    accepted,
                    seat,
                };
                match replaced {
                    None => self.enter(entering),
                    Some(mut gone) => {
                        self.phase = Phase::Entering(Box::new(entering));
                        self.line.running.push_back(Box::pin(async move {
                            while gone.recv().await.is_some() {}
                            Completion::Entered
                        }));
                    }
                }
                Ok(())
            }
        }
    }

    fn enter(&mut self, entering: Entering) {
        let Entering {
            request,
            flags,
            text,
            accepted,
            seat,
        } = entering;
        seat.join();
        self.login_response(&request, seat.tsih, flags, text, None);
        let params = accepted.params;
        self.line
            .out
            .set_digests(params.header_digest, params.data_digest);
        self.decoder.header_digest = params.header_digest;
        self.decoder.data_digest = params.data_digest;
        self.decoder.segment_bytes_max = RECV_SEGMENT_BYTES_MAX;
        self.phase = Phase::Full(Box::new(Full::new(
            seat,
            params,
            request.cid.get(),
            self.local,
        )));
    }

    fn refuse(&mut self, request: &LoginRequest, refusal: Refusal) -> Disconnect {
        self.login_response(
            request,
            0,
            request.flags & 0x0c,
            Bytes::new(),
            Some(refusal),
        );
        Disconnect::LoginRefused {
            class: refusal.class,
            detail: refusal.detail,
        }
    }

    fn login_response(
        &mut self,
        request: &LoginRequest,
        tsih: u16,
        flags: u8,
        text: Bytes,
        refusal: Option<Refusal>,
    ) {
        let header = LoginResponse {
            opcode: opcode::LOGIN_RESPONSE,
            flags,
            isid: request.isid,
            tsih: tsih.into(),
            itt: request.itt,
            stat_sn: self.line.next_stat_sn().into(),
            exp_cmd_sn: self.line.window.expected().into(),
            max_cmd_sn: self.line.window.last().into(),
            status_class: refusal.map_or(0, |refusal| refusal.class),
            status_detail: refusal.map_or(0, |refusal| refusal.detail),
            ..LoginResponse::default()
        };
        self.line.out.push(zerocopy::transmute!(header), &[text]);
    }
}
