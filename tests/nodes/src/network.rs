//! A network of nodes.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Context, Error, Result};
use crate::ip::{ip, ip_in};
use crate::leftovers::{self, PREFIX, directory, lock};
use crate::link::{BRIDGE, NIC};
use crate::machine::Machine;

/// How many subnets of 10.88.0.0/16 are used in turns. Networks do not meet, but different addresses make logs readable.
const SUBNETS: u32 = 250;

static COUNT: AtomicU32 = AtomicU32::new(0);
static SWEPT: Once = Once::new();

/// Nodes that reach each other and nobody else. Dropping it removes everything, unless it is to stay.
pub struct Network {
    prefix: String,
    machines: Vec<Machine>,
    stays: bool,
}

impl Network {
    /// Makes nodes of these names. Removes what dead processes have left before.
    pub fn new(names: &[&str]) -> Result<Network> {
        SWEPT.call_once(|| match leftovers::sweep() {
            Ok(swept) if swept.is_empty() => {}
            Ok(swept) => eprintln!("removed what aborted runs had left: {}", swept.join(", ")),
            Err(error) => eprintln!("what aborted runs have left stays: {error:?}"),
        });
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let subnet = std::process::id().wrapping_add(count) % SUBNETS + 1;
        Network::make(leftovers::own_prefix(count), names, subnet)
    }

    /// Makes nodes under a name by which other processes find them.
    pub fn named(name: &str, names: &[&str]) -> Result<Network> {
        Network::make(format!("{PREFIX}-{name}"), names, 0)
    }

    /// Lets the nodes stay when this process ends.
    pub fn stay(&mut self) {
        self.stays = true;
    }

    /// The nodes that were left under this name, if there are any.
    pub fn find(name: &str) -> Result<Option<Network>> {
        let prefix = format!("{PREFIX}-{name}");
        let namespaces = leftovers::namespaces(&prefix);
        let nodes = namespaces.iter().filter_map(|namespace| {
            let name = namespace.split_once('.')?.1;
            (name != SWITCH).then(|| name.to_owned())
        });
        let nodes: Vec<String> = nodes.collect();
        if nodes.is_empty() {
            return Ok(None);
        }
        let machine = |(index, name): (usize, &String)| Machine::new(&prefix, name, index, 0);
        let machines = nodes.iter().enumerate().map(machine);
        Ok(Some(Network {
            machines: machines.collect(),
            prefix,
            stays: true,
        }))
    }

    fn make(prefix: String, names: &[&str], subnet: u32) -> Result<Network> {
        let subnet = u8::try_from(subnet).unwrap_or_default();
        let machine = |(index, name): (usize, &&str)| Machine::new(&prefix, name, index, subnet);
        // It is there before its parts are, so that a failure half-way removes what was made.
        let network = Network {
            machines: names.iter().enumerate().map(machine).collect(),
            stays: false,
            prefix,
        };
        let held = lock()?;
        let built = network.build();
        // Removing takes the lock, too.
        drop(held);
        built.map(|()| network)
    }

    fn build(&self) -> Result<()> {
        let directory = self.directory();
        std::fs::create_dir(&directory).context("make", &directory)?;
        let switch = self.switch();
        ip(&format!("netns add {switch}"))?;
        ip_in(&switch, &format!("link add {BRIDGE} type bridge"))?;
        ip_in(&switch, &format!("link set {BRIDGE} up"))?;
        for machine in &self.machines {
            self.connect(machine)?;
            machine.make_directory()?;
        }
        Ok(())
    }

    /// Makes the node's namespace, and its link to the switch.
    fn connect(&self, machine: &Machine) -> Result<()> {
        let node = machine.namespace();
        ip(&format!("netns add {node}"))?;
        machine.link().connect(machine.address())?;
        ip_in(node, "link set lo up").map(drop)
    }

    fn switch(&self) -> String {
        switch(&self.prefix)
    }

    /// Where the directories of the nodes are.
    pub fn directory(&self) -> PathBuf {
        directory(&self.prefix)
    }

    /// All nodes.
    pub fn machines(&self) -> &[Machine] {
        &self.machines
    }

    /// The node of that name.
    pub fn machine(&self, name: &str) -> Result<&Machine> {
        let found = self.machines.iter().find(|machine| machine.name() == name);
        found.ok_or_else(|| Error::NoNode {
            name: name.to_owned(),
        })
    }

    /// Loses what one node sends to another, and nothing else. Two calls cut two nodes off from each other while a third
    /// one still reaches both.
    pub fn cut_path(&self, from: &Machine, to: &Machine) -> Result<()> {
        // Packets go to a card that nobody has.
        let words = format!(
            "neigh replace {} lladdr 02:00:00:00:00:01 nud permanent dev {NIC}",
            to.address()
        );
        ip_in(from.namespace(), &words).map(drop)
    }

    /// Ends [`Network::cut_path`].
    pub fn heal_path(&self, from: &Machine, to: &Machine) -> Result<()> {
        let words = format!("neigh del {} dev {NIC}", to.address());
        ip_in(from.namespace(), &words).map(drop)
    }

    /// Removes a network that was left.
    pub fn remove(mut self) -> Result<()> {
        self.stays = true;
        let _held = lock()?;
        leftovers::remove(&self.prefix)
    }
}

/// The last part of the name of the switch's namespace.
const SWITCH: &str = "switch";

impl Drop for Network {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        let removed = lock().and_then(|_held| leftovers::remove(&self.prefix));
        if let Err(error) = removed {
            if std::thread::panicking() {
                eprintln!("the network was not removed: {error:?}");
            } else {
                panic!("the network was not removed: {error:?}");
            }
        }
    }
}

/// The namespace of a network's switch.
pub(crate) fn switch(prefix: &str) -> String {
    format!("{prefix}.{SWITCH}")
}

/// The address of a node.
pub(crate) fn address(subnet: u8, index: usize) -> Ipv4Addr {
    let host = u8::try_from(index + 1).unwrap_or(u8::MAX);
    Ipv4Addr::new(10, 88, subnet, host)
}
