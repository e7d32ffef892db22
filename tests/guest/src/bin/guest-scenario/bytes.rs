//! Files with known content, full filesystems, and checks whether a filesystem is intact.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use trellis_api::Bytes;
use trellis_node::filesystem::{self, FilesystemKind};
use trellis_node::sys::mountinfo;

/// Pseudo-random bytes that belong to a seed.
pub fn content(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut content = Vec::with_capacity(bytes + 8);
    while content.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        content.extend_from_slice(&state.to_le_bytes());
    }
    content.truncate(bytes);
    content
}

/// Writes a file of pseudo-random bytes, durably, and answers its checksum.
pub fn write_file(path: &Path, bytes: usize, seed: u64) -> u32 {
    let content = content(bytes, seed);
    let mut file = File::create(path).unwrap();
    file.write_all(&content).unwrap();
    file.sync_all().unwrap();
    crc32c::crc32c(&content)
}

/// The checksum of a file.
pub fn checksum(path: &Path) -> u32 {
    crc32c::crc32c(&std::fs::read(path).unwrap())
}

/// Fills a filesystem until not one more byte fits: by reserving space where it can do so, which is quick,
/// and then by writing.
pub fn fill(path: &Path) {
    let mut file = File::create(path).unwrap();
    let mut end = 0;
    let mut part = 256u64 << 20;
    while part >= 1 << 20 {
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), end, part) {
            Ok(()) => end += part,
            Err(Errno::OPNOTSUPP) => break,
            Err(_) => part /= 4,
        }
    }
    file.seek(SeekFrom::Start(end)).unwrap();
    let chunk = vec![0xa5; 1 << 20];
    for piece in [chunk.len(), 4096] {
        while file.write_all(&chunk[..piece]).is_ok() {}
    }
    // A filesystem that postpones the search for blocks may notice only now.
    let _ = file.sync_all();
}

/// Panics if a file of a mebibyte still fits.
pub fn assert_full(path: &Path) {
    let fitted = std::fs::write(path, vec![0x5a; 1 << 20]).is_ok();
    assert!(!fitted, "the filesystem is not full");
    let _ = std::fs::remove_file(path);
}

/// Has an unmounted filesystem's own program check it, which changes nothing.
pub fn assert_clean(kind: FilesystemKind, data: &Path) {
    let arguments: &[&str] = match kind {
        FilesystemKind::Xfs => &["xfs_repair", "-n", "-f"],
        FilesystemKind::Btrfs => &["btrfs", "check", "--readonly"],
        FilesystemKind::Ext4 | FilesystemKind::Ext3 => &["e2fsck", "-f", "-n"],
    };
    let output = Command::new(arguments[0])
        .args(&arguments[1..])
        .arg(data)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{kind} is damaged: {arguments:?}\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The size of a mounted filesystem in two ways, and of its device.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// The device that it is on.
    pub device: Bytes,
    /// By its geometry: an ioctl of its own, or its superblock on the device.
    pub geometry: Bytes,
    /// The most that its geometry could be on the device as that is now.
    pub largest_fit: Bytes,
    /// By statfs, without what it keeps for itself.
    pub statfs: Bytes,
}

/// Measures the filesystem that is mounted at a path.
pub fn sizes(kind: FilesystemKind, path: &Path) -> Sizes {
    let mounts = mountinfo::read().unwrap();
    let mount = mountinfo::at(&mounts, path).expect("it is mounted");
    let device = Path::new(&mount.source);
    let geometry = filesystem::measure_mounted(kind, path, device).unwrap();
    let size = trellis_node::sys::block::size(File::open(device).unwrap()).unwrap();
    let statfs = rustix::fs::statvfs(path).unwrap();
    Sizes {
        device: size,
        geometry: geometry.size(),
        largest_fit: geometry.largest_fit(size),
        statfs: Bytes::new(statfs.f_blocks * statfs.f_frsize),
    }
}
