//! A filesystem in memory for one benchmark alone. It is larger than the machine's memory, because little of what is
//! promised on it is written.

use std::path::Path;
use std::process::Command;

use anyhow::Context;

const SIZE: &str = "size=128g";

/// Is unmounted when it is dropped. Its name is short: sockets below it have long paths.
pub struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    pub fn mount() -> anyhow::Result<Tmpfs> {
        let directory = tempfile::Builder::new().prefix("tb-").tempdir()?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", SIZE, "trellis-bench"])
            .arg(directory.path())
            .status()
            .context("mount cannot be run")?;
        anyhow::ensure!(mounted.success(), "a tmpfs cannot be mounted");
        Ok(Tmpfs(directory))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}
