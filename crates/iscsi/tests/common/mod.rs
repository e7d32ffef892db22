//! A small initiator for the tests: it speaks PDUs over a socket, or straight into a connection.
#![allow(
    clippy::unwrap_used,
    missing_docs,
    dead_code,
    reason = "shared by tests that each use a part of it"
)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use trellis_iscsi::pdu::header::{
    DataIn, DataOut, LoginRequest, LoginResponse, LogoutRequest, NopOut, R2t, ScsiCommand,
    ScsiResponse, TaskManagement, TextRequest,
};
use trellis_iscsi::pdu::{Decoder, FINAL, IMMEDIATE, Outbox, Pdu, TAG_NONE, opcode};
use trellis_iscsi::session::{Connection, Times, Work};
use trellis_iscsi::{Access, Disconnect, Portal, Target};
use trellis_test_luns::RamLun;

pub const TARGET: &str = "iqn.2026-11.dev.trellis:test";
pub const INITIATOR: &str = "iqn.2026-11.dev.trellis:initiator";
pub const MIB: u64 = 1 << 20;

/// A portal with one target that has one unit.
pub fn portal(lun: Arc<dyn trellis_iscsi::Lun>, access: Access) -> (Arc<Portal>, Arc<Target>) {
    let portal = Portal::new(16, None);
    let target = Target::new(TARGET, access).unwrap();
    target.add_unit(0, lun).unwrap();
    portal.add_target(Arc::clone(&target)).unwrap();
    (portal, target)
}

pub fn ram(size: u64) -> Arc<RamLun> {
    Arc::new(RamLun::new("ram", size, 512))
}

/// Where PDUs go to and come from.
pub trait Wire {
    fn send(&mut self, bytes: &[u8]);
    /// More bytes, or none when nothing will come.
    fn recv(&mut self, into: &mut BytesMut) -> bool;
}

impl Wire for TcpStream {
    fn send(&mut self, bytes: &[u8]) {
        // A closed connection shows when reading.
        let _closed = self.write_all(bytes);
    }

    fn recv(&mut self, into: &mut BytesMut) -> bool {
        let mut chunk = vec![0; 65536];
        match self.read(&mut chunk) {
            Ok(0) | Err(_) => false,
            Ok(len) => {
                into.extend_from_slice(&chunk[..len]);
                true
            }
        }
    }
}

/// A connection in memory, with the futures that it has handed out.
pub struct Local {
    pub conn: Connection,
    pub input: BytesMut,
    pub ended: Option<Disconnect>,
    pub running: Vec<Work>,
    pub start: Instant,
}

impl Local {
    pub fn new(portal: &Arc<Portal>) -> Self {
        Local::with_times(portal, Times::default())
    }

    pub fn with_times(portal: &Arc<Portal>, times: Times) -> Self {
        let start = Instant::now();
        let local: SocketAddr = "192.0.2.1:3260".parse().unwrap();
        Local {
            conn: Connection::new(Arc::clone(portal), local, times, start),
            input: BytesMut::new(),
            ended: None,
            running: Vec::new(),
            start,
        }
    }

    /// Let everything happen that can happen without waiting.
    pub fn settle(&mut self) {
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        loop {
            let mut moved = false;
            self.conn.pump();
            while let std::task::Poll::Ready(control) = self.conn.poll_control(&mut cx) {
                moved = true;
                match control {
                    Ok(control) => self.conn.control(&control),
                    Err(reason) => {
                        self.ended.get_or_insert(reason);
                        break;
                    }
                }
            }
            while let Some(work) = self.conn.take_running() {
                self.running.push(work);
            }
            let mut waiting = Vec::new();
            for mut work in std::mem::take(&mut self.running) {
                match work.as_mut().poll(&mut cx) {
                    std::task::Poll::Ready(done) => {
                        moved = true;
                        if let Err(reason) = self.conn.complete(done) {
                            self.ended.get_or_insert(reason);
                        }
                    }
                    std::task::Poll::Pending => waiting.push(work),
                }
            }
            self.running.append(&mut waiting);
            if !moved || self.ended.is_some() {
                return;
            }
        }
    }
}

impl Wire for Local {
    fn send(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
        while self.ended.is_none() {
            match self.conn.decode(&mut self.input) {
                Ok(Some(pdu)) => {
                    if let Err(reason) = self.conn.receive(pdu) {
                        self.ended = Some(reason);
                    }
                }
                Ok(None) => break,
                Err(reason) => self.ended = Some(reason),
            }
        }
        self.settle();
    }

    fn recv(&mut self, into: &mut BytesMut) -> bool {
        self.settle();
        let bytes = self.conn.outbox().take();
        into.extend_from_slice(&bytes);
        !bytes.is_empty()
    }
}

/// Flags, status and pairs of a login response.
pub type LoginAnswer = (u8, (u8, u8), Vec<(String, String)>);

/// What became of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    pub status: u8,
    /// Key, code and qualifier.
    pub sense: Option<(u8, u8, u8)>,
    pub data: Vec<u8>,
    pub flags: u8,
    pub residual: u32,
}

impl Reply {
    pub fn good(&self) -> bool {
        self.status == 0
    }
}

pub const CAPACITY_CHANGED: Option<(u8, u8, u8)> = Some((6, 0x2a, 0x09));

pub struct Initiator<W> {
    pub wire: W,
    pub input: BytesMut,
    pub decoder: Decoder,
    pub out: Outbox,
    pub cmd_sn: u32,
    pub exp_cmd_sn: u32,
    pub max_cmd_sn: u32,
    pub next_tag: u32,
    pub isid: [u8; 6],
    pub segment: usize,
    pub first_burst: usize,
    pub immediate: bool,
}

/// Keys for an ordinary session.
pub fn keys(initiator: &str, target: Option<&str>) -> Vec<(String, String)> {
    let mut keys = vec![("InitiatorName".to_owned(), initiator.to_owned())];
    match target {
        Some(name) => {
            keys.push(("TargetName".to_owned(), name.to_owned()));
            keys.push(("SessionType".to_owned(), "Normal".to_owned()));
        }
        None => keys.push(("SessionType".to_owned(), "Discovery".to_owned())),
    }
    keys
}

pub fn text(pairs: &[(String, String)]) -> Bytes {
    let mut bytes = Vec::new();
    for (key, value) in pairs {
        bytes.extend_from_slice(format!("{key}={value}\0").as_bytes());
    }
    Bytes::from(bytes)
}

impl Initiator<Local> {
    pub fn local(portal: &Arc<Portal>) -> Self {
        Initiator::over(Local::new(portal))
    }

    /// A session that is logged in.
    pub fn logged_in(portal: &Arc<Portal>, isid: u8) -> Self {
        let mut initiator = Initiator::local(portal);
        initiator.isid[5] = isid;
        initiator.login_plain();
        initiator
    }
}

impl Initiator<TcpStream> {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        stream.set_nodelay(true).unwrap();
        Initiator::over(stream)
    }
}

impl<W: Wire> Initiator<W> {
    pub fn over(wire: W) -> Self {
        let mut decoder = Decoder::default();
        decoder.segment_bytes_max = 1 << 24;
        Initiator {
            wire,
            input: BytesMut::new(),
            decoder,
            out: Outbox::default(),
            cmd_sn: 1,
            exp_cmd_sn: 1,
            max_cmd_sn: 1,
            next_tag: 1,
            isid: [0x80, 0, 0, 0, 0, 1],
            segment: 8192,
            first_burst: 65536,
            immediate: true,
        }
    }

    pub fn push(&mut self, header: [u8; 48], data: &[u8]) {
        self.out.push(header, &[Bytes::copy_from_slice(data)]);
        let bytes = self.out.take();
        self.wire.send(&bytes);
    }

    /// The next PDU, or nothing when nothing comes.
    pub fn pull(&mut self) -> Option<Pdu> {
        loop {
            if let Some(pdu) = self.decoder.decode(&mut self.input).unwrap() {
                return Some(pdu);
            }
            if !self.wire.recv(&mut self.input) {
                return None;
            }
        }
    }

    pub fn tag(&mut self) -> u32 {
        self.next_tag += 1;
        self.next_tag
    }

    pub fn login_pdu(&mut self, flags: u8, pairs: &[(String, String)]) {
        let header = LoginRequest {
            opcode: opcode::LOGIN | IMMEDIATE,
            flags,
            isid: self.isid,
            itt: 1.into(),
            cmd_sn: self.cmd_sn.into(),
            ..LoginRequest::default()
        };
        self.push(zerocopy::transmute!(header), &text(pairs));
    }

    /// The answer to a login: flags, status and pairs.
    pub fn login_answer(&mut self) -> Option<LoginAnswer> {
        let pdu = self.pull()?;
        assert_eq!(pdu.opcode(), opcode::LOGIN_RESPONSE);
        let header = LoginResponse::from_wire(&pdu.header);
        self.exp_cmd_sn = header.exp_cmd_sn.get();
        self.max_cmd_sn = header.max_cmd_sn.get();
        let pairs = trellis_iscsi::login::parse_text(&pdu.data).unwrap();
        Some((
            header.flags,
            (header.status_class, header.status_detail),
            pairs,
        ))
    }

    /// Straight to the full-feature phase, with these keys besides the names.
    pub fn login_with(
        &mut self,
        mut pairs: Vec<(String, String)>,
        more: &[(&str, &str)],
    ) -> (u8, u8) {
        pairs.extend(
            more.iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned())),
        );
        self.login_pdu(0x87, &pairs);
        let (_, status, answers) = self.login_answer().unwrap();
        let answer = |key: &str| {
            answers
                .iter()
                .find(|(each, _)| each == key)
                .map(|(_, value)| value.clone())
        };
        let digest = |key: &str| answer(key).as_deref() == Some("CRC32C");
        self.decoder.header_digest = digest("HeaderDigest");
        self.decoder.data_digest = digest("DataDigest");
        self.out
            .set_digests(digest("HeaderDigest"), digest("DataDigest"));
        status
    }

    pub fn login_plain(&mut self) {
        let more = [
            ("MaxRecvDataSegmentLength", "262144"),
            ("InitialR2T", "No"),
            ("FirstBurstLength", "65536"),
        ];
        assert_eq!(
            self.login_with(keys(INITIATOR, Some(TARGET)), &more),
            (0, 0)
        );
    }

    /// Send a command with its immediate data; the rest of the data waits to be asked for.
    pub fn command(&mut self, cdb: [u8; 16], flags: u8, expected: u32, data: &[u8]) -> u32 {
        let itt = self.tag();
        let now = if self.immediate {
            data.len().min(self.segment).min(self.first_burst)
        } else {
            0
        };
        let header = ScsiCommand {
            opcode: opcode::SCSI_COMMAND,
            flags: FINAL | flags,
            itt: itt.into(),
            expected_len: expected.into(),
            cmd_sn: self.cmd_sn.into(),
            cdb,
            ..ScsiCommand::default()
        };
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        self.push(zerocopy::transmute!(header), &data[..now]);
        itt
    }

    /// What becomes of a command; asked for data is sent.
    pub fn reply(&mut self, itt: u32, data: &[u8]) -> Option<Reply> {
        let mut read = Vec::new();
        loop {
            let pdu = self.pull()?;
            match pdu.opcode() {
                opcode::R2T => {
                    let header = *R2t::from_wire(&pdu.header);
                    assert_eq!(header.itt.get(), itt);
                    self.send_burst(&header, data);
                }
                opcode::DATA_IN => {
                    let header = DataIn::from_wire(&pdu.header);
                    assert_eq!(header.itt.get(), itt);
                    assert_eq!(usize::try_from(header.offset.get()).unwrap(), read.len());
                    read.extend_from_slice(&pdu.data);
                    if header.flags & 1 != 0 {
                        self.max_cmd_sn = header.max_cmd_sn.get();
                        let (flags, residual) = (header.flags & 6, header.residual.get());
                        return Some(Reply {
                            status: header.status,
                            sense: None,
                            data: read,
                            flags,
                            residual,
                        });
                    }
                }
                opcode::SCSI_RESPONSE => {
                    let header = ScsiResponse::from_wire(&pdu.header);
                    assert_eq!(header.itt.get(), itt);
                    self.max_cmd_sn = header.max_cmd_sn.get();
                    let sense = (pdu.data.len() >= 16)
                        .then(|| (pdu.data[4] & 15, pdu.data[14], pdu.data[15]));
                    let (flags, residual) = (header.flags & 6, header.residual.get());
                    return Some(Reply {
                        status: header.status,
                        sense,
                        data: read,
                        flags,
                        residual,
                    });
                }
                opcode::NOP_IN => {}
                other => panic!("unexpected PDU {other:02x}h"),
            }
        }
    }

    pub fn send_burst(&mut self, r2t: &R2t, data: &[u8]) {
        let start = usize::try_from(r2t.offset.get()).unwrap();
        let end = start + usize::try_from(r2t.desired_len.get()).unwrap();
        let mut at = start;
        let mut data_sn = 0u32;
        while at < end {
            let next = end.min(at + self.segment);
            let header = DataOut {
                opcode: opcode::DATA_OUT,
                flags: if next == end { FINAL } else { 0 },
                itt: r2t.itt,
                ttt: r2t.ttt,
                data_sn: data_sn.into(),
                offset: u32::try_from(at).unwrap().into(),
                ..DataOut::default()
            };
            self.push(zerocopy::transmute!(header), &data[at..next]);
            data_sn += 1;
            at = next;
        }
    }

    pub fn run(&mut self, cdb: [u8; 16], flags: u8, expected: u32, data: &[u8]) -> Reply {
        let itt = self.command(cdb, flags, expected, data);
        self.reply(itt, data).expect("an answer")
    }

    pub fn test_unit_ready(&mut self) -> Reply {
        self.run([0; 16], 0, 0, &[])
    }

    pub fn write(&mut self, lba: u32, data: &[u8]) -> Reply {
        let (cdb, len) = cdb10(0x2a, lba, data.len());
        self.run(cdb, 0x20, len, data)
    }

    pub fn read(&mut self, lba: u32, len: usize) -> Reply {
        let (cdb, len) = cdb10(0x28, lba, len);
        self.run(cdb, 0x40, len, &[])
    }

    /// READ CAPACITY(16): bytes.
    pub fn capacity(&mut self) -> Result<u64, Reply> {
        let mut cdb = [0; 16];
        cdb[..2].copy_from_slice(&[0x9e, 0x10]);
        cdb[13] = 32;
        let reply = self.run(cdb, 0x40, 32, &[]);
        if !reply.good() {
            return Err(reply);
        }
        let last = u64::from_be_bytes(reply.data[..8].try_into().unwrap());
        let block = u32::from_be_bytes(reply.data[8..12].try_into().unwrap());
        Ok((last + 1) * u64::from(block))
    }

    pub fn task_management(&mut self, function: u8, referenced: u32) -> u32 {
        let itt = self.tag();
        let header = TaskManagement {
            opcode: opcode::TASK_MANAGEMENT | IMMEDIATE,
            function: FINAL | function,
            itt: itt.into(),
            referenced_tag: referenced.into(),
            cmd_sn: self.cmd_sn.into(),
            ..TaskManagement::default()
        };
        self.push(zerocopy::transmute!(header), &[]);
        itt
    }

    pub fn nop(&mut self, immediate: bool, data: &[u8]) {
        let itt = self.tag();
        let header = NopOut {
            opcode: opcode::NOP_OUT | if immediate { IMMEDIATE } else { 0 },
            flags: FINAL,
            itt: itt.into(),
            ttt: TAG_NONE.into(),
            cmd_sn: self.cmd_sn.into(),
            ..NopOut::default()
        };
        if !immediate {
            self.cmd_sn += 1;
        }
        self.push(zerocopy::transmute!(header), data);
    }

    pub fn text(&mut self, ttt: u32, pairs: &[(String, String)]) {
        let itt = self.tag();
        let header = TextRequest {
            opcode: opcode::TEXT | IMMEDIATE,
            flags: FINAL,
            itt: itt.into(),
            ttt: ttt.into(),
            cmd_sn: self.cmd_sn.into(),
            ..TextRequest::default()
        };
        self.push(zerocopy::transmute!(header), &text(pairs));
    }

    pub fn logout(&mut self) {
        let itt = self.tag();
        let header = LogoutRequest {
            opcode: opcode::LOGOUT | IMMEDIATE,
            reason: FINAL,
            itt: itt.into(),
            cmd_sn: self.cmd_sn.into(),
            ..LogoutRequest::default()
        };
        self.push(zerocopy::transmute!(header), &[]);
    }
}

/// A ten-byte CDB over 512-byte blocks, and its length in bytes.
pub fn cdb10(opcode: u8, lba: u32, len: usize) -> ([u8; 16], u32) {
    let mut cdb = [0; 16];
    cdb[0] = opcode;
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[7..9].copy_from_slice(&u16::try_from(len / 512).unwrap().to_be_bytes());
    (cdb, u32::try_from(len).unwrap())
}
