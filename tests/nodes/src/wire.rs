//! A wire on which packets take their time and get lost.
//!
//! The kernel's own `sch_netem` is missing in small kernels, such as those of many test machines. So the wire is a thread
//! that carries Ethernet frames between two macvtap devices:
//!
//! ```text
//! node eth0 ──veth── port ═ near ── thread ── tap ═ far ──veth── wire ── bridge
//! ```
//!
//! A macvtap in passthru mode takes all that its lower device receives, and what is written to it leaves there. Frames
//! carry the kernel's header about segments and checksums (`virtio_net_hdr`) and are passed on with it, unread.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, OFlags, makedev, mknodat};

use crate::error::{Context, Error, Result};
use crate::ip::{ip_in, run};
use crate::leftovers::directory;
use crate::link::Weather;

/// A frame of segments that the card would have cut, with its header.
const FRAME_BYTES_MAX: usize = 68 << 10;
/// What may be on its way. More is lost, as in a switch.
const FLIGHT_BYTES_MAX: usize = 64 << 20;
/// How long the thread sleeps at most before it looks whether it is still wanted.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Where the numbers that decide about losses begin: they are the same in every run.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// A wire, until it is removed.
#[derive(Debug)]
pub(crate) struct Wire {
    switch: String,
    index: usize,
    bridge_end: String,
    shared: Arc<Shared>,
    carrier: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    weather: Mutex<Weather>,
    ends: AtomicBool,
}

impl Wire {
    /// Lays a wire from the switch's end of a node's link. Its other end is a device that is to be a port of the bridge.
    pub(crate) fn lay(switch: &str, port: &str, index: usize, weather: Weather) -> Result<Wire> {
        let shared = Arc::new(Shared {
            weather: Mutex::new(weather),
            ends: AtomicBool::new(false),
        });
        let mut wire = Wire {
            switch: switch.to_owned(),
            index,
            bridge_end: format!("wire{index}"),
            shared: Arc::clone(&shared),
            carrier: None,
        };
        let (bridge_end, far) = (&wire.bridge_end, format!("far{index}"));
        ip_in(
            switch,
            &format!("link add {bridge_end} type veth peer name {far}"),
        )?;
        for device in [bridge_end, &far] {
            ip_in(switch, &format!("link set {device} addrgenmode none up"))?;
        }
        let near = open_tap(switch, port, &format!("near{index}"))?;
        let far = open_tap(switch, &far, &format!("tap{index}"))?;
        wire.carrier = Some(std::thread::spawn(move || carry(near, far, &shared)));
        Ok(wire)
    }

    /// The device that is to be a port of the bridge.
    pub(crate) fn bridge_end(&self) -> &str {
        &self.bridge_end
    }

    pub(crate) fn set(&self, weather: Weather) {
        let there = self.shared.weather.lock();
        *there.unwrap_or_else(PoisonError::into_inner) = weather;
    }

    /// Takes the wire away. The link's end is as it was.
    pub(crate) fn remove(self) -> Result<()> {
        ip_in(&self.switch, &format!("link del near{}", self.index))?;
        ip_in(&self.switch, &format!("link del {}", self.bridge_end)).map(drop)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        if let Some(carrier) = self.carrier.take()
            && carrier.join().is_err()
        {
            eprintln!("the thread that carried frames has panicked");
        }
    }
}

/// Makes a macvtap device on a device, and opens it.
fn open_tap(switch: &str, lower: &str, name: &str) -> Result<File> {
    ip_in(
        switch,
        &format!("link add link {lower} name {name} type macvtap mode passthru"),
    )?;
    ip_in(switch, &format!("link set {name} addrgenmode none up"))?;
    // The device's numbers stand in the sysfs of its namespace, which `ip netns exec` mounts.
    let script = format!("cat /sys/class/net/{name}/tap*/dev");
    let mut command = Command::new("ip");
    let numbers = run(command.args(["netns", "exec", switch, "sh", "-c", &script]))?;
    let numbers: Option<(u32, u32)> = numbers
        .trim()
        .split_once(':')
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let (major, minor) = numbers.ok_or_else(|| Error::NoDevice {
        name: name.to_owned(),
    })?;
    let prefix = switch.split('.').next().unwrap_or_default();
    let path = directory(prefix).join(name);
    // A device file of our own: those in /dev have names that devices of other namespaces may have, too.
    mknodat(
        CWD,
        &path,
        FileType::CharacterDevice,
        Mode::RUSR | Mode::WUSR,
        makedev(major, minor),
    )
    .map_err(std::io::Error::from)
    .context("make", &path)?;
    let file = opened(&path);
    std::fs::remove_file(&path).context("remove", &path)?;
    file
}

fn opened(path: &PathBuf) -> Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let mut how = OpenOptions::new();
    how.read(true).write(true).custom_flags(flags);
    how.open(path).context("open", path)
}

/// Carries frames until the wire ends or its devices are gone.
fn carry(mut near: File, mut far: File, shared: &Shared) {
    let mut flight: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let mut flight_bytes = 0;
    let (mut random, mut buffer) = (SEED, vec![0; FRAME_BYTES_MAX]);
    while !shared.ends.load(Ordering::Relaxed) {
        let now = Instant::now();
        while flight.front().is_some_and(|(due, _)| *due <= now)
            && let Some((_, frame)) = flight.pop_front()
        {
            flight_bytes -= frame.len();
            // A device that has no room loses the frame.
            let _ = far.write(&frame);
        }
        let next = flight.front().map_or(LOOK_EVERY, |(due, _)| *due - now);
        if !wait(&near, &far, next.min(LOOK_EVERY)) {
            return;
        }
        let weather = *shared
            .weather
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        while let Some(frame) = read(&mut near, &mut buffer) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let is_lost = random % 100 < u64::from(weather.loss_percent);
            if is_lost || flight_bytes + frame.len() > FLIGHT_BYTES_MAX {
                continue;
            }
            flight_bytes += frame.len();
            let due = Instant::now() + weather.delay;
            // Frames do not overtake each other when the weather changes.
            let due = flight.back().map_or(due, |(last, _)| due.max(*last));
            flight.push_back((due, frame));
        }
        while let Some(frame) = read(&mut far, &mut buffer) {
            let _ = near.write(&frame);
        }
    }
}

/// Waits until a frame is there or the time is over; false if a device is gone.
fn wait(near: &File, far: &File, limit: Duration) -> bool {
    let mut devices = [
        PollFd::new(near, PollFlags::IN),
        PollFd::new(far, PollFlags::IN),
    ];
    let Ok(limit) = Timespec::try_from(limit) else {
        return false;
    };
    let gone = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
    match poll(&mut devices, Some(&limit)) {
        Ok(_) => !devices
            .iter()
            .any(|device| device.revents().intersects(gone)),
        Err(error) => error == rustix::io::Errno::INTR,
    }
}

fn read(device: &mut File, buffer: &mut [u8]) -> Option<Vec<u8>> {
    // If the device is gone, the next wait says so.
    let count = device.read(buffer).ok()?;
    Some(buffer[..count].to_vec())
}
