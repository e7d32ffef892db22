//! What a growth leaves on every layer: while it is held, when its goal moves, and when it is over.

use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{AN_HOUR, events, wait_explained};
use crate::harness::{Service, filesystem_mib, said};

const KINDS: [&str; 3] = [
    "volumes.trellis.dev",
    "targets.trellis.dev",
    "replicas.trellis.dev",
];

/// `Resizing` of a layer.
#[derive(Clone, Debug, PartialEq)]
struct Resizing {
    status: String,
    reason: String,
    message: String,
    since: String,
}

/// `Resizing` of every object of every layer of the only volume.
fn resizing(service: &Service) -> Vec<Resizing> {
    let mut all = Vec::new();
    for kind in KINDS {
        for object in service.objects(kind) {
            let conditions = object["status"]["conditions"].as_array().cloned();
            let found = conditions
                .into_iter()
                .flatten()
                .find(|each| each["type"] == "Resizing");
            let found = found.unwrap_or_default();
            let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
            all.push(Resizing {
                status: text("status"),
                reason: text("reason"),
                message: text("message"),
                since: text("lastTransitionTime"),
            });
        }
    }
    all
}

/// Waits until all layers agree that `Resizing` is so. There is a volume, a target, and the copies.
fn wait_resizing(
    service: &Service,
    copies: usize,
    what: &str,
    is_so: impl Fn(&Resizing) -> bool,
) -> Resizing {
    service.wait(what, |service| {
        let all = resizing(service);
        let agree = all.iter().all(&is_so);
        (agree && all.len() == 2 + copies).then(|| all[0].clone())
    })
}

/// Times of conditions have no fractions: what happens next happens in another second.
fn next_second() {
    std::thread::sleep(Duration::from_millis(1100));
}

/// When the last growth that is over was asked for, without fractions.
fn last_requested(service: &Service) -> String {
    let text = service.trellis(&["history", "data", "-o", "json"]);
    let records: Value = serde_json::from_str(&text).unwrap();
    let last = records.as_array().unwrap().last().unwrap().clone();
    let at = last["requestedAt"].as_str().unwrap();
    format!("{}Z", &at[..19])
}

// Fails if a layer does not say that it is growing, what holds it or since when; if a growth that took the place of
// another one seems to have begun with it; or if one that was over at once leaves no trace.
#[test]
fn every_layer_says_what_holds_a_growth_and_since_when() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    grow_in_three_ways(&service, 1);
}

// Fails like the one above, for the layers of a volume of several copies.
#[test]
fn every_copy_says_what_holds_a_growth_and_since_when() {
    let service = Service::start_told(AN_HOUR);
    three_copies(&service);
    service.claim("data", "three", "320Mi");
    grow_in_three_ways(&service, 3);
}

/// A growth that succeeds, one that is held, and one whose goal moves.
fn grow_in_three_ways(service: &Service, copies: usize) {
    let born = wait_resizing(service, copies, "nothing grows", |it| it.status == "False");
    assert_eq!(born.reason, "Reached");
    next_second();
    // One that succeeds, of a claim that nobody uses.
    service.trellis(&["grow", "data", "400Mi", "--wait"]);
    let over = wait_resizing(service, copies, "the growth is over", |it| {
        it.status == "False" && it.since > born.since
    });
    assert_eq!(over.reason, "Reached");
    assert!(over.since >= last_requested(service), "{over:?}");
    service.wait("it is told", |service| {
        events(service, "data")
            .contains("VolumeResizeSuccessful")
            .then_some(())
    });
    next_second();
    // One that is held.
    service.trellis(&["grow", "data", "900Ti"]);
    let held = wait_resizing(service, copies, "every layer is held", |it| {
        it.status == "True" && it.reason == "NoSpaceInPool"
    });
    assert!(held.message.contains("900Ti"), "{held:?}");
    assert!(held.since > over.since, "{held:?}");
    let all = resizing(service);
    assert!(all.iter().all(|it| *it == held), "{all:?}");
    service.wait("it is told", |service| {
        let said = events(service, "data");
        let failed = |line: &str| line.contains("VolumeResizeFailed") && line.contains("900Ti");
        said.lines().any(failed).then_some(())
    });
    next_second();
    // One whose goal moves while it is held.
    service.trellis(&["grow", "data", "950Ti"]);
    let moved = wait_resizing(service, copies, "every layer has the new goal", |it| {
        it.status == "True" && it.message.contains("950Ti")
    });
    assert_eq!(moved.reason, "NoSpaceInPool");
    assert!(moved.since > held.since, "{moved:?} after {held:?}");
    let all = resizing(service);
    assert!(all.iter().all(|it| *it == moved), "{all:?}");
    next_second();
    service.trellis(&["cancel", "data"]);
    wait_resizing(service, copies, "nothing grows any more", |it| {
        it.status == "False" && it.reason == "Reached"
    });
    wait_explained(service, "data", &["All is well"]);
}

/// Shuts an xfs down with a journal that has to be replayed.
fn shut_down(path: &std::path::Path) {
    let shut = Command::new("xfs_io")
        .args(["-x", "-c", "shutdown -f"])
        .arg(path)
        .output();
    said(&shut.unwrap(), "xfs_io shutdown");
}

/// A filesystem is shut down, a growth is asked for, and the claim is mounted again.
fn after_a_shutdown(service: &Service, while_idle: bool) {
    let path = service.mount("data");
    std::fs::write(path.join("file"), vec![7; 1 << 20]).unwrap();
    shut_down(&path);
    if !while_idle {
        service.trellis(&["grow", "data", "400Mi"]);
        wait_explained(service, "data", &["FilesystemDown"]);
    }
    service.trellis(&["umount", "data"]);
    if while_idle {
        service.trellis(&["grow", "data", "400Mi"]);
    }
    wait_explained(service, "data", &["FilesystemUnclean"]);
    let path = service.mount("data");
    service.wait("it fills its volume", |_| {
        (filesystem_mib(&path) == 400).then_some(())
    });
    wait_explained(service, "data", &["All is well"]);
    let left = |service: &Service| {
        let mut all = service.objects("volumes.trellis.dev");
        all.extend(service.objects("targets.trellis.dev"));
        all.extend(service.objects("replicas.trellis.dev"));
        let text = serde_json::to_string(&all).unwrap();
        text.contains("FilesystemUnclean") || text.contains("\"Growing\"")
    };
    service.wait("no layer says that it is unfinished", |service| {
        (!left(service)).then_some(())
    });
}

// Fails if a growth that is done looks unfinished until the next resync.
#[test]
fn a_growth_after_a_shutdown_is_over_when_it_is_mounted() {
    for while_idle in [false, true] {
        let service = Service::start_told(AN_HOUR);
        service.claim("data", "", "320Mi");
        after_a_shutdown(&service, while_idle);
    }
}

/// A class of three copies on pools of their own.
fn three_copies(service: &Service) {
    for pool in ["a", "b", "c"] {
        let path = service.path(&format!("pool-{pool}"));
        std::fs::create_dir_all(&path).unwrap();
        service.trellis(&["pool", "add", pool, path.to_str().unwrap()]);
    }
    service.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: three}\nprovisioner: trellis.dev\nallowVolumeExpansion: true\nparameters: {replicas: \"3\", allowSharedDisk: \"true\", pools: \"a,b,c\"}\n",
    );
}

// Fails if a growth of several copies that is done looks unfinished until the next resync.
#[test]
fn a_growth_of_several_copies_after_a_shutdown_is_over_when_it_is_mounted() {
    for while_idle in [false, true] {
        let service = Service::start_told(AN_HOUR);
        three_copies(&service);
        service.claim("data", "three", "320Mi");
        after_a_shutdown(&service, while_idle);
    }
}

// Fails if somebody else's loop device, on a file that nobody serves just now, keeps a claim from being used or grown.
#[test]
fn a_dead_loop_device_of_somebody_else_blocks_nobody() {
    let other = Service::start_told(&["--silent-target-seconds", "3600"]);
    three_copies(&other);
    other.claim("data", "three", "320Mi");
    other.mount("data");
    let volume = other.object("pvc", "data")["spec"]["volumeName"].clone();
    let run = other.data().join("run").join(volume.as_str().unwrap());
    let text = std::fs::read_to_string(run.join("target.lock")).unwrap();
    let frozen = Pid::from_raw(text.trim().parse().unwrap()).unwrap();
    kill_process(frozen, Signal::STOP).unwrap();
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    service.mount("data");
    service.trellis(&["grow", "data", "400Mi", "--wait"]);
    service.trellis(&["umount", "data"]);
    service.trellis(&["grow", "data", "500Mi", "--wait"]);
    kill_process(frozen, Signal::CONT).unwrap();
    other.trellis(&["umount", "data"]);
}
