//! Holds a volume and writes to it until it is killed: `volume-load VOLUME CF GROW-TO
//! VERSION [credentials=DIR] REPLICA=ADDRESS…`.
//! Every write is told on the standard output, before it begins and after it is acknowledged; when a
//! line arrives on the standard input, the volume is asked to grow, again and again by a MiB.

#[path = "../tests/common/load.rs"]
mod load;

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::sync::Arc;

use load::{Model, Witness};
use rustix::process::{Signal, set_parent_process_death_signal};
use trellis_engine::drive::{Address, Credentials, Volume, VolumeSettings};
use trellis_engine::proto::Config;
use uuid::Uuid;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let mut arguments = std::env::args().skip(1);
    let mut next = |what: &str| arguments.next().ok_or(format!("{what} is missing"));
    let volume = Uuid::parse_str(&next("the volume")?)?;
    let consistency = next("the consistency factor")?.parse()?;
    let mut to: u64 = next("the size")?.parse()?;
    let version: u64 = next("the last version of a block")?.parse()?;
    let mut addresses = BTreeMap::new();
    let mut credentials = None;
    for argument in arguments {
        let (replica, address) = argument.split_once('=').ok_or("REPLICA=ADDRESS")?;
        if replica == "credentials" {
            credentials = Some(Credentials::read(address.as_ref())?);
            continue;
        }
        addresses.insert(Uuid::parse_str(replica)?, address.parse::<Address>()?);
    }
    let config = Config {
        members: addresses.keys().copied().collect(),
        consistency,
    };
    let runtime = tokio::runtime::Runtime::new()?;
    let settings = VolumeSettings {
        credentials,
        ..VolumeSettings::new(volume, config, addresses)
    };
    let handle = runtime.block_on(async { Volume::start(settings) });
    runtime.block_on(handle.ready())?;
    let model = Arc::new(Model::above(version));
    let witness: Witness = Arc::new(|block, version, is_acked| {
        // One call a line, so that a kill leaves whole lines.
        let line = format!(
            "{} {block} {version}\n",
            if is_acked { "acked" } else { "begun" }
        );
        let _ = std::io::stdout().lock().write_all(line.as_bytes());
    });
    let _load = {
        let _in_runtime = runtime.enter();
        load::start(&handle, &model, 16, Some(&witness))
    };
    std::io::stdin().lock().read_line(&mut String::new())?;
    loop {
        runtime.block_on(handle.grow(to))?;
        to += 1 << 20;
    }
}
