//! A service in a temporary directory, and what a person does with it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use trellis_api::Bytes;

/// How long anything may take that normally takes well under a second. Generous: it only bounds a
/// failing test, and the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// A running (or crashed) service and its directory.
pub struct Service {
    dir: TempDir,
    child: Option<Child>,
    /// Killed, and not waited for.
    dying: Vec<Child>,
    arguments: Vec<String>,
    machine: Machine,
    /// The file of the program.
    program: PathBuf,
    /// Whether the service is told what node it is.
    is_named: bool,
}

/// What a service runs on.
pub struct Machine {
    /// The data directory.
    pub data: PathBuf,
    /// The program that starts the service, with its arguments; none starts it directly.
    pub prefix: Vec<String>,
}

impl Service {
    /// Starts a service in a new directory with additional arguments, which it keeps over restarts.
    pub fn start_told(arguments: &[&str]) -> Service {
        let mut service = Service::prepare();
        service.arguments = arguments.iter().map(|each| (*each).to_owned()).collect();
        service.up(&[]);
        service
    }

    fn prepare() -> Service {
        let dir = tempfile::Builder::new()
            .prefix("trellis-e2e-")
            .tempdir()
            .unwrap();
        Service {
            machine: Machine {
                data: dir.path().join("data"),
                prefix: Vec::new(),
            },
            dir,
            child: None,
            dying: Vec::new(),
            arguments: Vec::new(),
            program: PathBuf::from(env!("CARGO_BIN_EXE_trellis")),
            is_named: true,
        }
    }

    /// A service on that machine, which is not started yet.
    pub fn on(machine: Machine) -> Service {
        let mut service = Service::prepare();
        service.machine = machine;
        service
    }

    /// A service in a new directory that is not started yet, and is another file of the program.
    pub fn of_program(name: &str) -> Service {
        let mut service = Service::prepare();
        service.program = service.path(name);
        service.install();
        service
    }

    /// Puts a new file of the program in the place of the service's own, as a package does.
    pub fn install(&self) {
        let new = self.program.with_extension("new");
        copy_program(&new);
        std::fs::rename(&new, &self.program).unwrap();
    }

    /// From the next start on the service is not told what node it is.
    pub fn forget_node(&mut self) {
        self.is_named = false;
    }

    /// Starts a service in a new directory.
    pub fn start() -> Service {
        Service::start_with(&[])
    }

    /// Starts a service in a new directory with additional environment.
    pub fn start_with(environment: &[(&str, &str)]) -> Service {
        let mut service = Service::prepare();
        service.up(environment);
        service
    }

    /// Starts the process and waits until it says that it is up, or has died.
    pub fn up(&mut self, environment: &[(&str, &str)]) {
        assert!(self.child.is_none(), "one service at a time");
        self.dying
            .retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
        let mut whole = self.machine.prefix.clone();
        whole.push(self.program.to_str().unwrap().to_owned());
        let mut command = Command::new(&whole[0]);
        command
            .args(&whole[1..])
            .arg("up")
            .arg("--data")
            .arg(self.data())
            .args(&self.arguments);
        if self.is_named {
            command.args(["--node", "test-node"]);
        }
        command
            .env_remove("KUBECONFIG")
            .envs(environment.iter().copied());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        if !line.contains("trellis is up") && child.wait().unwrap().signal() != Some(9) {
            let mut said = String::new();
            child
                .stderr
                .take()
                .unwrap()
                .read_to_string(&mut said)
                .unwrap();
            panic!("the service did not come up: {line}{said}");
        }
        self.child = Some(child);
    }

    /// The data directory.
    pub fn data(&self) -> PathBuf {
        self.machine.data.clone()
    }

    /// A path for the test's own use, such as a mount point.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The process of the service.
    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(self.child.as_ref().unwrap())
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            child.wait().unwrap();
        }
    }

    /// `kill -9`, without waiting until it is gone: it may be waiting in the kernel.
    pub fn kill_at_once(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            self.dying.push(child);
        }
    }

    /// Whether the process has died by SIGKILL; it is let go of if so.
    pub fn has_crashed(&mut self) -> bool {
        let Some(child) = &mut self.child else {
            return false;
        };
        let Some(status) = child.try_wait().unwrap() else {
            return false;
        };
        assert_eq!(
            status.signal(),
            Some(9),
            "the service ended by itself: {status}"
        );
        self.child = None;
        true
    }

    /// Stops the service as an init system would, and waits for it.
    pub fn stop(&mut self) {
        let mut child = self.child.take().unwrap();
        let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(
            child.wait().unwrap().success(),
            "a service that is told to stop ends well"
        );
    }

    /// Waits until the service has ended by itself, and well.
    pub fn ends(&mut self) {
        let mut child = self.child.take().unwrap();
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(Instant::now() < deadline, "the service does not end"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(status.success(), "{status}");
    }

    /// A verb, ready to run.
    pub fn verb(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .arg("--data")
            .arg(self.data())
            .env_remove("KUBECONFIG");
        command
    }

    /// Runs a verb.
    pub fn try_trellis(&self, arguments: &[&str]) -> Output {
        self.verb(arguments).output().unwrap()
    }

    /// Starts a verb that nobody listens to.
    pub fn start_trellis(&self, arguments: &[&str]) -> Child {
        let mut command = self.verb(arguments);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    }

    /// Runs a verb that must succeed, and answers what it printed.
    pub fn trellis(&self, arguments: &[&str]) -> String {
        said(
            &self.try_trellis(arguments),
            &format!("trellis {arguments:?}"),
        )
    }

    /// Runs stock kubectl with the written kubeconfig and nothing else.
    pub fn try_kubectl(&self, arguments: &[&str]) -> Output {
        self.kubectl_command(arguments)
            .output()
            .expect("kubectl is installed by `make setup`")
    }

    /// Stock kubectl, ready to run.
    pub fn kubectl_command(&self, arguments: &[&str]) -> Command {
        let mut command =
            Command::new(std::env::var("KUBECTL").unwrap_or_else(|_| "kubectl".to_owned()));
        command
            .args(arguments)
            .env("KUBECONFIG", self.data().join("kubeconfig"));
        command.env("HOME", self.dir.path());
        command
    }

    /// Runs kubectl, which must succeed, and answers what it printed.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        said(
            &self.try_kubectl(arguments),
            &format!("kubectl {arguments:?}"),
        )
    }

    /// Applies a manifest from memory.
    pub fn apply(&self, manifest: &str) -> String {
        let output = self.try_apply(manifest);
        said(&output, "kubectl apply")
    }

    /// Applies a manifest from memory, which may be refused.
    pub fn try_apply(&self, manifest: &str) -> Output {
        let mut command = self.kubectl_command(&["apply", "-f", "-"]);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .expect("kubectl is installed by `make setup`");
        child
            .stdin
            .take()
            .unwrap()
            .write_all(manifest.as_bytes())
            .unwrap();
        child.wait_with_output().unwrap()
    }

    /// An object as JSON; null if it does not exist.
    pub fn object(&self, kind: &str, name: &str) -> Value {
        let output = self.try_kubectl(&["get", kind, name, "-o", "json"]);
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// All objects of a kind.
    pub fn objects(&self, kind: &str) -> Vec<Value> {
        let list: Value =
            serde_json::from_str(&self.kubectl(&["get", kind, "-A", "-o", "json"])).unwrap();
        list["items"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until `check` answers something, and says `what` was waited for if it never does.
    pub fn wait<T>(&self, what: &str, mut check: impl FnMut(&Service) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(answer) = check(self) {
                return answer;
            }
            if Instant::now() >= deadline {
                panic!("gave up waiting for: {what}\n{}", self.everything());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until the claim is bound.
    pub fn wait_bound(&self, claim: &str) {
        self.wait(&format!("{claim} is bound"), |service| {
            (service.object("pvc", claim)["status"]["phase"] == "Bound").then_some(())
        });
    }

    /// Waits until the claim's status reports `size`.
    pub fn wait_size(&self, claim: &str, size: &str) {
        let wanted: Bytes = size.parse().unwrap();
        self.wait(&format!("{claim} has {size}"), |service| {
            let claim = service.object("pvc", claim);
            let has = claim["status"]["capacity"]["storage"].as_str()?;
            (has.parse() == Ok(wanted)).then_some(())
        });
    }

    /// Makes a claim and waits until it is bound.
    pub fn claim(&self, name: &str, class: &str, size: &str) {
        self.apply(&claim(name, class, size));
        self.wait_bound(name);
    }

    /// Mounts a claim below the test's directory.
    pub fn mount(&self, claim: &str) -> PathBuf {
        let path = self.path(&format!("mnt-{claim}"));
        self.trellis(&["mount", claim, path.to_str().unwrap()]);
        path
    }

    /// The data file of the only replica of a claim's volume.
    pub fn data_file(&self, claim: &str) -> PathBuf {
        let volume = self.object("pvc", claim)["spec"]["volumeName"]
            .as_str()
            .unwrap()
            .to_owned();
        let replicas = self.objects("replicas.trellis.dev");
        let replica = replicas
            .iter()
            .find(|each| each["spec"]["volume"] == volume.as_str())
            .unwrap();
        PathBuf::from(replica["status"]["path"].as_str().unwrap())
    }

    /// All that is stored, for the message of a failed test.
    pub fn everything(&self) -> String {
        let kinds = "pvc,pv,volumes.trellis.dev,targets.trellis.dev,replicas.trellis.dev,attachments.trellis.dev,pools.trellis.dev,events";
        let output = self.try_kubectl(&["get", kinds, "-A", "-o", "wide"]);
        format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
            if std::thread::panicking()
                && let Some(mut stderr) = child.stderr.take()
            {
                let mut said = String::new();
                let _ = stderr.read_to_string(&mut said);
                eprintln!("the service said: {said}");
            }
        }
        sweep(self.dir.path());
        kill_processes(&self.data());
        sweep(self.dir.path());
    }
}

/// Makes another file of the program. Another process does it: a child of another test that is just being started would
/// have the file open for writing, and it could not be executed.
pub fn copy_program(path: &Path) {
    let mut copy = Command::new("cp");
    let copied = copy.arg(env!("CARGO_BIN_EXE_trellis")).arg(path).status();
    assert!(copied.unwrap().success());
}

/// The processes of a data directory that outlive the service, the keeper first: it would start the others again.
pub fn processes(data: &Path) -> Vec<rustix::process::Pid> {
    let volumes = std::fs::read_dir(data.join("run")).into_iter().flatten();
    let directories = volumes.flatten().map(|volume| volume.path());
    let mut pids = Vec::new();
    for directory in std::iter::once(data.join("keeper")).chain(directories) {
        for file in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = file.path();
            if path.extension().is_none_or(|kind| kind != "lock") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let pid = text.trim().parse().ok();
            // What has ended leaves its number behind, which another process may have by now.
            let command = pid.map(|pid: i32| std::fs::read(format!("/proc/{pid}/cmdline")));
            let is_ours = matches!(command, Some(Ok(text)) if text.starts_with(b"trellis\0"));
            pids.extend(
                pid.filter(|_| is_ours)
                    .and_then(rustix::process::Pid::from_raw),
            );
        }
    }
    pids
}

/// Kills what serves volumes: these processes outlive the service, as they should.
pub fn kill_processes(data: &Path) {
    for pid in processes(data) {
        // A frozen one goes as well.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    std::thread::sleep(Duration::from_millis(100));
}

/// Unmounts and detaches whatever is left below `dir`.
pub fn sweep(dir: &Path) {
    abort_unserved(dir);
    for _ in 0..3 {
        for mount in mounts_below(dir).iter().rev() {
            let _ = Command::new("umount")
                .arg(mount)
                .stderr(Stdio::null())
                .status();
        }
        for device in loops_below(dir) {
            let _ = Command::new("losetup")
                .arg("-d")
                .arg(device)
                .stderr(Stdio::null())
                .status();
        }
    }
}

/// Ends the FUSE connections below `dir` whose file does not answer in time: whatever stands on them could not be taken
/// away, and the machine would stay as it is.
fn abort_unserved(dir: &Path) {
    for mount in trellis_node::sys::mountinfo::read().unwrap() {
        if !mount.mount_point.starts_with(dir) || !mount.fs_type.starts_with("fuse") {
            continue;
        }
        let file = mount.mount_point.join("volume");
        if answers(&["stat", file.to_str().unwrap()], Duration::from_secs(10)) {
            continue;
        }
        let control = tempfile::tempdir().unwrap();
        let mut mounting = Command::new("mount");
        mounting.args(["-t", "fusectl", "none"]).arg(control.path());
        if mounting.status().is_err() {
            continue;
        }
        let connection = control.path().join(mount.device.minor.to_string());
        eprintln!("nobody serves {}: ended", file.display());
        let _ = std::fs::write(connection.join("abort"), "1");
        let _ = Command::new("umount").arg(control.path()).status();
    }
}

/// Whether a program ends within that time, however it ends. One that does not is left behind.
pub fn answers(command: &[&str], limit: Duration) -> bool {
    let mut program = Command::new(command[0]);
    program.args(&command[1..]).stdin(Stdio::null());
    let mut child = program
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if child.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    // It may be waiting in the kernel, and is let go of when it gets through.
    std::thread::spawn(move || child.wait());
    false
}

/// Mount points below `dir`, in the order in which they were mounted.
pub fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let mounts = trellis_node::sys::mountinfo::read().unwrap();
    mounts
        .into_iter()
        .map(|mount| mount.mount_point)
        .filter(|path| path.starts_with(dir))
        .collect()
}

/// Loop devices on files below `dir`.
pub fn loops_below(dir: &Path) -> Vec<PathBuf> {
    // From sysfs, because a device on a file that nobody serves any more cannot be asked.
    let devices = std::fs::read_dir("/sys/block").unwrap().flatten();
    let on_file = |device: std::fs::DirEntry| {
        let file = std::fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        let below = Path::new(file.trim_end()).starts_with(dir);
        below.then(|| Path::new("/dev").join(device.file_name()))
    };
    devices.filter_map(on_file).collect()
}

/// A manifest of a claim; an empty class means the default one.
pub fn claim(name: &str, class: &str, size: &str) -> String {
    let class = if class.is_empty() {
        String::new()
    } else {
        format!("  storageClassName: {class}\n")
    };
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata:\n  name: {name}\nspec:\n{class}  accessModes: [ReadWriteOnce]\n  resources:\n    requests:\n      storage: {size}\n"
    )
}

/// A manifest of a class for one filesystem.
pub fn class(name: &str, filesystem: &str) -> String {
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: {name}\nprovisioner: trellis.dev\nallowVolumeExpansion: true\nparameters:\n  csi.storage.k8s.io/fstype: {filesystem}\n"
    )
}

/// What a program printed, if it succeeded.
pub fn said(output: &Output, what: &str) -> String {
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "{what} failed with {}:\n{stdout}{stderr}",
        output.status
    );
    stdout.into_owned()
}

/// Writes a file of pseudo-random bytes, durably, and answers its checksum.
pub fn write_file(path: &Path, bytes: usize, seed: u64) -> u32 {
    let mut state = seed | 1;
    let mut content = Vec::with_capacity(bytes);
    while content.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        content.extend_from_slice(&state.to_le_bytes());
    }
    content.truncate(bytes);
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(&content).unwrap();
    file.sync_all().unwrap();
    crc32c::crc32c(&content)
}

/// The checksum of a file.
pub fn checksum(path: &Path) -> u32 {
    crc32c::crc32c(&std::fs::read(path).unwrap())
}

/// Checks an unmounted filesystem in a file with its own program.
pub fn assert_clean(filesystem: &str, data: &Path) {
    let mut command = match filesystem {
        "xfs" => {
            let mut command = Command::new("xfs_repair");
            command.args(["-n", "-f"]);
            command
        }
        "btrfs" => {
            let mut command = Command::new("btrfs");
            command.args(["check", "--readonly"]);
            command
        }
        _ => {
            let mut command = Command::new("e2fsck");
            command.args(["-f", "-n"]);
            command
        }
    };
    said(
        &command.arg(data).output().unwrap(),
        &format!("checking the {filesystem} in {}", data.display()),
    );
}

/// The size of the filesystem mounted at a path, as the filesystem itself says.
pub fn filesystem_mib(path: &Path) -> u64 {
    let mounts = trellis_node::sys::mountinfo::read().unwrap();
    let mount = mounts
        .iter()
        .rev()
        .find(|mount| mount.mount_point == path)
        .expect("it is mounted");
    let kind = mount.fs_type.parse().unwrap();
    let geometry =
        trellis_node::filesystem::measure_mounted(kind, path, Path::new(&mount.source)).unwrap();
    geometry.size().get() >> 20
}
