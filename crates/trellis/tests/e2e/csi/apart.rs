//! Controller and node service in processes of their own, as in a cluster.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use trellis_csi::client::Driver;

use super::caller::{Caller, GIB, mount, request, with};
use super::leftovers;
use crate::harness::{filesystem_mib, kill_processes};

/// A process of a service that runs elsewhere.
struct Role {
    process: Child,
    data: PathBuf,
    socket: PathBuf,
}

impl Role {
    fn start(caller: &Caller, name: &str, arguments: &[&str]) -> Role {
        let (data, socket) = (
            caller.service.path(name),
            caller.service.path("").join(format!("{name}.sock")),
        );
        let process = Command::new(env!("CARGO_BIN_EXE_trellis"))
            .args(arguments)
            .arg("--csi-endpoint")
            .arg(&socket)
            .arg("--data")
            .arg(&data)
            .env_remove("KUBECONFIG")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Role {
            process,
            data,
            socket,
        }
    }

    fn driver(&self, caller: &Caller) -> Driver {
        caller.service.wait("the socket is there", |_| {
            self.socket.exists().then_some(())
        });
        caller.connect(&self.socket)
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        kill_processes(&self.data);
    }
}

// Fails if a node cannot do its part with the rights that its own token has, if the controller needs the node's process, or
// if a growth that the one asks for is not seen by the other.
#[test]
fn controller_and_node_do_their_parts_in_processes_of_their_own() {
    let mut caller = Caller::start(&[]);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let joins = text(&caller.service.path("b.kubeconfig"));
    caller
        .service
        .trellis(&["node", "add", "b", "--kubeconfig-out", &joins]);
    let admin = text(&caller.service.data().join("kubeconfig"));
    let node = Role::start(&caller, "b", &["node", "run", "--join", &joins]);
    let controller = Role::start(&caller, "c", &["controller", "--kubeconfig", &admin]);
    caller.driver = Driver {
        controller: controller.driver(&caller).controller,
        ..node.driver(&caller)
    };
    caller
        .service
        .wait("the pool of the node is ready", |service| {
            let pool = service.object("pools.trellis.dev", "default-b");
            (pool["status"]["conditions"][0]["status"] == "True").then_some(())
        });
    let asked = with(
        request("pvc-apart", GIB, mount()),
        &[("pools", "default-b")],
    );
    let made = caller.create_with(asked).unwrap();
    assert_eq!(
        made.accessible_topology[0].segments["trellis.dev/node"],
        "b"
    );
    let (staging, target) = caller.paths("a");
    caller.publish_to("pvc-apart", "b", mount()).unwrap();
    caller.stage("pvc-apart", &staging, mount()).unwrap();
    caller
        .show("pvc-apart", &staging, &target, mount(), false)
        .unwrap();
    let grown = caller.expand("pvc-apart", 2 * GIB).unwrap();
    assert!(!grown.node_expansion_required);
    assert_eq!(filesystem_mib(Path::new(&target)), 2048);
    assert_eq!(
        caller.grow_on_node("pvc-apart", &target, 2 * GIB).unwrap(),
        2 * GIB
    );
    caller.hide("pvc-apart", &target).unwrap();
    caller.unstage("pvc-apart", &staging).unwrap();
    caller.unpublish_from("pvc-apart", "b").unwrap();
    caller.delete("pvc-apart").unwrap();
    assert_eq!(leftovers(&caller), Vec::<String>::new());
}
