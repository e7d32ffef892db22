//! The keeper becomes another program in the middle of I/O, and whoever uses the volume sees nothing.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Pid;
use trellis_api::step::Step;
use trellis_keeper::Link;
use trellis_keeper::process::living;

use super::together::{has_connection, keeper, kill, mount_anew};
use super::{Load, end, mounted, process, service, successor, wait_whole, with_pools};
use crate::harness::{Machine, Service, copy_program, filesystem_mib, write_file};

/// How often the keeper is replaced.
const ROUNDS: usize = 10;

fn socket(service: &Service) -> PathBuf {
    service.data().join("keeper/keeper.sock")
}

/// Asks the keeper to become that program.
fn become_program(service: &Service, program: &Path) -> std::io::Result<()> {
    Link::open(&socket(service))?.replace(&File::open(program)?, program)
}

/// A file of the program with that name, of its own.
fn another(service: &Service, name: &str) -> PathBuf {
    let path = service.path(name);
    copy_program(&path);
    path
}

/// The file that a process runs, as the kernel names it.
fn runs(pid: Pid) -> PathBuf {
    std::fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero())).unwrap()
}

/// The sockets that a process has open.
fn sockets(pid: Pid) -> BTreeSet<PathBuf> {
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).unwrap();
    let links = descriptors.filter_map(|each| std::fs::read_link(each.unwrap().path()).ok());
    links
        .filter(|link| link.to_string_lossy().starts_with("socket:"))
        .collect()
}

/// The sockets that it keeps open, without those of single questions.
fn links(pid: Pid) -> BTreeSet<PathBuf> {
    let mut links = sockets(pid);
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(50));
        let now = sockets(pid);
        links.retain(|each| now.contains(each));
    }
    links
}

/// Looks at the lock of the keeper again and again, and answers whether it was held each time.
fn is_always_held(lock: &Path, is_over: &AtomicBool) -> bool {
    while !is_over.load(Ordering::Relaxed) {
        if !matches!(living(lock), Ok(Some(_))) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// The keeper, when there is another one than `last` and it holds the connection.
fn next_keeper(service: &Service, last: Pid) -> Pid {
    service.wait("another keeper holds the connection", |service| {
        keeper(service).filter(|next| *next != last && has_connection(*next))
    })
}

fn doctor(service: &Service) -> String {
    let said = service.try_trellis(&["doctor"]);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let line = said.lines().find(|line| line.contains("keeper's program"));
    line.unwrap_or_else(|| panic!("{said}")).to_owned()
}

// Fails if the keeper's upgrade is seen by whoever uses the volume, ends the keeper's process, lets go of its lock for a
// moment, breaks the link of a target, loses a connection, so that the next death of a target is an error, or loses a
// child, so that a dead one is not let go of.
#[test]
fn the_keeper_becomes_another_program_ten_times_in_the_middle_of_io() {
    let mut service = service();
    let path = mounted(&service);
    let programs = [another(&service, "first"), another(&service, "second")];
    let load = Load::start(&path.join("load"));
    let (first, target) = (keeper(&service).unwrap(), process(&service, "target"));
    let links = links(first);
    let (mut longest, is_over) = (Duration::ZERO, AtomicBool::new(false));
    let lock = service.data().join("keeper/keeper.lock");
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| is_always_held(&lock, &is_over));
        for (round, program) in programs.iter().cycle().take(ROUNDS).enumerate() {
            let asked = Instant::now();
            become_program(&service, program).unwrap();
            longest = longest.max(asked.elapsed());
            assert_eq!(runs(first), *program, "round {round}");
            if round == ROUNDS / 2 {
                service.trellis(&["grow", "data", "768Mi", "--wait"]);
            }
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(looking.join().unwrap(), "the lock was free for a moment");
    });
    println!("{ROUNDS} replacements of the keeper, the longest took {longest:.1?}");
    assert_eq!(keeper(&service), Some(first), "the process stays");
    // The service, the target, and the listener.
    assert!(links.len() >= 3 && links.is_subset(&sockets(first)));
    assert_eq!(process(&service, "target"), target);
    kill(target);
    let next = successor(&service, target);
    assert_eq!(
        runs(next),
        runs(first),
        "what is started is the new program"
    );
    service.trellis(&["grow", "data", "1Gi", "--wait"]);
    let gone = rustix::process::test_kill_process(target);
    assert_eq!(gone, Err(Errno::SRCH), "the dead child is let go of");
    service.kill();
    write_file(&path.join("meanwhile"), 4 << 20, 5);
    service.up(&[]);
    service.wait("the keeper runs the program of the service", |service| {
        (runs(first) == runs(service.pid())).then_some(())
    });
    service.trellis(&["grow", "data", "1280Mi", "--wait"]);
    assert_eq!(filesystem_mib(&path), 1280);
    assert_eq!(keeper(&service), Some(first));
    load.finish("the keeper replaced ten times, then the target and the service killed");
    end(&service, &path);
}

// Fails if a service that was upgraded leaves the keeper with the old program, or ends what runs; if what is started then
// is still the old program; or if nobody is told.
#[test]
fn an_upgraded_service_brings_its_keeper_along() {
    let mut service = Service::of_program("trellis");
    service.up(&[]);
    with_pools(&service);
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    let (first, target) = (keeper(&service).unwrap(), process(&service, "target"));
    let said = doctor(&service);
    assert!(said.contains("it runs this build"), "{said}");
    service.install();
    let said = doctor(&service);
    assert!(said.contains("it was not asked to yet"), "{said}");
    let is_old = |pid: Pid| runs(pid).to_string_lossy().ends_with(" (deleted)");
    assert!(is_old(first));
    service.kill();
    service.up(&[]);
    let inode = service.path("trellis").metadata().unwrap().ino();
    service.wait("the keeper runs the new program", |_| {
        let runs = std::fs::metadata(format!("/proc/{}/exe", first.as_raw_nonzero()));
        (runs.unwrap().ino() == inode).then_some(())
    });
    let said = doctor(&service);
    assert!(said.contains("it runs this build"), "{said}");
    assert_eq!(keeper(&service), Some(first), "the process stays");
    assert_eq!(process(&service, "target"), target);
    assert!(is_old(target), "what runs goes on");
    kill(target);
    assert!(!is_old(successor(&service, target)));
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    load.finish("the program upgraded, then the target killed");
    end(&service, &path);
}

// Fails if a program that cannot take over ends the keeper or costs it something, or if nobody is told why.
#[test]
fn a_program_that_cannot_take_over_leaves_the_keeper_serving() {
    let service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    let (first, target) = (keeper(&service).unwrap(), process(&service, "target"));
    let (program, links) = (runs(first), links(first));
    let gone = become_program(&service, &service.path("gone")).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
    let plain = service.path("plain");
    std::fs::write(&plain, "no program").unwrap();
    let half = another(&service, "half");
    let length = half.metadata().unwrap().len();
    File::options()
        .write(true)
        .open(&half)
        .unwrap()
        .set_len(length / 8)
        .unwrap();
    for (unfit, why) in [
        (plain.as_path(), "cannot be executed"),
        (Path::new("/bin/true"), "cannot take over (exit code 0)"),
        (Path::new("/bin/false"), "cannot take over (exit code 1)"),
        (half.as_path(), "half"),
    ] {
        let refused = become_program(&service, unfit).unwrap_err().to_string();
        println!("{refused}");
        assert!(refused.contains(why), "{refused}");
        let said = doctor(&service);
        assert!(!said.contains("absent"), "it is the right one: {said}");
        assert_eq!(
            (keeper(&service), runs(first)),
            (Some(first), program.clone())
        );
    }
    assert!(links.is_subset(&sockets(first)), "a link has broken");
    // One whose file is removed while it is tried is as good as any other.
    let removed = another(&service, "removed");
    let open = File::open(&removed).unwrap();
    std::fs::remove_file(&removed).unwrap();
    let link = Link::open(&socket(&service)).unwrap();
    link.replace(&open, &removed).unwrap();
    let said = doctor(&service);
    assert!(said.contains("it runs another build"), "{said}");
    kill(target);
    successor(&service, target);
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    load.finish("the keeper asked to become what it cannot");
    end(&service, &path);
}

// Fails if a keeper that dies at a step of its own, under load, is seen by whoever uses the volume, is not replaced, or
// leaves something undone; or if a step is not reached.
#[test]
fn a_keeper_that_dies_at_any_step_of_its_own_is_replaced() {
    let mut service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    let program = another(&service, "another");
    for (round, step) in (0..).zip(Step::ALL.iter().filter(|step| step.is_of_the_keeper())) {
        println!("death at {}", step.name());
        let marks = service.path(step.name());
        std::fs::create_dir(&marks).unwrap();
        let at = format!("{}:{}", step.name(), marks.display());
        service.kill();
        let last = keeper(&service).unwrap();
        kill(last);
        service.up(&[("TRELLIS_KEEPER_CRASH_AT", &at)]);
        let armed = next_keeper(&service, last);
        match step {
            Step::KeeperHandsOver | Step::KeeperReplaced => {
                let died = become_program(&service, &program);
                assert!(died.is_err(), "{} is not reached", step.name());
            }
            // One more copy shall run, or one fewer.
            _ => {
                let copies = if round % 2 == 0 { "4" } else { "3" };
                service.trellis(&["volume", "scale", "data", copies]);
            }
        }
        service.wait("the keeper dies", |_| {
            marks.join("keeper").exists().then_some(())
        });
        next_keeper(&service, armed);
        let target = process(&service, "target");
        kill(target);
        successor(&service, target);
        let mib = 544 + 32 * round;
        service.trellis(&["grow", "data", &format!("{mib}Mi"), "--wait"]);
        assert_eq!(filesystem_mib(&path), mib);
        wait_whole(&service);
    }
    load.finish("the keeper killed at each of its own steps, then the target");
    end(&service, &path);
}

// Fails if a volume needs the keeper to go on, if a connection is lost with the keeper although its target lives, or if
// one that was lost with both leaves its users waiting instead of telling them.
#[test]
fn without_a_keeper_a_connection_lives_as_long_as_its_target() {
    let mut service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    let (first, target) = (keeper(&service).unwrap(), process(&service, "target"));
    service.kill();
    kill(first);
    write_file(&path.join("without"), 4 << 20, 3);
    service.up(&[]);
    let next = next_keeper(&service, first);
    assert_eq!(process(&service, "target"), target, "it goes on");
    kill(target);
    let target = successor(&service, target);
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    load.finish("keeper and service killed, then the target");
    let file = super::run_dir(&service).join("file/volume");
    service.kill();
    kill(next);
    kill(target);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let found = std::fs::metadata(&file)
            .map(drop)
            .map_err(|error| error.raw_os_error());
        if found == Err(Some(Errno::NOTCONN.raw_os_error())) {
            break;
        }
        assert!(Instant::now() < deadline, "{found:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    service.up(&[]);
    mount_anew(&service, &path);
    end(&service, &path);
}

// Fails if the processes that outlive the service keep open what was open where it was started: a pipe that never ends,
// or a filesystem that cannot be unmounted.
#[test]
fn nothing_that_was_open_where_the_service_was_started_stays_open() {
    let data = tempfile::Builder::new()
        .prefix("trellis-e2e-")
        .tempdir()
        .unwrap();
    let script = format!("exec 7>{}/open; exec \"$@\"", data.path().display());
    let prefix = ["sh", "-c", script.as_str(), "sh"];
    let mut service = Service::on(Machine {
        data: data.path().join("data"),
        prefix: prefix.map(str::to_owned).to_vec(),
    });
    service.up(&[]);
    with_pools(&service);
    let path = mounted(&service);
    let has = |pid: Pid| {
        let link = std::fs::read_link(format!("/proc/{}/fd/7", pid.as_raw_nonzero()));
        link.is_ok_and(|link| link == data.path().join("open"))
    };
    assert!(has(service.pid()), "the service was started with it");
    for pid in ["0", "1", "2", "target"].map(|name| process(&service, name)) {
        assert!(!has(pid), "{:?} has it", runs(pid));
    }
    assert!(!has(keeper(&service).unwrap()), "the keeper has it");
    end(&service, &path);
}
