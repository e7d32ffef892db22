//! The guest's kernel: Debian's cloud kernel, downloaded once, unpacked, never installed.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::error::{Context, Error, Result};
use crate::target;

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
    let kept = target().join("guest/kernel");
    if !kept.is_dir() {
        fetch(&kept)?;
    }
    let image = only_entry(&kept.join("boot"), "vmlinuz-")?;
    let modules = only_entry(&kept.join("lib/modules"), "")?;
    Ok(Kernel { image, modules })
}

/// Downloads and unpacks the kernel beside where it is kept, and moves it there when it is whole, so that
/// whoever else does the same finds all of it or nothing.
fn fetch(kept: &Path) -> Result<()> {
    let above = kept.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(above).context("make", above)?;
    let work = tempfile::Builder::new()
        .prefix("kernel-")
        .tempdir_in(above)
        .context("make a directory in", above)?;
    let package = match newest() {
        Ok(package) => package,
        Err(_) => {
            apt("apt-get", &["update", "-qq"], work.path())?;
            newest()?
        }
    };
    if apt("apt-get", &["download", "-qq", &package], work.path()).is_err() {
        // The list may be older than what the mirror still has.
        apt("apt-get", &["update", "-qq"], work.path())?;
        apt("apt-get", &["download", "-qq", &newest()?], work.path())?;
    }
    let archive = only_entry(work.path(), "linux-image-")?;
    let unpacked = work.path().join("unpacked");
    let arguments = [OsStr::new("-x"), archive.as_os_str(), unpacked.as_os_str()];
    succeeded(
        "dpkg-deb",
        Command::new("dpkg-deb").args(arguments).output(),
    )?;
    match fs::rename(&unpacked, kept) {
        Err(_) if kept.is_dir() => Ok(()),
        moved => moved.context("keep the kernel as", kept),
    }
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

fn apt(program: &'static str, arguments: &[&str], dir: &Path) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(dir)
        .output();
    succeeded(program, output)
}

/// What a program printed, if it succeeded.
pub(crate) fn succeeded(program: &'static str, output: std::io::Result<Output>) -> Result<String> {
    let output = output.map_err(|source| Error::NoProgram { program, source })?;
    if !output.status.success() {
        return Err(Error::Failed {
            program,
            status: output.status,
            said: String::from_utf8_lossy(&output.stderr).into_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
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
