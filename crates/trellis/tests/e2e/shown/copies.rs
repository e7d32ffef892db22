//! Copies that do not answer: every verb says so within seconds, also while nobody writes.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{AN_HOUR, events, told, wait_explained};
use crate::harness::{Service, processes};

const POOLS: [&str; 3] = ["a", "b", "c"];

/// A service with a bound claim of three copies that nobody uses.
fn idle_claim(arguments: &[&str]) -> Service {
    let service = Service::start_told(&[AN_HOUR, arguments].concat());
    for pool in POOLS {
        let path = service.path(&format!("pool-{pool}"));
        std::fs::create_dir_all(&path).unwrap();
        service.trellis(&["pool", "add", pool, path.to_str().unwrap()]);
    }
    service.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: three}\nprovisioner: trellis.dev\nallowVolumeExpansion: true\nparameters: {replicas: \"3\", allowSharedDisk: \"true\", pools: \"a,b,c\"}\n",
    );
    service.claim("data", "three", "320Mi");
    wait_explained(&service, "data", &["All is well"]);
    service
}

/// The process that serves a copy, or the target, and the pool of the copy.
fn process(service: &Service, name: &str) -> Pid {
    let volume = service.object("pvc", "data")["spec"]["volumeName"].clone();
    let run = service.data().join("run").join(volume.as_str().unwrap());
    let text = std::fs::read_to_string(run.join(format!("{name}.lock"))).unwrap();
    let pid = Pid::from_raw(text.trim().parse().unwrap()).unwrap();
    assert!(processes(&service.data()).contains(&pid));
    pid
}

fn replica(service: &Service, number: &str) -> Value {
    let replicas = service.objects("replicas.trellis.dev");
    let name = |each: &Value| each["metadata"]["name"].as_str().unwrap().to_owned();
    let found = replicas
        .into_iter()
        .find(|each| name(each).ends_with(number));
    found.unwrap()
}

fn pool(service: &Service, number: &str) -> String {
    let replica = replica(service, number);
    replica["spec"]["pool"].as_str().unwrap().to_owned()
}

fn flushes(service: &Service) -> u64 {
    let text = service.kubectl(&["get", "--raw", "/debug/store"]);
    let stats: Value = serde_json::from_str(&text).unwrap();
    stats["flushes"].as_u64().unwrap()
}

/// Waits until nothing more is written.
fn wait_at_rest(service: &Service) {
    service.wait("nothing more is written", |service| {
        let before = flushes(service);
        // Longer than it takes to give a copy up and to greet it again.
        std::thread::sleep(std::time::Duration::from_secs(8));
        (flushes(service) == before).then_some(())
    });
}

/// The line of a table that begins with a word.
fn line(text: &str, word: &str) -> String {
    let mut lines = text.lines();
    let found = lines.find(|line| line.split_whitespace().next() == Some(word));
    found.unwrap_or_default().to_owned()
}

// Fails if a copy that is frozen while nobody writes passes for one that is well in any verb, if the store is written
// again and again because of it, if a growth without it does not say so, or if it still looks bad when it is back.
#[test]
fn a_copy_that_is_frozen_while_nobody_writes_is_silent_everywhere() {
    let service = idle_claim(&[]);
    let (frozen, silent) = (process(&service, "1"), pool(&service, "-1"));
    kill_process(frozen, Signal::STOP).unwrap();
    let said = wait_explained(&service, "data", &["state: Degraded", "RedundancyLow"]);
    let words = format!("the copy on pool {silent:?} is Silent ");
    assert!(said.contains(&words), "{said}");
    assert!(said.contains("2 of 3 copies hold everything"), "{said}");
    assert!(!said.contains("All is well"), "{said}");
    assert_eq!(told(&service, &["explain", "data"]).1, Some(3));
    let show = service.trellis(&["volume", "show", "data"]);
    assert!(line(&show, &silent).contains("Silent "), "{show}");
    assert_eq!(show.matches("InSync").count(), 2, "{show}");
    assert!(show.contains("RedundancyMet NO"), "{show}");
    let ladder = service.trellis(&["ladder", "data"]);
    let rung = ladder
        .lines()
        .find(|line| line.contains(&format!("pool {silent} ")));
    assert!(rung.unwrap_or_default().contains("Silent "), "{ladder}");
    let df = service.trellis(&["df"]);
    assert!(df.contains("Degraded RedundancyLow"), "{df}");
    wait_at_rest(&service);

    let grown = service.trellis(&["grow", "data", "400Mi", "--wait"]);
    let last = grown.lines().last().unwrap_or_default();
    let behind = format!("the copy on pool {silent} is behind with 320Mi (Silent ");
    assert!(last.starts_with(&behind), "{grown}");
    service.wait("the history says it", |service| {
        let history = service.trellis(&["history", "data"]);
        let said = format!("succeeded, behind: {silent}");
        history.contains(&said).then_some(())
    });
    service.wait("an event says it", |service| {
        let said = format!("The copy on pool {silent} is behind");
        events(service, "data").contains(&said).then_some(())
    });
    service.wait("the copy says what holds it", |service| {
        let replica = replica(service, "-1");
        let conditions = replica["status"]["conditions"].as_array()?.clone();
        let resizing = conditions.iter().find(|each| each["type"] == "Resizing")?;
        let is_held = resizing["status"] == "True" && resizing["reason"] == "ReplicaUnavailable";
        is_held.then_some(())
    });

    kill_process(frozen, Signal::CONT).unwrap();
    wait_explained(&service, "data", &["All is well"]);
    let show = service.trellis(&["volume", "show", "data"]);
    assert_eq!(show.matches("InSync").count(), 3, "{show}");
    wait_at_rest(&service);
}

// Fails if copies that are frozen count among those that are there, or if a growth that waits for them is not told of
// although nobody uses the claim.
#[test]
fn too_few_copies_are_those_that_answer() {
    let service = idle_claim(&[]);
    let frozen = ["0", "1"].map(|name| process(&service, name));
    for pid in frozen {
        kill_process(pid, Signal::STOP).unwrap();
    }
    service.trellis(&["grow", "data", "400Mi"]);
    let words = [
        "TooFewReplicas",
        "1 of 3 copies of volume",
        "answer, and 2 must",
    ];
    wait_explained(&service, "data", &words);
    service.wait("an event says it", |service| {
        let said = events(service, "data");
        let held = |line: &str| line.contains("VolumeResizeFailed") && line.contains("TooFew");
        said.lines().any(held).then_some(())
    });
    for pid in frozen {
        kill_process(pid, Signal::CONT).unwrap();
    }
    service.wait_size("data", "400Mi");
    wait_explained(&service, "data", &["All is well"]);
}

// Fails if the last word of a target that does not answer any more is taken for news of its copies.
#[test]
fn the_copies_of_a_frozen_target_are_silent_too() {
    let service = idle_claim(&["--silent-target-seconds", "3600"]);
    let frozen = process(&service, "target");
    kill_process(frozen, Signal::STOP).unwrap();
    let said = wait_explained(&service, "data", &["TargetSilent"]);
    assert!(!said.contains("All is well"), "{said}");
    let show = service.trellis(&["volume", "show", "data"]);
    for pool in POOLS {
        assert!(line(&show, pool).contains("Silent "), "{show}");
    }
    assert!(show.contains("RedundancyMet unknown"), "{show}");
    let df = service.trellis(&["df"]);
    assert!(df.contains("Held TargetSilent"), "{df}");
    let ladder = service.trellis(&["ladder", "data"]);
    assert!(ladder.contains("TargetSilent"), "{ladder}");
    kill_process(frozen, Signal::CONT).unwrap();
    wait_explained(&service, "data", &["All is well"]);
}
