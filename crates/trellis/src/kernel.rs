//! What the kernel tells by itself, carried to the agent: block devices that change, and mounts that come
//! and go. It only says where to look; what is true is measured then.
//!
//! Each source has a thread of its own that sleeps in the kernel: they are two for the whole process, and
//! neither costs anything while nothing happens.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use trellis_control::world::World;
use trellis_node::sys::events::{DeviceEvent, DeviceEvents, MountEvents};

/// How long a thread sleeps at most; it has nothing to do when it wakes by that.
const NAP: Duration = Duration::from_secs(3600);
/// The pause after the kernel could not be asked, so that a lasting error does not spin.
const PAUSE: Duration = Duration::from_secs(10);

/// Listens as long as the process lives. Without an ear for the kernel the slow resync is left, so that is
/// said once and is no reason to stop.
pub fn listen(world: &Arc<World>, private_mounts: PathBuf) {
    let deaf = |error: &dyn std::error::Error| {
        tracing::warn!(%error, "the kernel cannot be listened to; its changes are seen at the resync");
    };
    let for_devices = world.clone();
    match DeviceEvents::open() {
        Ok(events) => start("devices", move || devices(&for_devices, &events)),
        Err(error) => deaf(&error),
    }
    let for_mounts = world.clone();
    match MountEvents::open() {
        Ok(events) => start("mounts", move || {
            mounts(&for_mounts, &private_mounts, events)
        }),
        Err(error) => deaf(&error),
    }
}

fn start(name: &str, listen: impl FnOnce() + Send + 'static) {
    let named = std::thread::Builder::new().name(format!("trellis-{name}"));
    if let Err(error) = named.spawn(listen) {
        tracing::warn!(%error, "no thread to listen to the kernel; its changes are seen at the resync");
    }
}

fn devices(world: &World, events: &DeviceEvents) {
    loop {
        let seen = events.wait(NAP).and_then(|_| events.read_events());
        for event in seen.unwrap_or_else(pause) {
            match event {
                DeviceEvent::Device { name, .. } => world.device_changed(&format!("/dev/{name}")),
                DeviceEvent::Lost => world.push_all(),
            }
        }
    }
}

fn mounts(world: &World, private: &Path, mut events: MountEvents) {
    loop {
        let seen = events.wait(NAP).and_then(|_| events.read_events());
        for event in seen.unwrap_or_else(pause) {
            let place = &event.mount().mount_point;
            if let Some(volume) = place.strip_prefix(private).ok().and_then(Path::to_str) {
                world.passes.push(volume);
            }
            world.path_changed(&place.to_string_lossy());
        }
    }
}

fn pause<T>(error: trellis_node::Error) -> Vec<T> {
    tracing::debug!(%error, "the kernel could not be asked what has changed");
    std::thread::sleep(PAUSE);
    Vec::new()
}
