//! Requests that wait in a connection that nobody serves: they are told of, and do not wait for ever.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::together::{keeper, mount_anew};
use super::{end, mounted, process, run_dir, service};
use crate::harness::{Service, checksum, write_file};

/// How long such requests wait, as docs/replication.md says.
const UNSERVED: Duration = Duration::from_secs(60);

/// The end of such a wait comes within this time.
const ENDED_WITHIN: Duration = Duration::from_secs(120);

/// Whether a text names the connection of the volume and how many requests wait in it.
fn names_connection(text: &str, volume: &str) -> bool {
    let middle = format!(" of volume {volume} has ");
    let Some((before, after)) = text.split_once(&middle) else {
        return false;
    };
    let number = before.rsplit(' ').next().unwrap_or_default();
    let (waiting, rest) = after.split_once(' ').unwrap_or_default();
    before.ends_with(&format!("Connection {number}"))
        && number.parse::<u32>().is_ok()
        && waiting.parse::<u64>().is_ok_and(|count| count > 0)
        && rest.starts_with("requests waiting and no server.")
}

fn volume(service: &Service) -> String {
    let name = service.object("pvc", "data")["spec"]["volumeName"].clone();
    name.as_str().unwrap().to_owned()
}

fn wait_named(service: &Service, verb: &[&str], volume: &str) {
    service.wait(&format!("{verb:?} names the connection"), |service| {
        let said = service.trellis_any(verb);
        names_connection(&said, volume).then_some(())
    });
}

// Fails if `doctor` or `explain` does not say that requests wait for a volume that nobody serves, or says so when
// somebody serves it again.
#[test]
fn requests_without_a_server_are_named_by_doctor_and_explain() {
    let service = service();
    let path = mounted(&service);
    let volume = volume(&service);
    let well = service.trellis_any(&["doctor"]);
    assert!(well.contains("all are served"), "{well}");
    // No target can listen here, so every one ends at its start.
    let socket = run_dir(&service).join("target.sock");
    std::fs::remove_file(&socket).unwrap();
    std::fs::create_dir_all(socket.join("in-the-way")).unwrap();
    kill_process(process(&service, "target"), Signal::KILL).unwrap();
    let file = path.join("file");
    let writer = std::thread::spawn(move || write_file(&file, 1 << 20, 5));
    wait_named(&service, &["doctor"], &volume);
    wait_named(&service, &["explain", "data"], &volume);
    assert!(!writer.is_finished(), "nobody can have answered");
    std::fs::remove_dir_all(&socket).unwrap();
    service.wait("the write goes on", |_| writer.is_finished().then_some(()));
    assert_eq!(checksum(&path.join("file")), writer.join().unwrap());
    service.wait("all is well", |service| {
        let explained = service.trellis_any(&["explain", "data"]);
        let doctor = service.trellis_any(&["doctor"]);
        (explained.contains("All is well") && doctor.contains("all are served")).then_some(())
    });
    end(&service, &path);
}

fn write_durably(path: &Path) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&[7; 1 << 20])?;
    file.sync_all()
}

// Fails if whoever waits for a connection that no target will serve waits for ever, gets an error before the documented
// time, or if the volume cannot be used afterwards.
#[test]
fn a_connection_that_nobody_will_serve_is_ended_after_its_time() {
    let mut service = service();
    let path = mounted(&service);
    let sum = write_file(&path.join("before"), 1 << 20, 6);
    let volume = volume(&service);
    // The keeper has the connection open and does nothing with it. There is no target, and nobody can start one.
    let (holder, target) = (keeper(&service).unwrap(), process(&service, "target"));
    kill_process(holder, Signal::STOP).unwrap();
    service.kill();
    kill_process(target, Signal::KILL).unwrap();
    let file = path.join("file");
    let writer = std::thread::spawn(move || write_durably(&file));
    wait_named(&service, &["doctor"], &volume);
    let since = Instant::now();
    service.up(&[]);
    while !writer.is_finished() {
        assert!(since.elapsed() < ENDED_WITHIN, "a user waits for ever");
        std::thread::sleep(Duration::from_millis(100));
    }
    let took = since.elapsed();
    println!("the connection was ended after {took:.1?}");
    assert!(writer.join().unwrap().is_err(), "nobody can have answered");
    assert!(took >= UNSERVED, "a successor could still have come");
    kill_process(holder, Signal::KILL).unwrap();
    mount_anew(&service, &path);
    assert_eq!(checksum(&path.join("before")), sum);
    end(&service, &path);
}
