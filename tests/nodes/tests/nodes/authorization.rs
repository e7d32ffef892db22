//! The embedded API on one node, and what the others may do with it, through TLS between namespaces.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};
use trellis_nodes_tests::machine::Machine;
use trellis_nodes_tests::network::Network;
use trellis_nodes_tests::service::Service;

/// Runs kubectl on a node; what it printed, or what it complained of.
fn kubectl(on: &Machine, config: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = on.kubectl(config, arguments).output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    }
}

/// Makes an object from a file in the node's directory.
fn create(on: &Machine, config: &Path, object: &Value) -> Result<String, String> {
    let file = on.directory().join("object.json");
    std::fs::write(&file, object.to_string()).unwrap();
    kubectl(on, config, &["create", "-f", file.to_str().unwrap()])
}

fn pool(name: &str, node: &Machine) -> Value {
    json!({
        "apiVersion": "trellis.dev/v1alpha1", "kind": "Pool", "metadata": { "name": name },
        "spec": { "node": node.name(), "path": node.directory(), "overcommitPercent": 100 },
    })
}

const STATUS: &str = r#"{"status":{"conditions":[]}}"#;

#[test]
fn nodes_join_with_a_token_write_what_is_theirs_and_are_shut_out_when_removed() {
    // Fails if a node cannot reach or trust the API on another node, can write what is another's, or goes on watching
    // after it was removed.
    let network = Network::new(&["a", "b", "c"]).unwrap();
    let [a, b, c] = network.machines() else {
        panic!("three nodes")
    };
    let home = Service::up(a, &[]).unwrap();
    let (of_b, of_c) = (home.add(b).unwrap(), home.add(c).unwrap());
    for (machine, config) in [(b, &of_b), (c, &of_c)] {
        let nodes = kubectl(machine, config, &["get", "nodes", "-o", "name"]).unwrap();
        assert_eq!(nodes, "node/a\nnode/b\nnode/c\n");
        let who = kubectl(machine, config, &["auth", "whoami"]).unwrap();
        assert!(
            who.contains(&format!("system:node:{}", machine.name())),
            "{who}"
        );
    }
    create(b, &of_b, &pool("of-b", b)).unwrap();
    create(c, &of_c, &pool("of-c", c)).unwrap();
    let status = |pool| {
        [
            "patch",
            "pool",
            pool,
            "--subresource=status",
            "--type=merge",
            "-p",
            STATUS,
        ]
    };
    kubectl(b, &of_b, &status("of-b")).unwrap();
    kubectl(c, &of_c, &status("of-c")).unwrap();
    for (machine, config, words) in [
        (b, &of_b, &status("of-c")[..]),
        (b, &of_b, &["delete", "pool", "of-c"]),
        (b, &of_b, &["get", "secrets", "-A"]),
        (b, &of_b, &["get", "--raw", "/debug/backup"]),
        (b, &of_b, &["delete", "node", "c"]),
        (c, &of_c, &["label", "node", "b", "x=y"]),
        (c, &of_c, &["annotate", "pool", "default", "x=y"]),
    ] {
        let said = kubectl(machine, config, words).unwrap_err();
        assert!(said.contains("forbidden"), "{words:?}: {said}");
    }
    let said = create(c, &of_c, &pool("third", b)).unwrap_err();
    let words = r#"pools.trellis.dev "third" is forbidden: User "system:node:c" cannot create resource "pools" in API group "trellis.dev" at the cluster scope"#;
    assert!(said.contains(words), "{said}");
    kubectl(c, &of_c, &["label", "node", "c", "x=y"]).unwrap();

    let mut watch = b.kubectl(&of_b, &["get", "pools", "--watch-only", "-o", "name"]);
    let mut watch = watch
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    // Whichever of the changes it sees first: the watch is open.
    let seen = std::thread::spawn(move || (lines.next(), lines));
    let mut count = 0;
    while !seen.is_finished() {
        count += 1;
        let change = format!("count={count}");
        kubectl(c, &of_c, &["label", "pool", "of-c", "--overwrite", &change]).unwrap();
    }
    let (first, rest) = seen.join().unwrap();
    assert!(first.unwrap().unwrap().contains("of-c"));
    let shown = home.trellis(&["node", "ls"]).unwrap();
    assert!(
        shown
            .lines()
            .any(|line| line.starts_with("b ") && line.contains("yes")),
        "{shown}"
    );
    assert!(
        home.trellis(&["node", "rm", "b"])
            .unwrap()
            .contains("no longer counts")
    );
    // kubectl ends when its watch is closed and it is refused another.
    rest.for_each(drop);
    watch.wait().unwrap();
    let said = kubectl(b, &of_b, &["get", "nodes"]).unwrap_err();
    assert!(
        said.contains("Unauthorized") || said.contains("logged in"),
        "{said}"
    );
    kubectl(c, &of_c, &["get", "nodes"]).unwrap();
    let pools = kubectl(c, &of_c, &["get", "pools", "-o", "name"]).unwrap();
    assert_eq!(pools, "pool.trellis.dev/default\npool.trellis.dev/of-c\n");
}
