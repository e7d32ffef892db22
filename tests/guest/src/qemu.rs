//! The machine: QEMU, its console, its port and its disk.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use trellis_guest_parts::error::Context;
use trellis_guest_parts::package::succeeded;

use crate::error::{Error, Result};
use crate::image::Image;
use crate::protocol::PORT;

/// The guest's memory and processors.
const MEMORY_MIB: u32 = 2048;
const PROCESSORS: u32 = 2;
/// The size of the disk on which scenarios keep their files. It is a sparse file that is gone with the guest.
/// It is the largest number of whole tebibytes that a file on ext4 can have.
const SCRATCH_BYTES: u64 = 15 << 40;
/// The serial number by which the guest knows that disk.
pub const SCRATCH: &str = "scratch";
/// The word on the kernel's command line that asks for a shell.
pub const SHELL: &str = "trellis.shell";
/// How much of the console is shown when a guest has died.
const CONSOLE_TAIL_BYTES: u64 = 6000;
/// How long QEMU may take until it has opened its port.
const START_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);

/// A running machine. It is killed when this goes away, and when this process does.
pub struct Machine {
    child: Child,
    console: File,
    /// Its files, until it has opened them.
    dir: Option<TempDir>,
}

impl Machine {
    /// Starts a machine and answers its port.
    pub fn start(image: &Image) -> Result<(Machine, UnixStream)> {
        let dir = work_dir()?;
        let (socket, console_path) = (dir.path().join("port"), dir.path().join("console"));
        let listener = UnixListener::bind(&socket).context("listen at", &socket)?;
        listener
            .set_nonblocking(true)
            .context("listen at", &socket)?;
        File::create(&console_path).context("make", &console_path)?;
        let console = File::open(&console_path).context("open", &console_path)?;
        let mut command = command(image, dir.path(), "")?;
        command
            .arg("-serial")
            .arg(format!("file:{}", console_path.display()));
        command.args(["-device", "virtio-serial-pci"]);
        command.arg("-chardev");
        command.arg(format!("socket,id=port,path={}", socket.display()));
        command.arg("-device");
        command.arg(format!("virtserialport,chardev=port,name={PORT}"));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let errors = File::options()
            .append(true)
            .open(&console_path)
            .context("open", &console_path)?;
        command.stderr(errors);
        let child = command.spawn().map_err(|source| Error::NoProgram {
            program: "setpriv",
            source,
        })?;
        let mut machine = Machine {
            child,
            console,
            dir: Some(dir),
        };
        let port = machine.connected(&listener)?;
        Ok((machine, port))
    }

    fn connected(&mut self, listener: &UnixListener) -> Result<UnixStream> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            if let Ok((port, _)) = listener.accept() {
                port.set_nonblocking(false)
                    .context("use", Path::new("the port"))?;
                return Ok(port);
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                let console = self.console_tail();
                return Err(Error::Stillborn { status, console });
            }
            if Instant::now() >= deadline {
                let console = self.console_tail();
                return Err(Error::Silent {
                    limit: START_LIMIT,
                    console,
                });
            }
            std::thread::sleep(POLL);
        }
    }

    /// Removes the machine's files. It has opened them, and from now on a sudden death of this process
    /// leaves nothing behind.
    pub fn forget_files(&mut self) {
        self.dir = None;
    }

    /// The last lines of the console, and what QEMU itself said.
    pub fn console_tail(&mut self) -> String {
        let mut bytes = Vec::new();
        let length = self.console.seek(SeekFrom::End(0)).unwrap_or(0);
        let from = length.saturating_sub(CONSOLE_TAIL_BYTES);
        if self.console.seek(SeekFrom::Start(from)).is_ok() {
            let _ = self.console.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until the machine has switched itself off, or kills it.
    pub fn finish(mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            std::thread::sleep(POLL);
        }
        None
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a machine with its console on this terminal until its shell ends.
pub fn shell(image: &Image) -> Result<ExitStatus> {
    let dir = work_dir()?;
    let mut command = command(image, dir.path(), SHELL)?;
    command.args(["-chardev", "stdio,id=terminal,signal=off"]);
    command.args(["-serial", "chardev:terminal"]);
    command.status().map_err(|source| Error::NoProgram {
        program: "setpriv",
        source,
    })
}

fn work_dir() -> Result<TempDir> {
    let dir = TempDir::with_prefix("trellis-guest-");
    Ok(dir.context("make a directory in", &std::env::temp_dir())?)
}

/// QEMU with all but its console and port.
///
/// The processor is emulated on purpose, also where there is a `/dev/kvm`: one that is there need not work,
/// and hangs the guest then. `setpriv` has the kernel kill QEMU when the thread that started it ends.
fn command(image: &Image, dir: &Path, more: &str) -> Result<Command> {
    let disk = dir.join("scratch");
    make_disk(&disk)?;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
    command.args([
        "-accel",
        "tcg,thread=multi",
        "-machine",
        "q35",
        "-cpu",
        "max",
    ]);
    command.args([
        "-smp",
        &PROCESSORS.to_string(),
        "-m",
        &MEMORY_MIB.to_string(),
    ]);
    command.args([
        "-display",
        "none",
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
    ]);
    command.arg("-kernel").arg(&image.kernel.image);
    command.arg("-initrd").arg(image.path());
    command.arg("-append");
    command.arg(format!(
        "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic {more}"
    ));
    command.args(["-device", "virtio-rng-pci", "-drive"]);
    // Nothing on this disk has to outlive the guest, so its flushes need not reach ours.
    command.arg(format!(
        "if=none,id=scratch,format=raw,cache=unsafe,discard=unmap,file={}",
        disk.display()
    ));
    command.arg("-device");
    command.arg(format!("virtio-blk-pci,drive=scratch,serial={SCRATCH}"));
    Ok(command)
}

/// A sparse disk with an xfs on it, which carries sparse files of a tebibyte with ease. It is made here,
/// where the processor is real.
fn make_disk(path: &Path) -> Result<()> {
    let file = File::create(path).context("make", path)?;
    file.set_len(SCRATCH_BYTES).context("extend", path)?;
    let output = Command::new("mkfs.xfs")
        .args(["-q", "-K", "-l", "size=64m"])
        .arg(path)
        .output();
    succeeded("mkfs.xfs", output)?;
    Ok(())
}
