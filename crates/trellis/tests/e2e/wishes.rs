//! Wishes that are not for Trellis to fulfil: each is honoured as Kubernetes would, or held with a code. None is ignored.

use std::path::Path;

use trellis_node::sys::mountinfo::{self, Mount};

use crate::harness::{Service, claim};

fn by_hand(name: &str, size: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}, labels: {{disk: {name}}}}}\nspec:\n  \
         storageClassName: manual\n  capacity: {{storage: {size}}}\n  accessModes: [ReadWriteOnce]\n  \
         hostPath: {{path: /srv}}\n"
    )
}

fn phase(service: &Service, kind: &str, name: &str, phase: &str) {
    service.wait(&format!("{kind} {name} is {phase}"), |service| {
        (service.object(kind, name)["status"]["phase"] == phase).then_some(())
    });
}

fn wait_held(service: &Service, name: &str, code: &str) {
    service.wait(&format!("{name} is held: {code}"), |service| {
        let conditions = &service.object("pvc", name)["status"]["conditions"];
        let held = conditions
            .as_array()?
            .iter()
            .find(|each| each["type"] == "Held")?;
        (held["reason"] == code).then_some(())
    });
}

// Fails if a volume made by hand waits for ever, is given to the wrong claim, or goes while a claim has it.
#[test]
fn a_volume_made_by_hand_is_bound_as_in_a_cluster() {
    let service = Service::start();
    service.apply(&by_hand("one", "2Gi"));
    service.apply(&by_hand("two", "1Gi"));
    phase(&service, "pv", "one", "Available");
    // Before its volume is there, the claim says what it waits for.
    let selecting = claim("three", "manual", "1Gi") + "  selector: {matchLabels: {disk: three}}\n";
    service.apply(&selecting);
    wait_held(&service, "three", "SelectorUnmatched");
    service.apply(&by_hand("three", "5Gi"));
    service.wait_bound("three");
    assert_eq!(
        service.object("pvc", "three")["spec"]["volumeName"],
        "three"
    );
    // The smallest that fits, and the one that is named.
    service.apply(&claim("any", "manual", "1Gi"));
    service.wait_bound("any");
    let any = service.object("pvc", "any");
    assert_eq!(any["spec"]["volumeName"], "two");
    assert_eq!(any["status"]["capacity"]["storage"], "1Gi");
    service.apply(&(claim("named", "manual", "1Gi") + "  volumeName: one\n"));
    service.wait_bound("named");
    phase(&service, "pv", "one", "Bound");
    let body = r#"{"spec":{"resources":{"requests":{"storage":"3Gi"}}}}"#;
    let grown = service.try_kubectl(&["patch", "pvc", "named", "-p", body]);
    let said = String::from_utf8_lossy(&grown.stderr).into_owned();
    assert!(
        said.contains("forbidden: only dynamically provisioned pvc can be resized"),
        "{said}"
    );
    // It is protected as long as a claim has it.
    service.kubectl(&["delete", "pv", "one", "--wait=false"]);
    assert!(!service.object("pv", "one")["metadata"]["deletionTimestamp"].is_null());
    service.kubectl(&["delete", "pvc", "named"]);
    service.wait("the volume goes with the claim", |service| {
        (!service.try_kubectl(&["get", "pv", "one"]).status.success()).then_some(())
    });
    service.kubectl(&["delete", "pvc", "any"]);
    phase(&service, "pv", "two", "Released");
    service.kubectl(&["delete", "pv", "two"]);
}

// Fails if a claim that asks for something that is not honoured becomes an ordinary, empty volume.
#[test]
fn what_is_not_honoured_is_held_with_a_code() {
    let service = Service::start();
    let source = "  dataSource: {kind: PersistentVolumeClaim, name: other}\n";
    service.apply(&(claim("filled", "trellis", "320Mi") + source));
    wait_held(&service, "filled", "DataSourceUnsupported");
    // The newer field, which may name what only others know.
    let reference = "  dataSourceRef: {apiGroup: example.com, kind: Populator, name: other}\n";
    service.apply(&(claim("populated", "trellis", "320Mi") + reference));
    wait_held(&service, "populated", "DataSourceUnsupported");
    let said = service.trellis_any(&["explain", "populated"]);
    assert!(said.contains("Populator \"other\""), "{said}");
    // No volume is made for a claim that selects one, although the class is ours.
    let selecting = "  selector: {matchLabels: {disk: fast}}\n";
    service.apply(&(claim("selecting", "trellis", "320Mi") + selecting));
    wait_held(&service, "selecting", "SelectorUnmatched");
    service.apply(&(claim("named", "trellis", "320Mi") + "  volumeName: nowhere\n"));
    wait_held(&service, "named", "VolumeNotFound");
    service.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: zoned}\nprovisioner: trellis.dev\n\
         allowedTopologies: [{matchLabelExpressions: [{key: zone, values: [a]}]}]\n",
    );
    service.apply(&claim("zoned", "zoned", "320Mi"));
    wait_held(&service, "zoned", "ClassInvalid");
    assert!(service.objects("volumes.trellis.dev").is_empty());
}

fn mounted(path: &Path) -> Mount {
    let mounts = mountinfo::read().unwrap();
    let found = mounts.into_iter().rfind(|mount| mount.mount_point == path);
    found.expect("it is mounted")
}

fn has(options: &str, wanted: &[&str]) {
    for option in wanted {
        let found = options.split(',').any(|each| each == *option);
        assert!(found, "{option} is not among {options}");
    }
}

// Fails if a mount option is ignored: it is in force, or the claim or the use is held and says which one it is.
#[test]
fn mount_options_are_honoured_or_refused() {
    let service = Service::start();
    let options = |name: &str, options: &str| {
        crate::harness::class(name, "xfs") + &format!("mountOptions: [{options}]\n")
    };
    service.apply(&options("quick", "noatime, nosuid, logbufs=4"));
    service.claim("data", "quick", "320Mi");
    let volume = service.object("pvc", "data")["spec"]["volumeName"].clone();
    let volume = volume.as_str().unwrap();
    // A reader first: the mount becomes writable with the next use and keeps its options.
    let (reader, writer) = (service.path("reader"), service.path("writer"));
    service.trellis(&["mount", "data", reader.to_str().unwrap(), "--read-only"]);
    has(
        &mounted(&reader).options,
        &["ro", "noatime", "nosuid", "nodev"],
    );
    service.trellis(&["mount", "data", writer.to_str().unwrap()]);
    let found = mounted(&writer);
    has(&found.options, &["rw", "noatime", "nosuid", "nodev"]);
    has(&found.super_options, &["logbufs=4"]);
    let private = service.data().join("mounts").join(volume);
    has(&mounted(&private).options, &["rw", "noatime", "nosuid"]);
    service.trellis(&["grow", "data", "352Mi", "--wait"]);
    service.trellis(&["umount", "data"]);
    // The volume's own options are those that count from then on.
    let set = |options: &str| {
        let body = format!(r#"{{"spec":{{"mountOptions":[{options}]}}}}"#);
        service.kubectl(&["patch", "pv", volume, "-p", &body]);
    };
    set(r#""norecovery""#);
    let held = service.try_trellis(&["mount", "data", writer.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&held.stderr).into_owned();
    assert_eq!(held.status.code(), Some(3), "{said}");
    assert!(said.contains("MountOptionRefused"), "{said}");
    assert!(said.contains("the journal is always replayed"), "{said}");
    set(r#""noexec""#);
    service.trellis(&["mount", "data", writer.to_str().unwrap()]);
    has(&mounted(&writer).options, &["noexec", "relatime"]);
    service.trellis(&["umount", "data"]);
    // A class that asks for something else makes no volume, and says why.
    for (name, option, why) in [
        ("unsafe", "nobarrier", "a power loss takes writes"),
        ("unknown", "sparkle", "does not know it for xfs"),
        ("fstab", "x-systemd.automount", "a word for mount(8)"),
    ] {
        service.apply(&options(name, option));
        service.apply(&claim(name, name, "320Mi"));
        wait_held(&service, name, "ClassInvalid");
        let said = service.trellis_any(&["explain", name]);
        assert!(said.contains(option) && said.contains(why), "{said}");
    }
    assert_eq!(service.objects("volumes.trellis.dev").len(), 1);
}

// Fails if a pod whose containers nobody runs waits without a word.
#[test]
fn a_pod_of_containers_is_told_that_nobody_runs_it() {
    let service = Service::start();
    service.apply(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: c, image: i}]}\n",
    );
    let message = service.wait("the pod is told", |service| {
        let pod = service.object("pod", "web");
        let conditions = pod["status"]["conditions"].as_array()?.clone();
        let told = conditions
            .iter()
            .find(|each| each["type"] == "PodScheduled")?;
        assert_eq!(pod["status"]["phase"], "Pending");
        Some(told["message"].as_str()?.to_owned())
    });
    assert!(message.contains("trellis mount"), "{message}");
    service.wait("an event says it too", |service| {
        let said = service.kubectl(&["describe", "pod", "web"]);
        (said.contains("FailedScheduling")).then_some(())
    });
}

// Fails if a use that the claim is not made for begins, does not say why it does not, or cannot be taken back.
#[test]
fn a_use_that_the_claim_is_not_made_for_is_held() {
    let service = Service::start();
    service.claim("data", "trellis", "320Mi");
    let path = service.path("device");
    service.apply(&format!(
        "apiVersion: trellis.dev/v1alpha1\nkind: Attachment\nmetadata: {{name: wrong}}\nspec:\n  claimName: data\n  node: test-node\n  consumer: {{device: {{path: {}}}}}\n",
        path.display()
    ));
    let hold = service.wait("the use is held", |service| {
        let hold = &service.object("attachments.trellis.dev", "wrong")["status"]["hold"];
        (!hold.is_null()).then(|| hold.clone())
    });
    assert_eq!(hold["reason"], "ConsumerUnfit");
    assert!(!path.exists());
    service.kubectl(&["delete", "attachments.trellis.dev", "wrong"]);
    service.mount("data");
    service.trellis(&["umount", "data"]);
}
