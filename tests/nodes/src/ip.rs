//! Running programs, above all `ip`, which changes the network.

use std::process::{Command, Output};

use crate::error::{Error, Result};

/// Runs `ip` with these words.
pub(crate) fn ip(words: &str) -> Result<String> {
    run(Command::new("ip").args(words.split_whitespace()))
}

/// Runs `ip` in a namespace.
pub(crate) fn ip_in(namespace: &str, words: &str) -> Result<String> {
    ip(&format!("-n {namespace} {words}"))
}

/// Runs a program that must succeed; what it printed.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let answer = command.output();
    let Output {
        status,
        stdout,
        stderr,
    } = answer.map_err(|source| Error::NoProgram { program, source })?;
    if !status.success() {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
        return Err(Error::Failed {
            command: words.join(" "),
            status,
            said: String::from_utf8_lossy(&stderr).into_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}
