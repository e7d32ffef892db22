//! Process 1 of the guest: mounts what a system has, loads modules, runs scenarios as the host asks for
//! them, cleans up after each, and switches the machine off.

mod clean;
mod execute;
mod system;

use std::fs::{self, File};
use std::io;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::system::RebootCommand;
use trellis_guest_tests::protocol::{Answer, PORT, Request, receive, send};
use trellis_guest_tests::qemu::SHELL;

/// How long the port may take to appear.
const PORT_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);

fn main() {
    if let Err(error) = live() {
        eprintln!("guest-init: {error}");
    }
    rustix::fs::sync();
    if let Err(error) = rustix::system::reboot(RebootCommand::PowerOff) {
        eprintln!("guest-init: the machine cannot be switched off: {error}");
    }
}

fn live() -> io::Result<()> {
    system::set_up()?;
    if fs::read_to_string("/proc/cmdline")?.contains(SHELL) {
        return shell();
    }
    let baseline = clean::Baseline::take()?;
    let port = open_port()?;
    let (mut from_host, to_host) = (port.try_clone()?, Mutex::new(port));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    tell(
        &to_host,
        &Answer::Ready {
            kernel: kernel.trim().to_owned(),
            uptime: uptime()?,
        },
    )?;
    while let Request::Run(order) = receive(&mut from_host)? {
        let ended = execute::execute(&order, &to_host, &baseline);
        tell(&to_host, &Answer::Ended(ended))?;
    }
    Ok(())
}

/// Sends an answer; what a scenario prints is sent from another thread.
fn tell(to_host: &Mutex<File>, answer: &Answer) -> io::Result<()> {
    let mut port = to_host
        .lock()
        .map_err(|_| io::Error::other("a thread that was sending has panicked"))?;
    send(&mut *port, answer)
}

/// The device of the port, which is known by its name.
fn open_port() -> io::Result<File> {
    let deadline = Instant::now() + PORT_LIMIT;
    while Instant::now() < deadline {
        for entry in fs::read_dir("/sys/class/virtio-ports")?.flatten() {
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            let device = std::path::Path::new("/dev").join(entry.file_name());
            if name.trim() == PORT && device.exists() {
                return File::options().read(true).write(true).open(device);
            }
        }
        std::thread::sleep(POLL);
    }
    Err(io::Error::other("the host's port does not appear"))
}

/// A person's shell on the console. It sees every module that a scenario may ask for.
fn shell() -> io::Result<()> {
    let greeting = "echo; echo 'The guest of the tests. /scratch has room for sparse files; insmod /lib/guest/X.ko loads a module; exit switches off.'";
    let mut child = Command::new("/bin/busybox")
        .args(["setsid", "-c", "/bin/busybox", "sh", "-c"])
        .arg(format!(
            "exec </dev/ttyS0 >/dev/ttyS0 2>&1; cd /scratch; {greeting}; exec /bin/sh"
        ))
        .envs(system::ENVIRONMENT)
        .env("TERM", "linux")
        .spawn()?;
    child.wait().map(drop)
}

fn uptime() -> io::Result<Duration> {
    let text = fs::read_to_string("/proc/uptime")?;
    let seconds = text.split_whitespace().next().unwrap_or_default().parse();
    let seconds: f64 = seconds.map_err(io::Error::other)?;
    Duration::try_from_secs_f64(seconds).map_err(io::Error::other)
}
