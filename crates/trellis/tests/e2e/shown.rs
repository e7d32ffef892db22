//! What is shown is what is: no verb says that all is well unless it is, and what holds is said on every layer.

mod branches;
mod copies;
mod growth;

use serde_json::Value;

use crate::harness::{Service, claim};

/// So long that nothing in these tests comes from a resync.
const AN_HOUR: &[&str] = &["--resync-seconds", "3600"];

/// What a verb prints, with its exit code.
fn told(service: &Service, verb: &[&str]) -> (String, Option<i32>) {
    let output = service.try_trellis(verb);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (text, output.status.code())
}

/// Waits until `explain` shows all of these words.
fn wait_explained(service: &Service, name: &str, words: &[&str]) -> String {
    service.wait(&format!("{name} is explained with {words:?}"), |service| {
        let said = service.trellis_any(&["explain", name]);
        words.iter().all(|word| said.contains(word)).then_some(said)
    })
}

/// The events of a claim, each as its reason and its message.
fn events(service: &Service, name: &str) -> String {
    let events = service.objects("events");
    let about = |event: &&Value| event["involvedObject"]["name"] == name;
    let line = |event: &Value| format!("{} {}\n", event["reason"], event["message"]);
    events.iter().filter(about).map(line).collect()
}

// Fails if a size beyond all sizes is taken for none, so that a small volume is made or the wish is ignored, or if it
// is not said what was asked for.
#[test]
fn an_absurd_request_is_held_and_shown_as_it_was_written() {
    let service = Service::start_told(AN_HOUR);
    service.apply(&claim("new", "trellis", "16Ei"));
    wait_explained(&service, "new", &["SizeTooLarge", "asks for: 16Ei"]);
    assert!(service.objects("volumes.trellis.dev").is_empty());
    service.claim("data", "", "320Mi");
    let body = r#"{"spec":{"resources":{"requests":{"storage":"16Ei"}}}}"#;
    service.kubectl(&["patch", "pvc", "data", "-p", body]);
    let said = wait_explained(&service, "data", &["SizeTooLarge", "asks for: 16Ei"]);
    assert!(said.contains("16Ei is asked for"), "{said}");
    assert!(!said.contains("All is well"), "{said}");
    assert_eq!(told(&service, &["explain", "data"]).1, Some(3));
    let (ladder, _) = told(&service, &["ladder", "data"]);
    assert!(ladder.contains("asks for 16Ei"), "{ladder}");
    let (df, _) = told(&service, &["df"]);
    let held = |line: &str| line.contains("16Ei") && line.contains("Held SizeTooLarge");
    assert_eq!(df.lines().filter(|line| held(line)).count(), 2, "{df}");
    service.trellis(&["cancel", "data"]);
    wait_explained(&service, "data", &["All is well"]);
}

// Fails if a claim of which Trellis knows nothing is said to be well, or to be on its way.
#[test]
fn what_others_serve_is_said_to_be_theirs() {
    let service = Service::start_told(AN_HOUR);
    service.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: theirs}\nprovisioner: other.example.com\n",
    );
    service.apply(&claim("theirs", "theirs", "1Gi"));
    service.apply(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: handmade}\nspec:\n  capacity: {storage: 1Gi}\n  accessModes: [ReadWriteOnce]\n  storageClassName: manual\n  persistentVolumeReclaimPolicy: Retain\n  hostPath: {path: /nowhere}\n",
    );
    service.apply(&claim("static", "manual", "1Gi"));
    service.wait_bound("static");
    service.apply(&claim("classless", "\"\"", "1Gi"));
    for (name, words) in [
        ("theirs", ["state: Foreign", "other.example.com"]),
        ("static", ["made by hand", "\"handmade\""]),
        ("classless", ["ClassNotSet", "no storage class is set"]),
    ] {
        let said = wait_explained(&service, name, &words);
        assert!(!said.contains("All is well"), "{said}");
        assert!(!said.contains("being made"), "{said}");
    }
    assert_eq!(told(&service, &["explain", "classless"]).1, Some(3));
    let (ladder, _) = told(&service, &["ladder", "theirs"]);
    assert!(ladder.contains("another provisioner"), "{ladder}");
    let (df, _) = told(&service, &["df", "theirs"]);
    assert!(df.contains("Foreign"), "{df}");
}
