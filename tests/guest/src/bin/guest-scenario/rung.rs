//! How long the filesystem rung takes alone, when the device is already larger. The rung, the bare ioctl and the
//! filesystem's own program take turns, so that all three see the same machine.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use trellis_api::Bytes;
use trellis_node::filesystem::{self, FilesystemKind, Geometry};
use trellis_node::sys::{fsctl, loopdev};
use trellis_node::volume;

const GROWTHS: u64 = 200;
/// The size that filesystems begin with, and by how much each growth raises it.
const FIRST: Bytes = Bytes::gib(1);
const BY: Bytes = Bytes::mib(8);

/// Grows a filesystem 200 times in each of the three ways, and prints how long each took.
pub fn run(kind: FilesystemKind) {
    let dir = tempfile::Builder::new()
        .prefix("trellis-rung-")
        .tempdir()
        .unwrap();
    let [rung, bare, program] =
        ["rung", "bare", "program"].map(|name| Subject::make(dir.path().join(name), kind));
    let mut times: [Vec<Duration>; 3] = Default::default();
    for index in 1..=GROWTHS {
        let to = Bytes::new(FIRST.get() + BY.get() * index);
        times[0].push(rung.timed(to, Subject::by_rung));
        times[1].push(bare.timed(to, Subject::by_ioctl));
        times[2].push(program.timed(to, Subject::by_program));
    }
    let mut medians = Vec::new();
    for (name, mut times) in ["rung", "bare ioctl", "program"].into_iter().zip(times) {
        times.sort_unstable();
        let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)];
        let (median, p99) = (at(50), at(99));
        println!("{kind:<6} {name:<12} median {median:>9.2?}  p99 {p99:>9.2?}");
        medians.push(median);
    }
    println!(
        "{kind:<6} the rung is {:.2?} above the bare ioctl, the program {:.2?}",
        medians[0].saturating_sub(medians[1]),
        medians[2].saturating_sub(medians[1]),
    );
}

/// A sparse file, a loop device, a mounted filesystem.
struct Subject {
    kind: FilesystemKind,
    file: PathBuf,
    device: PathBuf,
    mount: PathBuf,
}

impl Subject {
    fn make(dir: PathBuf, kind: FilesystemKind) -> Subject {
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("file");
        File::create(&file).unwrap().set_len(FIRST.get()).unwrap();
        let device = volume::attach(&file, false).unwrap().path;
        let mount = dir.join("mnt");
        let subject = Subject {
            kind,
            file,
            device,
            mount,
        };
        volume::ensure_filesystem(&subject.device, kind, &dir.join("note")).unwrap();
        volume::stage(&subject.device, kind, &subject.mount, false).unwrap();
        subject
    }

    /// Makes the device larger, then grows the filesystem by `grow`, which answers how long it took, and checks
    /// that it did.
    fn timed(&self, to: Bytes, grow: fn(&Subject, Bytes) -> Duration) -> Duration {
        let file = File::options().write(true).open(&self.file).unwrap();
        file.set_len(to.get()).unwrap();
        loopdev::refresh_size(File::open(&self.device).unwrap().as_fd()).unwrap();
        let took = grow(self, to);
        let geometry = self.geometry();
        assert_eq!(geometry.size(), geometry.largest_fit(to));
        took
    }

    fn geometry(&self) -> Geometry {
        filesystem::measure_mounted(self.kind, &self.mount, &self.device).unwrap()
    }

    /// As the agent raises the rung, with all its checks and the reading back.
    fn by_rung(&self, _: Bytes) -> Duration {
        let started = Instant::now();
        volume::grow_filesystem(self.kind, &self.mount, &self.device).unwrap();
        started.elapsed()
    }

    /// The one call, with all that it needs at hand.
    fn by_ioctl(&self, to: Bytes) -> Duration {
        let place = File::open(&self.mount).unwrap();
        let geometry = self.geometry();
        let fit = geometry.largest_fit(to).get();
        let started = Instant::now();
        let went = match geometry {
            Geometry::Xfs(xfs) => {
                fsctl::xfs_grow(&place, fit / u64::from(xfs.block), xfs.inode_percent_max)
            }
            Geometry::Btrfs(btrfs) => fsctl::btrfs_resize(&place, btrfs.device_id, fit),
            Geometry::Ext(ext) => fsctl::ext_resize(&place, fit / u64::from(ext.block)),
        };
        went.unwrap();
        started.elapsed()
    }

    /// As other drivers do it: the filesystem's own program, from its start to its end.
    fn by_program(&self, _: Bytes) -> Duration {
        let mut command = match self.kind {
            FilesystemKind::Xfs => Command::new("xfs_growfs"),
            FilesystemKind::Btrfs => Command::new("btrfs"),
            FilesystemKind::Ext4 | FilesystemKind::Ext3 => Command::new("resize2fs"),
        };
        match self.kind {
            FilesystemKind::Xfs => command.arg(&self.mount),
            FilesystemKind::Btrfs => command
                .args(["filesystem", "resize", "max"])
                .arg(&self.mount),
            FilesystemKind::Ext4 | FilesystemKind::Ext3 => command.arg(&self.device),
        };
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let started = Instant::now();
        let status = command.status().unwrap();
        let took = started.elapsed();
        assert!(status.success(), "{command:?} failed with {status}");
        took
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.mount).status();
        let _ = volume::detach(&self.file);
    }
}
