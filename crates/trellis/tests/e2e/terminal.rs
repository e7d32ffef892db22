//! What a person at a terminal, a script and a log file get from the verbs, also from a service that is frozen or gone.

mod screen;

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::harness::{PATIENCE, Service};
use screen::Screen;

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Waits for the end of a program, and kills it when it does not come.
fn ends(mut child: Child, what: &str) -> Output {
    let deadline = Instant::now() + PATIENCE / 2;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() >= deadline {
            let _ = child.kill();
            panic!(
                "{what} does not end: {}",
                text(&child.wait_with_output().unwrap())
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

fn started(mut command: Command) -> Child {
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// A program at a terminal of that width, which `script` makes.
struct AtTerminal(Child);

impl AtTerminal {
    fn start(command: &Command, columns: usize) -> AtTerminal {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let quoted = words.map(|word| format!("'{}'", word.to_str().unwrap()));
        let quoted: Vec<String> = quoted.collect();
        let line = format!("stty cols {columns} rows 40; exec {}", quoted.join(" "));
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        script.env("TERM", "xterm-256color").env("SHELL", "/bin/sh");
        script.env_remove("NO_COLOR").env_remove("KUBECONFIG");
        script.stdin(Stdio::piped()).stdout(Stdio::piped());
        AtTerminal(script.spawn().unwrap())
    }

    /// Types Ctrl-C.
    fn interrupt(&mut self) {
        let stdin = self.0.stdin.as_mut().unwrap();
        stdin.write_all(b"\x03").unwrap();
        stdin.flush().unwrap();
    }

    /// What it wrote, and its code.
    fn end(self, what: &str) -> (String, Option<i32>) {
        let output = ends(self.0, what);
        (text(&output), output.status.code())
    }
}

// Fails if a verb waits for ever for a service that is frozen, ends with another code than 7, or does not say which
// service it waited for.
#[test]
fn a_time_limit_holds_for_every_verb_when_the_service_is_frozen() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let directory = service.path("pool");
    std::fs::create_dir(&directory).unwrap();
    let (pool, mount) = (directory.to_str().unwrap(), service.path("mnt"));
    let (mount, file) = (mount.to_str().unwrap(), service.path("backup"));
    let verbs: &[&[&str]] = &[
        &["df"],
        &["df", "--watch"],
        &["grow", "data", "+1Gi"],
        &["grow", "data", "+1Gi", "--wait"],
        &["grow", "data", "+1Gi", "--dry-run"],
        &["ladder", "data"],
        &["explain", "data"],
        &["cancel", "data"],
        &["history", "data"],
        &["mount", "data", mount],
        &["umount", "data"],
        &["volume", "show", "data"],
        &["volume", "scale", "data", "2"],
        &["volume", "recover", "data"],
        &["volume", "scrub", "data", "--wait"],
        &["volume", "replace", "data", "default"],
        &["pool", "ls"],
        &["pool", "add", "a", pool],
        &["pool", "grow", "default"],
        &["pool", "rm", "default", "--drain"],
        &["backup", file.to_str().unwrap()],
        &["recover", "--from-pools"],
    ];
    kill_process(service.pid(), Signal::STOP).unwrap();
    let running: Vec<(&&[&str], Child)> = verbs
        .iter()
        .map(|verb| {
            let whole = [*verb, &["--timeout", "2s"]].concat();
            (verb, started(service.verb(&whole)))
        })
        .collect();
    for (verb, child) in running {
        let output = ends(child, &format!("{verb:?}"));
        let said = text(&output);
        assert_eq!(output.status.code(), Some(7), "{verb:?}: {said}");
        assert!(said.contains(" at https://127.0.0.1:"), "{verb:?}: {said}");
    }
    kill_process(service.pid(), Signal::CONT).unwrap();
    service.trellis(&["df"]);
    let meaningless = service.try_trellis(&["check", pool, "--timeout", "2s"]);
    assert_eq!(meaningless.status.code(), Some(2), "{}", text(&meaningless));
}

// Fails if a verb that waits hangs or loses its way when the service dies meanwhile, or an error does not say where
// the service was looked for and what to do.
#[test]
fn a_service_that_is_gone_is_told_with_its_address() {
    let mut service = Service::start();
    service.claim("data", "", "320Mi");
    let port = std::fs::read_to_string(service.data().join("port")).unwrap();
    service.kill();
    let output = service.try_trellis(&["df"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(6), "{said}");
    for words in [port.trim(), "trellis up", "refused"] {
        assert!(said.contains(words), "{words:?}: {said}");
    }
    assert!(
        !said.contains(['{', '}']) && !said.contains("Error("),
        "{said}"
    );
    service.up(&[]);
    // A path that cannot be had yet: the mount is waited for, over a restart.
    service.apply("apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: later\nprovisioner: trellis.dev\nvolumeBindingMode: Immediate\nparameters:\n  pools: slow\n");
    service.apply(&crate::harness::claim("waits", "later", "320Mi"));
    let path = service.path("mnt");
    let mount = started(service.verb(&["mount", "waits", path.to_str().unwrap()]));
    service.wait("the mount is asked for", |service| {
        let uses = service.objects("attachments.trellis.dev");
        (!uses.is_empty()).then_some(())
    });
    service.kill();
    service.up(&[]);
    let directory = service.path("slow");
    std::fs::create_dir(&directory).unwrap();
    service.trellis(&["pool", "add", "slow", directory.to_str().unwrap()]);
    let output = ends(mount, "a mount");
    assert!(output.status.success(), "{}", text(&output));
}

// Fails if `mount` gives up because of a hold that passes by itself: a disk that is not mounted yet.
#[test]
fn mount_waits_for_a_hold_that_passes_by_itself() {
    let service = Service::start();
    let (pool, away) = (service.path("pool"), service.path("away"));
    std::fs::create_dir(&pool).unwrap();
    service.trellis(&["pool", "add", "a", pool.to_str().unwrap()]);
    service.apply("apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: there\nprovisioner: trellis.dev\nparameters:\n  pools: a\n");
    service.claim("data", "there", "320Mi");
    std::fs::rename(&pool, &away).unwrap();
    let path = service.path("mnt");
    let mut mount = started(service.verb(&["mount", "data", path.to_str().unwrap()]));
    service.wait("the mount is held", |service| {
        let uses = service.objects("attachments.trellis.dev");
        let held = |each: &serde_json::Value| each["status"]["hold"]["reason"].is_string();
        let has_ended = mount.try_wait().unwrap().is_some();
        (has_ended || uses.iter().any(held)).then_some(())
    });
    std::thread::sleep(Duration::from_millis(500));
    let has_given_up = mount.try_wait().unwrap().is_some();
    std::fs::rename(&away, &pool).unwrap();
    let output = ends(mount, "a mount");
    assert!(!has_given_up, "{}", text(&output));
    assert!(output.status.success(), "{}", text(&output));
}

// Fails if bars of a growth are left twice on the screen, wrap, or hide the answer.
#[test]
fn the_bars_of_a_growth_leave_each_line_once() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    service.mount("data");
    for (columns, size) in [(100, "400Mi"), (60, "500Mi")] {
        let grow = service.verb(&["grow", "data", size, "--wait"]);
        let (written, code) = AtTerminal::start(&grow, columns).end("a growth");
        assert_eq!(code, Some(0), "{written}");
        let lines = Screen::after(&written, columns).lines();
        for rung in ["replica", "volume", "device", "filesystem"] {
            let count = lines
                .iter()
                .filter(|line| {
                    line.contains(&format!("{rung} [")) || line.trim_start().starts_with(rung)
                })
                .count();
            assert_eq!(count, 1, "{rung}: {lines:#?}");
        }
        assert_eq!(lines.len(), 5, "four rungs and the answer: {lines:#?}");
        let last = lines.last().unwrap();
        assert!(last.contains(&format!("-> {size} in ")), "{lines:#?}");
    }
}

// Fails if Ctrl-C looks as if it had called a growth off, or does not say how to.
#[test]
fn ctrl_c_says_that_the_growth_goes_on() {
    let mut service = Service::start();
    service.claim("data", "", "320Mi");
    service.stop();
    // It stops in the middle of the growth.
    service.up(&[("TRELLIS_STOP_AT", "replica-data-extended")]);
    let grow = service.verb(&["grow", "data", "640Mi", "--wait"]);
    let mut at = AtTerminal::start(&grow, 100);
    let pid = service.pid();
    service.wait("the service has stopped in the growth", |_| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
        stat.unwrap().contains(") T ").then_some(())
    });
    at.interrupt();
    let (written, code) = at.end("a growth");
    assert_eq!(code, Some(130), "{written}");
    assert!(written.contains("the growth goes on"), "{written}");
    assert!(written.contains("trellis cancel data"), "{written}");
    kill_process(pid, Signal::CONT).unwrap();
    service.wait_size("data", "640Mi");
}

// Fails if a wish that makes no sense ends with another code than 5.
#[test]
fn what_is_refused_has_its_code() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    let path = path.to_str().unwrap();
    for verb in [
        &["mount", "data", path, "--read-only"][..],
        &["grow", "data", "100Mi"],
        &["volume", "scale", "data", "2"],
        &["volume", "replace", "data", "default"],
        &["volume", "scrub", "data"],
        &["pool", "rm", "default"],
        &["pool", "add", "file", "/etc/passwd"],
    ] {
        let output = service.try_trellis(verb);
        assert_eq!(output.status.code(), Some(5), "{verb:?}: {}", text(&output));
    }
}

// Fails if an ordinary user is told of damage where there is none, or a directory that is no pool passes for a sound one.
#[test]
fn check_says_what_it_could_not_look_at() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let pool = service.data().join("pools/default");
    let pool = pool.to_str().unwrap();
    let nobody = |directory: &str| {
        let mut check = Command::new(env!("CARGO_BIN_EXE_trellis"));
        check.args(["check", directory]).env_remove("KUBECONFIG");
        check.current_dir("/").uid(65_534).gid(65_534);
        check.output().unwrap()
    };
    let open = |path: &Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    let refused = |output: &Output| {
        let said = text(output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains("ermission denied") && said.contains("root"),
            "{said}"
        );
        assert!(
            !said.contains("damage") && !said.contains("broken"),
            "{said}"
        );
    };
    refused(&nobody(pool));
    // The program is below a directory that is root's alone; the pool can be entered, and its copies cannot.
    for path in [
        service.path(""),
        service.data(),
        service.data().join("pools"),
        pool.into(),
    ] {
        open(&path);
    }
    refused(&nobody(pool));
    assert!(service.trellis(&["check", pool]).contains("1 copy checked"));
    let output = service.try_trellis(&["check", service.path("").to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output));
    assert!(text(&output).contains("is no pool"), "{}", text(&output));
}

// Fails if an answer that is not at a terminal has codes for one, or if a verb or the service ends badly because nobody
// reads what it says.
#[test]
fn nobody_has_to_listen() {
    let mut service = Service::start();
    service.claim("data", "", "320Mi");
    service.mount("data");
    for verb in [
        &["df"][..],
        &["ladder", "data"],
        &["pool", "ls"],
        &["explain", "data"],
    ] {
        let output = service.try_trellis(verb);
        assert!(!text(&output).contains('\u{1b}'), "{verb:?}");
        // The reader is gone before the first word.
        let mut command = service.verb(verb);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdout(writer.try_clone().unwrap()).stderr(writer);
        let status = command.status().unwrap();
        assert!(status.success(), "{verb:?}: {status}");
    }
    let path = service.path("again");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut mount = service.verb(&["mount", "data", path.to_str().unwrap()]);
    let status = mount
        .stdout(writer.try_clone().unwrap())
        .stderr(writer)
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    service.stop();
    // A service whose log nobody reads any more.
    let (reader, writer) = std::io::pipe().unwrap();
    let mut up = Command::new(env!("CARGO_BIN_EXE_trellis"));
    up.args(["-vv", "up", "--node", "test-node", "--data"]);
    up.arg(service.data()).stdout(Stdio::null()).stderr(writer);
    let mut up = up.spawn().unwrap();
    drop(reader);
    let answered = service.wait("the service answers", |service| {
        let output = service.try_trellis(&["grow", "data", "400Mi", "--wait"]);
        output.status.success().then(|| text(&output))
    });
    let is_running = up.try_wait().unwrap().is_none();
    let _ = up.kill();
    let _ = up.wait();
    assert!(is_running, "{answered}");
}
