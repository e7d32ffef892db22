//! Serves one replica until its standard input ends: `replica-serve POOL/replicas/NAME VOLUME REPLICA
//! ADDRESS [thick] [unsummed] [credentials=DIR allow=NODE…]`. Says where it listens on its standard output.
//!
//! It dies with whoever started it, also when it is stopped at that moment.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::process::{Signal, getpid, kill_process, set_parent_process_death_signal};
use trellis_api::step::{self, Step};
use trellis_engine::drive::{Address, Credentials, ReplicaServer, ReplicaSettings};
use trellis_engine::replica::{Identity, Provisioning};
use uuid::Uuid;

static FATAL: OnceLock<Step> = OnceLock::new();

/// Dies as `kill -9` would, at the step that the environment names.
fn die_at(reached: Step) {
    if FATAL.get() == Some(&reached) {
        let _ = kill_process(getpid(), Signal::KILL);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let mut arguments = std::env::args().skip(1);
    let mut next = |what: &str| arguments.next().ok_or(format!("{what} is missing"));
    let path = PathBuf::from(next("the replica's directory")?);
    let identity = Identity {
        volume: Uuid::parse_str(&next("the volume")?)?,
        replica: Uuid::parse_str(&next("the replica")?)?,
    };
    let address: Address = next("the address")?.parse()?;
    let words: Vec<String> = arguments.collect();
    let says = |word: &str| words.iter().any(|said| said == word);
    let provisioning = if says("thick") {
        Provisioning::Thick
    } else {
        Provisioning::Thin
    };
    let settings = ReplicaSettings {
        path,
        pool: None,
        identity,
        provisioning,
        checksums: !says("unsummed"),
    };
    if let Ok(step) = std::env::var("DIES_AT") {
        let step = Step::from_name(&step).ok_or("DIES_AT names no step")?;
        let _ = FATAL.set(step);
        step::install_hook(die_at);
    }
    let values = |key: &str| -> Vec<&str> {
        let pairs = words.iter().filter_map(|word| word.split_once('='));
        let of_key = pairs.filter(|(name, _)| *name == key);
        of_key.map(|(_, value)| value).collect()
    };
    let server = match values("credentials").first() {
        None => ReplicaServer::start(settings, &address)?,
        Some(dir) => {
            let credentials = Credentials::read(Path::new(dir))?;
            let allowed = values("allow").into_iter().map(str::parse);
            let allowed = allowed.collect::<Result<_, _>>()?;
            ReplicaServer::start_tls(settings, &address, &credentials, allowed)?
        }
    };
    println!("{}", server.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    server.stop();
    Ok(())
}
