//! Everything dies at once, at every step of a growth under load: the machine stays usable, and all goes on.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{Load, end, mounted, process, service};
use crate::harness::{Service, answers, filesystem_mib, processes};

/// How long something may take that needs no volume at all.
const USABLE_TIME_MAX: Duration = Duration::from_secs(30);
/// The steps of a growth that the service takes.
const STEPS: [&str; 5] = [
    "goals-raised",
    "target-raised",
    "device-raised",
    "filesystem-raised",
    "claim-finished",
];
const GROWTH_MIB: u64 = 32;
const FIRST_MIB: u64 = 512;

/// When everything is killed.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// When the service has just taken this step.
    After(&'static str),
    /// When the service is caught in what follows this step, because the copies were frozen before.
    CaughtAfter(&'static str),
}

fn moments() -> impl Iterator<Item = Moment> + Clone {
    let both = |step| [Moment::After(step), Moment::CaughtAfter(step)];
    STEPS.into_iter().flat_map(both)
}

/// Fails if a command that has nothing to do with our volumes does not end: loop devices can be listed, made and
/// taken away.
fn assert_usable(service: &Service) {
    assert!(
        answers(&["losetup", "-a"], USABLE_TIME_MAX),
        "losetup -a hangs"
    );
    let file = service.path("another");
    std::fs::File::create(&file)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let file = file.to_str().unwrap();
    let script = format!("losetup -d $(losetup --find --show {file})");
    assert!(
        answers(&["sh", "-c", &script], USABLE_TIME_MAX),
        "no loop device can be made"
    );
    assert!(
        answers(&["sync", file], USABLE_TIME_MAX),
        "a file cannot be synced"
    );
}

pub(super) fn kill(pid: Pid) {
    let _ = kill_process(pid, Signal::KILL);
}

/// Kills what outlives the service, the keeper as well if that is asked for.
fn kill_others(service: &Service, with_keeper: bool) {
    let keeper = keeper(service);
    let of_volumes = |pid: &Pid| Some(*pid) != keeper;
    if with_keeper {
        keeper.into_iter().for_each(kill);
        let deadline = Instant::now() + USABLE_TIME_MAX;
        loop {
            let left: Vec<Pid> = processes(&service.data());
            let living: Vec<Pid> = left.into_iter().filter(|pid| !is_dead(*pid)).collect();
            if living.is_empty() {
                return;
            }
            living.into_iter().for_each(kill);
            assert!(Instant::now() < deadline, "a process cannot be killed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    processes(&service.data())
        .into_iter()
        .filter(of_volumes)
        .for_each(kill);
}

fn is_dead(pid: Pid) -> bool {
    matches!(state(pid), None | Some('Z' | 'X'))
}

/// What the process does, as the kernel calls it; none if there is no such process.
fn state(pid: Pid) -> Option<char> {
    let path = format!("/proc/{}/stat", pid.as_raw_nonzero());
    let stat = std::fs::read_to_string(path).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

pub(super) fn keeper(service: &Service) -> Option<Pid> {
    let text = std::fs::read_to_string(service.data().join("keeper/keeper.lock")).ok()?;
    Pid::from_raw(text.trim().parse().ok()?)
}

/// Has everything die in the middle of a growth to `mib`.
fn die(service: &mut Service, moment: Moment, mib: u64, with_keeper: bool) {
    let size = format!("{mib}Mi");
    let grow = ["grow", "data", size.as_str()];
    let variable = match moment {
        Moment::After(step) => ("TRELLIS_CRASH_AT", step),
        Moment::CaughtAfter(step) => ("TRELLIS_STOP_AT", step),
    };
    // A service that stands still could not be asked for it.
    let copies = ["0", "1", "2"].map(|name| process(service, name));
    service.kill();
    service.up(&[variable]);
    // Its answer may be lost with the service.
    let mut asking = service.start_trellis(&grow);
    let deadline = Instant::now() + USABLE_TIME_MAX;
    let is_there = |service: &mut Service| match moment {
        Moment::After(_) => service.has_crashed(),
        Moment::CaughtAfter(_) => state(service.pid()) == Some('T'),
    };
    while !is_there(service) {
        assert!(Instant::now() < deadline, "{moment:?} is never reached");
        std::thread::sleep(Duration::from_millis(1));
    }
    if let Moment::CaughtAfter(_) = moment {
        for copy in copies {
            kill_process(copy, Signal::STOP).unwrap();
        }
        kill_process(service.pid(), Signal::CONT).unwrap();
        // Now the service waits in the kernel for I/O of the volume, and so does whoever writes.
        std::thread::sleep(Duration::from_millis(300));
        service.kill_at_once();
    }
    kill_others(service, with_keeper);
    let _ = asking.kill();
    asking.wait().unwrap();
}

/// Writes files of one block and remembers those that were durable, until something fails.
struct Files {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<BTreeSet<u64>>,
}

impl Files {
    fn start(directory: &Path, round: usize) -> Files {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, directory) = (stop.clone(), directory.to_owned());
        let thread = std::thread::spawn(move || {
            let mut durable = BTreeSet::new();
            for number in 0.. {
                let path = directory.join(name(round, number));
                let written = std::fs::File::create(path).and_then(|mut file| {
                    file.write_all(&content(number))?;
                    file.sync_all()
                });
                if written.is_err() || stopped.load(Ordering::Relaxed) {
                    return durable;
                }
                durable.insert(number);
            }
            durable
        });
        Files { stop, thread }
    }

    /// Ends, and answers what was durable. Fails if the last write never comes back.
    fn finish(self) -> BTreeSet<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let deadline = Instant::now() + USABLE_TIME_MAX;
        while !self.thread.is_finished() {
            assert!(Instant::now() < deadline, "a user of the volume hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
        self.thread.join().unwrap()
    }
}

fn name(round: usize, number: u64) -> String {
    format!("round-{round}-{number}")
}

fn content(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(512)
}

/// Waits for the growth. It is asked for again: the service may have died before it had heard.
fn wait_grown(service: &Service, mib: u64) {
    let size = format!("{mib}Mi");
    let _ = service.try_trellis(&["grow", "data", &size]);
    service.wait_size("data", &size);
}

/// Mounts the claim anew: what used it has got errors.
pub(super) fn mount_anew(service: &Service, path: &Path) {
    service.wait("the claim is unmounted", |service| {
        let output = service.try_trellis(&["umount", "data", "--timeout", "5s"]);
        matches!(output.status.code(), Some(0 | 4)).then_some(())
    });
    service.wait("the claim is mounted again", |service| {
        let output = service.try_trellis(&["mount", "data", path.to_str().unwrap()]);
        output.status.success().then_some(())
    });
}

/// All but the keeper die, at each of these moments. Nobody who uses the volume sees more than a pause.
fn all_but_the_keeper(moments: impl Iterator<Item = Moment>) {
    let mut service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    let mut mib = FIRST_MIB;
    for moment in moments {
        mib += GROWTH_MIB;
        die(&mut service, moment, mib, false);
        assert_usable(&service);
        service.up(&[]);
        wait_grown(&service, mib);
        assert_eq!(filesystem_mib(&path), mib, "{moment:?}");
    }
    load.finish("all but the keeper killed in growths");
    end(&service, &path);
}

/// All die, at each of these moments. Users get errors; nothing hangs, and what was durable is there.
fn all(moments: impl Iterator<Item = Moment>) {
    let mut service = service();
    let path: PathBuf = mounted(&service);
    let mut mib = FIRST_MIB;
    for (round, moment) in moments.enumerate() {
        mib += GROWTH_MIB;
        let files = Files::start(&path, round);
        die(&mut service, moment, mib, true);
        assert_usable(&service);
        let durable = files.finish();
        service.up(&[]);
        mount_anew(&service, &path);
        wait_grown(&service, mib);
        assert_eq!(filesystem_mib(&path), mib, "{moment:?}");
        for number in &durable {
            let found = std::fs::read(path.join(name(round, *number))).unwrap();
            assert!(found == content(*number), "file {number} of {moment:?}");
        }
        println!("{moment:?}: {} durable files are there", durable.len());
    }
    end(&service, &path);
}

/// Whether the process has a FUSE connection open.
pub(super) fn has_connection(pid: Pid) -> bool {
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()));
    let mut descriptors = descriptors.into_iter().flatten().flatten();
    descriptors.any(|each| {
        std::fs::read_link(each.path()).is_ok_and(|file| file == Path::new("/dev/fuse"))
    })
}

// Fails if the death of the keeper is seen by whoever uses the volume, if there is no other one, or if that one does not
// hold the connection, so that the next death of the target is an error; or if the service holds one.
#[test]
fn the_keeper_dies_and_another_one_goes_on() {
    let service = service();
    let path = mounted(&service);
    let load = Load::start(&path.join("load"));
    let target = process(&service, "target");
    let first = keeper(&service).unwrap();
    assert!(has_connection(first) && has_connection(target));
    assert!(
        !has_connection(service.pid()),
        "the service has a connection"
    );
    kill(first);
    service.wait("another keeper holds the connection", |service| {
        keeper(service).filter(|next| *next != first && has_connection(*next))
    });
    assert_eq!(process(&service, "target"), target, "the target goes on");
    kill(target);
    service.trellis(&["grow", "data", "768Mi", "--wait"]);
    assert!(
        !has_connection(service.pid()),
        "the service has a connection"
    );
    load.finish("the keeper killed, then the target");
    end(&service, &path);
}

// Fails if service, target and copies that die together in the middle of a growth make a user of the volume see an
// error or wait for ever, keep the machine from using loop devices, or leave the growth undone.
#[test]
fn service_target_and_copies_die_together_and_the_keeper_goes_on() {
    all_but_the_keeper(moments().skip(1).step_by(2));
}

// Fails if everything that dies together leaves somebody waiting for ever: users, loop devices, the service's own
// successor; or if something that was durable is lost.
#[test]
fn everything_dies_together_and_the_machine_stays_usable() {
    all(moments());
}

// Fails as the two above; here at every moment, over and over, for `cargo xtask deaths`.
#[test]
#[ignore = "takes minutes; `cargo xtask deaths` runs it"]
fn everything_dies_together_fifty_times() {
    let many = moments().cycle();
    all(many.clone().take(26));
    all_but_the_keeper(many.take(26));
}
