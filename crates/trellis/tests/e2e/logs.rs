//! What the service says of itself, where nobody may be listening.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// A service that says everything, with its standard error at `log`. It is ended with the test.
struct Talkative(Child);

impl Talkative {
    fn start(data: &std::path::Path, log: File) -> Talkative {
        let child = Command::new(env!("CARGO_BIN_EXE_trellis"))
            .args(["-vv", "up", "--node", "test-node", "--data"])
            .arg(data)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        Talkative(child)
    }

    /// What it says first on standard output.
    fn first_word(&mut self) -> String {
        let mut line = String::new();
        let stdout = self.0.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        line
    }
}

impl Drop for Talkative {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

// Fails if a log on a full disk keeps the service from running.
#[test]
fn a_service_whose_log_cannot_be_written_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut service = Talkative::start(dir.path(), full);
    assert!(service.first_word().contains("trellis is up"));
    let answer = Command::new(env!("CARGO_BIN_EXE_trellis"))
        .args(["df", "--data"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert!(answer.status.success(), "{answer:?}");
    assert!(service.0.try_wait().unwrap().is_none(), "it still runs");
}

// Fails if a log file is full of codes for a terminal's colours.
#[test]
fn a_log_in_a_file_has_no_colours() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let mut service = Talkative::start(&dir.path().join("data"), File::create(&log).unwrap());
    assert!(service.first_word().contains("trellis is up"));
    drop(service);
    let said = std::fs::read(&log).unwrap();
    assert!(!said.is_empty());
    assert!(!said.contains(&0x1b), "{}", String::from_utf8_lossy(&said));
}
