//! Copies that are lost: I/O below the quorum, and the recovery of volumes whose copies are gone for good.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::process::Pid;
use rustix::process::Signal;
use rustix::process::kill_process;
use serde_json::Value;

use super::{
    LostDisk, MIB, WRITTEN_MIB, add_pool, class, condition, in_use, pattern, pool, read_back,
    replicas, service, target, write_all,
};
use crate::harness::Service;
use crate::harness::claim;

// Fails if a request below quorum fails although the class says that it waits, if it is not served when enough copies
// are back, or if nobody looks for these.
#[test]
fn below_quorum_io_waits_and_goes_on_when_the_disks_are_back() {
    let pools = ["a", "b", "c"];
    let service = service(&pools);
    // A request is asked anew after a second: one that lasts for several has outlived every limit that there is.
    service.apply(&class("3", "2", "  patience: 1s\n"));
    service.claim("data", "several", "512Mi");
    let path = service.mount("data");
    let first = crate::harness::write_file(&path.join("before"), 8 << 20, 1);
    let copies = replicas(&service);
    let lost: Vec<LostDisk> = copies[..2]
        .iter()
        .map(|copy| LostDisk::lose(&service, copy))
        .collect();
    service.wait("it is said that too few are there", |service| {
        (!condition(&target(service), "Available")).then_some(())
    });
    let file = path.join("meanwhile");
    let writer = std::thread::spawn(move || crate::harness::write_file(&file, 8 << 20, 2));
    std::thread::sleep(Duration::from_secs(6));
    assert!(!writer.is_finished(), "nothing can be durable now");
    for lost in lost {
        std::fs::rename(&lost.aside, &lost.pool).unwrap();
    }
    service.wait("the write goes on", |_| writer.is_finished().then_some(()));
    let second = writer.join().unwrap();
    service.wait("all copies are whole", |service| {
        condition(&target(service), "RedundancyMet").then_some(())
    });
    assert_eq!(crate::harness::checksum(&path.join("before")), first);
    assert_eq!(crate::harness::checksum(&path.join("meanwhile")), second);
    service.trellis(&["umount", "data"]);
}

// Fails if a request below quorum waits although the class says that it fails, or the volume does not serve again.
#[test]
fn below_quorum_io_fails_after_its_patience_if_the_class_says_so() {
    let pools = ["a", "b"];
    let service = service(&pools);
    service.apply(&class(
        "2",
        "2",
        "  whenBelowQuorum: fail\n  patience: 2s\n",
    ));
    let block = claim("data", "several", "128Mi");
    service.apply(&block.replace("spec:\n", "spec:\n  volumeMode: Block\n"));
    service.wait_bound("data");
    let path = service.mount("data");
    write_all(&path);
    let copies = replicas(&service);
    let lost = LostDisk::lose(&service, &copies[0]);
    service.wait("it is said that too few are there", |service| {
        (!condition(&target(service), "Available")).then_some(())
    });
    let mut device = File::options().write(true).open(&path).unwrap();
    let written = device
        .write_all(&pattern(0))
        .and_then(|()| device.sync_all());
    assert!(written.is_err(), "it was acknowledged by one of two");
    std::fs::rename(&lost.aside, &lost.pool).unwrap();
    service.wait("it serves again", |service| {
        condition(&target(service), "RedundancyMet").then_some(())
    });
    write_all(&path);
    read_back(&path);
    drop(device);
    service.trellis(&["umount", "data"]);
}

fn said(output: &std::process::Output) -> String {
    let (out, error) = (&output.stdout, &output.stderr);
    format!(
        "{}{}",
        String::from_utf8_lossy(out),
        String::from_utf8_lossy(error)
    )
}

/// Waits until the claim is not served, which is when a recovery is asked for.
fn wait_unavailable(service: &Service) {
    service.wait("it is said that too few are there", |service| {
        (!condition(&target(service), "Available")).then_some(())
    });
}

fn wait_served_by(service: &Service, copies: usize) {
    service.wait("the volume is served again by new copies too", |service| {
        let target = target(service);
        let whole = condition(&target, "Available") && condition(&target, "RedundancyMet");
        let members = target["status"]["members"]["replicas"].as_array()?;
        (whole && members.len() == copies).then_some(())
    });
}

// Fails if a volume of two copies is lost with one of them for good, if verbs that can do nothing say that they did,
// or if what was given up does harm when it comes back.
#[test]
fn of_two_copies_one_is_lost_for_good_and_the_volume_goes_on() {
    let pools = ["a", "b", "c"];
    let service = service(&pools[..2]);
    let device = in_use(&service, "2", "2");
    write_all(&device);
    let first = replicas(&service);
    let lost = LostDisk::lose(&service, &first[0]);
    let gone = pool(&first[0]);
    wait_unavailable(&service);
    for verb in [
        vec!["volume", "scale", "data", "1"],
        vec!["volume", "scale", "data", "2", "--consistency", "1"],
        vec!["volume", "replace", "data", &gone],
    ] {
        let output = service.try_trellis(&verb);
        assert_eq!(output.status.code(), Some(3), "{verb:?} {}", said(&output));
        assert!(
            said(&output).contains("TooFewReplicas"),
            "{}",
            said(&output)
        );
    }
    let shown = service.try_trellis(&["volume", "recover", "data"]);
    assert_eq!(shown.status.code(), Some(3), "{}", said(&shown));
    assert!(
        said(&shown).contains("no write that was acknowledged is lost"),
        "{}",
        said(&shown)
    );
    assert!(
        said(&shown).contains(&format!("--accept-loss {gone}")),
        "{}",
        said(&shown)
    );
    let other = service.try_trellis(&["volume", "recover", "data", "--accept-loss", "elsewhere"]);
    assert_eq!(other.status.code(), Some(4), "{}", said(&other));
    service.trellis(&["volume", "recover", "data", "--accept-loss", &gone]);
    service.wait("the volume is served", |service| {
        condition(&target(service), "Available").then_some(())
    });
    read_back(&device);
    let seen = target(&service);
    assert!(
        !condition(&seen, "RedundancyMet"),
        "one of two copies is there"
    );
    service.wait("it is in the history", |service| {
        let volume = service.objects("volumes.trellis.dev").remove(0);
        let records = volume["status"]["recoveries"].as_array()?.clone();
        (records[0]["recovery"]["lineage"] == seen["status"]["lineage"]).then_some(())
    });
    let history = service.trellis(&["history", "data"]);
    assert!(
        history.contains("gave up 1 and went on with 1"),
        "{history}"
    );
    service.wait("there is an event", |service| {
        let events = service.objects("events");
        let mut events = events.iter();
        events
            .any(|each| each["reason"] == "VolumeRecovered")
            .then_some(())
    });
    // The new copy is made when there is a pool for it; the old one comes back meanwhile.
    std::fs::rename(&lost.aside, &lost.pool).unwrap();
    add_pool(&service, "c");
    wait_served_by(&service, 2);
    read_back(&device);
    // Its pool is as good as any other again, and may have the new copy.
    service.wait("what was given up is gone", |service| {
        let copies = replicas(service);
        let is_old = |each: &Value| each["metadata"]["uid"] == first[0]["metadata"]["uid"];
        (copies.len() == 2 && !copies.iter().any(is_old)).then_some(())
    });
    write_all(&device);
    service.trellis(&["umount", "data"]);
}

/// The cells of the line that `volume recover` prints for the copy on a pool.
fn recover_line(text: &str, pool: &str) -> Vec<String> {
    let is_of_pool = |line: &&str| line.split_whitespace().next() == Some(pool);
    let line = text.lines().find(is_of_pool).unwrap_or_default();
    let cells = line.split("  ").map(str::trim);
    cells
        .filter(|cell| !cell.is_empty())
        .map(str::to_owned)
        .collect()
}

/// How far a copy got, as `volume recover` prints it: the larger is the later.
fn key(cell: &str) -> (u64, u64) {
    let (epoch, number) = cell.split_once('/').unwrap();
    (epoch.parse().unwrap(), number.parse().unwrap())
}

// Fails if a volume of two copies that was told before the loss that one is enough stops with one of them, or if
// `volume recover` does not say of each copy whether it is there, what it holds, since when, and how far it is behind.
#[test]
fn of_two_copies_one_is_enough_if_that_was_said_before_the_loss() {
    let pools = ["a", "b"];
    let service = service(&pools);
    let device = in_use(&service, "2", "2");
    service.trellis(&["volume", "scale", "data", "2", "--consistency", "1"]);
    service.wait("one copy is enough", |service| {
        let members = target(service)["status"]["members"].clone();
        (members["consistencyFactor"] == 1).then_some(())
    });
    let first = replicas(&service);
    let (gone, left) = (pool(&first[0]), pool(&first[1]));
    let recover = || service.try_trellis(&["volume", "recover", "data"]);
    let before = recover();
    assert_eq!(before.status.code(), Some(0), "{}", said(&before));
    let before = recover_line(&said(&before), &left);
    let lost = LostDisk::lose(&service, &first[0]);
    write_all(&device);
    read_back(&device);
    service.wait("the loss is said", |service| {
        let target = target(service);
        let is_said = !condition(&target, "RedundancyMet");
        assert!(condition(&target, "Available"), "one copy is enough");
        is_said.then_some(())
    });
    let shown = recover();
    let text = said(&shown);
    assert_eq!(shown.status.code(), Some(0), "{text}");
    assert!(text.contains("nothing has to be recovered"), "{text}");
    let alive = recover_line(&text, &left);
    let [_, counts, holds, written, behind, history, note] = &alive[..] else {
        panic!("{text}")
    };
    assert_eq!((counts.as_str(), note.as_str()), ("yes", "-"), "{text}");
    assert!(key(holds) > key(&before[2]), "{before:?} then {text}");
    let today = jiff::Timestamp::now().strftime("%Y-%m-").to_string();
    assert!(written.starts_with(&today), "{text}");
    assert_eq!(behind, "0 of 128 Mi", "{text}");
    assert!(history != "-", "{text}");
    let dead = recover_line(&text, &gone);
    assert_eq!(dead[1..6], ["yes", "-", "-", "-", "-"], "{text}");
    assert!(dead[6].len() > 1, "it is not said why: {text}");
    // Only the one that missed everything is there: it is said that this is not all, and nothing goes on by itself.
    let other = LostDisk::lose(&service, &first[1]);
    lost.find_again(&service, &first[0]);
    let text = service.wait("the one that is back says what it holds", |_| {
        let shown = recover();
        let text = said(&shown);
        let is_back = recover_line(&text, &gone).get(2)? != "-";
        let is_said = shown.status.code() == Some(3) && text.contains("MAY BE LOST");
        (is_back && is_said).then_some(text)
    });
    let back = recover_line(&text, &gone);
    // It has heard how far the volume is, and knows what it lacks.
    let behind = back[4].strip_suffix(" of 128 Mi").unwrap_or_default();
    let behind: usize = behind.parse().unwrap_or_default();
    assert!(behind >= WRITTEN_MIB, "{text}");
    assert_eq!(recover_line(&text, &left)[2], "-", "{text}");
    assert!(text.contains(&format!("--accept-loss {left}")), "{text}");
    let seen = target(&service);
    assert!(!condition(&seen, "Available"), "{text}");
    let seen = seen["status"]["conditions"].to_string();
    assert!(seen.contains("None of them holds everything."), "{seen}");
    let explained = service.trellis_any(&["explain", "data"]);
    let why = "0 of 2 copies hold everything";
    assert!(explained.contains(why), "{explained}");
    // Each gets what it missed when both are back.
    other.find_again(&service, &first[1]);
    wait_served_by(&service, 2);
    let whole = recover_line(&said(&recover()), &gone);
    assert_eq!(whole[4], "0 of 128 Mi", "{whole:?}");
    read_back(&device);
    service.trellis(&["umount", "data"]);
}

// Fails if a volume stays lost because the only copy that is left lacks the last writes, although the operator gives
// these up.
#[test]
fn a_copy_that_lacks_the_last_writes_goes_on_by_the_operators_word() {
    let pools = ["a", "b"];
    let service = service(&pools);
    let device = in_use(&service, "2", "1");
    write_all(&device);
    service.wait("both copies are whole", |service| {
        condition(&target(service), "RedundancyMet").then_some(())
    });
    let first = replicas(&service);
    let behind = LostDisk::lose(&service, &first[0]);
    let file = File::options().write(true).open(&device).unwrap();
    file.write_all_at(&pattern(WRITTEN_MIB), 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let _lost = LostDisk::lose(&service, &first[1]);
    wait_unavailable(&service);
    behind.find_again(&service, &first[0]);
    service.wait("the one that is back says what it holds", |service| {
        let shown = service.try_trellis(&["volume", "recover", "data"]);
        let line = recover_line(&said(&shown), &pool(&first[0]));
        let is_behind = line.get(4).is_some_and(|behind| behind != "-");
        (is_behind && shown.status.code() == Some(3)).then_some(())
    });
    service.trellis(&[
        "volume",
        "recover",
        "data",
        "--accept-loss",
        &pool(&first[1]),
    ]);
    service.wait("the volume is served", |service| {
        condition(&target(service), "Available").then_some(())
    });
    // Nothing but what was given up is missing.
    let file = File::open(&device).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut found = vec![0; MIB];
    for index in 1..WRITTEN_MIB {
        let at = u64::try_from(index * MIB).unwrap();
        file.read_exact_at(&mut found, at).unwrap();
        assert!(found == pattern(index), "MiB {index} is not what it was");
    }
    drop(file);
    write_all(&device);
    read_back(&device);
    service.trellis(&["umount", "data"]);
}

// Fails if a volume of three copies is lost with two of them, if it goes on without the operator's word, or if the two
// that were given up bring their history back as the majority that they once were.
#[test]
fn of_three_copies_two_are_lost_for_good_and_have_no_vote_when_they_return() {
    let pools = ["a", "b", "c", "d"];
    let mut service = service(&pools[..3]);
    let device = in_use(&service, "3", "2");
    write_all(&device);
    let first = replicas(&service);
    let lost: Vec<LostDisk> = first[..2]
        .iter()
        .map(|copy| LostDisk::lose(&service, copy))
        .collect();
    let (one, two) = (pool(&first[0]), pool(&first[1]));
    wait_unavailable(&service);
    let shown = service.try_trellis(&["volume", "recover", "data"]);
    assert!(said(&shown).contains("MAY BE LOST"), "{}", said(&shown));
    let half = service.try_trellis(&["volume", "recover", "data", "--accept-loss", &one]);
    assert_eq!(half.status.code(), Some(5), "{}", said(&half));
    let both = ["--accept-loss", &one, "--accept-loss", &two];
    service.trellis(&[&["volume", "recover", "data"][..], &both].concat());
    service.wait("the volume is served", |service| {
        condition(&target(service), "Available").then_some(())
    });
    read_back(&device);
    // Something is written that those who were given up do not have, and all of them return at a start.
    let mut file = File::options().write(true).open(&device).unwrap();
    file.write_all(&pattern(WRITTEN_MIB)).unwrap();
    file.sync_all().unwrap();
    drop(file);
    service.trellis(&["umount", "data"]);
    service.kill();
    for lost in &lost {
        std::fs::rename(&lost.aside, &lost.pool).unwrap();
    }
    // The target begins anew, and they are a majority of the copies that there once were.
    let run = service
        .data()
        .join("run")
        .join(first[0]["spec"]["volume"].as_str().unwrap());
    let lock = std::fs::read_to_string(run.join("target.lock")).unwrap();
    let target_process = Pid::from_raw(lock.trim().parse().unwrap()).unwrap();
    kill_process(target_process, Signal::KILL).unwrap();
    service.up(&[]);
    let device = service.mount("data");
    let mut found = vec![0; MIB];
    File::open(&device).unwrap().read_exact(&mut found).unwrap();
    assert!(found == pattern(WRITTEN_MIB), "what was given up is served");
    add_pool(&service, "d");
    wait_served_by(&service, 3);
    service.wait("what was given up is gone", |service| {
        (replicas(service).len() == 3).then_some(())
    });
    service.trellis(&["umount", "data"]);
}

// Fails if a death of the service in a recovery leaves it half done, or a step of it is not covered.
#[test]
fn a_recovery_survives_a_death_of_the_service_at_every_step() {
    let steps = trellis_api::step::Step::ALL
        .iter()
        .filter(|step| step.is_of_recovery());
    for step in steps {
        let pools = ["a", "b", "c"];
        let mut service = service(&pools);
        let device = in_use(&service, "2", "2");
        write_all(&device);
        let first = replicas(&service);
        service.stop();
        service.up(&[("TRELLIS_CRASH_AT", step.name())]);
        let _lost = LostDisk::lose(&service, &first[0]);
        wait_unavailable(&service);
        service.trellis(&[
            "volume",
            "recover",
            "data",
            "--accept-loss",
            &pool(&first[0]),
        ]);
        let deadline = std::time::Instant::now() + crate::harness::PATIENCE;
        while !service.has_crashed() {
            assert!(
                std::time::Instant::now() < deadline,
                "{step:?} is not reached"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        service.up(&[]);
        wait_served_by(&service, 2);
        read_back(&device);
        service.wait("it is recorded once", |service| {
            let volume = service.objects("volumes.trellis.dev").remove(0);
            (volume["status"]["recoveries"].as_array()?.len() == 1).then_some(())
        });
        service.trellis(&["umount", "data"]);
    }
}
