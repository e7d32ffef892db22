//! What a class asks of a volume's portal, and the secret that initiators must know.

use std::process::{Command, Output};

use serde_json::Value;

use super::{class, run_dir, service, service_told, target};
use crate::harness::{Service, claim};

const INITIATOR: &str = "iqn.2026-11.dev.example:allowed";
const SYSTEM: &str = "trellis-system";

/// The volume's Secret; null if there is none.
fn secret(service: &Service, volume: &str) -> Value {
    let name = format!("{volume}-chap");
    let output = service.try_kubectl(&["get", "secret", "-n", SYSTEM, &name, "-o", "json"]);
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

/// An entry of it.
fn entry(service: &Service, volume: &str, entry: &str) -> String {
    let name = format!("{volume}-chap");
    let path = format!("go-template={{{{index .data \"{entry}\" | base64decode}}}}");
    service.kubectl(&["get", "secret", "-n", SYSTEM, &name, "-o", &path])
}

fn volume(service: &Service) -> String {
    let claim = service.object("pvc", "data");
    claim["spec"]["volumeName"].as_str().unwrap().to_owned()
}

fn block(class: &str) -> String {
    claim("data", class, "64Mi").replace("spec:\n", "spec:\n  volumeMode: Block\n")
}

// Fails if the secret is not a Secret, is not that of the target, outlives its volume, or changes when an earlier
// release had it in a file alone.
#[test]
fn the_secret_of_a_volume_is_a_secret_and_is_made_once() {
    let mut service = service();
    service.apply(&block("three"));
    service.wait_bound("data");
    let volume = volume(&service);
    let made = secret(&service, &volume);
    assert_eq!(made["type"], "trellis.dev/chap");
    assert_eq!(made["metadata"]["ownerReferences"][0]["kind"], "Volume");
    let password = entry(&service, &volume, "password");
    assert_eq!(entry(&service, &volume, "username"), volume);
    let file = run_dir(&service).join("secret");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), password);
    // As an earlier release leaves it.
    service.stop();
    service.up(&[]);
    let name = format!("{volume}-chap");
    service.kubectl(&["delete", "secret", "-n", SYSTEM, &name]);
    service.stop();
    service.up(&[]);
    service.wait("the secret is stored again", |service| {
        (secret(service, &volume)["type"] == "trellis.dev/chap").then_some(())
    });
    assert_eq!(entry(&service, &volume, "password"), password);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), password);
    service.kubectl(&["delete", "pvc", "data"]);
    service.wait("the secret goes with its volume", |service| {
        secret(service, &volume).is_null().then_some(())
    });
}

// Fails if the portal is elsewhere than the class says, if an initiator that the class does not name gets in, if the
// target cannot prove itself, if somebody can write, or if a node without an address pretends to have one.
#[test]
fn a_portal_is_as_the_class_says() {
    let service = service_told(&["--link-address", "127.0.0.2"]);
    let more = format!(
        "  iscsiPortal: node\n  iscsiInitiators: {INITIATOR}\n  iscsiMutualChap: \"true\"\n  iscsiReadOnly: \"true\"\n"
    );
    service.apply(&(class("served", "3") + &more));
    service.apply(&block("served"));
    service.wait_bound("data");
    let status = target(&service)["status"].clone();
    let (iqn, portal) = (
        status["iqn"].as_str().unwrap().to_owned(),
        status["portal"].as_str().unwrap().to_owned(),
    );
    assert!(portal.starts_with("127.0.0.2:"), "{portal}");
    let volume = volume(&service);
    let (own, theirs) = (
        entry(&service, &volume, "password"),
        entry(&service, &volume, "targetPassword"),
    );
    let target_user = entry(&service, &volume, "targetUsername");
    let inquire = |name: &str, own: &str, theirs: &str| -> Output {
        let mutual = format!("target_user={target_user}&target_password={theirs}");
        let url = format!("iscsi://{volume}%{own}@{portal}/{iqn}/0?{mutual}");
        let output = Command::new("iscsi-inq").args(["-i", name, &url]).output();
        output.expect("libiscsi is installed by `make setup`")
    };
    let output = inquire(INITIATOR, &own, &theirs);
    assert!(output.status.success(), "{output:?}");
    for (name, own, theirs) in [
        (
            "iqn.2026-11.dev.example:other",
            own.as_str(),
            theirs.as_str(),
        ),
        (INITIATOR, "000000000000000000000000", &theirs),
        (INITIATOR, &own, "000000000000000000000000"),
    ] {
        let output = inquire(name, own, theirs);
        assert!(!output.status.success(), "{name}: {output:?}");
    }
    let image = format!(
        "driver=raw,file.driver=iscsi,file.transport=tcp,file.portal={portal},file.target={iqn},file.lun=0,file.user={volume},file.password-secret=s,file.initiator-name={INITIATOR}"
    );
    let proof = format!("secret,id=s,data={own}");
    let qemu = |more: &[&str]| {
        let arguments = ["--object", &proof, "--image-opts"];
        let output = Command::new("qemu-io")
            .args(arguments)
            .args(more)
            .arg(&image)
            .output();
        output.expect("QEMU is installed by `make setup`")
    };
    let read = qemu(&["-r", "-c", "read 0 1M"]);
    assert!(read.status.success(), "{read:?}");
    let write = qemu(&["-c", "write 0 1M"]);
    let said = String::from_utf8_lossy(&write.stderr).into_owned();
    assert!(
        !write.status.success() && said.contains("write protected"),
        "{write:?}"
    );
}

// Fails if a volume is served elsewhere than its class says because its node has no such address, or nobody says so.
#[test]
fn a_portal_at_an_address_that_the_node_does_not_have_is_held() {
    let service = service();
    service.apply(&(class("served", "3") + "  iscsiPortal: node\n"));
    service.apply(&block("served"));
    service.wait("the target is held", |service| {
        let targets = service.objects("targets.trellis.dev");
        let hold = &targets.first()?["status"]["hold"];
        (hold["reason"] == "LinkMissing").then_some(())
    });
    service.apply(&class("wrong", "1").replace(
        "  pools: a,b,c,d\n",
        "  pools: a,b,c,d\n  iscsiReadOnly: \"true\"\n",
    ));
    let one = block("wrong").replace("name: data", "name: one");
    service.apply(&one);
    service.wait("the class is refused", |service| {
        let said = service.try_trellis(&["explain", "one"]);
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        (said.contains("ClassInvalid") && said.contains("no target")).then_some(())
    });
}
