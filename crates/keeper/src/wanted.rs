//! The file that lists what must run.
//!
//! It is for the next keeper in the same run of the kernel. After a restart of the machine nothing is in use, and the
//! service says again what must run. So a file of an earlier run is not read, and no write of it has to reach the disk
//! before the keeper goes on: a keeper that waited for a busy disk would not notice that a process has died. The file
//! is replaced as a whole, so a killed keeper leaves the old one or the new one.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use trellis_api::step::{Step, reached};

use crate::message::Wanted;

/// Where the kernel tells its present run from all others.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The file.
#[derive(Debug)]
pub struct WantedFile {
    path: PathBuf,
    boot_id: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content {
    boot_id: String,
    processes: Vec<Wanted>,
}

impl WantedFile {
    /// The file of the keeper with that directory.
    pub fn of(directory: &Path) -> WantedFile {
        let boot_id = std::fs::read_to_string(BOOT_ID).unwrap_or_default();
        WantedFile {
            path: directory.join("wanted.json"),
            boot_id: boot_id.trim().to_owned(),
        }
    }

    /// What shall run; nothing if it was said in another run of the kernel.
    pub fn load(&self) -> Vec<Wanted> {
        let read = || -> io::Result<Content> {
            let text = std::fs::read(&self.path)?;
            Ok(serde_json::from_slice(&text)?)
        };
        match read() {
            Ok(content) if content.boot_id == self.boot_id => content.processes,
            Ok(_) => Vec::new(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                // The service says it again when it sees that a keeper has started.
                tracing::warn!(%error, path = %self.path.display(), "what shall run is not known");
                Vec::new()
            }
        }
    }

    /// Says it anew.
    pub fn store<'a>(&self, processes: impl Iterator<Item = &'a Wanted>) -> io::Result<()> {
        let content = Content {
            boot_id: self.boot_id.clone(),
            processes: processes.cloned().collect(),
        };
        let new = self.path.with_extension("new");
        std::fs::write(&new, serde_json::to_vec(&content)?)?;
        reached(Step::KeeperFileWritten);
        std::fs::rename(&new, &self.path)?;
        reached(Step::KeeperFileInPlace);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn wanted(name: &str) -> Wanted {
        Wanted {
            volume: "v".to_owned(),
            name: name.to_owned(),
            arguments: vec!["serve".into(), "--flag".into()],
        }
    }

    // Fails if what shall run is forgotten with the keeper, or if what ran before the machine was restarted is started
    // by itself, when pools may not be mounted yet.
    #[test]
    fn what_shall_run_is_known_until_the_machine_is_restarted() {
        let directory = tempfile::tempdir().unwrap();
        let mut file = WantedFile::of(directory.path());
        assert_eq!(file.load(), []);
        let both = [wanted("0"), wanted("target")];
        file.store(both.iter()).unwrap();
        assert_eq!(WantedFile::of(directory.path()).load(), both);
        file.boot_id = "another".to_owned();
        assert_eq!(file.load(), []);
        std::fs::write(directory.path().join("wanted.json"), "{\"boot").unwrap();
        assert_eq!(WantedFile::of(directory.path()).load(), []);
    }
}
