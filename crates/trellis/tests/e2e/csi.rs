//! The CSI driver, called as sidecars and kubelets call it: real service, real socket, real loop devices.

mod apart;
mod caller;
mod controller;
mod node;
mod refusals;
mod sanity;

use caller::{Caller, mount};

use crate::harness::{loops_below, mounts_below};

// Fails if the kubelet would not find the driver, if a service that was killed leaves a socket that stops the next one, if
// one that was stopped leaves one, or if others could use it.
#[test]
fn a_kubelet_learns_of_the_driver_also_after_a_kill() {
    use std::os::unix::fs::PermissionsExt;
    let plugins = tempfile::tempdir().unwrap();
    let mut caller = Caller::start(&["--registration-dir", plugins.path().to_str().unwrap()]);
    let socket = plugins.path().join("trellis.dev-reg.sock");
    for _ in 0..2 {
        let mut driver = caller.connect(&socket);
        let info = caller.wait(
            driver
                .registration
                .get_info(trellis_csi::proto::registration::InfoRequest {}),
        );
        let info = info.unwrap().into_inner();
        assert_eq!(
            (info.r#type.as_str(), info.name.as_str()),
            ("CSIPlugin", "trellis.dev")
        );
        assert_eq!(info.supported_versions, ["1.0.0"]);
        assert_eq!(info.endpoint, caller.endpoint().to_str().unwrap());
        for path in [&socket, &caller.endpoint()] {
            let mode = std::fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        caller.service.kill();
        assert!(socket.exists());
        caller.service.up(&[]);
    }
    caller.reconnect();
    let volume = caller.create("after-a-kill", 1 << 30, mount()).unwrap();
    caller.delete(&volume).unwrap();
    caller.service.stop();
    assert!(!socket.exists() && !caller.endpoint().exists());
}

/// What is left of the volumes of a service. A deleted volume is gone at once; its copies follow.
fn leftovers(caller: &Caller) -> Vec<String> {
    caller.service.wait("the copies are gone", |service| {
        let copies = service.objects("replicas.trellis.dev");
        let targets = service.objects("targets.trellis.dev");
        (copies.is_empty() && targets.is_empty()).then_some(())
    });
    let kinds = ["volumes", "attachments"];
    let stored = kinds.iter().flat_map(|kind| {
        let found = caller.service.objects(&format!("{kind}.trellis.dev"));
        found
            .into_iter()
            .map(|each| each["metadata"]["name"].to_string())
    });
    let stored: Vec<String> = stored.collect();
    let dir = caller.service.path("");
    let mounts = mounts_below(&dir).into_iter();
    let loops = loops_below(&dir).into_iter();
    let paths = mounts.chain(loops).map(|path| path.display().to_string());
    stored.into_iter().chain(paths).collect()
}
