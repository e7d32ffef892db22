//! A volume on a sparse file, with the calls by which a node brings volumes into use and grows them.

use std::fs::File;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use trellis_api::Bytes;
use trellis_node::Error;
use trellis_node::filesystem::FilesystemKind;
use trellis_node::volume::{self, AttachedDevice, Source};

/// A volume. Nothing of it stays when it goes away, also in a panic.
pub struct Volume {
    dir: TempDir,
    kind: FilesystemKind,
}

impl Volume {
    /// Makes a volume with an idle filesystem.
    pub fn make(kind: FilesystemKind, size: Bytes) -> Volume {
        let dir = TempDir::with_prefix("trellis-scenario-").unwrap();
        let data = dir.path().join("data");
        File::create(&data).unwrap().set_len(size.get()).unwrap();
        let volume = Volume { dir, kind };
        let (device, note) = (volume.device(), volume.path("note"));
        volume::ensure_filesystem(&device.path, kind, &note).unwrap();
        volume
    }

    /// Its device, which is attached if it is not.
    fn device(&self) -> AttachedDevice {
        volume::attach(&self.data(), false).unwrap()
    }

    /// The file with its bytes.
    pub fn data(&self) -> PathBuf {
        self.path("data")
    }

    /// A path for a consumer.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Shows the filesystem to a consumer.
    pub fn publish(&self, name: &str, read_only: bool) -> PathBuf {
        let staging = self.path("staging");
        volume::stage(&self.device().path, self.kind, &staging, read_only).unwrap();
        let path = self.path(name);
        let source = Source::Filesystem { staging: &staging };
        volume::publish(source, &path, read_only).unwrap();
        path
    }

    /// Ends every use, and lets go of the device.
    pub fn withdraw(&self, paths: &[PathBuf]) {
        let number = Some(self.device().number);
        for path in paths {
            volume::unpublish(path, number).unwrap();
        }
        volume::unstage(&self.path("staging"), number).unwrap();
        assert!(volume::detach(&self.data()).unwrap());
    }

    /// Raises the file.
    pub fn grow_file(&self, to: Bytes) {
        let file = File::options().write(true).open(self.data()).unwrap();
        file.set_len(to.get()).unwrap();
    }

    /// Raises the file and the device.
    pub fn grow_device(&self, to: Bytes) {
        self.grow_file(to);
        let outcome = volume::grow_device(&self.data(), to).unwrap();
        assert_eq!(outcome.size(), to);
    }

    /// Raises the filesystem, and answers its size as it was read back.
    pub fn grow_filesystem(&self) -> Result<Bytes, Error> {
        let staging = self.path("staging");
        let outcome = volume::grow_filesystem(self.kind, &staging, &self.device().path)?;
        Ok(outcome.size())
    }

    /// Raises the filesystem while nobody uses it, and answers its size as it was read back.
    pub fn grow_idle(&self) -> Bytes {
        let outcome = volume::grow_idle(&self.data(), self.kind).unwrap();
        outcome.size()
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        sweep(self.dir.path());
    }
}

/// Unmounts and detaches whatever a failure has left below `dir`.
pub fn sweep(dir: &Path) {
    let mounts = trellis_node::sys::mountinfo::read().unwrap_or_default();
    for mount in mounts.iter().rev() {
        if mount.mount_point.starts_with(dir) {
            let flags = rustix::mount::UnmountFlags::DETACH;
            let _ = rustix::mount::unmount(&mount.mount_point, flags);
        }
    }
    for device in trellis_node::sys::loopdev::list().unwrap_or_default() {
        if device.backing_hint.starts_with(dir)
            && let Ok(node) = File::open(&device.path)
        {
            let _ = trellis_node::sys::loopdev::clear(&node);
        }
    }
}
