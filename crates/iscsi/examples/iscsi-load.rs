//! A load for any iSCSI target: reads or writes of one size at one depth, on one connection.
//!
//! `iscsi-load ADDRESS TARGET_NAME LUN read|write random|sequential BLOCK_BYTES DEPTH SECONDS` prints what was
//! done and how long it took, as `name=value` words. When the target says that the volume has grown, it asks
//! for the size on the same session and prints when it was answered (`grown_ns`, since 1970). With `ISCSI_USER` and
//! `ISCSI_SECRET` in its environment it proves itself with CHAP.
//!
//! One thread; everything that is due is sent in one call. Large data that is read is discarded in the kernel without
//! being copied, and what is written comes from a few pages. So it costs little beside the target, and what it costs is
//! the same for all of them.

use std::error::Error;
use std::fmt::Write;
use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rustix::net::{RecvFlags, recv};
use sha2::{Digest, Sha256};
use trellis_iscsi::login::parse_text;
use trellis_iscsi::pdu::header::{
    DataOut, LoginRequest, LoginResponse, LogoutRequest, NopIn, NopOut, R2t, ScsiCommand,
};
use trellis_iscsi::pdu::{FINAL, HEADER_BYTES, IMMEDIATE, Outbox, TAG_NONE, opcode};
use trellis_iscsi::socket;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const IN_SECURITY: u8 = 0;
const SECURITY_TO_OPERATIONAL: u8 = 0x81;
const OPERATIONAL_TO_FULL_FEATURE: u8 = 0x87;
const READ: u8 = 0x40;
const WRITE: u8 = 0x20;
const SEGMENT: &str = "262144";
/// The tag of everything that is not a part of the load.
const ASIDE: u32 = TAG_NONE - 1;
const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;
/// The status travels with the last data.
const WITH_STATUS: u8 = 1;
/// Sense key, code and qualifier of "capacity data has changed".
const GROWN: [u8; 3] = [6, 0x2a, 9];
const UNIT_ATTENTION: u8 = 6;
const NOTHING: Payload = Payload {
    pages: Bytes::new(),
    len: 0,
};

/// From this size on data is left in the kernel; below it that costs more than it saves.
const LARGE_BYTES_MIN: usize = 32 << 10;

/// What has come from the target and was not looked at yet.
struct Input {
    stream: TcpStream,
    room: Vec<u8>,
    start: usize,
    end: usize,
    /// How much is taken from the socket at a time.
    at_once: usize,
}

impl Input {
    fn available(&self) -> usize {
        self.end - self.start
    }

    fn fill(&mut self) -> Result<()> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.room.len() - self.end < HEADER_BYTES {
            self.room.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let most = self.room.len().min(self.end + self.at_once);
        match self.stream.read(&mut self.room[self.end..most])? {
            0 => Err("the target closed the connection".into()),
            len => {
                self.end += len;
                Ok(())
            }
        }
    }

    /// Has the kernel throw away some of the next bytes; answers how many.
    fn discard(&mut self, most: usize) -> Result<usize> {
        let most = most.min(self.room.len());
        match recv(&self.stream, &mut self.room[..most], RecvFlags::TRUNC)?.1 {
            0 => Err("the target closed the connection".into()),
            len => Ok(len),
        }
    }

    /// Passes over the next bytes, and answers them if they are wanted.
    fn take(&mut self, len: usize, wanted: bool) -> Result<Vec<u8>> {
        let (mut kept, mut left) = (Vec::new(), len);
        while left > 0 {
            if self.available() == 0 && !wanted && left >= LARGE_BYTES_MIN {
                left -= self.discard(left)?;
                continue;
            }
            if self.available() == 0 {
                self.fill()?;
            }
            let now = left.min(self.available());
            if wanted {
                kept.extend_from_slice(&self.room[self.start..self.start + now]);
            }
            self.start += now;
            left -= now;
        }
        Ok(kept)
    }
}

/// A command that is over.
struct Done {
    tag: u32,
    status: u8,
    data: Vec<u8>,
}

/// What every write of the load writes: the same few pages over and over, which stay in the processor's cache.
struct Payload {
    pages: Bytes,
    len: usize,
}

impl Payload {
    /// So many bytes.
    fn new(len: usize) -> Payload {
        Payload {
            pages: Bytes::from(vec![0xa5; len.min(LARGE_BYTES_MIN)]),
            len,
        }
    }

    /// Sends so much of it behind a header.
    fn push(&self, out: &mut Outbox, header: [u8; HEADER_BYTES], mut len: usize) {
        let mut pieces = Vec::with_capacity(len.div_ceil(LARGE_BYTES_MIN));
        while len > 0 {
            let now = len.min(self.pages.len());
            pieces.push(self.pages.slice(..now));
            len -= now;
        }
        out.push(header, &pieces);
    }
}

struct Load {
    input: Input,
    out: Outbox,
    lun: u8,
    cmd_sn: u32,
    exp_stat_sn: u32,
    first_burst: usize,
    segment: usize,
}

impl Load {
    fn flush(&mut self) -> Result<()> {
        while !self.out.is_empty() {
            let written = socket::write(&self.out, &self.input.stream)?;
            self.out.advance(written);
        }
        Ok(())
    }

    fn pull(&mut self) -> Result<([u8; HEADER_BYTES], Vec<u8>)> {
        while self.input.available() < HEADER_BYTES {
            self.flush()?;
            self.input.fill()?;
        }
        let start = self.input.start;
        let header: [u8; HEADER_BYTES] = self.input.room[start..start + HEADER_BYTES].try_into()?;
        self.input.start += HEADER_BYTES;
        let data_len = u32::from_be_bytes([0, header[5], header[6], header[7]]);
        let len = usize::from(header[4]) * 4 + usize::try_from(data_len)?.next_multiple_of(4);
        // Less than a block is no data of the load.
        let wanted = header[0] & 0x3f != opcode::DATA_IN || len < 512;
        let data = self.input.take(len, wanted)?;
        Ok((header, data))
    }

    /// One step of the login; answers the flags and the pairs of the response.
    fn login_step(&mut self, flags: u8, text: String) -> Result<(u8, Vec<(String, String)>)> {
        // Each run is a port of its own: a target that still clears away the last one must not take us for it.
        let [.., high, low] = std::process::id().to_be_bytes();
        let header = LoginRequest {
            opcode: opcode::LOGIN | IMMEDIATE,
            flags,
            isid: [0x80, 0, low, high, 0, 7],
            itt: 1.into(),
            cmd_sn: 1.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            ..LoginRequest::default()
        };
        self.out
            .push(zerocopy::transmute!(header), &[Bytes::from(text)]);
        let (header, data) = self.pull()?;
        let response = LoginResponse::from_wire(&header);
        if response.status_class != 0 {
            return Err("the login was refused".into());
        }
        self.exp_stat_sn = response.stat_sn.get().wrapping_add(1);
        Ok((response.flags, parse_text(&data).unwrap_or_default()))
    }

    fn login(&mut self, target: &str, proof: Option<(String, String)>) -> Result<()> {
        let mut names = format!(
            "InitiatorName=iqn.2026-11.dev.trellis:load\0TargetName={target}\0SessionType=Normal\0"
        );
        if let Some((user, secret)) = proof {
            names.push_str("AuthMethod=CHAP\0");
            self.login_step(IN_SECURITY, std::mem::take(&mut names))?;
            let (_, challenge) = self.login_step(IN_SECURITY, "CHAP_A=7\0".to_owned())?;
            let response = chap_response(&challenge, &secret)?;
            let answer = format!("CHAP_N={user}\0CHAP_R={response}\0");
            self.login_step(SECURITY_TO_OPERATIONAL, answer)?;
        }
        let mut text = format!(
            "{names}HeaderDigest=None\0DataDigest=None\0InitialR2T=No\0ImmediateData=Yes\0\
             MaxBurstLength=1048576\0FirstBurstLength={SEGMENT}\0MaxRecvDataSegmentLength={SEGMENT}\0\
             MaxOutstandingR2T=1\0"
        );
        // A target may take several steps; each is answered with an empty request until it lets us in.
        for _ in 0..8 {
            let (flags, pairs) =
                self.login_step(OPERATIONAL_TO_FULL_FEATURE, std::mem::take(&mut text))?;
            for (key, value) in pairs {
                match key.as_str() {
                    "FirstBurstLength" => self.first_burst = value.parse()?,
                    "MaxRecvDataSegmentLength" => self.segment = value.parse()?,
                    _ => {}
                }
            }
            if flags & 0x83 == 0x83 {
                return Ok(());
            }
        }
        Err("the login does not end".into())
    }

    fn command(
        &mut self,
        tag: u32,
        cdb: [u8; 16],
        flags: u8,
        expected: usize,
        data: &Payload,
    ) -> Result<()> {
        let now = data.len.min(self.segment).min(self.first_burst);
        let header = ScsiCommand {
            opcode: opcode::SCSI_COMMAND,
            flags: FINAL | flags | 1,
            lun: [0, self.lun, 0, 0, 0, 0, 0, 0],
            itt: tag.into(),
            expected_len: u32::try_from(expected)?.into(),
            cmd_sn: self.cmd_sn.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            cdb,
            ..ScsiCommand::default()
        };
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        data.push(&mut self.out, zerocopy::transmute!(header), now);
        Ok(())
    }

    fn ask_capacity(&mut self) -> Result<()> {
        let mut cdb = [0; 16];
        cdb[0] = 0x25;
        self.command(ASIDE, cdb, READ, 8, &NOTHING)
    }

    fn burst(&mut self, r2t: &R2t, data: &Payload) -> Result<()> {
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
                exp_stat_sn: self.exp_stat_sn.into(),
                data_sn: data_sn.into(),
                offset: u32::try_from(at)?.into(),
                ..DataOut::default()
            };
            data.push(&mut self.out, zerocopy::transmute!(header), next - at);
            (at, data_sn) = (next, data_sn + 1);
        }
        Ok(())
    }

    /// The next command that is over. `written` is what every write of the load writes.
    fn completion(&mut self, written: &Payload) -> Result<Done> {
        loop {
            let (header, data) = self.pull()?;
            let over = match header[0] & 0x3f {
                opcode::DATA_IN => header[1] & WITH_STATUS != 0,
                opcode::SCSI_RESPONSE => true,
                opcode::R2T => {
                    self.burst(R2t::from_wire(&header), written)?;
                    false
                }
                opcode::NOP_IN => {
                    self.answer_ping(NopIn::from_wire(&header));
                    false
                }
                other => return Err(format!("unexpected PDU {other:02x}h").into()),
            };
            if over {
                let word = |at: usize| -> Result<u32> {
                    Ok(u32::from_be_bytes(header[at..at + 4].try_into()?))
                };
                self.exp_stat_sn = word(24)?.wrapping_add(1);
                return Ok(Done {
                    tag: word(16)?,
                    status: header[3],
                    data,
                });
            }
        }
    }

    /// Waits for what is still under way, and says goodbye: a target that is left in the middle of something is
    /// busy with that when the next run begins.
    fn leave(&mut self, mut under_way: u32, written: &Payload) -> Result<()> {
        while under_way > 0 {
            self.completion(written)?;
            under_way -= 1;
        }
        let header = LogoutRequest {
            opcode: opcode::LOGOUT | IMMEDIATE,
            reason: FINAL,
            itt: ASIDE.into(),
            cmd_sn: self.cmd_sn.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            ..LogoutRequest::default()
        };
        self.out.push(zerocopy::transmute!(header), &[]);
        while self.pull()?.0[0] & 0x3f != opcode::LOGOUT_RESPONSE {}
        Ok(())
    }

    fn answer_ping(&mut self, ping: &NopIn) {
        if ping.ttt.get() == TAG_NONE {
            return;
        }
        let header = NopOut {
            opcode: opcode::NOP_OUT | IMMEDIATE,
            flags: FINAL,
            lun: ping.lun,
            itt: TAG_NONE.into(),
            ttt: ping.ttt,
            cmd_sn: self.cmd_sn.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            ..NopOut::default()
        };
        self.out.push(zerocopy::transmute!(header), &[]);
    }
}

/// Sense key, code and qualifier of a failed command, in either of the two forms.
fn sense(data: &[u8]) -> [u8; 3] {
    let at = |index: usize| data.get(2 + index).copied().unwrap_or_default();
    if at(0) & 0x7e == 0x72 {
        [at(1) & 0xf, at(2), at(3)]
    } else {
        [at(2) & 0xf, at(12), at(13)]
    }
}

/// What proves that we know the secret: the SHA-256 of the number, the secret and the challenge.
fn chap_response(challenge: &[(String, String)], secret: &str) -> Result<String> {
    let value = |name: &str| {
        let mut pairs = challenge.iter();
        let pair = pairs.find(|(key, _)| key == name);
        pair.map(|(_, value)| value.as_str())
            .ok_or("an incomplete challenge")
    };
    let digits = value("CHAP_C")?
        .strip_prefix("0x")
        .ok_or("a challenge in other digits")?;
    let bytes: std::result::Result<Vec<u8>, _> = (0..digits.len() / 2)
        .map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16))
        .collect();
    let digest = Sha256::new()
        .chain_update([value("CHAP_I")?.parse::<u8>()?])
        .chain_update(secret)
        .chain_update(bytes?)
        .finalize();
    Ok(digest.iter().fold("0x".to_owned(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

/// What the load does, again and again.
struct Work {
    writes: bool,
    random: bool,
    block: usize,
    places: u64,
    data: Payload,
    state: u64,
}

impl Work {
    /// xorshift64: random enough for offsets.
    fn place(&mut self) -> u64 {
        if self.random {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
        } else {
            self.state += 1;
        }
        self.state % self.places
    }

    fn send(&mut self, load: &mut Load, tag: u32) -> Result<()> {
        let blocks = self.block / 512;
        let lba = u32::try_from(self.place() * u64::try_from(blocks)?)?;
        let mut cdb = [0; 16];
        cdb[0] = if self.writes { 0x2a } else { 0x28 };
        cdb[2..6].copy_from_slice(&lba.to_be_bytes());
        cdb[7..9].copy_from_slice(&u16::try_from(blocks)?.to_be_bytes());
        let flags = if self.writes { WRITE } else { READ };
        load.command(tag, cdb, flags, self.block, &self.data)
    }
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [
        address,
        target,
        lun,
        direction,
        order,
        block,
        depth,
        seconds,
    ] = args.as_slice()
    else {
        return Err("usage: iscsi-load ADDRESS TARGET LUN read|write random|sequential BLOCK_BYTES DEPTH SECONDS".into());
    };
    let (block, depth): (usize, u32) = (block.parse()?, depth.parse()?);
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut load = Load {
        input: Input {
            stream,
            room: vec![0; 1 << 20],
            start: 0,
            end: 0,
            at_once: 1 << 20,
        },
        out: Outbox::default(),
        lun: lun.parse()?,
        cmd_sn: 1,
        exp_stat_sn: 0,
        first_burst: 65536,
        segment: 8192,
    };
    let variable = |name: &str| std::env::var(name).ok();
    load.login(target, variable("ISCSI_USER").zip(variable("ISCSI_SECRET")))?;
    // Attentions of a new session come first.
    for _ in 0..8 {
        load.command(ASIDE, [0; 16], 0, 0, &NOTHING)?;
        if load.completion(&NOTHING)?.status == GOOD {
            break;
        }
    }
    load.ask_capacity()?;
    let answer = load.completion(&NOTHING)?.data;
    let last = answer.get(..4).ok_or("no capacity was answered")?;
    let bytes = (u64::from(u32::from_be_bytes(last.try_into()?)) + 1) * 512;
    let writes = direction == "write";
    if !writes && block >= LARGE_BYTES_MIN {
        // Headers alone are looked at.
        load.input.at_once = HEADER_BYTES;
    }
    let mut work = Work {
        writes,
        random: order == "random",
        block,
        places: bytes / u64::try_from(block)?,
        data: Payload::new(if writes { block } else { 0 }),
        state: 0x9e37_79b9_7f4a_7c15 >> 1,
    };
    run(
        &mut load,
        &mut work,
        depth,
        Duration::from_secs_f64(seconds.parse()?),
    )
}

fn run(load: &mut Load, work: &mut Work, depth: u32, limit: Duration) -> Result<()> {
    let start = Instant::now();
    let mut sent = vec![start; usize::try_from(depth)?];
    let mut times: Vec<u64> = Vec::with_capacity(1 << 20);
    let mut grown = None;
    for tag in 0..depth {
        work.send(load, tag)?;
    }
    let mut now = start;
    while now.duration_since(start) < limit {
        let done = load.completion(&work.data)?;
        now = Instant::now();
        if done.tag == ASIDE {
            grown.get_or_insert(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos());
            continue;
        }
        let slot = sent
            .get_mut(usize::try_from(done.tag)?)
            .ok_or("an unknown tag was answered")?;
        match done.status {
            GOOD => {
                times.push(u64::try_from(now.duration_since(*slot).as_nanos())?);
                *slot = now;
            }
            // The command was not done; it is sent again, and its time goes on.
            CHECK_CONDITION if sense(&done.data)[0] == UNIT_ATTENTION => {
                if sense(&done.data) == GROWN {
                    load.ask_capacity()?;
                }
            }
            other => {
                return Err(format!(
                    "a command failed with status {other:02x}h, sense {:02x?}",
                    sense(&done.data)
                )
                .into());
            }
        }
        work.send(load, done.tag)?;
    }
    print(&mut times, now.duration_since(start), grown);
    load.leave(depth, &work.data)
}

fn print(times: &mut [u64], took: Duration, grown: Option<u128>) {
    times.sort_unstable();
    let at = |permille: usize| {
        times
            .get((times.len() * permille / 1000).min(times.len().saturating_sub(1)))
            .copied()
            .unwrap_or_default()
    };
    print!("operations={} nanoseconds={}", times.len(), took.as_nanos());
    print!(
        " p50_ns={} p99_ns={} p999_ns={} longest_ns={}",
        at(500),
        at(990),
        at(999),
        times.last().copied().unwrap_or_default()
    );
    if let Some(grown) = grown {
        print!(" grown_ns={grown}");
    }
    println!();
}
