//! The verbs about nodes, and the tokens that they make. `tests/nodes` has nodes that are apart.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::harness::{Service, said};

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
