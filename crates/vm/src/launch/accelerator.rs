//! Whether this machine's processor can run guests itself, found out by running one.
//!
//! That `/dev/kvm` exists proves nothing. A machine that is virtual itself may offer one that runs firmware and a
//! boot sector, and hangs with the first kernel. So the probe ([`BOOT_SECTOR`], the source is `probe.s`) does what a
//! kernel does first: its own page tables, an exception, timer interrupts, user mode. A few bytes that merely end the
//! machine would pass where no kernel does.
//!
//! What it cannot prove: that every instruction of every kernel works. It is one second of truth, not a guarantee.

use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use trellis_node::exec::Program;

use super::{PROGRAM, RunAs};
use crate::error::{Context, Error, Result};

/// How long the probe may take. With a working accelerator it takes less than a second.
const PROBE_TIME_MAX: Duration = Duration::from_secs(10);
/// QEMU's exit status after the probe has written its value: twice that, and one.
const PROBE_EXIT: i32 = 0x2a * 2 + 1;
/// The size of the disk that the probe boots from; firmware does not like smaller ones.
const PROBE_DISK_BYTES: usize = 1 << 20;
const SECTOR_BYTES: usize = 512;
/// `setpriv` ends QEMU with us and gives up rights, so a probe that hangs outlives nobody.
const SETPRIV: Program = Program {
    name: "setpriv",
    package: "util-linux",
};

/// How instructions are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// By the processor itself, with the kernel's help.
    Kvm,
    /// By QEMU, an order of magnitude slower, everywhere.
    Tcg,
}

impl Accelerator {
    pub(super) fn argument(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg,thread=multi",
        }
    }

    pub(super) fn processor(self) -> &'static str {
        match self {
            Accelerator::Kvm => "host",
            Accelerator::Tcg => "max",
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        })
    }
}

/// Why a machine runs with the accelerator that it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// The probe ran to its end.
    ProbePassed,
    /// There is no device, or no right to use it.
    NoDevice,
    /// The probe did not reach its end in time.
    ProbeHung {
        /// The time that it had.
        limit: Duration,
    },
    /// QEMU or the probe ended in another way.
    ProbeFailed {
        /// The end of what QEMU said.
        said: String,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::ProbePassed => out.write_str("kvm ran a small guest to its end"),
            Why::NoDevice => {
                out.write_str("/dev/kvm cannot be opened, so QEMU emulates the processor")
            }
            Why::ProbeHung { limit } => write!(
                out,
                "/dev/kvm is there but hung a small guest for {limit:?}, so QEMU emulates the processor"
            ),
            Why::ProbeFailed { said } => write!(
                out,
                "/dev/kvm is there but failed with a small guest ({said}), so QEMU emulates the processor"
            ),
        }
    }
}

/// The accelerator to use, and why. It may take seconds and blocks the thread; ask once, and on a thread for that.
///
/// `dir` is a directory in which the probe's disk can be put for a moment, readable for `user`.
pub fn choose(dir: &Path, user: Option<RunAs>) -> Result<(Accelerator, Why)> {
    if fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_err()
    {
        return Ok((Accelerator::Tcg, Why::NoDevice));
    }
    let why = probe(Accelerator::Kvm, dir, user)?;
    let chosen = match why {
        Why::ProbePassed => Accelerator::Kvm,
        _ => Accelerator::Tcg,
    };
    Ok((chosen, why))
}

/// Runs the probe with an accelerator.
pub fn probe(accelerator: Accelerator, dir: &Path, user: Option<RunAs>) -> Result<Why> {
    let disk = ProbeDisk::make(dir)?;
    let mut arguments = vec!["--pdeathsig".to_owned(), "KILL".to_owned()];
    if let Some(user) = user {
        arguments.extend([
            format!("--reuid={}", user.uid),
            format!("--regid={}", user.gid),
            "--clear-groups".to_owned(),
        ]);
    }
    let file = disk.0.to_str().unwrap_or_default().replace(',', ",,");
    let drive = format!("if=none,id=probe,format=raw,readonly=on,file={file}");
    arguments.extend(
        [
            PROGRAM,
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
            "-display",
            "none",
            "-machine",
            "q35",
            "-m",
            "16",
            "-accel",
            accelerator.argument(),
            "-cpu",
            accelerator.processor(),
            "-device",
            "isa-debug-exit,iobase=0xf4,iosize=1",
            "-device",
            "virtio-blk-pci,drive=probe",
            "-drive",
            &drive,
        ]
        .map(str::to_owned),
    );
    match SETPRIV.run(&arguments, PROBE_TIME_MAX) {
        Err(trellis_node::Error::ProgramFailed { status, .. })
            if status.code() == Some(PROBE_EXIT) =>
        {
            Ok(Why::ProbePassed)
        }
        Err(trellis_node::Error::ProgramFailed { output, status, .. }) => Ok(Why::ProbeFailed {
            said: format!("{status}: {output}"),
        }),
        // A guest that merely switches itself off has not run the probe to its end.
        Ok(output) => Ok(Why::ProbeFailed {
            said: output.stderr,
        }),
        Err(trellis_node::Error::ProgramTimedOut { limit, .. }) => Ok(Why::ProbeHung { limit }),
        Err(source) => Err(Error::Probe { source }),
    }
}

/// The probe's disk, which goes when this does.
struct ProbeDisk(PathBuf);

impl ProbeDisk {
    fn make(dir: &Path) -> Result<ProbeDisk> {
        // Two probes at a time write the same bytes, each under its own name.
        let unique = format!(
            "probe-{}-{:?}.img",
            std::process::id(),
            std::thread::current().id()
        );
        let path = dir.join(unique.replace(['(', ')'], ""));
        let mut bytes = vec![0; PROBE_DISK_BYTES];
        bytes[..BOOT_SECTOR.len()].copy_from_slice(&BOOT_SECTOR);
        bytes[SECTOR_BYTES - 2..SECTOR_BYTES].copy_from_slice(&[0x55, 0xaa]);
        fs::write(&path, bytes).context("write", &path)?;
        let disk = ProbeDisk(path);
        fs::set_permissions(&disk.0, fs::Permissions::from_mode(0o644))
            .context("make readable", &disk.0)?;
        Ok(disk)
    }
}

impl Drop for ProbeDisk {
    fn drop(&mut self) {
        // A file of a mebibyte that stays does no harm.
        let _ = fs::remove_file(&self.0);
    }
}

/// What `probe.s` says, assembled. A test assembles it again and compares.
#[rustfmt::skip]
const BOOT_SECTOR: [u8; 480] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0x8e, 0xd8, 0xfc, 0xb8, 0x00, 0x10, 0x8e, 0xc0,
    0x31, 0xff, 0x66, 0x31, 0xc0, 0xb9, 0x00, 0x18, 0x66, 0xf3, 0xab, 0x26, 0xc7, 0x06, 0x00, 0x00,
    0x07, 0x10, 0x26, 0xc7, 0x06, 0x02, 0x00, 0x01, 0x00, 0x26, 0xc7, 0x06, 0x00, 0x10, 0x07, 0x20,
    0x26, 0xc7, 0x06, 0x02, 0x10, 0x01, 0x00, 0x26, 0xc7, 0x06, 0x00, 0x20, 0x87, 0x00, 0x26, 0xc7,
    0x06, 0x00, 0x30, 0x07, 0x40, 0x26, 0xc7, 0x06, 0x02, 0x30, 0x01, 0x00, 0x26, 0xc7, 0x06, 0x00,
    0x40, 0x07, 0x50, 0x26, 0xc7, 0x06, 0x02, 0x40, 0x01, 0x00, 0x26, 0xc7, 0x06, 0x00, 0x50, 0x87,
    0x00, 0x66, 0x0f, 0x01, 0x16, 0xd0, 0x7d, 0x66, 0xb8, 0xa0, 0x00, 0x00, 0x00, 0x0f, 0x22, 0xe0,
    0x66, 0xb8, 0x00, 0x00, 0x01, 0x00, 0x0f, 0x22, 0xd8, 0x66, 0xb9, 0x80, 0x00, 0x00, 0xc0, 0x0f,
    0x32, 0x0d, 0x01, 0x01, 0x0f, 0x30, 0x0f, 0x20, 0xc0, 0x66, 0x0d, 0x01, 0x00, 0x00, 0x80, 0x0f,
    0x22, 0xc0, 0x66, 0xea, 0x9a, 0x7c, 0x00, 0x00, 0x08, 0x00, 0xb8, 0x10, 0x00, 0x00, 0x00, 0x8e,
    0xd8, 0x8e, 0xc0, 0x8e, 0xd0, 0xbf, 0x00, 0x00, 0x02, 0x00, 0xb9, 0x00, 0x01, 0x00, 0x00, 0xba,
    0x6b, 0x7d, 0x00, 0x00, 0x80, 0xf9, 0xfa, 0x75, 0x05, 0xba, 0x57, 0x7d, 0x00, 0x00, 0x80, 0xf9,
    0xe0, 0x75, 0x05, 0xba, 0x63, 0x7d, 0x00, 0x00, 0x89, 0xd0, 0x0d, 0x00, 0x00, 0x08, 0x00, 0xab,
    0xb8, 0x00, 0xee, 0x00, 0x00, 0xab, 0x31, 0xc0, 0xab, 0xab, 0xe2, 0xd3, 0x0f, 0x01, 0x1c, 0x25,
    0xd6, 0x7d, 0x00, 0x00, 0xc7, 0x04, 0x25, 0x04, 0x00, 0x03, 0x00, 0x00, 0x70, 0x00, 0x00, 0xc7,
    0x04, 0x25, 0x08, 0x00, 0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0xb8, 0x28, 0x00, 0x00, 0x00, 0x0f,
    0x00, 0xd8, 0x31, 0xdb, 0x0f, 0x0b, 0x83, 0xfb, 0x06, 0x75, 0x49, 0xb8, 0x00, 0x30, 0x01, 0x00,
    0x0f, 0x22, 0xd8, 0x0f, 0x01, 0x3c, 0x25, 0x00, 0x7c, 0x00, 0x00, 0xbe, 0x7d, 0x7d, 0x00, 0x00,
    0xb9, 0x0c, 0x00, 0x00, 0x00, 0x0f, 0xb6, 0x16, 0x8a, 0x46, 0x01, 0xee, 0x83, 0xc6, 0x02, 0xe2,
    0xf4, 0x31, 0xdb, 0xfb, 0xf4, 0xfa, 0x83, 0xfb, 0x03, 0x72, 0xf8, 0x6a, 0x23, 0x68, 0x00, 0x60,
    0x00, 0x00, 0x6a, 0x02, 0x6a, 0x1b, 0x68, 0x4d, 0x7d, 0x00, 0x00, 0x48, 0xcf, 0xbb, 0x33, 0x00,
    0x00, 0x00, 0xcd, 0x80, 0xf4, 0xeb, 0xfd, 0xbb, 0x06, 0x00, 0x00, 0x00, 0x48, 0x83, 0x04, 0x24,
    0x02, 0x48, 0xcf, 0xff, 0xc3, 0xb0, 0x20, 0xe6, 0x20, 0x48, 0xcf, 0x83, 0xfb, 0x33, 0x75, 0xe4,
    0xf6, 0x44, 0x24, 0x08, 0x03, 0x74, 0xdd, 0xb0, 0x2a, 0xe6, 0xf4, 0xeb, 0xd7, 0x20, 0x11, 0xa0,
    0x11, 0x21, 0x20, 0xa1, 0x28, 0x21, 0x04, 0xa1, 0x02, 0x21, 0x01, 0xa1, 0x01, 0x21, 0xfe, 0x43,
    0x34, 0x40, 0xa9, 0x40, 0x04, 0x0f, 0x1f, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x9a, 0x20, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x92, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0xfa, 0x20, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xf2, 0x00, 0x00,
    0x67, 0x00, 0x00, 0x00, 0x03, 0x89, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x37, 0x00, 0x98, 0x7d, 0x00, 0x00, 0xff, 0x0f, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00,
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_bytes_of_the_probe_are_those_of_its_source() {
        // Fails if probe.s was changed and the bytes were not, or the other way round.
        let dir = tempfile::tempdir().unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/launch/probe.s");
        let (object, binary) = (dir.path().join("o"), dir.path().join("b"));
        let assembled = Command::new("as")
            .args(["--64", "-o"])
            .arg(&object)
            .arg(source)
            .status();
        assert!(assembled.unwrap().success());
        let linked = Command::new("ld")
            .args(["-Ttext", "0x7c00", "--oformat", "binary", "-o"])
            .args([&binary, &object])
            .status();
        assert!(linked.unwrap().success());
        let mut expected = BOOT_SECTOR.to_vec();
        expected.resize(SECTOR_BYTES - 2, 0);
        expected.extend([0x55, 0xaa]);
        assert_eq!(fs::read(&binary).unwrap(), expected);
    }

    #[test]
    fn an_emulated_processor_passes_the_probe() {
        // Fails if the probe asks for what a working processor cannot do: kvm would then never be chosen.
        let dir = tempfile::tempdir().unwrap();
        let why = probe(Accelerator::Tcg, dir.path(), None).unwrap();
        assert_eq!(why, Why::ProbePassed);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_guest_that_hangs_is_not_taken_for_one_that_runs() {
        // Fails if the choice says kvm where the probe did not pass, or if its reason is none.
        let dir = tempfile::tempdir().unwrap();
        let (chosen, why) = choose(dir.path(), None).unwrap();
        println!("{chosen}: {why}");
        assert_eq!(chosen == Accelerator::Kvm, why == Why::ProbePassed);
        assert!(why.to_string().contains("kvm"));
    }
}
