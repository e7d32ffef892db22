//! open-iscsi's daemon, with what it needs on a system that has nothing.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// The name of this machine's initiator.
pub const INITIATOR: &str = "iqn.2026-11.dev.trellis:initiator";
/// Where open-iscsi keeps what it knows of targets.
pub const RECORDS: &str = "/etc/iscsi/nodes";

const SETTINGS: &str = "/etc/iscsi";
const LOCKS: &str = "/run/lock";
/// Where iscsiadm reaches the daemon: a name without a file.
const SOCKET: &str = "@ISCSIADM_ABSTRACT_NAMESPACE";
/// Anything that the kernel does by itself has happened by then.
const LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(10);

/// The running daemon. It ends with this, also in a panic.
pub struct Daemon {
    child: Child,
}

/// Writes what open-iscsi's programs read. A session whose target has died waits so long for it before it fails
/// what it was asked.
pub fn configure(patience: Duration) {
    fs::create_dir_all(SETTINGS).unwrap();
    fs::create_dir_all(LOCKS).unwrap();
    let name = format!("InitiatorName={INITIATOR}\n");
    fs::write(Path::new(SETTINGS).join("initiatorname.iscsi"), name).unwrap();
    let seconds = patience.as_secs();
    let patience = format!("node.session.timeo.replacement_timeout = {seconds}\n");
    fs::write(Path::new(SETTINGS).join("iscsid.conf"), patience).unwrap();
}

impl Daemon {
    /// Starts it and waits until it can be asked.
    pub fn start() -> Daemon {
        // It ends its whole process group when it ends.
        let mut command = Command::new("/usr/sbin/iscsid");
        let child = command.arg("-f").process_group(0).spawn().unwrap();
        let daemon = Daemon { child };
        wait("iscsid", || {
            let sockets = fs::read_to_string("/proc/net/unix").unwrap();
            sockets.contains(SOCKET)
        });
        daemon
    }

    /// Ends it as a service manager would.
    pub fn stop(mut self) {
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        wait("the end of iscsid", || {
            self.child.try_wait().unwrap().is_some()
        });
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(SETTINGS);
    }
}

/// Waits for something that happens soon.
pub fn wait(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !happened() {
        assert!(Instant::now() < deadline, "no sign of {what}");
        std::thread::sleep(POLL);
    }
}
