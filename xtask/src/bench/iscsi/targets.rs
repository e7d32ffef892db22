//! The targets: how each is started. One row each.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::Context;
use tempfile::TempDir;

use super::Programs;
use super::copies;
use super::server::{Life, Role, Server};

const NAME: &str = "iqn.2026-11.dev.trellis:bench";
/// How long a target may take to listen.
const START_TIME_MAX: Duration = Duration::from_secs(10);
/// What tgt and istgt are told to allow, so that they are not slowed down by their defaults: as ours does.
const BURST: &str = "1048576";
const SEGMENT: &str = "262144";
/// tgt tells its instances apart by a number.
const TGT_CONTROL: u32 = 7261;

/// One row: a name, what it is for, and how it is started. `None` where it does not belong.
type Start = fn(&Programs, &BackingDir) -> anyhow::Result<Option<Server>>;
const TARGETS: [Start; 7] = [
    ours,
    tgt_aio,
    tgt_rdwr,
    istgt,
    null,
    three_copies,
    unsummed_copies,
];

/// A directory with the backing file and what the targets need, gone with this.
pub struct BackingDir {
    directory: TempDir,
    pub backing: PathBuf,
    pub size_mib: u64,
    /// Whether the file is in memory.
    pub in_memory: bool,
    parent: PathBuf,
}

impl BackingDir {
    /// With a file that has all of its bytes.
    pub fn new(parent: &Path, size_mib: u64) -> anyhow::Result<BackingDir> {
        let directory = TempDir::with_prefix_in("trellis-bench-iscsi-", parent)
            .with_context(|| format!("nothing can be made below {}", parent.display()))?;
        let backing = directory.path().join("backing");
        let mut file = std::fs::File::create(&backing).context("no backing file")?;
        let piece: Vec<u8> = (0..=u8::MAX).cycle().take(1 << 20).collect();
        for _ in 0..size_mib {
            file.write_all(&piece)
                .context("the backing file cannot be filled")?;
        }
        file.sync_all()
            .context("the backing file cannot be filled")?;
        let in_memory = filesystem_of(parent).is_some_and(|kind| kind == "tmpfs");
        Ok(BackingDir {
            directory,
            backing,
            size_mib,
            in_memory,
            parent: parent.to_owned(),
        })
    }

    /// Where it was made.
    pub fn parent(&self) -> &Path {
        &self.parent
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

/// The filesystem that a directory is on, by the longest mount point that it is below.
fn filesystem_of(directory: &Path) -> Option<String> {
    let real = directory.canonicalize().ok()?;
    let text = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let mounts = text.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        Some((fields.next()?, fields.next()?))
    });
    mounts
        .filter(|(point, _)| real.starts_with(point))
        .max_by_key(|(point, _)| point.len())
        .map(|(_, kind)| kind.to_owned())
}

/// A target from the command line.
#[derive(Clone)]
pub struct Extra {
    name: String,
    command: String,
}

impl FromStr for Extra {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Extra, Self::Err> {
        let (name, command) = text.split_once('=').ok_or("give it as NAME=COMMAND")?;
        Ok(Extra {
            name: name.to_owned(),
            command: command.to_owned(),
        })
    }
}

/// Starts all of them, ours first.
pub fn start_all(
    programs: &Programs,
    backing_dir: &BackingDir,
    extra: &[Extra],
) -> anyhow::Result<Vec<Server>> {
    let mut servers = Vec::new();
    for start in TARGETS {
        servers.extend(start(programs, backing_dir)?);
    }
    for Extra { name, command } in extra {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", command])
            .env("BACKING", &backing_dir.backing);
        servers.push(Server::speaking(name, Role::Extra, &mut shell)?);
    }
    Ok(servers)
}

/// Our own, on the file.
pub fn ours(programs: &Programs, backing_dir: &BackingDir) -> anyhow::Result<Option<Server>> {
    let mut command = Command::new(&programs.serve);
    command
        .args(["127.0.0.1:0", &backing_dir.size_mib.to_string()])
        .arg(&backing_dir.backing);
    // A call on a file in memory never waits, so it needs no other thread.
    command.args(backing_dir.in_memory.then_some("inline"));
    Server::speaking("trellis", Role::Ours, &mut command).map(Some)
}

/// Our own protocol with nothing behind it; the same on any backing, so it is shown once.
fn null(programs: &Programs, backing_dir: &BackingDir) -> anyhow::Result<Option<Server>> {
    if !backing_dir.in_memory {
        return Ok(None);
    }
    let mut command = Command::new(&programs.serve);
    command.args(["127.0.0.1:0", &backing_dir.size_mib.to_string(), "null"]);
    Server::speaking("null (limit)", Role::Limit, &mut command).map(Some)
}

fn unsummed_copies(
    programs: &Programs,
    backing_dir: &BackingDir,
) -> anyhow::Result<Option<Server>> {
    copies::start_unsummed(programs, backing_dir).map(Some)
}

fn three_copies(programs: &Programs, backing_dir: &BackingDir) -> anyhow::Result<Option<Server>> {
    copies::start(programs, backing_dir).map(Some)
}

fn tgt_aio(_: &Programs, backing_dir: &BackingDir) -> anyhow::Result<Option<Server>> {
    tgt("tgt aio", "aio", backing_dir).map(Some)
}

fn tgt_rdwr(_: &Programs, backing_dir: &BackingDir) -> anyhow::Result<Option<Server>> {
    tgt("tgt rdwr", "rdwr", backing_dir).map(Some)
}

fn tgt(name: &str, store: &str, backing_dir: &BackingDir) -> anyhow::Result<Server> {
    let (port, control) = (free_port()?, TGT_CONTROL.to_string());
    let socket = backing_dir.path(store);
    let address = format!("127.0.0.1:{port}");
    let process = Command::new("tgtd")
        .args([
            "-f",
            "-C",
            &control,
            "--iscsi",
            &format!("portal={address}"),
        ])
        .env("TGT_IPC_SOCKET", &socket)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("tgtd cannot be run; `scripts/setup bench` installs it")?;
    let server = listening(Server::of(
        name,
        Role::Peer,
        Life::Process(process),
        address,
        NAME,
        1,
    ))?;
    let admin = |arguments: &[&str]| -> anyhow::Result<()> {
        let output = Command::new("tgtadm")
            .args(["-C", &control, "--lld", "iscsi", "--tid", "1"])
            .args(arguments)
            .env("TGT_IPC_SOCKET", &socket)
            .output()
            .context("tgtadm cannot be run")?;
        anyhow::ensure!(
            output.status.success(),
            "tgtadm {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    };
    let backing = backing_dir
        .backing
        .to_str()
        .context("a path of other characters")?;
    admin(&["--mode", "target", "--op", "new", "-T", NAME])?;
    admin(&[
        "--mode",
        "logicalunit",
        "--op",
        "new",
        "--lun",
        "1",
        "-b",
        backing,
        "--bstype",
        store,
    ])?;
    admin(&["--mode", "target", "--op", "bind", "-I", "ALL"])?;
    for (key, value) in [
        ("MaxRecvDataSegmentLength", SEGMENT),
        ("MaxXmitDataSegmentLength", SEGMENT),
        ("FirstBurstLength", SEGMENT),
        ("MaxBurstLength", BURST),
        ("InitialR2T", "No"),
        ("MaxOutstandingR2T", "16"),
        ("MaxQueueCmd", "128"),
    ] {
        admin(&["--mode", "target", "--op", "update", "-n", key, "-v", value])?;
    }
    Ok(server)
}

fn istgt(_: &Programs, backing_dir: &BackingDir) -> anyhow::Result<Option<Server>> {
    let (address, control) = (format!("127.0.0.1:{}", free_port()?), free_port()?);
    let (base, target) = NAME.split_once(':').context("a name with two parts")?;
    let path = |name| backing_dir.path(name).display().to_string();
    let configuration = format!(
        "[Global]\n NodeBase \"{base}\"\n PidFile {}\n AuthFile {}\n LogFacility \"local7\"\n Timeout 30\n \
         NopInInterval 20\n DiscoveryAuthMethod None\n MaxSessions 16\n MaxConnections 4\n MaxR2T 32\n \
         MaxOutstandingR2T 16\n DefaultTime2Wait 2\n DefaultTime2Retain 60\n FirstBurstLength {SEGMENT}\n \
         MaxBurstLength {BURST}\n MaxRecvDataSegmentLength {SEGMENT}\n InitialR2T Yes\n ImmediateData Yes\n \
         DataPDUInOrder Yes\n DataSequenceInOrder Yes\n ErrorRecoveryLevel 0\n\
         [UnitControl]\n AuthMethod None\n AuthGroup None\n Portal UC1 127.0.0.1:{control}\n \
         Netmask 127.0.0.1\n[PortalGroup1]\n Portal DA1 {address}\n\
         [InitiatorGroup1]\n InitiatorName \"ALL\"\n Netmask 127.0.0.1\n\
         [LogicalUnit1]\n TargetName {target}\n Mapping PortalGroup1 InitiatorGroup1\n AuthMethod None\n \
         UseDigest Auto\n UnitType Disk\n QueueDepth 64\n LUN0 Storage {} {}MB\n",
        path("istgt.pid"),
        path("istgt.auth"),
        backing_dir.backing.display(),
        backing_dir.size_mib,
    );
    std::fs::write(backing_dir.path("istgt.conf"), configuration).context("no configuration")?;
    std::fs::write(backing_dir.path("istgt.auth"), "").context("no configuration")?;
    let process: Child = Command::new("istgt")
        .args(["-D", "-c", &path("istgt.conf")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("istgt cannot be run; `scripts/setup bench` installs it")?;
    let life = Life::Process(process);
    listening(Server::of("istgt", Role::Peer, life, address, NAME, 0)).map(Some)
}

/// A port that nobody has at this moment.
fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
    Ok(listener.local_addr().context("no free port")?.port())
}

/// Waits until it listens.
fn listening(server: Server) -> anyhow::Result<Server> {
    let deadline = Instant::now() + START_TIME_MAX;
    while TcpStream::connect(&server.address).is_err() {
        anyhow::ensure!(Instant::now() < deadline, "{} does not listen", server.name);
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(server)
}
