//! Stock kubectl with the written kubeconfig and no other flag behaves as on a cluster.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use crate::harness::Service;

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");

// Fails if the examples cannot be applied, shown, described, grown, watched and deleted by stock kubectl.
#[test]
fn the_examples_work_with_stock_kubectl() {
    let service = Service::start();
    let applied = service.kubectl(&["apply", "-f", EXAMPLES]);
    assert!(
        applied.contains("persistentvolumeclaim/data created"),
        "{applied}"
    );
    assert!(
        service
            .kubectl(&["apply", "-f", EXAMPLES])
            .contains("persistentvolumeclaim/data unchanged")
    );
    service.wait_bound("data");
    service.wait_bound("photos");
    let shown = service.kubectl(&["get", "pvc,pv,volumes.trellis.dev", "-o", "wide"]);
    for heading in [
        "STATUS",
        "CAPACITY",
        "ACCESS MODES",
        "RECLAIM POLICY",
        "VOLUMEMODE",
        "REQUESTED",
    ] {
        assert!(shown.contains(heading), "{heading} is missing:\n{shown}");
    }
    let described = service.kubectl(&["describe", "pvc", "data"]);
    for text in [
        "Status:        Bound",
        "Capacity:      1Gi",
        "Finalizers:    [kubernetes.io/pvc-protection]",
        "ProvisioningSucceeded",
    ] {
        assert!(
            described.contains(text),
            "{text:?} is missing:\n{described}"
        );
    }
    let path = service.mount("data");
    let mut watch = service
        .kubectl_command(&["get", "pvc", "data", "-w"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("STATUS"));
    assert!(lines.next().unwrap().unwrap().contains("1Gi"));
    let patch = r#"{"spec":{"resources":{"requests":{"storage":"2Gi"}}}}"#;
    assert!(
        service
            .kubectl(&["patch", "pvc", "data", "-p", patch])
            .contains("patched")
    );
    assert!(
        lines.any(|line| line.unwrap().contains("2Gi")),
        "the watch shows the growth"
    );
    watch.kill().unwrap();
    watch.wait().unwrap();
    service.wait_size("data", "2Gi");
    let described = service.kubectl(&["describe", "pvc", "data"]);
    assert!(
        described.contains("Resizing") && described.contains("FileSystemResizeSuccessful"),
        "{described}"
    );
    assert!(crate::harness::filesystem_mib(&path) == 2048);
    service.trellis(&["umount", "data"]);
    let deleted = service.kubectl(&["delete", "-f", EXAMPLES]);
    assert!(
        deleted.contains("persistentvolumeclaim \"data\" deleted"),
        "{deleted}"
    );
    service.wait("the volumes are gone", |service| {
        service.objects("pv").is_empty().then_some(())
    });
}

// Fails if the kubeconfig can be read by others, or the service answers who has no token.
#[test]
fn the_kubeconfig_is_private_and_needed() {
    let service = Service::start();
    let path = service.data().join("kubeconfig");
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let stranger = service.path("stranger");
    let text = std::fs::read_to_string(&path).unwrap();
    let token = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("token: "))
        .unwrap();
    std::fs::write(&stranger, text.replace(token, "\"guessed\"")).unwrap();
    let output = service
        .kubectl_command(&["get", "pvc", "--kubeconfig", stranger.to_str().unwrap()])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(
        said.contains("Unauthorized") || said.contains("logged in") || said.contains("Username"),
        "{said}"
    );
}

// Fails if a claim can be shrunk, or grown where its class forbids it, or is refused in other words than a
// cluster's.
#[test]
fn growth_is_refused_as_a_cluster_refuses_it() {
    let service = Service::start();
    service.apply("apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: fixed\nprovisioner: trellis.dev\nallowVolumeExpansion: false\n");
    service.claim("data", "", "320Mi");
    service.claim("rigid", "fixed", "320Mi");
    let patch = |claim: &str, size: &str| {
        let body = format!(r#"{{"spec":{{"resources":{{"requests":{{"storage":"{size}"}}}}}}}}"#);
        let output = service.try_kubectl(&["patch", "pvc", claim, "-p", &body]);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(patch("data", "100Mi").contains("field can not be less than status.capacity"));
    assert!(patch("rigid", "640Mi").contains("only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize"));
}
