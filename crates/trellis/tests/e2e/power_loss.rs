//! Power lost by the whole machine: data directory and pools lie on one filesystem, which is shut down without its
//! journal while everything runs. All processes are killed, the filesystem is mounted again, and the service starts in
//! another run of the kernel. Whatever was bound works, and whatever was synced is there.
//!
//! `make test` cuts the power a few times; `cargo xtask power` does it as often as it is told.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{
    Machine, PATIENCE, Service, checksum, claim, class, loops_below, said, sweep, write_file,
};

/// How often the power is cut, if the environment says so.
const CUTS: &str = "TRELLIS_POWER_CUTS";
const CUTS_USUAL: usize = 3;

/// How often processes are looked for that were killed and have not ended yet.
const KILLS_MAX: usize = 1000;

/// How long after the last answer the power goes, one after the other.
const MOMENTS_MS: [u64; 6] = [0, 700, 40, 3000, 200, 5];

/// A disk that can lose its power, and a run of the kernel.
struct Disk {
    home: tempfile::TempDir,
    cuts: u32,
    /// The mounts of the service that runs on it, by which its processes are known.
    namespace: Option<PathBuf>,
    /// The FUSE connections that it had when it was killed.
    connections: Vec<String>,
    /// The loop devices that it had then, and the files below them.
    devices: Vec<(PathBuf, PathBuf)>,
}

impl Disk {
    fn new() -> Disk {
        let home = tempfile::Builder::new()
            .prefix("trellis-power-")
            .tempdir()
            .unwrap();
        let disk = Disk {
            home,
            cuts: 0,
            namespace: None,
            connections: Vec::new(),
            devices: Vec::new(),
        };
        let image = std::fs::File::create(disk.image()).unwrap();
        image.set_len(8 << 30).unwrap();
        run(Command::new("mkfs.xfs").arg("-q").arg(disk.image()));
        std::fs::create_dir(disk.place()).unwrap();
        disk.switch_on();
        disk
    }

    fn image(&self) -> PathBuf {
        self.home.path().join("image")
    }

    fn place(&self) -> PathBuf {
        self.home.path().join("disk")
    }

    fn boot_id(&self) -> PathBuf {
        self.home.path().join("boot-id")
    }

    /// Mounts the disk, in a run of the kernel that has not been before.
    fn switch_on(&self) {
        let id = format!("00000000-0000-4000-8000-{:012}\n", self.cuts);
        std::fs::write(self.boot_id(), id).unwrap();
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(self.image())
            .arg(self.place()));
    }

    /// A service sees that run of the kernel, and has mounts of its own, which vanish with its processes.
    fn machine(&self) -> Machine {
        let script = format!(
            "mount --bind {} /proc/sys/kernel/random/boot_id && exec \"$@\"",
            self.boot_id().display()
        );
        let prefix = [
            "unshare",
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            &script,
            "sh",
        ];
        Machine {
            data: self.place().join("data"),
            prefix: prefix.map(str::to_owned).to_vec(),
        }
    }

    /// Everything that was not synced is lost, and nothing runs any more.
    fn lose_power(&mut self, service: &mut Service) {
        run(Command::new("xfs_io")
            .args(["-x", "-c", "shutdown"])
            .arg(self.place()));
        self.kill_all();
        service.kill();
        self.cuts += 1;
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "the disk is still in use");
            detach(&self.devices);
            let _ = Command::new("umount")
                .arg(self.place())
                .stderr(Stdio::null())
                .status();
            // The mounts of a process vanish some time after it, and with the last of them the disk.
            if loops_below(self.home.path()).is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.switch_on();
    }

    /// Starts the service on this disk.
    fn start(&mut self, service: &mut Service) {
        service.up(&[]);
        self.namespace = namespace_of(&number(service));
    }

    /// Ends the FUSE connections of the service. A machine without power has none; here a thread that waits in the kernel
    /// for one keeps it, and itself, alive.
    fn abort_connections(&mut self) {
        let connections = std::mem::take(&mut self.connections);
        let control = self.home.path().join("fusectl");
        let _ = std::fs::create_dir(&control);
        let mut mount = Command::new("mount");
        mount.args(["-t", "fusectl", "fusectl"]).arg(&control);
        if connections.is_empty() || !mount.status().is_ok_and(|status| status.success()) {
            return;
        }
        for connection in connections {
            let _ = std::fs::write(control.join(connection).join("abort"), "1");
        }
        let _ = Command::new("umount").arg(&control).status();
    }

    /// Kills every process that has the service's mounts, until there is none.
    fn kill_all(&mut self) {
        let Some(namespace) = self.namespace.take() else {
            return;
        };
        if Some(&namespace) == namespace_of("self").as_ref() {
            return;
        }
        // They outlive the mounts by which they are found.
        let devices = loops_below(&self.place()).into_iter();
        self.devices = devices
            .filter_map(|device| Some((device.clone(), backing(&device)?)))
            .collect();
        self.connections = connections_of(&namespace, &self.place());
        self.kill(&namespace);
        self.abort_connections();
    }

    fn kill(&self, namespace: &Path) {
        for _ in 0..KILLS_MAX {
            let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
            let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
            let living = names.filter(|name| namespace_of(name).as_deref() == Some(namespace));
            let living: Vec<Pid> = living
                .filter_map(|name| Pid::from_raw(name.parse().ok()?))
                .collect();
            if living.is_empty() {
                return;
            }
            for pid in living {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.kill_all();
        // The mounts of a process vanish some time after it.
        for _ in 0..KILLS_MAX {
            detach(&self.devices);
            sweep(self.home.path());
            if loops_below(self.home.path()).is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = Command::new("umount")
            .arg("-l")
            .arg(self.place())
            .stderr(Stdio::null())
            .status();
    }
}

/// The numbers of the FUSE connections whose mounts lie below `place`, as a process with these mounts sees them.
fn connections_of(namespace: &Path, place: &Path) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let process = names.find(|name| namespace_of(name).as_deref() == Some(namespace));
    let mounts = process.and_then(|name| {
        let mounts = std::fs::read_to_string(format!("/proc/{name}/mountinfo"));
        mounts.ok()
    });
    let of_line = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        let is_fuse = line.contains(" - fuse");
        let below = Path::new(fields.get(4)?).starts_with(place);
        let (_, number) = fields.get(2)?.split_once(':')?;
        (is_fuse && below).then(|| number.to_owned())
    };
    let mounts = mounts.unwrap_or_default();
    mounts.lines().filter_map(of_line).collect()
}

/// What a loop device stands on. Of a file whose mount is gone only the end of the path is left.
fn backing(device: &Path) -> Option<PathBuf> {
    let name = device.file_name()?.to_str()?;
    let path = std::fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()?;
    Some(PathBuf::from(path.trim_end()))
}

/// Detaches devices that still stand on their files; another test may have got the number of one that is gone.
fn detach(devices: &[(PathBuf, PathBuf)]) {
    for (device, file) in devices {
        let is_it = |now: PathBuf| file.ends_with(now.strip_prefix("/").unwrap_or(&now));
        if !backing(device).is_some_and(is_it) {
            continue;
        }
        let _ = Command::new("losetup")
            .arg("-d")
            .arg(device)
            .stderr(Stdio::null())
            .status();
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    said(&output, &format!("{command:?}"));
}

fn number(service: &Service) -> String {
    service.pid().as_raw_nonzero().to_string()
}

fn namespace_of(process: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/ns/mnt")).ok()
}

/// A claim that was bound, and what was synced in it.
struct Kept {
    claim: String,
    file: Option<(String, u32)>,
}

impl Kept {
    /// Where the service has it mounted, as seen from here.
    fn place(&self, service: &Service) -> PathBuf {
        let path = service.path(&format!("mnt-{}", self.claim));
        let root = PathBuf::from(format!("/proc/{}/root", number(service)));
        root.join(path.strip_prefix("/").unwrap_or(&path))
    }

    fn write(&mut self, service: &Service, seed: u64) {
        let name = format!("file-{seed}");
        let sum = write_file(&self.place(service).join(&name), 1 << 20, seed);
        let directory = std::fs::File::open(self.place(service)).unwrap();
        directory.sync_all().unwrap();
        self.file = Some((name, sum));
    }

    /// It is mounted again by itself if it was in use, or else by whoever asks.
    fn assert_whole(&self, service: &Service) {
        let path = service.path(&format!("mnt-{}", self.claim));
        let mounted = ["mount", self.claim.as_str(), path.to_str().unwrap()];
        service.trellis(&mounted);
        if let Some((name, sum)) = &self.file {
            let file = self.place(service).join(name);
            service.wait("a mount is back", |_| file.exists().then_some(()));
            assert_eq!(checksum(&file), *sum, "{} after a power loss", self.claim);
        }
    }
}

fn add_pools(service: &Service, disk: &Path) {
    for name in ["a", "b"] {
        let path = disk.join(format!("pool-{name}"));
        std::fs::create_dir_all(&path).unwrap();
        service.trellis(&["pool", "add", name, path.to_str().unwrap()]);
    }
}

// Fails if a power loss at any moment leaves a file of ours without its bytes, so that a volume that was bound cannot be
// served, or if a byte that was synced is gone.
#[test]
fn what_was_bound_works_after_a_power_loss_and_what_was_synced_is_there() {
    let cuts = std::env::var(CUTS).ok().and_then(|text| text.parse().ok());
    let cuts = cuts.unwrap_or(CUTS_USUAL);
    let mut disk = Disk::new();
    let mut service = Service::on(disk.machine());
    disk.start(&mut service);
    add_pools(&service, &disk.place());
    let several =
        class("several", "ext4") + "  replicas: \"2\"\n  allowSharedDisk: \"true\"\n  pools: a,b\n";
    service.apply(&(class("one", "ext4") + "---\n" + &several));
    let mut kept: Vec<Kept> = Vec::new();
    for cut in 0..cuts {
        println!("cut {cut}");
        let number = u64::try_from(cut).unwrap();
        for (kind, in_use) in [("one", true), ("several", true), ("several", false)] {
            let name = format!("{kind}-{in_use}-{cut}");
            service.apply(&claim(&name, kind, "24Mi"));
            service.wait_bound(&name);
            let mut new = Kept {
                claim: name,
                file: None,
            };
            if in_use {
                new.assert_whole(&service);
                new.write(&service, number * 10 + 1);
            }
            kept.push(new);
        }
        let moment = MOMENTS_MS[cut % MOMENTS_MS.len()];
        std::thread::sleep(Duration::from_millis(moment));
        disk.lose_power(&mut service);
        // What it is called stands in the data directory.
        service.forget_node();
        disk.start(&mut service);
        for (each, seed) in kept.iter_mut().zip(100..) {
            each.assert_whole(&service);
            each.write(&service, number * 1000 + seed);
        }
        // So that many cuts do not gather many volumes.
        while kept.len() > 9 {
            let old = kept.remove(0).claim;
            service.trellis(&["umount", &old]);
            service.kubectl(&["delete", "pvc", &old]);
        }
    }
    disk.kill_all();
    service.kill();
}
