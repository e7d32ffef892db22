//! A node's link to the switch: cut, healed, slow, lossy.

use std::net::Ipv4Addr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::ip::{ip, ip_in};
use crate::wire::Wire;

/// The node's end of its link.
pub(crate) const NIC: &str = "eth0";
/// The bridge in the switch's namespace.
pub(crate) const BRIDGE: &str = "bridge";

/// How often, and how many times, to look whether a port forwards.
const LOOK_EVERY: Duration = Duration::from_millis(10);
const LOOKS_MAX: usize = 300;

/// What happens to packets that a node sends. What it receives comes as the others send it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weather {
    /// How much later each packet arrives.
    pub delay: Duration,
    /// How many of a hundred packets are lost.
    pub loss_percent: u8,
}

/// The link of one node. On the switch's side it is a port of the bridge; in bad weather a [`Wire`] lies in between.
#[derive(Debug)]
pub(crate) struct Link {
    node: String,
    switch: String,
    index: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_cut: bool,
    wire: Option<Wire>,
}

impl Link {
    pub(crate) fn new(node: &str, switch: &str, index: usize) -> Link {
        Link {
            node: node.to_owned(),
            switch: switch.to_owned(),
            index,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The switch's end of the link.
    fn port(&self) -> String {
        format!("port{}", self.index)
    }

    /// Makes the link, with this address at the node's end.
    pub(crate) fn connect(&self, address: Ipv4Addr) -> Result<()> {
        let Link { node, switch, .. } = self;
        let port = self.port();
        ip(&format!(
            "link add {NIC} netns {node} type veth peer name {port} netns {switch}"
        ))?;
        // No addresses of its own making: a node has one address.
        ip_in(node, &format!("link set {NIC} addrgenmode none up"))?;
        ip_in(node, &format!("addr add {address}/24 dev {NIC}"))?;
        ip_in(switch, &format!("link set {port} addrgenmode none up"))?;
        self.join(&port)
    }

    /// Makes a device a port of the bridge, and waits until it forwards.
    fn join(&self, device: &str) -> Result<()> {
        ip_in(&self.switch, &format!("link set {device} master {BRIDGE}"))?;
        let look = format!("-d link show {device}");
        for _ in 0..LOOKS_MAX {
            if ip_in(&self.switch, &look)?.contains("state forwarding") {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Err(Error::NotForwarding {
            device: device.to_owned(),
        })
    }

    /// Takes a device from the bridge. It stays up, so its other end is not told, and what it receives goes nowhere.
    fn part(&self, device: &str) -> Result<()> {
        ip_in(&self.switch, &format!("link set {device} nomaster")).map(drop)
    }

    /// Cuts or heals the link, whatever the weather.
    pub(crate) fn set_cut(&self, is_cut: bool) -> Result<()> {
        let mut state = self.state();
        let device = match &state.wire {
            Some(wire) => wire.bridge_end().to_owned(),
            None => self.port(),
        };
        match is_cut {
            true => self.part(&device)?,
            false => self.join(&device)?,
        }
        state.is_cut = is_cut;
        Ok(())
    }

    /// Sets the weather, in the place of what it was.
    pub(crate) fn set_weather(&self, weather: Weather) -> Result<()> {
        let mut state = self.state();
        if let Some(wire) = &state.wire {
            wire.set(weather);
            return Ok(());
        }
        let port = self.port();
        self.part(&port)?;
        let wire = Wire::lay(&self.switch, &port, self.index, weather)?;
        if !state.is_cut {
            self.join(wire.bridge_end())?;
        }
        state.wire = Some(wire);
        Ok(())
    }

    /// Ends delay and loss. What is on its way is lost.
    pub(crate) fn calm(&self) -> Result<()> {
        let mut state = self.state();
        let Some(wire) = state.wire.take() else {
            return Ok(());
        };
        wire.remove()?;
        match state.is_cut {
            true => Ok(()),
            false => self.join(&self.port()),
        }
    }
}
