//! Where the processes of a volume have their sockets, locks and logs.

use std::path::{Path, PathBuf};

/// The longest path that a socket can have.
const SOCKET_PATH_MAX: usize = 107;

/// The run directory of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// The directory of the volume of that name, below the run directory of the node.
    pub fn of(run: &Path, volume: &str) -> RunDir {
        RunDir(run.join(volume))
    }

    /// The directory that a process was told of.
    pub fn at(path: PathBuf) -> RunDir {
        RunDir(path)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes it, for this user alone.
    pub fn make(&self) -> std::io::Result<()> {
        trellis_files::make_directory(&self.0)
    }

    /// Where the FUSE file is mounted.
    pub fn file(&self) -> PathBuf {
        self.0.join("file")
    }

    /// What the target is told at its start.
    pub fn target_settings(&self) -> PathBuf {
        self.0.join("target.json")
    }

    /// The port at which the volume was last served.
    pub fn port(&self) -> PathBuf {
        self.0.join("port")
    }

    /// What an initiator must know to use the volume by iSCSI; its user is the volume's name. The agent writes it.
    pub fn secret(&self) -> PathBuf {
        self.0.join("secret")
    }

    /// What the target proves to an initiator, if the volume asks for that.
    pub fn target_secret(&self) -> PathBuf {
        self.0.join("target-secret")
    }

    /// The term of another target that the copies have followed instead of the one here.
    pub fn outbid(&self) -> PathBuf {
        self.0.join("outbid")
    }

    /// When the copies were last compared with the sums of their blocks, and what was found.
    pub fn scrubbed(&self) -> PathBuf {
        self.0.join("scrubbed")
    }

    /// The process with that name: `target`, or the number of a copy.
    pub fn process(&self, name: &str) -> ProcessPaths {
        let path = |kind: &str| self.0.join(format!("{name}.{kind}"));
        ProcessPaths {
            socket: path("sock"),
            deaf_socket: path("new"),
            lock: path("lock"),
            log: path("log"),
            settings: path("json"),
            control: path("ctl"),
            deaf_control: path("ctl-new"),
            link: path("link"),
        }
    }
}

/// The files of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessPaths {
    /// Where it listens.
    pub socket: PathBuf,
    /// The socket's name until it listens: a client that sees the real name can connect.
    pub deaf_socket: PathBuf,
    /// Locked as long as it lives; holds its pid.
    pub lock: PathBuf,
    /// What it says.
    pub log: PathBuf,
    /// What a copy is told about other nodes, for its next start.
    pub settings: PathBuf,
    /// Where a copy is told about other nodes, and asked who was refused.
    pub control: PathBuf,
    /// The name of that socket until it listens.
    pub deaf_control: PathBuf,
    /// Where other nodes reached the copy last.
    pub link: PathBuf,
}

impl ProcessPaths {
    /// Whether the socket can have that path.
    pub fn fits(&self) -> bool {
        let longest = self.socket.as_os_str().len();
        longest.max(self.deaf_control.as_os_str().len()) <= SOCKET_PATH_MAX
    }
}

/// The short name of a copy's process: what its name has beyond that of its volume.
pub fn copy_name<'a>(volume: &str, replica: &'a str) -> &'a str {
    let rest = replica.strip_prefix(volume);
    rest.and_then(|rest| rest.strip_prefix('-'))
        .unwrap_or(replica)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if two copies of a volume share their files, or a usual path does not fit a socket.
    #[test]
    fn every_process_has_files_of_its_own() {
        let volume = "pvc-0f6dbd05-6f1a-4f2f-8f2b-7f0f3b7a1c2d";
        let run = RunDir::of(Path::new("/var/lib/trellis/run"), volume);
        let (zero, one) = (format!("{volume}-0"), format!("{volume}-1"));
        let paths = [
            run.process(copy_name(volume, &zero)),
            run.process(copy_name(volume, &one)),
            run.process("target"),
        ];
        for (index, each) in paths.iter().enumerate() {
            assert!(each.fits());
            assert!(paths[index + 1..].iter().all(|other| other != each));
        }
        assert_eq!(copy_name("v", "other"), "other");
    }
}
