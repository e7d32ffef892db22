//! The ladder is one trunk, and a branch for each use.

use std::path::Path;

use serde_json::Value;

use super::{AN_HOUR, told, wait_explained};
use crate::harness::Service;

/// The ladder for programs.
fn ladder(service: &Service) -> Value {
    let text = service.trellis(&["ladder", "data", "-o", "json"]);
    serde_json::from_str(&text).unwrap()
}

/// The explanation for programs.
fn explanation(service: &Service) -> Value {
    let (text, _) = told(service, &["explain", "data", "-o", "json"]);
    serde_json::from_str(&text).unwrap()
}

/// The names of rungs, each with its size.
fn rungs(list: &Value) -> Vec<String> {
    let rung = |each: &Value| {
        let word = |field: &str| each[field].as_str().unwrap_or_default().to_owned();
        format!("{} {} {}", word("rung"), word("size"), word("state"))
    };
    list.as_array().unwrap().iter().map(rung).collect()
}

fn mount(service: &Service, path: &Path) {
    service.trellis(&["mount", "data", path.to_str().unwrap()]);
}

// Fails if the trunk is shown once for each use, a use is left out or shown on another branch, a use that is held makes
// the others look held, or a claim that nobody uses does not say so.
#[test]
fn each_use_is_a_branch_of_one_trunk() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    let unused = service.trellis(&["ladder", "data"]);
    assert!(unused.contains("\nnobody uses it\n"), "{unused}");
    let explained = wait_explained(&service, "data", &["All is well"]);
    assert!(explained.contains("use: nobody uses it"), "{explained}");
    assert_eq!(ladder(&service)["branches"].as_array().unwrap().len(), 0);

    let (one, two) = (service.path("mnt-1"), service.path("mnt-2"));
    mount(&service, &one);
    mount(&service, &two);
    service.trellis(&["grow", "data", "400Mi", "--wait"]);
    let shown = service.trellis(&["ladder", "data"]);
    for path in [&one, &two] {
        let branch = format!("mount {} on node test-node: ok\n", path.display());
        assert!(shown.contains(&branch), "{branch}{shown}");
    }
    assert_eq!(shown.matches("replica on pool").count(), 1, "{shown}");
    assert_eq!(shown.matches("\nvolume ").count(), 1, "{shown}");
    assert_eq!(shown.matches("\n  device ").count(), 2, "{shown}");
    assert!(!shown.contains("nobody uses it"), "{shown}");
    let seen = ladder(&service);
    assert_eq!(
        rungs(&seen["trunk"]),
        ["replica 400Mi ok", "volume 400Mi ok"]
    );
    let branch = ["device 400Mi ok", "filesystem 400Mi ok"];
    for index in 0..2 {
        assert_eq!(rungs(&seen["branches"][index]["rungs"]), branch, "{seen}");
    }
    assert_eq!(seen["branches"][0]["path"], one.to_str().unwrap());
    assert_eq!(seen["branches"][1]["consumer"], "mount");
    assert_eq!(seen["rungs"].as_array().unwrap().len(), 4, "{seen}");

    // A third use is held, because the claim has a filesystem; the others have what is asked for.
    let device = service.path("device");
    service.apply(&format!(
        "apiVersion: trellis.dev/v1alpha1\nkind: Attachment\nmetadata: {{name: unfit}}\nspec: {{claimName: data, node: test-node, consumer: {{device: {{path: {}}}}}}}\n",
        device.display()
    ));
    let held = format!("device {} on node test-node", device.display());
    let words = [&format!("{held}; held ConsumerUnfit"), "state: Held"];
    let explained = wait_explained(&service, "data", &words);
    let place = format!("held at: {} on node test-node", device.display());
    assert!(explained.contains(&place), "{explained}");
    let counted = "2 of 3 uses have what is asked for";
    assert!(explained.contains(counted), "{explained}");
    assert_eq!(told(&service, &["explain", "data"]).1, Some(3));
    let shown = service.trellis(&["ladder", "data"]);
    assert!(
        shown.contains(&format!("{held}: held ConsumerUnfit\n")),
        "{shown}"
    );
    assert!(shown.contains(counted), "{shown}");
    assert_eq!(
        shown.matches(" on node test-node: ok\n").count(),
        2,
        "{shown}"
    );
    let seen = explanation(&service);
    assert_eq!(seen["hold"]["reason"], "ConsumerUnfit", "{seen}");
    assert_eq!(seen["hold"]["path"], device.to_str().unwrap(), "{seen}");
    assert_eq!(rungs(&seen["trunk"]).len(), 2, "{seen}");
    assert_eq!(seen["branches"].as_array().unwrap().len(), 3, "{seen}");

    service.kubectl(&["delete", "attachments.trellis.dev", "unfit"]);
    for path in [&one, &two] {
        service.trellis(&["umount", path.to_str().unwrap()]);
    }
    let rest = service.wait("its filesystem is known again", |service| {
        let seen = ladder(service);
        (seen["idle"]["size"] == "400Mi").then_some(seen)
    });
    assert_eq!(rest["branches"].as_array().unwrap().len(), 0, "{rest}");
}

// Fails if a use that may only read is not told apart, or if what would hold its growth is foretold of the trunk.
#[test]
fn a_forecast_names_the_use_that_would_be_held() {
    let service = Service::start_told(AN_HOUR);
    service.claim("data", "", "320Mi");
    let path = service.path("mnt");
    mount(&service, &path);
    service.trellis(&["umount", "data"]);
    service.trellis(&["mount", "data", path.to_str().unwrap(), "--read-only"]);
    let shown = service.trellis(&["ladder", "data"]);
    let branch = format!("read-only mount {} on node test-node: ok", path.display());
    assert!(shown.contains(&branch), "{shown}");
    let (forecast, code) = told(&service, &["grow", "data", "400Mi", "--dry-run"]);
    assert_eq!(code, Some(3), "{forecast}");
    let line = |word: &str| {
        let found = forecast.lines().find(|line| line.starts_with(word));
        found.unwrap_or_default().to_owned()
    };
    for layer in ["replica", "volume", "device"] {
        assert!(line(layer).contains("rise"), "{forecast}");
    }
    assert!(
        line("filesystem").contains("be held ReadOnly"),
        "{forecast}"
    );
    assert!(line("claim").contains("wait"), "{forecast}");
    // What was foretold comes to pass.
    service.trellis(&["grow", "data", "400Mi"]);
    wait_explained(
        &service,
        "data",
        &["ReadOnly", "held at: the filesystem of"],
    );
    let shown = service.trellis(&["ladder", "data"]);
    assert!(shown.contains("read-only mount"), "{shown}");
    assert!(shown.contains(": held ReadOnly\n"), "{shown}");
}
