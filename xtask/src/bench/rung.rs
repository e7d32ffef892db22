//! The filesystem rung alone: the device is larger, now the filesystem. The rung beside the bare ioctl and beside
//! the filesystem's own program, in turns, so that all three meet the same machine.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use trellis_api::Bytes;
use trellis_node::filesystem::{self, FilesystemKind, Geometry};
use trellis_node::sys::{fsctl, loopdev};
use trellis_node::volume;

use super::service::sweep;
use super::statistics::{Times, millis};

const KINDS: [FilesystemKind; 3] = [
    FilesystemKind::Xfs,
    FilesystemKind::Btrfs,
    FilesystemKind::Ext4,
];
/// The size that filesystems begin with, and by how much each growth raises it.
const FIRST: Bytes = Bytes::gib(1);
const BY: Bytes = Bytes::mib(8);

/// A directory that is swept when it goes, whatever happened in it.
struct Swept(tempfile::TempDir);

impl Drop for Swept {
    fn drop(&mut self) {
        sweep(self.0.path());
    }
}

/// Grows each kind of filesystem `growths` times in each of the three ways, in a directory below `below`.
pub fn run(below: &Path, growths: usize) -> anyhow::Result<()> {
    println!(
        "device larger -> filesystem grown, below {}, {growths} times by {BY}",
        below.display()
    );
    println!("  {:<6} {:<12} {:>9}  {:>9}", "", "", "median", "p99");
    for kind in KINDS {
        let dir = Swept(
            tempfile::Builder::new()
                .prefix("trellis-rung-")
                .tempdir_in(below)?,
        );
        match measured(dir.0.path(), kind, growths) {
            Ok([rung, bare, program]) => {
                for (name, times) in [
                    ("rung", &rung),
                    ("bare ioctl", &bare),
                    ("program", &program),
                ] {
                    println!(
                        "  {kind:<6} {name:<12} {:>9}  {:>9}",
                        millis(times.median()),
                        millis(times.permille(990))
                    );
                }
                let above = rung.median().saturating_sub(bare.median());
                println!(
                    "  {kind:<6} the rung is {} above the bare ioctl",
                    millis(above)
                );
            }
            Err(error) => println!("  {kind:<6} cannot be measured here: {error:#}"),
        }
    }
    println!();
    Ok(())
}

fn measured(dir: &Path, kind: FilesystemKind, growths: usize) -> anyhow::Result<[Times; 3]> {
    let rung = Subject::make(dir.join("rung"), kind)?;
    let bare = Subject::make(dir.join("bare"), kind)?;
    let program = Subject::make(dir.join("program"), kind)?;
    let mut times = [Times::default(), Times::default(), Times::default()];
    for index in 0..growths {
        let to = Bytes::new(FIRST.get() + BY.get() * u64::try_from(index + 1)?);
        times[0].push(rung.timed(to, Subject::by_rung)?);
        times[1].push(bare.timed(to, Subject::by_ioctl)?);
        times[2].push(program.timed(to, Subject::by_program)?);
    }
    Ok(times)
}

/// A sparse file, a loop device, a mounted filesystem.
struct Subject {
    kind: FilesystemKind,
    file: PathBuf,
    device: PathBuf,
    mount: PathBuf,
}

impl Subject {
    fn make(dir: PathBuf, kind: FilesystemKind) -> anyhow::Result<Subject> {
        std::fs::create_dir_all(&dir)?;
        let file = dir.join("file");
        File::create(&file)?.set_len(FIRST.get())?;
        let device = volume::attach(&file, false)?.path;
        let mount = dir.join("mnt");
        volume::ensure_filesystem(&device, kind, &dir.join("note"))?;
        volume::stage(&device, kind, &mount, false)?;
        Ok(Subject {
            kind,
            file,
            device,
            mount,
        })
    }

    /// Makes the device larger, then grows the filesystem by `grow`, which answers how long it took, and checks
    /// that it did.
    fn timed(
        &self,
        to: Bytes,
        grow: fn(&Subject, Bytes) -> anyhow::Result<Duration>,
    ) -> anyhow::Result<Duration> {
        let file = File::options().write(true).open(&self.file)?;
        file.set_len(to.get())?;
        loopdev::refresh_size(File::open(&self.device)?.as_fd())?;
        let took = grow(self, to)?;
        let geometry = self.geometry()?;
        anyhow::ensure!(
            geometry.size() >= geometry.largest_fit(to),
            "the {} has {} of {to}",
            self.kind,
            geometry.size()
        );
        Ok(took)
    }

    fn geometry(&self) -> anyhow::Result<Geometry> {
        Ok(filesystem::measure_mounted(
            self.kind,
            &self.mount,
            &self.device,
        )?)
    }

    /// As the agent raises the rung, with all its checks and the reading back.
    fn by_rung(&self, _: Bytes) -> anyhow::Result<Duration> {
        let started = Instant::now();
        volume::grow_filesystem(self.kind, &self.mount, &self.device)?;
        Ok(started.elapsed())
    }

    /// The one call, with all that it needs at hand.
    fn by_ioctl(&self, to: Bytes) -> anyhow::Result<Duration> {
        let place = File::open(&self.mount)?;
        let geometry = self.geometry()?;
        let fit = geometry.largest_fit(to).get();
        let started = Instant::now();
        match geometry {
            Geometry::Xfs(xfs) => {
                fsctl::xfs_grow(&place, fit / u64::from(xfs.block), xfs.inode_percent_max)?;
            }
            Geometry::Btrfs(btrfs) => fsctl::btrfs_resize(&place, btrfs.device_id, fit)?,
            Geometry::Ext(ext) => fsctl::ext_resize(&place, fit / u64::from(ext.block))?,
        }
        Ok(started.elapsed())
    }

    /// As other drivers do it: the filesystem's own program, from its start to its end.
    fn by_program(&self, _: Bytes) -> anyhow::Result<Duration> {
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
        let status = command.status().context("the program cannot be run")?;
        let took = started.elapsed();
        anyhow::ensure!(status.success(), "{command:?} failed with {status}");
        Ok(took)
    }
}
