//! The run in which volumes were brought into use: that of the kernel, unless `trellis down --all` ends it earlier.
//!
//! If something was in use in this run and is gone, somebody took it away, and it is held. `trellis down --all` takes
//! everything away itself, as a restart of the machine does, and that must not look the same. So it begins the next run
//! before it unmounts anything. If it dies halfway, the service brings back what is gone and finds what is still there.

use std::path::{Path, PathBuf};

use uuid::Uuid;

/// Where the kernel identifies its present run.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The file in the data directory that identifies the present run.
fn file(data: &Path) -> PathBuf {
    data.join("incarnation")
}

/// The present run. If it is not known, it counts as a new one: what is missing is brought back, not held.
pub fn present(data: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let kernel = std::fs::read_to_string(BOOT_ID)?;
        let ours = trellis_files::read_whole(&file(data), |_| true)?;
        let ours = ours.map(|ours| format!("/{ours}")).unwrap_or_default();
        Ok(format!("{}{ours}", kernel.trim()))
    };
    read().unwrap_or_else(|error| {
        tracing::warn!(%error, "it is not known whether what is missing was taken away");
        Uuid::new_v4().to_string()
    })
}

/// Whether `down --all` or `restore` has ended that run. A run that ended with the kernel's own is not recognized.
pub fn is_over(data: &Path, run: &str) -> bool {
    let ours = trellis_files::read_whole(&file(data), |_| true);
    let ours = ours.ok().flatten();
    ours.is_some_and(|ours| !run.ends_with(&format!("/{ours}")))
}

/// Begins another run, durably.
pub fn begin(data: &Path) -> std::io::Result<()> {
    trellis_files::replace(&file(data), Uuid::new_v4().to_string().as_bytes())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    // Fails if the run changes by itself, which would bring back what somebody has taken away, or does not change when
    // another one begins.
    #[test]
    fn a_run_lasts_until_another_one_begins() {
        let data = tempfile::tempdir().unwrap();
        let first = present(data.path());
        assert_eq!(present(data.path()), first);
        assert_eq!(
            first,
            std::fs::read_to_string(BOOT_ID).unwrap().trim(),
            "what earlier versions have stored is still this run"
        );
        begin(data.path()).unwrap();
        let second = present(data.path());
        assert!(second.starts_with(&first) && second != first);
        assert!(!is_over(data.path(), &second) && is_over(data.path(), &first));
        begin(data.path()).unwrap();
        assert_ne!(present(data.path()), second);
    }
}
