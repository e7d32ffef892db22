//! The kernel's own events, carried to the agent: block devices that change, and mounts that come and go. They only say
//! where to look; the state is measured then.
//!
//! Each source has a thread of its own that sleeps in the kernel. There are two for the whole process, and neither
//! costs anything while nothing happens.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use trellis_control::world::World;
use trellis_node::sys::events::{DeviceEvent, DeviceEvents, MountEvent, MountEvents};
use trellis_node::sys::loopdev;
use trellis_node::sys::mountinfo::Mount;

/// How long a thread sleeps at most; when it wakes by that, it has nothing to do.
const NAP: Duration = Duration::from_secs(3600);
/// The pause after the kernel could not be asked, so that a lasting error does not spin.
const PAUSE: Duration = Duration::from_secs(10);

/// Listens as long as the process lives. If the kernel cannot be listened to, the slow resync is left; that is logged
/// once and is no reason to stop.
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
    let mut by_hand = ByHand::default();
    loop {
        let seen = events.wait(NAP).and_then(|_| events.read_events());
        for event in seen.unwrap_or_else(pause) {
            let volume_in = |mount: &Mount| world.volume_in(&loopdev::backing_hint(&mount.source)?);
            if let Some(volume) = by_hand.take(&event, volume_in) {
                world.passes.push(&volume);
            }
            let place = &event.mount().mount_point;
            if let Some(volume) = place.strip_prefix(private).ok().and_then(Path::to_str) {
                world.passes.push(volume);
            }
            world.path_changed(&place.to_string_lossy());
        }
    }
}

/// Mounts of volumes that somebody makes by hand, where no use of ours is. Such a mount replays a journal, and a growth
/// that waited for that can go on. What was mounted can be told only while it is mounted.
#[derive(Default)]
struct ByHand {
    mounted: HashMap<u64, String>,
}

impl ByHand {
    /// The volume that something happened to, if it is one.
    fn take(
        &mut self,
        event: &MountEvent,
        volume_in: impl Fn(&Mount) -> Option<String>,
    ) -> Option<String> {
        match event {
            MountEvent::Mounted(mount) => {
                let volume = volume_in(mount)?;
                self.mounted.insert(mount.id, volume.clone());
                Some(volume)
            }
            MountEvent::Unmounted(mount) => self.mounted.remove(&mount.id),
            MountEvent::Changed(mount) => self.mounted.get(&mount.id).cloned(),
        }
    }
}

fn pause<T>(error: trellis_node::Error) -> Vec<T> {
    tracing::debug!(%error, "the kernel could not be asked what has changed");
    std::thread::sleep(PAUSE);
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_node::sys::block::DeviceNumber;

    fn mount(id: u64, source: &str) -> Mount {
        Mount {
            id,
            parent: 1,
            device: DeviceNumber { major: 7, minor: 0 },
            root: "/".into(),
            mount_point: "/mnt".into(),
            options: "rw".to_owned(),
            shared: false,
            fs_type: "xfs".to_owned(),
            source: source.into(),
            super_options: "rw".to_owned(),
        }
    }

    // Fails if a volume that somebody mounted and unmounted by hand is not looked at, so that a growth that waited for
    // its journal goes on only after a pause; or if mounts of others are taken for one.
    #[test]
    fn a_volume_that_was_mounted_by_hand_is_looked_at_when_it_is_unmounted() {
        let mut by_hand = ByHand::default();
        let volume_in = |mount: &Mount| {
            let is_ours = mount.source == Path::new("/dev/loop3");
            is_ours.then(|| "pvc-1".to_owned())
        };
        // The device is gone by then, and nothing tells what was on it.
        let nothing = |_: &Mount| None;
        let (ours, other) = (mount(5, "/dev/loop3"), mount(6, "/dev/loop4"));
        let volume = Some("pvc-1".to_owned());
        assert_eq!(
            by_hand.take(&MountEvent::Mounted(ours.clone()), volume_in),
            volume
        );
        assert_eq!(
            by_hand.take(&MountEvent::Mounted(other.clone()), volume_in),
            None
        );
        assert_eq!(
            by_hand.take(&MountEvent::Unmounted(ours.clone()), nothing),
            volume
        );
        assert_eq!(by_hand.take(&MountEvent::Unmounted(other), nothing), None);
        assert_eq!(by_hand.take(&MountEvent::Unmounted(ours), nothing), None);
        assert!(by_hand.mounted.is_empty());
    }
}
