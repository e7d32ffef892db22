//! The programs that run in the guest, as cargo builds them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::workspace;

/// Integration tests that are built: those that run in the guest, and those whose packages' programs do.
///
/// Cargo chooses the features of dependencies for all packages that it is told of. It is told of the whole
/// workspace, as in `make test`, so that nothing is built twice, and then of these targets, so that nothing
/// else is built.
const TESTS: [&str; 5] = ["e2e", "fuse_death", "growth", "guest", "refusal"];

/// What cargo has built.
#[derive(Clone, Debug)]
pub struct Artifacts {
    programs: BTreeMap<String, PathBuf>,
    tests: BTreeMap<String, PathBuf>,
}

impl Artifacts {
    /// Has cargo build what is not built yet.
    pub fn build() -> Result<Artifacts> {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.current_dir(workspace());
        command.args(["test", "--workspace", "--no-run", "--quiet"]);
        command.arg("--message-format=json");
        for test in TESTS {
            command.args(["--test", test]);
        }
        let output = command.stderr(Stdio::inherit()).output();
        let said = trellis_guest_parts::package::succeeded("cargo", output)?;
        let mut artifacts = Artifacts {
            programs: BTreeMap::new(),
            tests: BTreeMap::new(),
        };
        for line in said.lines() {
            let Ok(Message {
                target,
                executable: Some(path),
            }) = serde_json::from_str(line)
            else {
                continue;
            };
            match target.kind.first().map(String::as_str) {
                Some("bin") => artifacts.programs.insert(target.name, path),
                Some("test") => artifacts.tests.insert(target.name, path),
                _ => None,
            };
        }
        Ok(artifacts)
    }

    /// The program of that name.
    pub fn program(&self, name: &str) -> Result<&Path> {
        find(&self.programs, name)
    }

    /// The integration test of that name.
    pub fn test(&self, name: &str) -> Result<&Path> {
        find(&self.tests, name)
    }

    /// All of them but `guest-init`, which is packed by itself, and the test that runs the guest.
    pub fn for_guest(&self) -> impl Iterator<Item = &Path> {
        let programs = self.programs.iter().chain(&self.tests);
        programs
            .filter(|(name, _)| !["guest-init", "guest"].contains(&name.as_str()))
            .map(|(_, path)| path.as_path())
    }
}

fn find<'a>(among: &'a BTreeMap<String, PathBuf>, name: &str) -> Result<&'a Path> {
    let found = among.get(name).map(PathBuf::as_path);
    found.ok_or_else(|| Error::NotBuilt {
        name: name.to_owned(),
    })
}

#[derive(Deserialize)]
struct Message {
    target: Target,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}
