//! The verbs about nodes, and the tokens that they make. `tests/nodes` has nodes that are apart.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use trellis_api::step::Step;

use crate::harness::{Service, checksum, claim, filesystem_mib, kill_processes, said, write_file};

const REFUSED: Option<i32> = Some(5);

/// Runs kubectl with another kubeconfig; what it printed, or what it complained of.
fn kubectl(service: &Service, config: &Path, arguments: &[&str]) -> Result<String, String> {
    let mut command = service.kubectl_command(arguments);
    let output = command.env("KUBECONFIG", config).output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    }
}

#[test]
fn a_node_is_added_gets_another_token_and_is_removed() {
    // Fails if a token works before it was made or after it was replaced, if others can read it, or if a node goes that
    // carries something.
    let service = Service::start();
    let config = service.path("b.kubeconfig");
    let add = [
        "node",
        "add",
        "b",
        "--kubeconfig-out",
        config.to_str().unwrap(),
    ];
    let added = service.try_trellis(&add);
    assert!(String::from_utf8_lossy(&added.stderr).contains("other machines cannot reach"));
    assert!(said(&added, "node add").contains("node b is added"));
    let mode = std::fs::metadata(&config).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let who = kubectl(&service, &config, &["auth", "whoami"]).unwrap();
    assert!(who.contains("system:node:b"), "{who}");
    assert_eq!(service.try_trellis(&add).status.code(), REFUSED);

    let other = service.path("other.kubeconfig");
    std::fs::write(&other, service.trellis(&["node", "add", "b", "--rotate"])).unwrap();
    assert!(kubectl(&service, &config, &["get", "nodes"]).is_err());
    assert!(kubectl(&service, &other, &["get", "nodes"]).is_ok());
    let misnamed = service.try_trellis(&["node", "add", "Not_A_Name"]);
    assert_eq!(misnamed.status.code(), REFUSED);

    let shown = service.trellis(&["node", "ls"]);
    let line = |name: &str| {
        let line = shown.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_default();
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        line("test-node"),
        ["test-node", "-", "no", "1", "0", "0", "0"]
    );
    assert_eq!(line("b"), ["b", "-", "yes", "0", "0", "0", "0"]);

    // The node that the service runs on is not removed by mistake.
    let own = service.try_trellis(&["node", "rm", "test-node"]);
    assert_eq!(own.status.code(), REFUSED);
    let use_of_b = "apiVersion: trellis.dev/v1alpha1\nkind: Attachment\nmetadata:\n  name: use\nspec:\n  claimName: none\n  node: b\n  consumer:\n    mount:\n      path: /mnt\n";
    let pool_of_b = "apiVersion: trellis.dev/v1alpha1\nkind: Pool\nmetadata:\n  name: of-b\n  finalizers: [trellis.dev/pool]\nspec:\n  node: b\n  path: /nowhere\n";
    service.apply(&format!("{use_of_b}---\n{pool_of_b}"));
    let refused = service.try_trellis(&["node", "rm", "b"]);
    assert_eq!(refused.status.code(), REFUSED);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("1 uses (use)"));
    assert!(kubectl(&service, &other, &["get", "nodes"]).is_ok());
    service.trellis(&["node", "rm", "b", "--force"]);
    assert!(kubectl(&service, &other, &["get", "nodes"]).is_err());
    assert!(service.object("pool", "of-b").is_null());
    assert!(service.object("node", "b").is_null());
    assert!(!service.object("attachment", "use").is_null());
    assert_eq!(
        service.try_trellis(&["node", "rm", "b"]).status.code(),
        Some(4)
    );
}

/// Another node on this machine: the node role in a process of its own, on a data directory of its own.
struct JoinedNode {
    agent: Child,
    data: PathBuf,
    config: PathBuf,
}

impl JoinedNode {
    fn join(service: &Service, name: &str) -> JoinedNode {
        JoinedNode::join_armed(service, name, None)
    }

    /// Joins with an agent that dies at a step, once.
    fn join_armed(service: &Service, name: &str, step: Option<Step>) -> JoinedNode {
        let config = service.path(&format!("{name}.kubeconfig"));
        let out = config.to_str().unwrap();
        service.trellis(&["node", "add", name, "--kubeconfig-out", out]);
        let data = service.path(name);
        JoinedNode {
            agent: JoinedNode::run(&data, &config, step),
            data,
            config,
        }
    }

    fn run(data: &Path, config: &Path, step: Option<Step>) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trellis"));
        if let Some(step) = step {
            command.env("TRELLIS_CRASH_AT", step.name());
        }
        command
            .arg("--data")
            .arg(data)
            .args(["node", "run", "--link-address", "127.0.0.3", "--join"])
            .arg(config)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// The agent dies; the processes of volumes go on.
    fn die(&mut self) {
        self.agent.kill().unwrap();
        self.agent.wait().unwrap();
    }

    fn come_back(&mut self) {
        self.agent = JoinedNode::run(&self.data, &self.config, None);
    }

    /// Starts the agent again if it has died; whether it has.
    fn revive(&mut self) -> bool {
        let has_died = self.agent.try_wait().unwrap().is_some();
        if has_died {
            self.come_back();
        }
        has_died
    }
}

impl Drop for JoinedNode {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
        kill_processes(&self.data);
    }
}

/// Waits until both copies were measured at a size.
fn wait_copies(service: &Service, size: &str) {
    service.wait(&format!("both copies have {size}"), |service| {
        let copies = service.objects("replicas.trellis.dev");
        let has = |copy: &&serde_json::Value| copy["status"]["capacity"] == size;
        (copies.iter().filter(has).count() == 2).then_some(())
    });
}

/// The first copy, and with it the target, goes where there is more room: not to node b.
fn first_copy_at_home(service: &Service) {
    let less = r#"{"spec":{"overcommitPercent":50}}"#;
    let patch = [
        "patch",
        "pools.trellis.dev",
        "default-b",
        "--type=merge",
        "-p",
    ];
    service.kubectl(&[&patch[..], &[less]].concat());
}

/// The ladder has the copies of both nodes in one trunk, the use at home that is done, and the use on node b that waits.
fn assert_two_branches(service: &Service, home: &Path, away: &Path) {
    let shown = service.trellis(&["ladder", "data"]);
    let has = |line: String| assert!(shown.contains(&line), "{line}\n{shown}");
    has("replica on pool default-b of node b ".to_owned());
    has("volume on node test-node ".to_owned());
    has(format!("mount {} on node test-node: ok", home.display()));
    let waits = format!("mount {} on node b: held UsedElsewhere", away.display());
    has(waits.clone());
    has("1 of 2 uses has what is asked for".to_owned());
    let text = service.trellis(&["ladder", "data", "-o", "json"]);
    let ladder: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(ladder["trunk"].as_array().unwrap().len(), 3, "{ladder}");
    let branches = ladder["branches"].as_array().unwrap();
    let states: Vec<&str> = branches
        .iter()
        .filter_map(|each| each["state"].as_str())
        .collect();
    assert_eq!(states, ["held", "ok"], "{ladder}");
    assert_eq!(branches[0]["node"], "b");
    assert_eq!(branches[0]["rungs"].as_array().unwrap().len(), 0);
    let explained = service.try_trellis(&["explain", "data"]);
    let explained = String::from_utf8_lossy(&explained.stdout).into_owned();
    let line = waits.replace(": held", "; held");
    assert!(explained.contains(&line), "{explained}");
}

#[test]
fn a_node_that_joins_carries_a_copy_through_growths_and_the_death_of_its_agent() {
    // Fails if a joined node does not make, serve, measure or raise its copy, if a write waits for its agent, if a use on
    // the wrong node does not say why it waits or is no branch of the ladder, or if the node is let go of while it carries
    // something.
    let service = Service::start_told(&["--link-address", "127.0.0.2"]);
    let mut joined = JoinedNode::join(&service, "b");
    service.wait("node b has a pool and is heard of", |service| {
        let pool = service.object("pools.trellis.dev", "default-b");
        let shown = service.trellis(&["node", "ls"]);
        let line = shown
            .lines()
            .find(|line| line.starts_with("b "))?
            .to_owned();
        let is_heard = line.split_whitespace().nth(1) != Some("-");
        (is_heard && !pool["status"]["capacity"].is_null()).then_some(())
    });
    first_copy_at_home(&service);
    service.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: two}\nprovisioner: trellis.dev\n\
         allowVolumeExpansion: true\nparameters: {replicas: \"2\", allowSharedDisk: \"true\"}\n",
    );
    service.apply(&claim("data", "two", "320Mi"));
    let path = service.mount("data");
    let nodes = |service: &Service| {
        let copies = service.objects("replicas.trellis.dev");
        let mut nodes: Vec<String> = copies
            .iter()
            .map(|copy| copy["spec"]["node"].as_str().unwrap_or_default().to_owned())
            .collect();
        nodes.sort();
        nodes
    };
    assert_eq!(nodes(&service), ["b", "test-node"]);
    let sum = write_file(&path.join("file"), 64 << 20, 1);
    service.trellis(&["grow", "data", "400Mi", "--wait"]);
    assert_eq!(filesystem_mib(&path), 400);
    wait_copies(&service, "400Mi");

    joined.die();
    let later = write_file(&path.join("later"), 16 << 20, 2);
    service.trellis(&["grow", "data", "480Mi", "--wait"]);
    assert_eq!(filesystem_mib(&path), 480);
    joined.come_back();
    wait_copies(&service, "480Mi");
    assert_eq!(checksum(&path.join("file")), sum);
    assert_eq!(checksum(&path.join("later")), later);

    let elsewhere = service.path("elsewhere");
    service.apply(&format!(
        "apiVersion: trellis.dev/v1alpha1\nkind: Attachment\nmetadata: {{name: elsewhere}}\nspec: {{claimName: data, node: b, consumer: {{mount: {{path: {}}}}}}}\n",
        elsewhere.display()
    ));
    service.wait("a use on another node says why it waits", |service| {
        let hold = &service.object("attachments.trellis.dev", "elsewhere")["status"]["hold"];
        (hold["reason"] == "UsedElsewhere").then_some(())
    });
    assert_two_branches(&service, &path, &elsewhere);
    service.kubectl(&["delete", "attachments.trellis.dev", "elsewhere"]);

    let refused = service.try_trellis(&["node", "rm", "b"]);
    assert_eq!(refused.status.code(), REFUSED);
    service.trellis(&["umount", "data"]);
    service.kubectl(&["delete", "pvc", "data"]);
    service.wait("the copies are gone", |service| {
        service
            .objects("replicas.trellis.dev")
            .is_empty()
            .then_some(())
    });
}

/// Where the agent dies in the middle of a move.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Dies {
    /// The service, which decides about the move and serves the volume before it.
    Service,
    /// The node that the volume goes to.
    Joined,
}

fn attachment(name: &str, node: &str, path: &Path) -> String {
    format!(
        "apiVersion: trellis.dev/v1alpha1\nkind: Attachment\nmetadata: {{name: {name}}}\nspec: {{claimName: data, node: {node}, consumer: {{mount: {{path: {}}}}}}}\n",
        path.display()
    )
}

/// A volume moves from the node of the service to another one, and an agent dies on the way.
fn move_through(step: Step, dies: Dies) {
    println!("death of {dies:?} at {}", step.name());
    let armed = |who: Dies| (who == dies).then_some(step);
    let mut service = Service::start_told(&["--link-address", "127.0.0.2"]);
    let mut joined = JoinedNode::join_armed(&service, "b", armed(Dies::Joined));
    service.wait("node b has a pool", |service| {
        let pool = service.object("pools.trellis.dev", "default-b");
        (!pool["status"]["capacity"].is_null()).then_some(())
    });
    first_copy_at_home(&service);
    service.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: two}\nprovisioner: trellis.dev\n\
         parameters: {replicas: \"2\", allowSharedDisk: \"true\"}\n",
    );
    service.apply(&claim("data", "two", "320Mi"));
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 16 << 20, 3);
    let there = service.path("there");
    service.apply(&attachment("there", "b", &there));
    if let Some(step) = armed(Dies::Service) {
        service.kill();
        service.up(&[("TRELLIS_CRASH_AT", step.name())]);
    }
    service.try_trellis(&["umount", "data"]);
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut has_died = false;
    loop {
        if service.has_crashed() {
            has_died = true;
            service.up(&[]);
        }
        has_died |= joined.revive();
        let object = service.object("attachments.trellis.dev", "there");
        let is_there =
            object["status"]["phase"] == "Attached" && object["status"]["hold"].is_null();
        if is_there && has_died {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "died: {has_died}\n{}",
            service.everything()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(checksum(&there.join("file")), sum);
    let targets = service.objects("targets.trellis.dev");
    assert_eq!(targets[0]["spec"]["node"], "b");
    service.kubectl(&["delete", "attachments.trellis.dev", "there"]);
    service.kubectl(&["delete", "pvc", "data"]);
    service.wait("the copies are gone", |service| {
        let copies = service.objects("replicas.trellis.dev");
        copies.is_empty().then_some(())
    });
}

#[test]
fn a_death_at_any_step_of_a_move_heals() {
    // Fails if a volume is lost, stuck or served twice when an agent dies on its way to another node.
    for step in Step::ALL.iter().filter(|step| step.is_of_a_move()) {
        move_through(*step, Dies::Service);
    }
    move_through(Step::TargetRetired, Dies::Service);
    for step in [
        Step::TargetServed,
        Step::DeviceAttached,
        Step::FilesystemMounted,
        Step::AttachmentReported,
    ] {
        move_through(step, Dies::Joined);
    }
}
