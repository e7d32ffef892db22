//! The scenarios by name: what each runs in the guest, with what, and its time limit.

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
    /// Whether it always runs, or only when it is named.
    pub always: bool,
}

/// Every scenario, in the order in which they begin.
pub const ALL: &[Scenario] = &[
    // Fails if the guest lacks something that every claim needs; then nothing else here means anything.
    Scenario {
        name: "doctor",
        program: Program::Own("trellis"),
        arguments: &["doctor"],
        modules: &["btrfs"],
        limit_s: 30,
        always: true,
    },
    // Fails if a mounted filesystem does not grow rung by rung to exactly what fits, loses a byte, or is damaged.
    Scenario {
        name: "ladder",
        program: Program::Own("guest-scenario"),
        arguments: &["ladder", "ext4", "ext3", "xfs", "btrfs"],
        modules: &["btrfs"],
        limit_s: 300,
        always: true,
    },
    // Fails if one way of growing a volume in one kind of use does not end at exactly the size, is not held where it
    // should be, loses a byte, or leaves a damaged filesystem.
    Scenario {
        name: "matrix-ext4",
        program: Program::Own("guest-scenario"),
        arguments: &["matrix", "ext4"],
        modules: &[],
        limit_s: 1200,
        always: true,
    },
    Scenario {
        name: "matrix-ext3",
        program: Program::Own("guest-scenario"),
        arguments: &["matrix", "ext3"],
        modules: &[],
        limit_s: 1200,
        always: true,
    },
    Scenario {
        name: "matrix-xfs",
        program: Program::Own("guest-scenario"),
        arguments: &["matrix", "xfs"],
        modules: &[],
        limit_s: 1200,
        always: true,
    },
    Scenario {
        name: "matrix-btrfs",
        program: Program::Own("guest-scenario"),
        arguments: &["matrix", "btrfs"],
        modules: &["btrfs"],
        limit_s: 1200,
        always: true,
    },
    // Fails if a growth makes a write or a read fail that goes on meanwhile, or changes what was written.
    Scenario {
        name: "load-ext4",
        program: Program::Own("guest-scenario"),
        arguments: &["load", "ext4"],
        modules: &[],
        limit_s: 120,
        always: true,
    },
    Scenario {
        name: "load-ext3",
        program: Program::Own("guest-scenario"),
        arguments: &["load", "ext3"],
        modules: &[],
        limit_s: 120,
        always: true,
    },
    Scenario {
        name: "load-xfs",
        program: Program::Own("guest-scenario"),
        arguments: &["load", "xfs"],
        modules: &[],
        limit_s: 120,
        always: true,
    },
    Scenario {
        name: "load-btrfs",
        program: Program::Own("guest-scenario"),
        arguments: &["load", "btrfs"],
        modules: &["btrfs"],
        limit_s: 120,
        always: true,
    },
    // Fails if one of the tests that the machine itself runs behaves differently where the kernel allows more:
    // there the growth of a mounted ext3 and ext4 is refused, here it works. What takes a minute in here and has
    // nothing to do with that is left out.
    Scenario {
        name: "node-growth",
        program: Program::Test("growth"),
        arguments: &["--skip", "a_full_filesystem_grows"],
        modules: &["btrfs"],
        limit_s: 240,
        always: true,
    },
    Scenario {
        name: "node-refusal",
        program: Program::Test("refusal"),
        arguments: &["--skip", "an_outgrown_xfs"],
        modules: &["btrfs"],
        limit_s: 240,
        always: true,
    },
    // Fails if a request that a killed server of a volume had taken is lost, fails or is done when it must not be, on a
    // kernel that cannot deliver requests again (Debian's 6.1).
    Scenario {
        name: "node-fuse-death",
        program: Program::Test("fuse_death"),
        arguments: &["--test-threads", "1"],
        modules: &[],
        limit_s: 300,
        always: true,
    },
    // Fails if Linux's own iSCSI initiator does not get, from our target, what it writes, the size that a volume has grown
    // to on the session that it has, and zeros where it gave space back; or if the target takes a wrong proof.
    Scenario {
        name: "initiator",
        program: Program::Own("guest-scenario"),
        arguments: &["initiator"],
        modules: &["iscsi_tcp", "sd_mod"],
        limit_s: 240,
        always: true,
    },
    // Fails if a claim of three copies that comes by Linux's own initiator does not mount, grow while it is written to and
    // while nobody uses it, survive the death of its target and of the service at every step of the disk, or leave
    // nothing behind.
    Scenario {
        name: "copies",
        program: Program::Own("guest-scenario"),
        arguments: &["copies", "ext4"],
        modules: &["iscsi_tcp", "sd_mod", "fuse"],
        limit_s: 600,
        always: true,
    },
    Scenario {
        name: "copies-xfs",
        program: Program::Own("guest-scenario"),
        arguments: &["copies", "xfs"],
        modules: &["iscsi_tcp", "sd_mod", "fuse"],
        limit_s: 600,
        always: false,
    },
    // Prints how long the filesystem rung takes beside the bare ioctl and the filesystem's own program.
    Scenario {
        name: "rung",
        program: Program::Own("guest-scenario"),
        arguments: &["rung", "ext4", "ext3", "xfs", "btrfs"],
        modules: &["btrfs"],
        limit_s: 900,
        always: false,
    },
    // Fails as the matrix does; here in its whole extent, which takes very long on this processor.
    Scenario {
        name: "matrix-ext4-all",
        program: Program::Own("guest-scenario"),
        arguments: &["matrix-all", "ext4"],
        modules: &[],
        limit_s: 7200,
        always: false,
    },
    Scenario {
        name: "matrix-ext3-all",
        program: Program::Own("guest-scenario"),
        arguments: &["matrix-all", "ext3"],
        modules: &[],
        limit_s: 7200,
        always: false,
    },
    Scenario {
        name: "matrix-xfs-all",
        program: Program::Own("guest-scenario"),
        arguments: &["matrix-all", "xfs"],
        modules: &[],
        limit_s: 7200,
        always: false,
    },
    Scenario {
        name: "matrix-btrfs-all",
        program: Program::Own("guest-scenario"),
        arguments: &["matrix-all", "btrfs"],
        modules: &["btrfs"],
        limit_s: 7200,
        always: false,
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
