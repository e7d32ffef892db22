//! `kill -9` at every named step, then restart: everything converges, nothing is lost, nothing is left.

use std::path::PathBuf;
use std::time::Instant;

use trellis_api::step::Step;

use crate::harness::{
    PATIENCE, Service, assert_clean, checksum, claim, class, filesystem_mib, loops_below,
    mounts_below, write_file,
};

/// A service that is armed to die once, and is started again when it has.
struct Mortal {
    service: Service,
    died: bool,
}

impl Mortal {
    /// Tries `act` until it works, starting the service again when it has died meanwhile.
    fn until<T>(&mut self, what: &str, mut act: impl FnMut(&Service) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if self.service.has_crashed() {
                assert!(!self.died, "it was armed to die once");
                self.died = true;
                self.service.up(&[]);
            }
            if let Some(answer) = act(&self.service) {
                return answer;
            }
            assert!(
                Instant::now() < deadline,
                "gave up: {what}\n{}",
                self.service.everything()
            );
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    fn verb(&mut self, arguments: &[&str]) {
        self.until(&format!("{arguments:?}"), |service| {
            service
                .try_trellis(arguments)
                .status
                .success()
                .then_some(())
        });
    }
}

/// The pools of a claim with several copies.
const POOLS: [&str; 3] = ["a", "b", "c"];

/// The whole life of a claim, with one copy or with three, whatever dies on the way.
fn live_through(step: Step, filesystem: &str, copies: usize) {
    let service = Service::start_with(&[("TRELLIS_CRASH_AT", step.name())]);
    let mut mortal = Mortal {
        service,
        died: false,
    };
    let mut manifest = class("tested", filesystem);
    let mut pools = vec![mortal.service.data().join("pools/default")];
    if copies > 1 {
        manifest.push_str(&format!(
            "  replicas: \"{copies}\"\n  allowSharedDisk: \"true\"\n  pools: a,b,c\n"
        ));
        for name in POOLS {
            let pool = mortal.service.path(name);
            std::fs::create_dir_all(&pool).unwrap();
            mortal.verb(&["pool", "add", name, pool.to_str().unwrap()]);
            pools.push(pool);
        }
    }
    let manifest = manifest + "---\n" + &claim("data", "tested", "320Mi");
    mortal.until("the claim is applied", |service| {
        service.try_apply(&manifest).status.success().then_some(())
    });
    mortal.until("the claim is bound", |service| {
        (service.object("pvc", "data")["status"]["phase"] == "Bound").then_some(())
    });
    let path: PathBuf = mortal.service.path("mnt");
    mortal.verb(&["mount", "data", path.to_str().unwrap(), "--timeout", "20s"]);
    let sum = write_file(&path.join("file"), 4 << 20, 77);
    let grow = r#"{"spec":{"resources":{"requests":{"storage":"640Mi"}}}}"#;
    mortal.until("the growth is asked for", |service| {
        service
            .try_kubectl(&["patch", "pvc", "data", "-p", grow])
            .status
            .success()
            .then_some(())
    });
    mortal.until("the claim has grown", |service| {
        let status = &service.object("pvc", "data")["status"];
        let done = status["capacity"]["storage"] == "640Mi"
            && status["allocatedResourceStatuses"].is_null();
        done.then_some(())
    });
    assert!(
        filesystem_mib(&path) == 640,
        "what is reported was measured"
    );
    assert_eq!(checksum(&path.join("file")), sum);
    let data = mortal.service.data_file("data");
    mortal.until("the claim is unmounted", |service| {
        let output = service.try_trellis(&["umount", "data", "--timeout", "20s"]);
        matches!(output.status.code(), Some(0 | 4)).then_some(())
    });
    mortal.until("nothing is mounted", |service| {
        let mounts = mounts_below(&service.data().join("mounts"));
        (mounts.is_empty() && loops_below(&service.data()).is_empty()).then_some(())
    });
    assert_clean(filesystem, &data);
    mortal.until("the claim is deleted", |service| {
        let arguments = [
            "delete",
            "pvc",
            "data",
            "--ignore-not-found",
            "--wait=false",
        ];
        service
            .try_kubectl(&arguments)
            .status
            .success()
            .then_some(())
    });
    mortal.until("nothing is left of it", |service| {
        let kinds = "pvc,pv,volumes.trellis.dev,targets.trellis.dev,replicas.trellis.dev,attachments.trellis.dev";
        let output = service.try_kubectl(&["get", kinds, "-A", "-o", "name"]);
        let files = pools.iter().map(|pool| pool.join("replicas"));
        let files = files.map(|replicas| std::fs::read_dir(replicas).map_or(0, Iterator::count));
        let gone = files.sum::<usize>() == 0 && mounts_below(&service.data()).is_empty();
        (output.status.success() && output.stdout.is_empty() && gone).then_some(())
    });
    // A step that is reached only after the last thing that was waited for must still come.
    let deadline = Instant::now() + std::time::Duration::from_secs(5);
    while !mortal.died && Instant::now() < deadline {
        mortal.died = mortal.service.has_crashed();
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(mortal.died, "nothing reaches the step {:?}", step.name());
    assert!(!path.exists() || std::fs::read_dir(&path).unwrap().next().is_none());
}

/// Lives through a death at every `count`-th step from the `first` on, so that several tests can share
/// the steps and run at the same time.
fn live_through_share(filesystem: &str, first: usize, count: usize) {
    // This claim is mounted when it grows; an idle one has steps of its own.
    let steps = Step::ALL.iter().filter(|step| !step.is_of_idle_growth());
    let steps = steps.filter(|step| !step.is_of_several_copies() && !step.is_of_recovery());
    let steps = steps.filter(|step| !step.is_of_a_copy() && !step.is_of_the_keeper());
    let steps = steps.filter(|step| !step.is_of_credentials() && !step.is_of_a_move());
    let steps = steps.filter(|step| !step.is_of_vm_images());
    for step in steps.skip(first).step_by(count) {
        println!("death at {} on {filesystem}", step.name());
        live_through(*step, filesystem, 1);
    }
}

// Fails if a death after a step that only volumes of several copies take loses data, leaves a process, a mount or a
// file, or never heals.
#[test]
fn a_death_at_any_step_of_several_copies_heals() {
    for step in Step::ALL.iter().filter(|step| step.is_of_several_copies()) {
        println!("death at {} with three copies", step.name());
        live_through(*step, "xfs", POOLS.len());
    }
}

/// A claim grows while nobody uses it, whatever dies on the way.
fn live_through_idle(step: Step, filesystem: &str) {
    println!("death at {} on an idle {filesystem}", step.name());
    let service = Service::start_with(&[("TRELLIS_CRASH_AT", step.name())]);
    let mut mortal = Mortal {
        service,
        died: false,
    };
    mortal.service.apply(&class("tested", filesystem));
    mortal.service.claim("data", "tested", "320Mi");
    let path = mortal.service.mount("data");
    let sum = write_file(&path.join("file"), 4 << 20, 78);
    mortal.service.trellis(&["umount", "data"]);
    let grow = r#"{"spec":{"resources":{"requests":{"storage":"640Mi"}}}}"#;
    mortal.until("the growth is asked for", |service| {
        let asked = service.try_kubectl(&["patch", "pvc", "data", "-p", grow]);
        asked.status.success().then_some(())
    });
    mortal.until("the claim has grown", |service| {
        let size = &service.object("pvc", "data")["status"]["capacity"]["storage"];
        (size == "640Mi").then_some(())
    });
    assert!(mortal.died, "nothing reaches the step {:?}", step.name());
    assert!(mounts_below(&mortal.service.data()).is_empty());
    assert!(loops_below(&mortal.service.data()).is_empty());
    assert_clean(filesystem, &mortal.service.data_file("data"));
    let path = mortal.service.mount("data");
    assert_eq!(filesystem_mib(&path), 640);
    assert_eq!(checksum(&path.join("file")), sum);
}

// Fails if a death during the growth of an idle filesystem loses data, leaks a mount or device, or never heals.
#[test]
fn a_death_at_any_step_of_an_idle_growth_heals() {
    for filesystem in ["xfs", "btrfs"] {
        for step in Step::ALL.iter().filter(|step| step.is_of_idle_growth()) {
            live_through_idle(*step, filesystem);
        }
    }
}

// Fails if a death while the service makes any of its files for the first time leaves one that the next start cannot
// use, or if there is no such file.
#[test]
fn a_death_at_any_file_of_the_first_start_heals() {
    for step in [Step::FileWritten, Step::FileInPlace] {
        let mut deaths = 0;
        loop {
            let at = format!("{}:{}", step.name(), deaths + 1);
            let mut service = Service::start_with(&[("TRELLIS_CRASH_AT", &at)]);
            if !service.has_crashed() {
                break;
            }
            deaths += 1;
            service.up(&[]);
            assert!(service.trellis(&["pool", "ls"]).contains("default"));
            let left = std::fs::read_dir(service.data()).unwrap().flatten();
            let unfinished = left.filter(|entry| {
                let name = entry.file_name();
                name.to_string_lossy().starts_with(".trellis-new-")
            });
            assert_eq!(unfinished.count(), 0, "death {deaths} at {}", step.name());
        }
        assert!(deaths >= 6, "{deaths} files were made at {}", step.name());
    }
}

// Fails if a death on the way to a node's certificate leaves a key without one, another authority, or no certificate.
#[test]
fn a_death_at_any_step_of_the_credentials_heals() {
    for step in Step::ALL.iter().filter(|step| step.is_of_credentials()) {
        println!("death at {}", step.name());
        let mut service = Service::start_with(&[("TRELLIS_CRASH_AT", step.name())]);
        let deadline = Instant::now() + PATIENCE;
        while !service.has_crashed() {
            assert!(Instant::now() < deadline, "nothing reaches {}", step.name());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let pki = service.data().join("pki");
        let read = |name: &str| std::fs::read_to_string(pki.join(name)).unwrap_or_default();
        let before = read("authority.pem");
        assert_eq!(
            before.matches("-----BEGIN").count(),
            2,
            "key and certificate"
        );
        service.up(&[]);
        let own = service.wait("the node has a certificate", |_| {
            let own = read("node/node.pem");
            (!own.is_empty()).then_some(own)
        });
        assert_eq!(own.matches("-----BEGIN").count(), 2, "key and certificate");
        assert_eq!(read("authority.pem"), before);
        assert!(before.contains(&read("node/ca.crt")));
        let requests = service.objects("csr");
        let is_signed = |each: &&serde_json::Value| each["status"]["certificate"].is_string();
        assert!(requests.iter().any(|each| is_signed(&each)));
        assert!(
            requests.len() <= 2,
            "one of before and one of now: {requests:#?}"
        );
    }
}

// Fails if a death after any step (this share of them) loses data, leaks something, or never heals on xfs.
#[test]
fn a_death_at_any_step_heals_on_xfs_1() {
    live_through_share("xfs", 0, 2);
}

// Fails if a death after any step (the other share) loses data, leaks something, or never heals on xfs.
#[test]
fn a_death_at_any_step_heals_on_xfs_2() {
    live_through_share("xfs", 1, 2);
}

// Fails if a death after any step (this share of them) loses data, leaks something, or never heals on btrfs.
#[test]
fn a_death_at_any_step_heals_on_btrfs_1() {
    live_through_share("btrfs", 0, 2);
}

// Fails if a death after any step (the other share) loses data, leaks something, or never heals on btrfs.
#[test]
fn a_death_at_any_step_heals_on_btrfs_2() {
    live_through_share("btrfs", 1, 2);
}
