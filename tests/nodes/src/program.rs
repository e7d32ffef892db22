//! The program under test.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::ip::run;

/// Names the program, so that it is not built.
const NAMED: &str = "TRELLIS";

/// The file of `trellis`, built if it is not up to date.
pub fn trellis() -> Result<PathBuf> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if let Some(path) = std::env::var_os(NAMED) {
        return Ok(path.into());
    }
    if let Some(path) = BUILT.get() {
        return Ok(path.clone());
    }
    let path = build()?;
    Ok(BUILT.get_or_init(|| path).clone())
}

/// Cargo chooses the features of dependencies for all packages that it is told of. It is told of the whole workspace, as
/// in `make test`, so that nothing is built twice, and then of one test that needs the program.
fn build() -> Result<PathBuf> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    command.args([
        "test",
        "--workspace",
        "--no-run",
        "--quiet",
        "--test",
        "e2e",
    ]);
    command
        .arg("--message-format=json")
        .stderr(Stdio::inherit());
    let said = run(&mut command)?;
    let messages = said
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok());
    let mut programs = messages.filter(|message| {
        message.target.name == "trellis" && message.target.kind.iter().any(|kind| kind == "bin")
    });
    let program = programs.find_map(|message| message.executable);
    program.ok_or(Error::NotBuilt)
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
