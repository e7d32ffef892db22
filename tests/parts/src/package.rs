//! Debian packages that are downloaded once and unpacked, never installed: the guest's needs must not change the
//! machine that it runs on.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::error::{Context, Error, Result};
use crate::target;

/// The directory of that name with the content of the packages that `choose` names, from an earlier time if there was one.
///
/// It is made beside where it is kept, and moved there when it is whole, so that whoever else does the same finds all
/// of it or nothing.
pub fn unpacked(name: &str, choose: impl Fn() -> Result<Vec<String>>) -> Result<PathBuf> {
    let above = target().join("guest");
    let kept = above.join(name);
    if kept.is_dir() {
        return Ok(kept);
    }
    fs::create_dir_all(&above).context("make", &above)?;
    let work = tempfile::Builder::new()
        .prefix(&format!("{name}-"))
        .tempdir_in(&above)
        .context("make a directory in", &above)?;
    let download = || {
        let packages = choose()?;
        let mut arguments = vec!["download", "-qq"];
        arguments.extend(packages.iter().map(String::as_str));
        apt("apt-get", &arguments, work.path())
    };
    if download().is_err() {
        // There is no list yet, or it is older than what the mirror still has.
        apt("apt-get", &["update", "-qq"], work.path())?;
        download()?;
    }
    let unpacked = work.path().join("unpacked");
    let entries = fs::read_dir(work.path()).context("read", work.path())?;
    for entry in entries.flatten() {
        let archive = entry.path();
        if archive.extension() != Some(OsStr::new("deb")) {
            continue;
        }
        let arguments = [OsStr::new("-x"), archive.as_os_str(), unpacked.as_os_str()];
        succeeded(
            "dpkg-deb",
            Command::new("dpkg-deb").args(arguments).output(),
        )?;
    }
    match fs::rename(&unpacked, &kept) {
        Err(_) if kept.is_dir() => Ok(kept),
        moved => moved.context("keep packages as", &kept).map(|()| kept),
    }
}

/// What one of apt's programs printed.
pub fn apt(program: &'static str, arguments: &[&str], dir: &Path) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(dir)
        .output();
    succeeded(program, output)
}

/// What a program printed, if it succeeded.
pub fn succeeded(program: &'static str, output: std::io::Result<Output>) -> Result<String> {
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
