//! A volume of three copies follows whoever uses it, also away from a node that is lost, and nothing that was durable is
//! lost on the way.

use std::time::Duration;

use trellis_nodes_tests::cluster::Cluster;
use trellis_nodes_tests::writer::{Writer, held};

/// What `held` must begin with, if these numbers were durable: every number at its own place.
fn assert_held(numbers: &[u64], noted: &[u64]) {
    let expected: Vec<u64> = (0..noted.last().map_or(0, |last| last + 1)).collect();
    let there = numbers.get(..expected.len());
    assert_eq!(there, Some(expected.as_slice()), "a durable number is lost");
}

fn write_some(writer: &Writer, more: usize) {
    writer.wait_for(more).unwrap();
}

#[test]
fn a_volume_follows_its_user_from_node_to_node_and_grows_on_the_way() {
    // Fails if a volume cannot be used on another node than that of its first copy, if it is served on a node where
    // nobody uses it, if a move loses something, or if a use on a second node begins while the first goes on.
    let cluster = Cluster::up(&[]).unwrap();
    cluster.claim("data", "320Mi").unwrap();
    let mut noted = Vec::new();
    for (node, next, size) in [
        ("b", "c", "400Mi"),
        ("c", "a", "480Mi"),
        ("a", "b", "560Mi"),
    ] {
        let (path, took) = cluster.mount("data", node).unwrap();
        eprintln!("mounted on {node} after {took:?}");
        assert_eq!(cluster.served_on().unwrap(), node);
        assert_held(&held(&path).unwrap_or_default(), &noted);
        let writer = Writer::start(cluster.machine(node).unwrap(), &path, node).unwrap();
        write_some(&writer, 20);
        cluster.ask_mount("data", next).unwrap();
        cluster
            .wait("the second use says why it waits", |cluster| {
                let name = format!("data-on-{next}");
                let found = cluster.object("attachments.trellis.dev", &name)?;
                Ok(found["status"]["hold"]["reason"] == "UsedElsewhere")
            })
            .unwrap();
        cluster.grow("data", size).unwrap();
        write_some(&writer, 20);
        let (numbers, stall) = writer.stop().unwrap();
        eprintln!(
            "{} numbers on {node}, longest stall {stall:?}",
            numbers.len()
        );
        noted.extend(numbers);
        cluster.ask_unmount("data", node).unwrap();
        cluster.wait_unmounted("data", node).unwrap();
    }
    let (path, _) = cluster.mount("data", "b").unwrap();
    assert_held(&held(&path).unwrap(), &noted);
    cluster.wait_whole("560Mi").unwrap();
    cluster.ask_unmount("data", "b").unwrap();
    cluster.wait_unmounted("data", "b").unwrap();
    cluster.delete("pvc", "data").unwrap();
    cluster
        .wait("the copies are gone", |cluster| {
            Ok(cluster.objects("replicas.trellis.dev")?.is_empty())
        })
        .unwrap();
}

#[test]
fn a_node_that_is_lost_gives_up_its_volume_and_is_harmless_when_it_wakes_up() {
    // Fails if the volume of a lost node cannot be used elsewhere, if something durable is lost, or if the lost node goes
    // on writing when it is back.
    let cluster = Cluster::up(&[]).unwrap();
    cluster.claim("data", "320Mi").unwrap();
    let (path, _) = cluster.mount("data", "b").unwrap();
    let b = cluster.machine("b").unwrap().clone();
    let mut writer = Writer::start(&b, &path, "b").unwrap();
    write_some(&writer, 50);
    // It is cut off first, so that its processes go on for a moment without the others; then they stop where they are.
    b.cut().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    b.freeze().unwrap();
    let (noted, _) = writer.noted().unwrap();
    let (there, took) = cluster.mount("data", "c").unwrap();
    eprintln!("taken over by c after {took:?}, with the time until b counted as lost");
    assert_held(&held(&there).unwrap(), &noted);
    let other = Writer::start(cluster.machine("c").unwrap(), &there, "c").unwrap();
    write_some(&other, 50);
    // It wakes up, first without the others and then with them.
    b.thaw();
    std::thread::sleep(Duration::from_secs(2));
    let (again, _) = writer.noted().unwrap();
    assert_eq!(
        again, noted,
        "a node wrote that was cut off from the others"
    );
    b.heal().unwrap();
    cluster
        .wait("whoever used the volume on b gets errors", |_| {
            Ok(writer.has_failed())
        })
        .unwrap();
    let (again, _) = writer.noted().unwrap();
    assert_eq!(again, noted, "two nodes wrote");
    write_some(&other, 50);
    cluster
        .wait(
            "the use on b says that the volume is elsewhere",
            |cluster| {
                let found = cluster.object("attachments.trellis.dev", "data-on-b")?;
                Ok(found["status"]["hold"]["reason"] == "UsedElsewhere")
            },
        )
        .unwrap();
    cluster.wait_whole("320Mi").unwrap();
    let (numbers, stall) = other.stop().unwrap();
    eprintln!("{} numbers on c, longest stall {stall:?}", numbers.len());
    // The use on b gets the volume back when c has done.
    cluster.ask_unmount("data", "c").unwrap();
    cluster.wait_unmounted("data", "c").unwrap();
    let (path, took) = cluster.mount("data", "b").unwrap();
    eprintln!("back on b after {took:?}");
    let mut all = noted;
    all.extend(numbers);
    assert_held(&held(&path).unwrap(), &all);
}

#[test]
fn the_copy_of_a_lost_node_is_made_anew_and_the_target_of_an_idle_volume_rests() {
    // Fails if a copy is missing for ever with its node, if what nobody uses keeps its process, or if a volume that rests
    // does not grow.
    let arguments = ["--copy-lost-after", "2s", "--target-rests-after", "1s"];
    let mut cluster = Cluster::up(&arguments).unwrap();
    let second = cluster.machine("c").unwrap().disk("second", "1g").unwrap();
    let second = second.to_string_lossy().into_owned();
    cluster
        .apply(&serde_json::json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Pool", "metadata": { "name": "second-c" },
            "spec": { "node": "c", "path": second, "overcommitPercent": 100 },
        }))
        .unwrap();
    cluster.claim("data", "320Mi").unwrap();
    let (path, _) = cluster.mount("data", "a").unwrap();
    let writer = Writer::start(cluster.machine("a").unwrap(), &path, "a").unwrap();
    write_some(&writer, 20);
    let nodes = |cluster: &Cluster| {
        let copies = cluster.objects("replicas.trellis.dev").unwrap();
        let staying = copies
            .iter()
            .filter(|copy| copy["metadata"]["deletionTimestamp"].is_null());
        let mut nodes: Vec<String> = staying
            .map(|copy| copy["spec"]["node"].as_str().unwrap_or_default().to_owned())
            .collect();
        nodes.sort();
        nodes
    };
    assert_eq!(nodes(&cluster), ["a", "b", "c"]);
    cluster.kill("b").unwrap();
    let took = cluster
        .wait("another copy on c counts", |cluster| {
            let whole = cluster.wait_whole("320Mi").is_ok();
            Ok(whole && nodes(cluster) == ["a", "c", "c"])
        })
        .unwrap();
    eprintln!("replaced after {took:?}");
    let (numbers, stall) = writer.stop().unwrap();
    eprintln!("{} numbers, longest stall {stall:?}", numbers.len());
    // What the dead node still has of the volume goes when it is back.
    cluster.start("b").unwrap();
    cluster
        .wait("the old copy is gone", |cluster| {
            Ok(cluster.objects("replicas.trellis.dev")?.len() == 3)
        })
        .unwrap();
    cluster.ask_unmount("data", "a").unwrap();
    let rests = |cluster: &Cluster| {
        let targets = cluster.objects("targets.trellis.dev")?;
        let target = targets.first().cloned().unwrap_or_default();
        let conditions = target["status"]["conditions"].as_array().cloned();
        let mut conditions = conditions.unwrap_or_default().into_iter();
        let told =
            conditions.any(|each| each["type"] == "Available" && each["reason"] == "Resting");
        Ok(target["spec"]["rests"] == true && told)
    };
    cluster.wait("the target rests", rests).unwrap();
    assert_eq!(targets_running(&cluster), 0);
    cluster.grow("data", "400Mi").unwrap();
    cluster.wait("the target rests again", rests).unwrap();
    let (path, took) = cluster.mount("data", "c").unwrap();
    eprintln!("woken up on c after {took:?}");
    assert_held(&held(&path).unwrap(), &numbers);
    cluster.wait_whole("400Mi").unwrap();
}

/// How many targets run, on all nodes.
fn targets_running(cluster: &Cluster) -> usize {
    let machines = cluster.network.machines().iter();
    let pids = machines.flat_map(|machine| machine.processes());
    let is_target = |pid: &rustix::process::Pid| {
        let path = format!("/proc/{}/cmdline", pid.as_raw_nonzero());
        let line = std::fs::read(path).unwrap_or_default();
        line.split(|byte| *byte == 0)
            .any(|word| word == b"serve-target")
    };
    pids.filter(is_target).count()
}
