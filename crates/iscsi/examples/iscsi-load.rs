//! A load for any iSCSI target: random reads or writes of one size at one depth.
//!
//! `iscsi-load ADDRESS TARGET_NAME LUN read|write BLOCK_BYTES DEPTH SECONDS` prints commands a second.
//! One thread, one connection, everything that is due in one write: it costs little beside the target.

use std::error::Error;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use trellis_iscsi::login::parse_text;
use trellis_iscsi::pdu::header::{
    DataIn, DataOut, LoginRequest, LoginResponse, R2t, ScsiCommand, ScsiResponse,
};
use trellis_iscsi::pdu::{Decoder, FINAL, IMMEDIATE, Outbox, Pdu, TAG_NONE, opcode};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const READ: u8 = 0x40;
const WRITE: u8 = 0x20;
const SEGMENT: &str = "262144";

struct Load {
    stream: TcpStream,
    input: BytesMut,
    chunk: Vec<u8>,
    decoder: Decoder,
    out: Outbox,
    lun: u8,
    cmd_sn: u32,
    first_burst: usize,
    segment: usize,
}

impl Load {
    fn flush(&mut self) -> Result<()> {
        let bytes = self.out.take();
        Ok(self.stream.write_all(&bytes)?)
    }

    fn pull(&mut self) -> Result<Pdu> {
        loop {
            if let Some(pdu) = self.decoder.decode(&mut self.input)? {
                return Ok(pdu);
            }
            self.flush()?;
            let len = self.stream.read(&mut self.chunk)?;
            if len == 0 {
                return Err("the target closed the connection".into());
            }
            self.input.extend_from_slice(&self.chunk[..len]);
        }
    }

    fn login(&mut self, target: &str) -> Result<()> {
        let header = LoginRequest {
            opcode: opcode::LOGIN | IMMEDIATE,
            flags: 0x87,
            isid: [0x80, 0, 0, 0, 0, 7],
            itt: 1.into(),
            cmd_sn: 1.into(),
            ..LoginRequest::default()
        };
        let text = format!(
            "InitiatorName=iqn.2026-11.dev.trellis:load\0TargetName={target}\0SessionType=Normal\0\
             HeaderDigest=None\0DataDigest=None\0InitialR2T=No\0ImmediateData=Yes\0MaxBurstLength=1048576\0\
             FirstBurstLength={SEGMENT}\0MaxRecvDataSegmentLength={SEGMENT}\0MaxOutstandingR2T=1\0"
        );
        self.out
            .push(zerocopy::transmute!(header), &[Bytes::from(text)]);
        // A target may take several steps; each is answered with an empty request until it lets us in.
        for _ in 0..8 {
            let pdu = self.pull()?;
            let response = LoginResponse::from_wire(&pdu.header);
            if response.status_class != 0 {
                return Err("the login was refused".into());
            }
            for (key, value) in parse_text(&pdu.data).unwrap_or_default() {
                match key.as_str() {
                    "FirstBurstLength" => self.first_burst = value.parse()?,
                    "MaxRecvDataSegmentLength" => self.segment = value.parse()?,
                    _ => {}
                }
            }
            if response.flags & 0x83 == 0x83 {
                return Ok(());
            }
            self.out.push(zerocopy::transmute!(header), &[]);
        }
        Err("the login does not end".into())
    }

    fn command(
        &mut self,
        itt: u32,
        cdb: [u8; 16],
        flags: u8,
        expected: usize,
        data: &Bytes,
    ) -> Result<()> {
        let now = data.len().min(self.segment).min(self.first_burst);
        let header = ScsiCommand {
            opcode: opcode::SCSI_COMMAND,
            flags: FINAL | flags | 1,
            lun: [0, self.lun, 0, 0, 0, 0, 0, 0],
            itt: itt.into(),
            expected_len: u32::try_from(expected)?.into(),
            cmd_sn: self.cmd_sn.into(),
            cdb,
            ..ScsiCommand::default()
        };
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        self.out
            .push(zerocopy::transmute!(header), &[data.slice(..now)]);
        Ok(())
    }

    fn burst(&mut self, r2t: &R2t, data: &Bytes) -> Result<()> {
        let start = usize::try_from(r2t.offset.get())?;
        let end = start + usize::try_from(r2t.desired_len.get())?;
        let (mut at, mut data_sn) = (start, 0u32);
        while at < end {
            let next = end.min(at + self.segment);
            let header = DataOut {
                opcode: opcode::DATA_OUT,
                flags: if next == end { FINAL } else { 0 },
                itt: r2t.itt,
                ttt: r2t.ttt,
                data_sn: data_sn.into(),
                offset: u32::try_from(at)?.into(),
                ..DataOut::default()
            };
            self.out
                .push(zerocopy::transmute!(header), &[data.slice(at..next)]);
            (at, data_sn) = (next, data_sn + 1);
        }
        Ok(())
    }

    /// The tag and status of the next command that is over.
    fn completion(&mut self, data: &Bytes) -> Result<(u32, u8, Bytes)> {
        loop {
            let pdu = self.pull()?;
            match pdu.opcode() {
                opcode::DATA_IN if pdu.header[1] & 1 != 0 => {
                    let header = DataIn::from_wire(&pdu.header);
                    return Ok((header.itt.get(), header.status, pdu.data.clone()));
                }
                opcode::SCSI_RESPONSE => {
                    let header = ScsiResponse::from_wire(&pdu.header);
                    return Ok((header.itt.get(), header.status, Bytes::new()));
                }
                opcode::R2T => self.burst(R2t::from_wire(&pdu.header), data)?,
                opcode::DATA_IN | opcode::NOP_IN => {}
                other => return Err(format!("unexpected PDU {other:02x}h").into()),
            }
        }
    }
}

/// xorshift64: random enough for offsets.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [address, target, lun, direction, block, depth, seconds] = args.as_slice() else {
        return Err(
            "usage: iscsi-load ADDRESS TARGET LUN read|write BLOCK_BYTES DEPTH SECONDS".into(),
        );
    };
    let (block, depth): (usize, u32) = (block.parse()?, depth.parse()?);
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut load = Load {
        stream,
        input: BytesMut::new(),
        chunk: vec![0; 1 << 20],
        decoder: Decoder {
            segment_bytes_max: 1 << 20,
            ..Decoder::default()
        },
        out: Outbox::default(),
        lun: lun.parse()?,
        cmd_sn: 1,
        first_burst: 65536,
        segment: 8192,
    };
    load.login(target)?;
    let nothing = Bytes::new();
    // Attentions of a new session come first.
    for _ in 0..8 {
        load.command(TAG_NONE - 1, [0; 16], 0, 0, &nothing)?;
        if load.completion(&nothing)?.1 == 0 {
            break;
        }
    }
    let capacity = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    load.command(TAG_NONE - 1, capacity, READ, 8, &nothing)?;
    let answer = load.completion(&nothing)?.2;
    let blocks = u64::from(u32::from_be_bytes(answer[..4].try_into()?)) + 1;
    let (per, places) = (block / 512, blocks * 512 / u64::try_from(block)?);

    let writes = direction == "write";
    let data = Bytes::from(vec![0xa5; if writes { block } else { 0 }]);
    let mut state = 0x9e37_79b9_7f4a_7c15;
    let mut send = |load: &mut Load, itt: u32| -> Result<()> {
        let lba = u32::try_from(next(&mut state) % places * u64::try_from(per)?)?;
        let mut cdb = [0; 16];
        cdb[0] = if writes { 0x2a } else { 0x28 };
        cdb[2..6].copy_from_slice(&lba.to_be_bytes());
        cdb[7..9].copy_from_slice(&u16::try_from(per)?.to_be_bytes());
        load.command(itt, cdb, if writes { WRITE } else { READ }, block, &data)
    };
    for itt in 0..depth {
        send(&mut load, itt)?;
    }
    let (start, limit) = (Instant::now(), Duration::from_secs_f64(seconds.parse()?));
    let mut done: u64 = 0;
    while start.elapsed() < limit {
        let (itt, status, _) = load.completion(&data)?;
        if status != 0 {
            return Err(format!("a command failed with status {status:02x}h").into());
        }
        done += 1;
        send(&mut load, itt)?;
    }
    println!(
        "{:.0}",
        f64::from(u32::try_from(done)?) / start.elapsed().as_secs_f64()
    );
    Ok(())
}
