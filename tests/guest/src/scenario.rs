//! The scenarios by name: what runs in the guest, with what, and for how long at most.

use std::time::Duration;

use crate::artifacts::Artifacts;
use crate::error::{Error, Result};
use crate::image::Image;
use crate::protocol::Order;

/// What a scenario runs.
#[derive(Clone, Copy, Debug)]
enum Program {
    /// A program of the workspace.
    Own(&'static str),
    /// An integration test of the workspace.
    Test(&'static str),
}

/// A scenario.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    program: Program,
    arguments: &'static [&'static str],
    /// Kernel modules that it needs beside those that are always there.
    modules: &'static [&'static str],
    limit_s: u64,
}

/// Every scenario, in the order in which they run.
pub const ALL: &[Scenario] = &[
    // Fails if the guest lacks something that every claim needs; then nothing else here means anything.
    Scenario {
        name: "doctor",
        program: Program::Own("trellis"),
        arguments: &["doctor"],
        modules: &["btrfs"],
        limit_s: 30,
    },
    // Fails if one of the tests that the machine itself runs behaves differently where the kernel allows more:
    // there the growth of a mounted ext3 and ext4 is refused, here it works.
    Scenario {
        name: "node-growth",
        program: Program::Test("growth"),
        arguments: &["--test-threads=2", "ext_growth"],
        modules: &["btrfs"],
        limit_s: 120,
    },
];

/// The scenario of that name.
pub fn named(name: &str) -> Result<Scenario> {
    let found = ALL.iter().find(|scenario| scenario.name == name);
    found.copied().ok_or_else(|| Error::NoScenario {
        name: name.to_owned(),
        known: ALL.iter().map(|each| each.name.to_owned()).collect(),
    })
}

impl Scenario {
    /// The scenario as the guest is told of it.
    pub fn order(&self, artifacts: &Artifacts, image: &Image) -> Result<Order> {
        let program = match self.program {
            Program::Own(name) => artifacts.program(name)?,
            Program::Test(name) => artifacts.test(name)?,
        };
        let trellis = artifacts.program("trellis")?;
        Ok(Order {
            name: self.name.to_owned(),
            program: program.to_owned(),
            arguments: self.arguments.iter().map(|&each| each.to_owned()).collect(),
            environment: vec![
                ("RUST_BACKTRACE".to_owned(), "1".to_owned()),
                ("TRELLIS".to_owned(), trellis.display().to_string()),
            ],
            modules: image.module_files(self.modules)?,
            limit: Duration::from_secs(self.limit_s),
        })
    }
}
