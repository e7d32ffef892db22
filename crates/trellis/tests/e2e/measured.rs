//! What `df` and `pool ls` show is measured when they are asked, however a claim is carried, or has its age beside it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;

use serde_json::Value;
use trellis_api::Bytes;

use crate::harness::{PATIENCE, Service, claim, class, said, write_file};

/// Far less than what the node would report by itself, which it does once a minute.
const FILE: usize = 2 << 20;

fn json(service: &Service, verb: &[&str]) -> Vec<Value> {
    let text = service.trellis(&[verb, &["-o", "json"]].concat());
    serde_json::from_str(&text).unwrap()
}

fn of(lines: &[Value], key: &str, name: &str) -> Value {
    let line = lines.iter().find(|line| line[key] == name);
    line.unwrap_or_else(|| panic!("{name}: {lines:?}")).clone()
}

fn size(value: &Value) -> u64 {
    let text = value
        .as_str()
        .unwrap_or_else(|| panic!("{value} is a size"));
    text.parse::<Bytes>().unwrap().get()
}

fn three_copies(service: &Service) {
    for name in ["a", "b", "c"] {
        let pool = service.path(name);
        std::fs::create_dir(&pool).unwrap();
        service.trellis(&["pool", "add", name, pool.to_str().unwrap()]);
    }
    service.apply("apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: three\nprovisioner: trellis.dev\nparameters:\n  replicas: \"3\"\n  allowSharedDisk: \"true\"\n  pools: a,b,c\n");
}

fn sync(path: &Path) {
    let output = Command::new("sync").arg("-f").arg(path).output().unwrap();
    said(&output, "sync");
}

// Fails if `df` shows what a node has reported where it could measure, or shows an old number as if it were of now.
#[test]
fn df_measures_every_mounted_claim_and_shows_the_age_of_what_it_cannot_measure() {
    let service = Service::start();
    three_copies(&service);
    service.apply(&class("b", "btrfs"));
    let claims = [("x", ""), ("b", "b"), ("several", "three")];
    // A link above the path leads where the kernel shows the mount.
    std::fs::create_dir(service.path("real")).unwrap();
    std::os::unix::fs::symlink(service.path("real"), service.path("link")).unwrap();
    for (name, class) in claims {
        service.claim(name, class, "320Mi");
        let path = service.path("link").join(name);
        service.trellis(&["mount", name, path.to_str().unwrap()]);
        let used = |service: &Service| {
            let line = of(&json(service, &["df"]), "claim", name);
            assert_eq!(line["measuredNow"], true, "{line}");
            size(&line["usage"]["used"])
        };
        let before = used(&service);
        write_file(&path.join("file"), FILE, 7);
        sync(&path);
        let after = used(&service);
        let file = u64::try_from(FILE).unwrap();
        assert!(after >= before + file, "{name}: {before} and then {after}");
    }
    service.apply(&(claim("disk", "", "64Mi") + "  volumeMode: Block\n"));
    service.wait_bound("disk");
    service.claim("idle", "", "320Mi");
    service.mount("idle");
    service.trellis(&["umount", "idle"]);
    let lines = json(&service, &["df"]);
    for name in ["disk", "idle"] {
        let line = of(&lines, "claim", name);
        assert!(
            line["usage"].is_null() && line["measuredNow"] == false,
            "{line}"
        );
        assert!(line["allocated"].is_string(), "{line}");
    }
    let path = service.path("real").join("x");
    said(
        &Command::new("umount").arg(&path).output().unwrap(),
        "umount",
    );
    let table = service.trellis(&["df"]);
    let line = |claim: &str| {
        let mut lines = table.lines();
        let line = lines.find(|line| line.starts_with(&format!("{claim} ")));
        line.unwrap().to_owned()
    };
    assert!(table.contains("MEASURED"), "{table}");
    assert!(line("b").contains(" now "), "{table}");
    assert!(!line("x").contains(" now "), "{table}");
    assert!(line("x").contains("s ago "), "{table}");
}

// Fails if `df --watch` never tells that a volume fills up, because no object changes by that.
#[test]
fn df_watch_refreshes_usage() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    let mut watch = service.verb(&["df", "--watch"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    let (tell, told) = mpsc::channel();
    let stdout = BufReader::new(watch.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        for line in stdout.lines().map_while(Result::ok) {
            let _ = tell.send(line);
        }
    });
    let used = || loop {
        let line = told.recv_timeout(PATIENCE / 3).ok()?;
        if line.starts_with("data ") {
            let mut words = line.split_whitespace().skip(3);
            return words.next().map(str::to_owned);
        }
    };
    let mut before = used();
    let mut rounds = 0;
    // Each is too little for a report of the node, which could come by chance.
    for seed in 1..=4 {
        write_file(&path.join(format!("file{seed}")), FILE / 4, seed);
        sync(&path);
        let now = std::iter::repeat_with(&used).take(10);
        let mut now = now.filter(|now| *now != before);
        before = now.next().flatten();
        rounds += usize::from(before.is_some());
    }
    let _ = watch.kill();
    let _ = watch.wait();
    let _ = reader.join();
    assert_eq!(rounds, 4, "every change is told");
}

// Fails if `pool ls` shows room that is gone, or calls a pool ready whose disk is not there.
#[test]
fn pool_ls_measures_the_pools_of_this_machine() {
    let service = Service::start();
    let pool = service.path("pool");
    std::fs::create_dir(&pool).unwrap();
    service.trellis(&["pool", "add", "p", pool.to_str().unwrap()]);
    service.wait("the pool is ready", |service| {
        let line = of(&json(service, &["pool", "ls"]), "name", "p");
        (line["ready"] == true).then_some(())
    });
    let free = |service: &Service| {
        let line = of(&json(service, &["pool", "ls"]), "name", "p");
        assert_eq!(line["measuredNow"], true, "{line}");
        size(&line["allocated"])
    };
    assert_eq!(free(&service), 0);
    // Somebody writes into a copy's file behind the service's back; other writers share the disk of these tests.
    let copy = pool.join("replicas/stray");
    std::fs::create_dir(&copy).unwrap();
    write_file(&copy.join("data"), FILE, 9);
    assert!(free(&service) >= u64::try_from(FILE).unwrap());
    let table = service.trellis(&["pool", "ls"]);
    assert!(
        table.contains("MEASURED") && table.contains(" now "),
        "{table}"
    );
    let away = service.path("away");
    std::fs::rename(&pool, &away).unwrap();
    let line = of(&json(&service, &["pool", "ls"]), "name", "p");
    assert_eq!(line["ready"], false, "{line}");
    assert_eq!(line["measuredNow"], false, "{line}");
    std::fs::rename(&away, &pool).unwrap();
}
