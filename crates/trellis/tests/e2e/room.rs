//! Room on pools: promised once, refused with a reason, given when it appears.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{Service, claim, filesystem_mib, said, sweep, write_file};

/// A small filesystem of its own for a pool. It is unmounted when it is dropped.
pub struct SmallPool {
    pub path: PathBuf,
}

impl SmallPool {
    pub fn mount(path: PathBuf, size: &str) -> SmallPool {
        std::fs::create_dir_all(&path).unwrap();
        let options = format!("size={size}");
        let output = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(&path)
            .output()
            .unwrap();
        said(&output, "mounting a tmpfs");
        SmallPool { path }
    }

    pub fn resize(&self, size: &str) {
        let options = format!("remount,size={size}");
        let output = Command::new("mount")
            .args(["-o", &options])
            .arg(&self.path)
            .output()
            .unwrap();
        said(&output, "resizing a tmpfs");
    }
}

impl Drop for SmallPool {
    fn drop(&mut self) {
        sweep(&self.path);
        let _ = Command::new("umount").arg("-l").arg(&self.path).status();
    }
}

fn pooled_class(pool: &str) -> String {
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: small\nprovisioner: trellis.dev\nallowVolumeExpansion: true\nparameters:\n  pools: {pool}\n"
    )
}

fn small_pool(service: &Service, size: &str) -> SmallPool {
    let pool = SmallPool::mount(service.path("pool"), size);
    service.trellis(&["pool", "add", "small", pool.path.to_str().unwrap()]);
    service.wait("the pool is ready", |service| {
        (service.object("pools.trellis.dev", "small")["status"]["conditions"][0]["status"]
            == "True")
            .then_some(())
    });
    service.apply(&pooled_class("small"));
    pool
}

fn reason(service: &Service, claim: &str) -> String {
    service.trellis_any(&["explain", claim])
}

// Fails if more is promised than there is, if the reason is not told, or if the claim does not go on when
// room appears.
#[test]
fn a_growth_without_room_is_held_and_goes_on_when_the_pool_grows() {
    let service = Service::start();
    let pool = small_pool(&service, "700m");
    service.claim("data", "small", "320Mi");
    let path = service.mount("data");
    let before = filesystem_mib(&path);
    service.trellis(&["grow", "data", "1Gi"]);
    service.wait("the reason is told", |service| {
        reason(service, "data")
            .contains("NoSpaceInPool")
            .then_some(())
    });
    let claim = service.object("pvc", "data");
    assert_eq!(
        claim["status"]["allocatedResourceStatuses"]["storage"],
        "ControllerResizeInfeasible"
    );
    assert_eq!(claim["status"]["capacity"]["storage"], "320Mi");
    assert_eq!(filesystem_mib(&path), before);
    write_file(&path.join("file"), 1 << 16, 1);
    pool.resize("2g");
    service.trellis(&["pool", "add", "small", pool.path.to_str().unwrap()]);
    service.wait_size("data", "1Gi");
    assert!(filesystem_mib(&path) == 1024);
    assert!(
        service.object("pvc", "data")["status"]["conditions"]
            .as_array()
            .is_none_or(Vec::is_empty)
    );
    drop_all(&service, &["data"]);
    drop(pool);
}

// Fails if a request that cannot be met cannot be taken back, or leaves a trace on the claim.
#[test]
fn a_held_growth_can_be_cancelled() {
    let service = Service::start();
    let pool = small_pool(&service, "700m");
    service.claim("data", "small", "320Mi");
    service.mount("data");
    service.trellis(&["grow", "data", "5Gi"]);
    service.wait("the reason is told", |service| {
        reason(service, "data")
            .contains("NoSpaceInPool")
            .then_some(())
    });
    service.trellis(&["cancel", "data"]);
    service.wait("the claim is at rest", |service| {
        let status = &service.object("pvc", "data")["status"];
        let quiet = status["conditions"].as_array().is_none_or(Vec::is_empty);
        (quiet && status["allocatedResourceStatuses"].is_null()).then_some(())
    });
    let history = service.wait("the history says so", |service| {
        let text = service.trellis(&["history", "data", "-o", "json"]);
        text.contains("Cancelled").then_some(text)
    });
    assert!(history.contains("5Gi"), "{history}");
    drop_all(&service, &["data"]);
    drop(pool);
}

// Fails if two claims that want the last room at the same time both get it, or if the one that was refused
// does not get it when the other goes.
#[test]
fn the_last_room_is_promised_once() {
    let service = Service::start();
    let pool = small_pool(&service, "700m");
    let names = ["a", "b", "c", "d"];
    let all: String = names
        .map(|name| claim(name, "small", "400Mi") + "---\n")
        .concat();
    service.apply(&all);
    let winner = service.wait("one claim is bound", |service| {
        let bound = |name: &&str| service.object("pvc", name)["status"]["phase"] == "Bound";
        names.iter().copied().find(bound)
    });
    let losers: Vec<&str> = names.into_iter().filter(|name| *name != winner).collect();
    for loser in &losers {
        service.wait("the others are told", |service| {
            reason(service, loser)
                .contains("NoSpaceInPool")
                .then_some(())
        });
    }
    assert_eq!(service.objects("replicas.trellis.dev").len(), 1);
    service.kubectl(&["delete", "pvc", winner, "--wait=true"]);
    service.wait("another claim gets the room", |service| {
        losers
            .iter()
            .any(|name| service.object("pvc", name)["status"]["phase"] == "Bound")
            .then_some(())
    });
    drop_all(&service, &losers);
    drop(pool);
}

// Fails if a volume is formatted although it carries somebody's data.
#[test]
fn foreign_data_is_never_overwritten() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let file = service.data_file("data");
    let output = Command::new("mkswap").arg(&file).output().unwrap();
    said(&output, "mkswap");
    let before = head(&file);
    let path = service.path("mnt-foreign");
    let output = service.try_trellis(&["mount", "data", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("ForeignData"));
    assert_eq!(head(&file), before, "not a byte was changed");
}

fn pod_using(claim: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  containers: [{{name: c, image: i}}]\n  volumes: [{{name: v, persistentVolumeClaim: {{claimName: {claim}}}}}]\n"
    )
}

/// The reasons of the events of an object, of one type.
fn events(service: &Service, kind: &str, severity: &str) -> Vec<String> {
    let events = service.objects("events");
    let of = events
        .iter()
        .filter(|event| event["involvedObject"]["kind"] == kind && event["type"] == severity);
    of.map(|event| event["message"].as_str().unwrap().to_owned())
        .collect()
}

// Fails if an idle claim whose bytes are not those of its filesystem is reported as grown, or nobody is told.
#[test]
fn an_idle_claim_with_foreign_content_is_held_and_not_reported_as_grown() {
    let service = Service::start();
    for (name, program, code) in [
        ("swap", "mkswap", "ForeignData"),
        ("other", "mkfs.ext4", "FilesystemMismatch"),
    ] {
        service.claim(name, "", "320Mi");
        service.apply(&pod_using(name));
        let made = Command::new(program).arg(service.data_file(name)).output();
        said(&made.unwrap(), program);
        service.trellis(&["grow", name, "352Mi"]);
        service.wait("the code is told", |service| {
            reason(service, name).contains(code).then_some(())
        });
        let claim = service.object("pvc", name);
        assert_eq!(claim["status"]["capacity"]["storage"], "320Mi");
        for kind in ["PersistentVolumeClaim", "Pod"] {
            service.wait(&format!("an event of the {kind}"), |service| {
                let said = events(service, kind, "Warning");
                said.iter().any(|each| each.contains(code)).then_some(())
            });
        }
        let shown = service.trellis(&["df"]);
        assert!(shown.contains(code), "{shown}");
        service.kubectl(&["delete", "pod", "web"]);
        service.kubectl(&["delete", "pvc", name]);
    }
}

// Fails if a growth that waits for its reader is told as a failure.
#[test]
fn a_reader_is_no_failure() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    service.mount("data");
    service.trellis(&["umount", "data"]);
    let path = service.path("mnt-data");
    service.trellis(&["mount", "data", path.to_str().unwrap(), "--read-only"]);
    service.trellis(&["grow", "data", "352Mi"]);
    service.wait("the reason is told", |service| {
        reason(service, "data").contains("ReadOnly").then_some(())
    });
    service.wait("an event says what it waits for", |service| {
        let said = events(service, "PersistentVolumeClaim", "Normal");
        let told = said.iter().any(|each| each.contains("is read-only"));
        told.then_some(())
    });
    let warnings = events(&service, "PersistentVolumeClaim", "Warning");
    assert_eq!(warnings, Vec::<String>::new());
    service.trellis(&["umount", "data"]);
    service.wait_size("data", "352Mi");
}

fn head(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()[..1 << 20].to_vec()
}

/// Takes everything off a pool before its filesystem is unmounted.
fn drop_all(service: &Service, claims: &[&str]) {
    for claim in claims {
        let _ = service.try_trellis(&["umount", claim]);
        service.kubectl(&["delete", "pvc", claim, "--ignore-not-found", "--wait=true"]);
    }
}

// Fails if the empty directory below an unmounted disk is taken for a pool, so that copies are made there or
// believed lost, or if the pool is not used again when its disk is back.
#[test]
fn a_pool_whose_disk_is_not_mounted_is_not_used() {
    let mut service = Service::start();
    let (disk, place) = (service.path("disk"), service.path("pool"));
    std::fs::create_dir(&disk).unwrap();
    std::fs::create_dir(&place).unwrap();
    let bind = || {
        said(
            &Command::new("mount")
                .arg("--bind")
                .arg(&disk)
                .arg(&place)
                .output()
                .unwrap(),
            "mount --bind",
        )
    };
    let unmount = || {
        said(
            &Command::new("umount").arg(&place).output().unwrap(),
            "umount",
        )
    };
    bind();
    service.trellis(&["pool", "add", "small", place.to_str().unwrap()]);
    service.apply(&pooled_class("small"));
    service.claim("data", "small", "320Mi");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 1 << 20, 23);
    service.trellis(&["umount", "data"]);
    service.stop();
    unmount();
    service.up(&[]);
    service.wait("the pool is not ready", |service| {
        let status =
            &service.object("pools.trellis.dev", "small")["status"]["conditions"][0]["status"];
        (status == "False").then_some(())
    });
    assert_eq!(
        std::fs::read_dir(&place).unwrap().count(),
        0,
        "nothing was made in the empty directory"
    );
    bind();
    service.trellis(&["pool", "add", "small", place.to_str().unwrap()]);
    let path = service.mount("data");
    assert_eq!(crate::harness::checksum(&path.join("file")), sum);
    drop_all(&service, &["data"]);
    service.kill();
    unmount();
}
