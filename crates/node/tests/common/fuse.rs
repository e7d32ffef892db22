//! A volume for FUSE tests: a plain file, read and written by calls that can be slowed down and refused.

#![allow(dead_code, reason = "every test binary uses another part")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use bytes::Bytes as Data;
use rustix::fs::FallocateFlags;
use tempfile::TempDir;
use trellis_api::Bytes;
use trellis_node::fuse::{Backing, BackingError, Chunks, Options, Reply, Server};

/// How many calls a slow volume works on at the same time.
const WORKERS: usize = 8;

pub struct FileBacking {
    file: Arc<File>,
    size: AtomicU64,
    pub read_only: AtomicBool,
    /// What everything is answered with, if anything.
    pub refusal: Mutex<Option<BackingError>>,
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub durable_writes: AtomicU64,
    pub flushes: AtomicU64,
    pub zeroed: AtomicU64,
    pub misaligned: AtomicU64,
    workers: Option<mpsc::Sender<Work>>,
}

type Work = Box<dyn FnOnce() + Send>;

impl FileBacking {
    /// Answers every call before it returns.
    pub fn prompt(path: &Path) -> Arc<FileBacking> {
        Arc::new(FileBacking::on(path, None))
    }

    /// Answers from other threads, after a pause.
    pub fn slow(path: &Path, pause: Duration) -> Arc<FileBacking> {
        let (sender, receiver) = mpsc::channel::<Work>();
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..WORKERS {
            let receiver = Arc::clone(&receiver);
            thread::spawn(move || {
                loop {
                    let next = receiver.lock().unwrap().recv();
                    let Ok(work) = next else { return };
                    thread::sleep(pause);
                    work();
                }
            });
        }
        Arc::new(FileBacking::on(path, Some(sender)))
    }

    fn on(path: &Path, workers: Option<mpsc::Sender<Work>>) -> FileBacking {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        FileBacking {
            size: AtomicU64::new(file.metadata().unwrap().len()),
            file: Arc::new(file),
            read_only: AtomicBool::new(false),
            refusal: Mutex::new(None),
            reads: AtomicU64::new(0),
            writes: AtomicU64::new(0),
            durable_writes: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            zeroed: AtomicU64::new(0),
            misaligned: AtomicU64::new(0),
            workers,
        }
    }

    pub fn grow(&self, to: Bytes) {
        self.file.set_len(to.get()).unwrap();
        self.size.store(to.get(), Ordering::SeqCst);
    }

    /// What the volume takes on the disk.
    pub fn allocated(&self) -> u64 {
        rustix::fs::fstat(&*self.file)
            .unwrap()
            .st_blocks
            .cast_unsigned()
            * 512
    }

    pub fn refuse(&self, error: Option<BackingError>) {
        *self.refusal.lock().unwrap() = error;
    }

    fn work(&self, work: impl FnOnce(Option<BackingError>, &File) + Send + 'static) {
        let refusal = *self.refusal.lock().unwrap();
        let file = Arc::clone(&self.file);
        match &self.workers {
            Some(workers) => workers
                .send(Box::new(move || work(refusal, &file)))
                .unwrap(),
            None => work(refusal, &file),
        }
    }
}

impl Backing for FileBacking {
    fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    fn read_only(&self) -> bool {
        self.read_only.load(Ordering::SeqCst)
    }

    fn read(&self, offset: u64, len: u32, reply: Reply<Chunks>) {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.work(move |refusal, file| {
            if let Some(error) = refusal {
                return reply.send(Err(error));
            }
            let mut data = vec![0; usize::try_from(len).unwrap()];
            file.read_exact_at(&mut data, offset).unwrap();
            // In pieces, as a volume of several chunks answers.
            let mut data = Data::from(data);
            let first = data.split_to(data.len() / 3);
            reply.send(Ok(vec![first, data]));
        });
    }

    fn write(&self, offset: u64, data: Data, fua: bool, reply: Reply<()>) {
        self.writes.fetch_add(1, Ordering::SeqCst);
        self.durable_writes
            .fetch_add(u64::from(fua), Ordering::SeqCst);
        if !data.as_ptr().addr().is_multiple_of(4096) {
            self.misaligned.fetch_add(1, Ordering::SeqCst);
        }
        self.work(move |refusal, file| {
            reply.send(match refusal {
                Some(error) => Err(error),
                None => file
                    .write_all_at(&data, offset)
                    .map_err(|_| BackingError::Medium),
            });
        });
    }

    fn zero(&self, offset: u64, len: u64, deallocate: bool, reply: Reply<()>) {
        self.zeroed.fetch_add(len, Ordering::SeqCst);
        self.work(move |refusal, file| {
            let how = if deallocate {
                FallocateFlags::PUNCH_HOLE
            } else {
                FallocateFlags::ZERO_RANGE
            };
            reply.send(match refusal {
                Some(error) => Err(error),
                None => rustix::fs::fallocate(file, how | FallocateFlags::KEEP_SIZE, offset, len)
                    .map_err(|_| BackingError::Medium),
            });
        });
    }

    fn flush(&self, reply: Reply<()>) {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        self.work(move |refusal, _| reply.send(refusal.map_or(Ok(()), Err)));
    }
}

/// A volume's file and where it is mounted, in a directory that is cleared away also on panic.
///
/// It does not use the machine's list of loop devices: one whose server is dead would not answer.
pub struct FuseHome {
    dir: TempDir,
}

impl FuseHome {
    pub fn new(size: Bytes) -> FuseHome {
        FuseHome::below(&std::env::temp_dir(), size)
    }

    pub fn below(parent: &Path, size: Bytes) -> FuseHome {
        let home = FuseHome {
            dir: TempDir::with_prefix_in("trellis-fuse-", parent).unwrap(),
        };
        std::fs::create_dir(home.mount_point()).unwrap();
        crate::common::set_size(&home.data(), size);
        home
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(name)
    }

    pub fn data(&self) -> PathBuf {
        self.path("data")
    }

    pub fn mount_point(&self) -> PathBuf {
        self.path("at")
    }

    /// The volume's file as it is shown.
    pub fn file(&self) -> PathBuf {
        self.mount_point().join("volume")
    }

    pub fn serve(&self, backing: &Arc<FileBacking>) -> Server {
        let backing: Arc<dyn Backing> = Arc::<FileBacking>::clone(backing);
        Server::mount(&self.mount_point(), backing, Options::default()).unwrap()
    }
}

impl Drop for FuseHome {
    fn drop(&mut self) {
        use rustix::mount::UnmountFlags;
        use trellis_node::sys::{loopdev, mountinfo};
        let root = self.path("");
        let below = |path: &Path| path.starts_with(&root);
        // From the top down: filesystems, their devices, the volume.
        let mounts = mountinfo::read().unwrap_or_default();
        let volumes = |mount: &&mountinfo::Mount| mount.fs_type.starts_with("fuse");
        for mount in mounts.iter().rev().filter(|mount| !volumes(mount)) {
            if below(&mount.mount_point) {
                let _ = rustix::mount::unmount(&mount.mount_point, UnmountFlags::DETACH);
            }
        }
        for (device, _) in loopdev::on_path(&self.file()).unwrap_or_default() {
            if let Ok(node) = File::open(&device) {
                let _ = loopdev::clear(&node);
            }
        }
        for mount in mounts.iter().rev().filter(volumes) {
            if below(&mount.mount_point) {
                // By force first: whoever still waits for a dead server gets an error, and lets go.
                let _ = rustix::mount::unmount(&mount.mount_point, UnmountFlags::FORCE);
                let _ = rustix::mount::unmount(&mount.mount_point, UnmountFlags::DETACH);
            }
        }
    }
}

/// Room for one block at an address that direct I/O takes.
pub struct Aligned {
    room: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    pub fn new(len: usize) -> Aligned {
        let room = vec![0; len + 4096];
        let at = room.as_ptr().addr();
        Aligned {
            start: at.next_multiple_of(4096) - at,
            room,
            len,
        }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.room[self.start..self.start + self.len]
    }
}

/// Opens a device or file past every cache.
pub fn open_direct(path: &Path) -> File {
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
    let mut options = OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, direct);
    options.read(true).write(true).open(path).unwrap()
}

/// A block of bytes that differ from block to block and from seed to seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut block = Vec::with_capacity(len + 8);
    while block.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        block.extend_from_slice(&state.to_le_bytes());
    }
    block.truncate(len);
    block
}
