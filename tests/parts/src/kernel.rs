//! The guest's kernel: Debian's cloud kernel, downloaded once, unpacked, never installed.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Context, Error, Result};
use crate::package::{apt, unpacked};

/// The package that depends on the newest kernel. The cloud kernel boots three times faster than the full one.
const PACKAGE: &str = "linux-image-cloud-amd64";

/// An unpacked kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// What QEMU boots.
    pub image: PathBuf,
    /// The directory of its modules.
    pub modules: PathBuf,
}

/// The kernel that was unpacked before, or else the newest one.
pub fn kernel() -> Result<Kernel> {
    let kept = unpacked("kernel", || newest().map(|package| vec![package]))?;
    let image = only_entry(&kept.join("boot"), "vmlinuz-")?;
    let modules = only_entry(&kept.join("lib/modules"), "")?;
    Ok(Kernel { image, modules })
}

/// The package of the newest kernel.
fn newest() -> Result<String> {
    let said = apt("apt-cache", &["depends", PACKAGE], Path::new("/"))?;
    let kernels = said
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    let mut kernels = kernels.filter(|name| name.starts_with("linux-image-"));
    kernels
        .next()
        .map(str::to_owned)
        .ok_or(Error::NoKernel { package: PACKAGE })
}

fn only_entry(dir: &Path, prefix: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(dir).context("read", dir)?;
    entries
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .ok_or_else(|| Error::Incomplete {
            path: dir.to_owned(),
            what: format!("{prefix}*"),
        })
}
