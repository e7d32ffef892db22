//! The command line: every verb and flag, with the words that `--help` prints.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use trellis_api::quantity::Growth;
use trellis_control::volume::surroundings::Waits;
use trellis_control::world::RESYNC;

use crate::serve::{Keeper, ServeReplica, ServeTarget};

/// Where a service keeps everything unless it is told otherwise.
pub const DATA_DEFAULT: &str = "/var/lib/trellis";

/// The shortest time after which a node may count as lost: its lease is renewed four times in it.
const LOST_AFTER_MIN: Duration = Duration::from_secs(2);

/// Volumes that grow while they are in use.
#[derive(Debug, Parser)]
#[command(name = "trellis", version, about, max_term_width = 100, after_help = AFTER_HELP)]
pub struct Cli {
    /// Where to find the service and who is asking.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

const AFTER_HELP: &str = "\
Exit codes: 0 done; 1 failed; 2 wrong usage; 3 held (the reason is printed); 4 not found;
5 refused; 6 the service cannot be reached; 7 not done in time; 130 interrupted (what was asked for
goes on).

A verb finds the service by --kubeconfig, then by KUBECONFIG, then in the data directory.";

/// Flags that every verb takes.
#[derive(Args, Clone, Debug)]
pub struct Global {
    /// The kubeconfig of the service to talk to
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The data directory of the service on this machine
    #[arg(long, global = true, value_name = "DIR", env = "TRELLIS_DATA", default_value = DATA_DEFAULT)]
    pub data: PathBuf,
    /// The namespace of the claim
    #[arg(short, long, global = true, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// How long to wait, such as 30s or 5m; 60s if it is not given. `pool rm` and `volume scrub --wait` take as long as it
    /// takes
    #[arg(long, global = true, value_name = "TIME", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
    /// Say more on standard error; twice says everything (RUST_LOG is honoured too)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run everything on this machine: the API, the controllers and the node agent
    Up(Up),
    /// Stop the service, or everything that runs for a data directory
    ///
    /// Without --all only the service stops: mounts, copies and targets go on, and are found again by the next `trellis
    /// up`. With --all the volumes are unmounted as well, their devices detached, and targets, copies and the keeper
    /// ended, in that order; nothing is left. While a volume is in use it changes nothing, says who uses it, and
    /// ends with code 5. The next `trellis up` brings back what was mounted.
    Down(Down),
    /// Plan volumes against an API that runs elsewhere; several may run, and one of them plans at a time
    ///
    /// `trellis up` plans its own volumes: next to it a controller waits for ever.
    Controller(Controller),
    /// Show every claim: what was asked for, what it has, how full it is
    Df(Df),
    /// Grow a claim while it is in use
    Grow(Grow),
    /// Show the size of every layer of a claim, as measured
    Ladder(Ladder),
    /// Say what keeps a claim from its size, and what to do about it
    Explain(OneClaim),
    /// Call off a growth that is not done
    Cancel(Cancel),
    /// Show who grew a claim, when, from what to what, and how long each layer took
    History(OneClaim),
    /// Make a claim appear at a path of this machine
    Mount(Mount),
    /// Take a claim away from a path of this machine
    Umount(Umount),
    /// Show the copies of a claim and how they are; change how many there are, and where
    #[command(subcommand)]
    Volume(VolumeVerb),
    /// Show, add and look after the directories where volumes live
    #[command(subcommand)]
    Pool(PoolVerb),
    /// Show the machines that volumes live on, let one join, and remove one
    #[command(subcommand)]
    Node(NodeVerb),
    /// Check the copies on a pool directory without changing anything
    Check(Check),
    /// Check what this machine's kernel and programs can do, and what is missing
    Doctor(Doctor),
    /// Start, watch and outlive the processes of volumes
    #[command(hide = true)]
    Keeper(Keeper),
    /// Write everything that the service has stored to a file, while it runs
    Backup {
        /// The file; it holds secrets, and only its owner can read it
        file: PathBuf,
    },
    /// Put the content of a backup in the place of the store; the service must not run
    Restore {
        /// The file that `trellis backup` has written
        file: PathBuf,
    },
    /// Take in the copies on the pools that the service does not know, after its store was lost or restored
    Recover(Recover),
    /// Serve one copy of a volume
    #[command(hide = true)]
    ServeReplica(ServeReplica),
    /// Serve a volume of several copies
    #[command(hide = true)]
    ServeTarget(ServeTarget),
    /// Write the manual pages into a directory
    #[command(hide = true)]
    Manual {
        /// The directory
        directory: PathBuf,
    },
    /// Print the completion script of a shell
    Completion {
        /// The shell
        shell: Shell,
    },
}

/// How this machine's volumes are looked after
#[derive(Args, Clone, Debug)]
pub struct AgentArgs {
    /// Whether filesystems may grow while they are mounted on this node; if not, they grow when nobody uses them
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub online_growth: bool,
    /// How often everything is looked at again although nothing changed, in seconds; a safety net
    #[arg(long, value_name = "SECONDS", default_value_t = RESYNC.as_secs(), value_parser = clap::value_parser!(u64).range(1..))]
    pub resync_seconds: u64,
    /// How long the process that serves a volume may be silent before it is killed and replaced, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = trellis_keeper::SILENCE_TIME_MAX.as_secs(), value_parser = clap::value_parser!(u64).range(5..=3600))]
    pub silent_target_seconds: u64,
}

/// `trellis up`
#[derive(Args, Debug)]
pub struct Up {
    /// Address and port of the API. If not given, it answers on loopback alone, on the port of the last time or a free one.
    /// Other nodes join at an address that they can reach
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<std::net::SocketAddr>,
    /// This machine's name among nodes; its host name if not given
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    #[command(flatten)]
    pub agent: AgentArgs,
    #[command(flatten)]
    pub waits: WaitArgs,
    /// Serve metrics for Prometheus at this address (plain HTTP, /metrics); port 0 takes a free one
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<std::net::SocketAddr>,
    /// The address of this machine at which other nodes reach its copies; none if not given, and nothing listens then
    #[arg(long, value_name = "IP")]
    pub link_address: Option<std::net::IpAddr>,
    /// How long the certificates last that nodes prove themselves with to each other; renewed after two thirds
    #[arg(long, value_name = "TIME", default_value = "2160h", value_parser = parse_duration)]
    pub certificate_life: Duration,
    /// Serve the CSI driver trellis.dev at this Unix socket: identity, controller and node together
    #[arg(long, value_name = "SOCKET")]
    pub csi_endpoint: Option<PathBuf>,
    #[command(flatten)]
    pub kubelet: KubeletArgs,
}

/// The kubelet that the CSI driver works for
#[derive(Args, Clone, Debug)]
pub struct KubeletArgs {
    /// The kubelet's directory, such as /var/lib/kubelet: the driver registers in its plugins_registry, and lets volumes
    /// appear only below it
    #[arg(long, value_name = "DIR", requires = "csi_endpoint")]
    pub kubelet_dir: Option<PathBuf>,
    /// The directory in which the kubelet looks for plugins, if it is not plugins_registry in its own
    #[arg(long, value_name = "DIR", requires = "csi_endpoint")]
    pub registration_dir: Option<PathBuf>,
}

/// How long the volume room waits for what may pass.
#[derive(Args, Debug)]
pub struct WaitArgs {
    /// How long a node may be lost before the copies on it are made anew on others
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    pub copy_lost_after: Duration,
    /// How long nobody may use a volume of several copies before the process that serves it ends; it is started again
    /// when somebody does
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration)]
    pub target_rests_after: Duration,
}

impl WaitArgs {
    /// The same for the volume room.
    pub fn waits(&self) -> Waits {
        Waits {
            copy_lost: self.copy_lost_after,
            rest: self.target_rests_after,
        }
    }
}

/// `trellis controller`
#[derive(Args, Debug)]
pub struct Controller {
    #[command(flatten)]
    pub waits: WaitArgs,
    /// How long the planning controller may be silent before another one takes over, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(3..=600))]
    pub lease_seconds: u64,
    /// How often everything is looked at again although nothing changed, in seconds; a safety net
    #[arg(long, value_name = "SECONDS", default_value_t = RESYNC.as_secs(), value_parser = clap::value_parser!(u64).range(1..))]
    pub resync_seconds: u64,
    /// Serve the CSI driver trellis.dev at this Unix socket: identity and controller. Every controller serves it, whether it
    /// plans or not
    #[arg(long, value_name = "SOCKET")]
    pub csi_endpoint: Option<PathBuf>,
}

/// `trellis node run`
#[derive(Args, Debug)]
pub struct NodeRun {
    /// How long this node may be silent before it counts as lost and others take over its volumes
    #[arg(long, value_name = "TIME", default_value = "40s", value_parser = parse_lost_after)]
    pub lost_after: Duration,
    /// The kubeconfig that `trellis node add` has written for this node
    #[arg(long, value_name = "KUBECONFIG")]
    pub join: PathBuf,
    /// This machine's name among nodes; the one that the kubeconfig is for if not given
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
    /// The address of this machine at which other nodes reach its copies; none if not given, and nothing listens then
    #[arg(long, value_name = "IP")]
    pub link_address: Option<std::net::IpAddr>,
    #[command(flatten)]
    pub agent: AgentArgs,
    /// Serve the CSI driver trellis.dev at this Unix socket: identity and node
    #[arg(long, value_name = "SOCKET")]
    pub csi_endpoint: Option<PathBuf>,
    #[command(flatten)]
    pub kubelet: KubeletArgs,
}

/// `trellis down`
#[derive(Args, Debug)]
pub struct Down {
    /// Also unmount the volumes, and end the processes that carry them
    #[arg(long)]
    pub all: bool,
}

/// How a verb prints what it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table with all columns
    Wide,
    /// JSON
    Json,
    /// YAML
    Yaml,
}

/// How to print.
#[derive(Args, Clone, Debug)]
pub struct Output {
    /// Print as
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub output: Option<Format>,
    /// Go on printing whenever something changes, until interrupted
    #[arg(short, long)]
    pub watch: bool,
}

/// `trellis df`
#[derive(Args, Debug)]
pub struct Df {
    /// Only this claim
    pub claim: Option<String>,
    /// Claims of every namespace
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// How to print
    #[command(flatten)]
    pub output: Output,
}

/// `trellis grow`
#[derive(Args, Debug)]
pub struct Grow {
    /// The claim
    pub claim: String,
    /// The new size: 20Gi, or by how much: +10Gi or +25%
    #[arg(allow_hyphen_values = true)]
    pub size: Growth,
    /// Say what would happen, and what would keep it from happening, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Wait until every layer was measured at the new size, showing them rise
    #[arg(long)]
    pub wait: bool,
    /// Print as
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub output: Option<Format>,
}

/// `trellis ladder`
#[derive(Args, Debug)]
pub struct Ladder {
    /// The claim
    pub claim: String,
    /// How to print
    #[command(flatten)]
    pub output: Output,
}

/// A verb about one claim.
#[derive(Args, Debug)]
pub struct OneClaim {
    /// The claim
    pub claim: String,
    /// How to print
    #[command(flatten)]
    pub output: Output,
}

/// `trellis cancel`
#[derive(Args, Debug)]
pub struct Cancel {
    /// The claim
    pub claim: String,
    /// Print as
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub output: Option<Format>,
}

/// `trellis mount`
#[derive(Args, Debug)]
pub struct Mount {
    /// The claim
    pub claim: String,
    /// Where it shall appear: an empty or new directory; for a block volume, a new file
    pub path: PathBuf,
    /// Allow reading only
    #[arg(long)]
    pub read_only: bool,
}

/// `trellis umount`
#[derive(Args, Debug)]
pub struct Umount {
    /// The claim, or the path where it appears
    pub claim_or_path: String,
}

/// `trellis pool`
#[derive(Debug, Subcommand)]
pub enum PoolVerb {
    /// Show the pools
    Ls {
        /// How to print
        #[command(flatten)]
        output: Output,
    },
    /// Add a directory of this machine as a pool, or measure it again if it is one already
    Add {
        /// Name of the pool
        name: String,
        /// The directory
        directory: PathBuf,
        /// How much may be promised, in percent of what the directory can hold
        #[arg(long, value_name = "PERCENT", default_value_t = 100)]
        overcommit: u32,
    },
    /// Measure a pool at once, after the filesystem below it has grown: whoever waits for room goes on
    #[command(visible_alias = "measure")]
    Grow {
        /// Name of the pool
        name: String,
    },
    /// Remove a pool that no copy is on, and let go of its directory
    ///
    /// What is in the directory stays there. With --drain, copies of volumes with several copies move to other pools
    /// first, while they are in use; this can be interrupted, goes on by itself, and can be given again. `trellis pool add`
    /// with the same name and directory calls the move off.
    #[command(visible_alias = "remove")]
    Rm {
        /// Name of the pool
        name: String,
        /// Move the copies on it to other pools first
        #[arg(long)]
        drain: bool,
    },
}

/// `trellis node`
#[derive(Debug, Subcommand)]
pub enum NodeVerb {
    /// Show the nodes: when each was last heard of, and what is on it
    Ls {
        /// How to print
        #[command(flatten)]
        output: Output,
    },
    /// Let a machine join: make its token, and print the kubeconfig with which it finds the service
    ///
    /// The service keeps only a hash of the token. The token allows the node to read what it works with and to write what is
    /// its own; `trellis node rm` revokes it.
    Add {
        /// Name of the node
        name: String,
        /// Write the kubeconfig to this file, which only its owner can read, instead of printing it
        #[arg(long, value_name = "FILE")]
        kubeconfig_out: Option<PathBuf>,
        /// Make another token in the place of the one that the node has; the old one no longer counts
        #[arg(long)]
        rotate: bool,
    },
    /// Look after the volumes of this machine, as a node of a service that runs elsewhere
    ///
    /// Runs until it is told to stop. Mounts stay when it stops, and are adopted when it starts again.
    Run(NodeRun),
    /// Remove a node that carries nothing, with its pools, and revoke its token
    ///
    /// What is in the directories of its pools stays there. With --force the node is removed although it carries copies or
    /// uses, because its machine is lost or not to be trusted: the objects of these stay, its pools get no new copies, and
    /// copies of volumes with several copies are replaced on other nodes.
    #[command(visible_alias = "remove")]
    Rm {
        /// Name of the node
        name: String,
        /// Remove it although copies or uses are on it
        #[arg(long)]
        force: bool,
    },
}

/// `trellis volume`
#[derive(Debug, Subcommand)]
pub enum VolumeVerb {
    /// Show a claim's copies: where they are, their sizes, and how far a repair is
    Show {
        /// The claim
        claim: String,
        /// How to print
        #[command(flatten)]
        output: Output,
    },
    /// Change how many copies a claim has, while it is in use
    Scale {
        /// The claim
        claim: String,
        /// How many copies
        #[arg(value_parser = clap::value_parser!(u32).range(1..=5))]
        replicas: u32,
        /// How many of them must have a write before it is acknowledged; a majority if not given
        #[arg(long, value_name = "COPIES", value_parser = clap::value_parser!(u32).range(1..=5))]
        consistency: Option<u32>,
        /// Allow two copies on one filesystem from now on, which are lost together
        #[arg(long)]
        allow_shared_disk: bool,
    },
    /// Show what each copy of a claim holds, and go on with those that are left when others are lost for good
    ///
    /// Without --accept-loss nothing is changed: it shows what each copy holds and how far it is, and says what giving
    /// up the missing ones would cost.
    Recover {
        /// The claim
        claim: String,
        /// Give up the copy on this pool, for good; to be said for every copy that is missing
        #[arg(long, value_name = "POOL")]
        accept_loss: Vec<String>,
        /// How many of the copies that are left must have a write before it is acknowledged
        #[arg(long, value_name = "COPIES", value_parser = clap::value_parser!(u32).range(1..=5))]
        consistency: Option<u32>,
        /// Print as
        #[arg(short, long, value_enum, value_name = "FORMAT")]
        output: Option<Format>,
    },
    /// Compare all copies with the sums of their blocks and mend what has rotted, while the claim is in use
    Scrub {
        /// The claim
        claim: String,
        /// Wait until it is done, and say what was found
        #[arg(long)]
        wait: bool,
    },
    /// Replace the copy on a pool by one on another pool, while the claim is in use
    Replace {
        /// The claim
        claim: String,
        /// The pool whose copy goes
        pool: String,
    },
}

/// `trellis check`
#[derive(Args, Debug)]
pub struct Check {
    /// The pool's directory
    pub directory: PathBuf,
    /// Also read all data and compare it with the sums of its blocks. Copies that are in use are left out
    #[arg(long)]
    pub read_data: bool,
    /// Print as
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub output: Option<Format>,
}

/// `trellis recover`
#[derive(Args, Debug)]
pub struct Recover {
    /// Make volumes and claims again from what the copies on the pools say about themselves
    #[arg(long, required = true)]
    pub from_pools: bool,
    /// Only these pool directories; all pools of this machine if none is given
    #[arg(value_name = "DIR")]
    pub directories: Vec<PathBuf>,
    /// Say what would be done, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// What to add to the name of a claim that exists and has another volume, such as -old
    #[arg(long, value_name = "SUFFIX", allow_hyphen_values = true)]
    pub suffix: Option<String>,
    /// Print as
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub output: Option<Format>,
}

/// `trellis doctor`
#[derive(Args, Debug)]
pub struct Doctor {
    /// Print as
    #[arg(short, long, value_enum, value_name = "FORMAT")]
    pub output: Option<Format>,
}

/// A time such as `30s`, `5m` or `500ms`.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let split = text
        .find(|letter: char| !letter.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: u64 = number
        .parse()
        .map_err(|_| format!("{text:?} is not a time such as 30s or 5m"))?;
    let millis = match unit {
        "ms" => Some(number),
        "" | "s" => number.checked_mul(1_000),
        "m" => number.checked_mul(60_000),
        "h" => number.checked_mul(3_600_000),
        _ => return Err(format!("{unit:?} is not a unit of time; use ms, s, m or h")),
    };
    millis
        .map(Duration::from_millis)
        .ok_or_else(|| format!("{text:?} is too long a time"))
}

/// How long a node may be silent: its lease counts in whole seconds.
fn parse_lost_after(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    let is_whole = time.subsec_nanos() == 0;
    if !is_whole || time < LOST_AFTER_MIN {
        return Err(format!(
            "{text:?} is not a number of seconds from {} on",
            LOST_AFTER_MIN.as_secs()
        ));
    }
    Ok(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if two flags clash or a default does not parse.
    #[test]
    fn the_command_line_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    // Fails if a time is read wrongly or nonsense is taken for one.
    #[test]
    fn times_are_read() {
        assert_eq!(parse_duration("30"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "s", "-1s", "1d", "1.5s", "99999999999999999999s"] {
            assert!(parse_duration(bad).is_err(), "{bad:?}");
        }
    }
}
