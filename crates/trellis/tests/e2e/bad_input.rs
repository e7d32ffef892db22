//! Bad input gets a clear error and changes nothing.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::harness::{Service, checksum, claim, write_file};

fn up_fails(data: &Path) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_trellis"))
        .arg("up")
        .arg("--data")
        .arg(data)
        .output()
        .unwrap();
    assert_eq!(
        output.status.code(),
        Some(1),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stderr).into_owned()
}

// Fails if a second service takes over, disturbs the first, or does not say what is the matter.
#[test]
fn a_second_service_on_the_same_directory_is_refused() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let kubeconfig = std::fs::read(service.data().join("kubeconfig")).unwrap();
    let said = up_fails(&service.data());
    assert!(said.contains("store.redb"), "{said}");
    assert_eq!(
        std::fs::read(service.data().join("kubeconfig")).unwrap(),
        kubeconfig
    );
    service.claim("other", "", "320Mi");
}

// Fails if a damaged store is opened as if nothing were wrong, panics, or is changed by the attempt.
#[test]
fn a_truncated_or_corrupted_store_is_refused_and_kept() {
    let mut service = Service::start();
    service.claim("data", "", "320Mi");
    service.stop();
    let store = service.data().join("store.redb");
    let whole = std::fs::read(&store).unwrap();
    let mut damaged: Vec<Vec<u8>> = vec![b"not a database at all".to_vec()];
    damaged.extend(
        [0, 100, 4096]
            .map(|length| whole[..length].to_vec())
            .into_iter()
            .skip(1),
    );
    let mut scribbled = whole.clone();
    scribbled[..4096].fill(0x5a);
    damaged.push(scribbled);
    for content in damaged {
        std::fs::write(&store, &content).unwrap();
        let said = up_fails(&service.data());
        assert!(said.contains("store.redb"), "{said}");
        assert!(!said.contains("panicked"), "{said}");
        assert_eq!(
            std::fs::read(&store).unwrap(),
            content,
            "the file is kept as it was"
        );
    }
    std::fs::write(&store, &whole).unwrap();
    service.up(&[]);
    service.wait_bound("data");
}

// Fails if a replica with one bad superblock is lost, or one with two is used or changed.
#[test]
fn a_superblock_is_healed_from_its_twin_and_two_bad_ones_hold() {
    let mut service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 1 << 20, 21);
    let data = service.data_file("data");
    service.trellis(&["umount", "data"]);
    let copies = [
        data.with_file_name("superblock.a"),
        data.with_file_name("superblock.b"),
    ];
    for copy in &copies {
        service.stop();
        scribble(copy);
        service.up(&[]);
        let path = service.mount("data");
        assert_eq!(checksum(&path.join("file")), sum);
        service.trellis(&["umount", "data"]);
    }
    service.stop();
    copies.iter().for_each(|copy| scribble(copy));
    let before: Vec<Vec<u8>> = copies
        .iter()
        .map(|copy| std::fs::read(copy).unwrap())
        .collect();
    service.up(&[]);
    let output = service.try_trellis(&[
        "mount",
        "data",
        service.path("mnt-x").to_str().unwrap(),
        "--timeout",
        "20s",
    ]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("ReplicaDamaged"));
    let after: Vec<Vec<u8>> = copies
        .iter()
        .map(|copy| std::fs::read(copy).unwrap())
        .collect();
    assert_eq!(before, after);
}

fn scribble(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&[0x77; 64], 0).unwrap();
    file.sync_all().unwrap();
}

// Fails if a malformed size, an unknown class or an unknown claim is not said to be so, or changes anything.
#[test]
fn nonsense_is_refused_with_a_sentence() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let version = service.object("pvc", "data")["metadata"]["resourceVersion"].clone();
    for (arguments, code, text) in [
        (["grow", "data", "12Quux"], 2, "12Quux"),
        (["grow", "data", "-5Gi"], 2, "never shrink"),
        (["grow", "data", "1Mi"], 5, "cancel"),
        (["grow", "nobody", "1Gi"], 4, "nobody"),
        (["grow", "data", "99Ei"], 2, "99Ei"),
    ] {
        let output = service.try_trellis(&arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(text), "{arguments:?}: {said}");
    }
    assert_eq!(
        service.object("pvc", "data")["metadata"]["resourceVersion"],
        version
    );
    let output = service.try_apply(&claim("bad", "", "12Quux"));
    assert!(!output.status.success());
    assert!(
        String::from_utf8_lossy(&output.stderr)
            .contains("quantities must match the regular expression")
    );
    service.apply(&claim("lost", "nowhere", "320Mi"));
    service.wait("an unknown class is named", |service| {
        service
            .trellis_any(&["explain", "lost"])
            .contains("ClassNotFound")
            .then_some(())
    });
    service.apply("apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: odd\nprovisioner: trellis.dev\nparameters:\n  fstype: xfs\n");
    service.apply(&claim("odd", "odd", "320Mi"));
    service.wait("a misspelt parameter is named", |service| {
        service
            .trellis_any(&["explain", "odd"])
            .contains("ClassInvalid")
            .then_some(())
    });
}

// Fails if a path that something else uses is mounted over, or the failed mount appears later by surprise.
#[test]
fn a_busy_path_is_refused_and_left_alone() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let busy = service.path("busy");
    std::fs::create_dir(&busy).unwrap();
    std::fs::write(busy.join("file"), "precious").unwrap();
    let output = service.try_trellis(&["mount", "data", busy.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("PathBusy"));
    assert_eq!(
        std::fs::read_to_string(busy.join("file")).unwrap(),
        "precious"
    );
    service.wait("the failed mount leaves nothing", |service| {
        service
            .objects("attachments.trellis.dev")
            .is_empty()
            .then_some(())
    });
    service.mount("data");
}
