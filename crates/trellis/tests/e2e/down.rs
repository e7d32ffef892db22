//! `trellis down`: the service alone, or everything, whatever state it is in; and what the next start brings back.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rustix::process::{Pid, Signal, kill_process};
use trellis_api::step::Step;

use crate::harness::{
    Service, checksum, claim, filesystem_mib, loops_below, mounts_below, processes, said,
    write_file,
};

const POOLS: [&str; 3] = ["a", "b", "c"];

/// What a service has in use: a filesystem, one inside of it, a device, and a filesystem of three copies.
struct InUse {
    plain: PathBuf,
    inside: PathBuf,
    device: PathBuf,
    copies: PathBuf,
    sums: [u32; 3],
}

fn classes(service: &Service) {
    for name in POOLS {
        let pool = service.path(name);
        std::fs::create_dir_all(&pool).unwrap();
        service.trellis(&["pool", "add", name, pool.to_str().unwrap()]);
    }
    service.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: three\nprovisioner: trellis.dev\nallowVolumeExpansion: true\nparameters:\n  replicas: \"3\"\n  allowSharedDisk: \"true\"\n  pools: a,b,c\n---\napiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: elsewhere\nprovisioner: trellis.dev\nparameters:\n  csi.storage.k8s.io/fstype: btrfs\n  pools: b\n",
    );
}

impl InUse {
    fn begin(service: &Service) -> InUse {
        classes(service);
        service.claim("plain", "", "320Mi");
        service.claim("inside", "elsewhere", "320Mi");
        service.claim("copies", "three", "320Mi");
        service.apply(&(claim("disk", "elsewhere", "64Mi") + "  volumeMode: Block\n"));
        service.wait_bound("disk");
        let (plain, copies) = (service.mount("plain"), service.mount("copies"));
        let (inside, device) = (plain.join("inside"), service.path("device"));
        service.trellis(&["mount", "inside", inside.to_str().unwrap()]);
        service.trellis(&["mount", "disk", device.to_str().unwrap()]);
        let file = |path: &Path, seed| write_file(&path.join("file"), 2 << 20, seed);
        let sums = [file(&plain, 1), file(&inside, 2), file(&copies, 3)];
        InUse {
            plain,
            inside,
            device,
            copies,
            sums,
        }
    }

    /// Waits until everything is in use again, and nothing is held.
    fn is_back(&self, service: &Service) {
        service.wait("everything is in use and nothing is held", |service| {
            let uses = service.objects("attachments.trellis.dev");
            let is_well = |each: &serde_json::Value| {
                each["status"]["phase"] == "Attached" && each["status"]["hold"].is_null()
            };
            // Right after a start the statuses are those of before.
            let files = [&self.plain, &self.inside, &self.copies].map(|path| path.join("file"));
            let is_there = self.device.exists() && files.iter().all(|file| file.exists());
            (uses.len() == 4 && uses.iter().all(is_well) && is_there).then_some(())
        });
        let file = |path: &Path| checksum(&path.join("file"));
        let sums = [file(&self.plain), file(&self.inside), file(&self.copies)];
        assert_eq!(sums, self.sums);
        let shown = service.trellis(&["df"]);
        assert!(!shown.contains("Held"), "{shown}");
    }
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// The sockets below a directory.
fn sockets(dir: &Path) -> Vec<PathBuf> {
    use std::os::unix::fs::FileTypeExt;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(sockets(&entry.path()));
        } else if kind.is_socket() {
            found.push(entry.path());
        }
    }
    found
}

/// Whether a process that has not been waited for has ended.
fn is_gone(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |stat| stat.contains(") Z "))
}

fn assert_nothing_left(service: &Service, before: &[Pid]) {
    let dir = service.path("");
    assert_eq!(mounts_below(&dir), Vec::<PathBuf>::new());
    assert_eq!(loops_below(&dir), Vec::<PathBuf>::new());
    assert_eq!(sockets(&dir), Vec::<PathBuf>::new());
    let living: Vec<&Pid> = before.iter().filter(|pid| !is_gone(**pid)).collect();
    assert!(living.is_empty(), "{living:?}");
}

// Fails if `down` leaves the service running, returns before it is gone, or takes a mount, a copy or a target with it.
#[test]
fn down_stops_the_service_and_nothing_else() {
    let mut service = Service::start();
    classes(&service);
    service.claim("data", "three", "320Mi");
    let path = service.mount("data");
    let before = processes(&service.data());
    let pid = service.pid();
    let said = service.trellis(&["down"]);
    assert!(is_gone(pid), "it returns when the service has ended");
    assert!(said.contains("mounts, copies and targets go on"), "{said}");
    service.ends();
    let sum = write_file(&path.join("file"), 2 << 20, 4);
    assert_eq!(processes(&service.data()), before);
    let again = service.trellis(&["down"]);
    assert!(again.contains("no service runs"), "{again}");
    service.up(&[]);
    assert_eq!(checksum(&path.join("file")), sum);
    assert_eq!(filesystem_mib(&path), 320);
}

// Fails if `down --all` leaves a mount, a loop device, a process or a socket, ends things in the wrong order, or makes the
// next start hold what it has taken away itself.
#[test]
fn down_all_leaves_nothing_and_up_brings_everything_back() {
    let mut service = Service::start();
    let in_use = InUse::begin(&service);
    let before = processes(&service.data());
    assert!(
        before.len() >= 5,
        "keeper, target and three copies: {before:?}"
    );
    let output = service.try_trellis(&["down", "--all"]);
    let shown = text(&output);
    assert!(output.status.success(), "{shown}");
    service.ends();
    assert_nothing_left(&service, &before);
    let at = |words: &str| {
        shown
            .find(words)
            .unwrap_or_else(|| panic!("{words}: {shown}"))
    };
    let order = [
        "stopping the service",
        "unmounting",
        "detaching",
        "ending the target",
        "ending 3 copies",
        "ending the keeper",
    ];
    assert!(order.map(at).is_sorted(), "{shown}");
    let inside = format!("unmounting {}", in_use.inside.display());
    let around = format!("unmounting {}\n", in_use.plain.display());
    assert!(at(&inside) < at(&around), "{shown}");
    let again = service.trellis(&["down", "--all"]);
    assert!(again.contains("nothing runs"), "{again}");
    service.up(&[]);
    in_use.is_back(&service);
    // What somebody else takes away is still held: the start has not forgotten the difference.
    said(
        &Command::new("umount").arg(&in_use.copies).output().unwrap(),
        "umount",
    );
    service.wait("a mount that somebody took away is held", |service| {
        let uses = service.objects("attachments.trellis.dev");
        let held = |each: &serde_json::Value| each["status"]["hold"]["reason"] == "MountGone";
        uses.iter().any(held).then_some(())
    });
}

// Fails if `down --all` changes anything while a volume is in use, does not say who uses it, or takes away what is not
// Trellis' own.
#[test]
fn down_all_changes_nothing_while_a_volume_is_in_use() {
    let mut service = Service::start();
    let in_use = InUse::begin(&service);
    let (elsewhere, nested) = (service.path("elsewhere"), in_use.copies.join("nested"));
    for directory in [&elsewhere, &nested] {
        std::fs::create_dir(directory).unwrap();
    }
    let bind = |from: &Path, to: &Path| {
        let mut command = Command::new("mount");
        command.arg("--bind").args([from, to]);
        said(&command.output().unwrap(), "mount --bind");
    };
    let (running, before) = (service.pid(), mounts_below(&service.path("")));
    let refused = |what: &str, words: &[&str]| {
        let output = service.try_trellis(&["down", "--all"]);
        let shown = text(&output);
        assert_eq!(output.status.code(), Some(5), "{what}: {shown}");
        for word in words {
            assert!(shown.contains(word), "{what}: {word:?} is missing: {shown}");
        }
        assert!(!is_gone(running), "{what}: {shown}");
        let mounts = mounts_below(&service.path(""));
        assert!(before.iter().all(|mount| mounts.contains(mount)), "{what}");
    };
    let me = format!("process {}", std::process::id());
    let file = File::open(in_use.inside.join("file")).unwrap();
    // Twice: a look must not itself be what unmounts it the next time.
    for _ in 0..2 {
        refused(
            "an open file",
            &[&me, in_use.inside.to_str().unwrap(), "nothing was changed"],
        );
    }
    drop(file);
    let device = File::open(&in_use.device).unwrap();
    refused("an open device", &[&me]);
    drop(device);
    bind(&in_use.plain, &elsewhere);
    refused(
        "somebody's bind",
        &[elsewhere.to_str().unwrap(), "did not mount it"],
    );
    said(
        &Command::new("umount").arg(&elsewhere).output().unwrap(),
        "umount",
    );
    bind(&elsewhere, &nested);
    refused(
        "a mount inside",
        &[nested.to_str().unwrap(), "unmount that"],
    );
    said(
        &Command::new("umount").arg(&nested).output().unwrap(),
        "umount",
    );
    let processes = processes(&service.data());
    service.trellis(&["down", "--all"]);
    service.ends();
    assert_nothing_left(&service, &processes);
}

/// The process whose lock that is.
fn process(service: &Service, lock: &str) -> Pid {
    let text = std::fs::read_to_string(service.data().join(lock)).unwrap();
    Pid::from_raw(text.trim().parse().unwrap()).unwrap()
}

// Fails if `down --all` needs a service that runs, or a keeper that lives or answers.
#[test]
fn down_all_works_after_any_crash() {
    let mut service = Service::start();
    let in_use = InUse::begin(&service);
    for what in ["service", "keeper dead", "keeper frozen"] {
        println!("down --all after: {what}");
        let before = processes(&service.data());
        service.kill();
        let keeper = process(&service, "keeper/keeper.lock");
        match what {
            "keeper dead" => kill_process(keeper, Signal::KILL).unwrap(),
            "keeper frozen" => kill_process(keeper, Signal::STOP).unwrap(),
            _ => {}
        }
        service.trellis(&["down", "--all"]);
        assert_nothing_left(&service, &before);
        service.up(&[]);
        in_use.is_back(&service);
    }
}

// Fails if a death of `down --all` between any two of its steps leaves something that neither another `down --all` nor
// the next start gets over.
#[test]
fn a_death_at_any_step_of_down_all_heals() {
    let mut service = Service::start();
    let in_use = InUse::begin(&service);
    for (index, step) in Step::ALL
        .iter()
        .filter(|step| step.is_of_the_end())
        .enumerate()
    {
        println!("death at {}", step.name());
        let before = processes(&service.data());
        let mut down = service.verb(&["down", "--all"]);
        let output = down.env("TRELLIS_CRASH_AT", step.name()).output().unwrap();
        let died = output.status.signal() == Some(9);
        assert!(died, "{} is not reached: {}", step.name(), text(&output));
        service.ends();
        // Every other time it is given again first.
        if index % 2 == 0 {
            service.trellis(&["down", "--all"]);
            assert_nothing_left(&service, &before);
        }
        service.up(&[]);
        in_use.is_back(&service);
    }
}

// Fails if `down` waits for ever for a service that does not answer, or does not say what to do.
#[test]
fn down_says_when_the_service_does_not_end() {
    let mut service = Service::start();
    kill_process(service.pid(), Signal::STOP).unwrap();
    let output = service.try_trellis(&["down", "--all", "--timeout", "1s"]);
    let shown = text(&output);
    assert_eq!(output.status.code(), Some(7), "{shown}");
    assert!(shown.contains("kill -9"), "{shown}");
    kill_process(service.pid(), Signal::CONT).unwrap();
    service.ends();
    let output = service.try_trellis(&["down", "--data", "/nonexistent/trellis"]);
    assert_eq!(output.status.code(), Some(2), "given twice");
    let mut elsewhere = Command::new(env!("CARGO_BIN_EXE_trellis"));
    let output = elsewhere
        .args(["down", "--data", "/nonexistent/trellis"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", text(&output));
}
