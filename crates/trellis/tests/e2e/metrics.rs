//! Metrics: every name, with the value that the machine itself tells, and usage that reaches the status.

mod scrape;

use trellis_api::Bytes;
use trellis_node::volume::usage;

use crate::harness::{Service, filesystem_mib, write_file};
use scrape::{Scrape, get};

const UP: &[&str] = &["--metrics", "127.0.0.1:0"];
const CLAIM: &[(&str, &str)] = &[("namespace", "default"), ("persistentvolumeclaim", "data")];
const FILE: usize = 32 << 20;

fn scraped(service: &Service) -> Scrape {
    let (status, kind, body) = get(&address(service), "/metrics");
    assert_eq!(status, 200);
    assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
    Scrape::parse(&body)
}

fn address(service: &Service) -> String {
    let told = std::fs::read_to_string(service.data().join("metrics")).unwrap();
    told.trim_end().to_owned()
}

fn mib(mib: u64) -> f64 {
    exact(Bytes::mib(mib).get())
}

/// Sizes of tests are far below what a float holds exactly.
fn exact(number: u64) -> f64 {
    let high = u32::try_from(number >> 32).unwrap();
    let low = u32::try_from(number & u64::from(u32::MAX)).unwrap();
    f64::from(high) * 4_294_967_296.0 + f64::from(low)
}

fn of_claim(scrape: &Scrape, name: &str) -> f64 {
    scrape.value(name, CLAIM)
}

fn rung(scrape: &Scrape, rung: &str) -> f64 {
    scrape.value_with(
        "trellis_volume_rung_bytes",
        &[CLAIM, &[("rung", rung)]].concat(),
    )
}

fn result(scrape: &Scrape, result: &str, reason: &str) -> f64 {
    scrape.value(
        "trellis_growths_total",
        &[("result", result), ("reason", reason)],
    )
}

fn raises(scrape: &Scrape, rung: &str) -> f64 {
    scrape.value("trellis_growth_rung_seconds_count", &[("rung", rung)])
}

fn promised(scrape: &Scrape) -> f64 {
    scrape.value(
        "trellis_pool_bytes",
        &[("pool", "default"), ("state", "promised")],
    )
}

/// What the scrape says of the mounted claim is what the kernel says of the path.
fn assert_usage_is_the_kernels(scrape: &Scrape, path: &std::path::Path) {
    let usage = usage(path).unwrap();
    let told = |name: &str| of_claim(scrape, &format!("kubelet_volume_stats_{name}"));
    assert_eq!(told("capacity_bytes"), exact(usage.bytes_total.get()));
    assert_eq!(told("used_bytes"), exact(usage.bytes_used.get()));
    assert_eq!(told("available_bytes"), exact(usage.bytes_available.get()));
    assert_eq!(told("inodes"), exact(usage.inodes_total));
    assert_eq!(told("inodes_used"), exact(usage.inodes_used));
    assert_eq!(told("inodes_free"), exact(usage.inodes_available));
    assert_eq!(of_claim(scrape, "trellis_volume_usage_unmeasured"), 0.0);
}

fn assert_ladder(scrape: &Scrape, size_mib: u64, filesystem_mib: u64) {
    for name in ["replica", "volume", "device"] {
        assert_eq!(rung(scrape, name), mib(size_mib), "{name}");
    }
    assert_eq!(rung(scrape, "filesystem"), mib(filesystem_mib));
    let goal = scrape.value_with("trellis_volume_goal_bytes", CLAIM);
    assert_eq!(goal, mib(size_mib));
    assert_eq!(promised(scrape), mib(size_mib));
}

// Fails if any metric is missing, malformed, or tells something else than the kernel and the objects do
// before, during and after a growth.
#[test]
fn a_growth_shows_in_every_metric() {
    let mut service = Service::start_told(UP);
    assert_eq!(get(&address(&service), "/healthz").0, 200);
    assert_eq!(get(&address(&service), "/else").0, 404);
    service.claim("data", "", "320Mi");
    let path = service.mount("data");

    // The service hears of the mount as everybody else does, perhaps a moment after us.
    let before = service.wait("the mount is seen", |service| {
        let scrape = scraped(service);
        let seen = scrape.family("kubelet_volume_stats_capacity_bytes");
        (!seen.is_empty()).then_some(scrape)
    });
    assert_usage_is_the_kernels(&before, &path);
    assert_ladder(&before, 320, filesystem_mib(&path));
    assert_eq!(result(&before, "Succeeded", ""), 0.0);
    assert_eq!(raises(&before, "filesystem"), 0.0);
    assert_eq!(before.value("trellis_growth_seconds_count", &[]), 0.0);

    write_file(&path.join("file"), FILE, 1);
    let written = scraped(&service);
    assert_usage_is_the_kernels(&written, &path);
    let risen = |name: &str| of_claim(&written, name) - of_claim(&before, name);
    assert!(risen("kubelet_volume_stats_used_bytes") >= mib(32));
    assert!(risen("kubelet_volume_stats_available_bytes") <= -mib(32));
    assert_eq!(risen("kubelet_volume_stats_inodes_used"), 1.0);

    service.trellis(&["grow", "data", "500Mi", "--wait"]);
    // The record of a growth is written after the claim is done.
    let grown = service.wait("the growth is counted", |service| {
        let scrape = scraped(service);
        (result(&scrape, "Succeeded", "") == 1.0).then_some(scrape)
    });
    assert_usage_is_the_kernels(&grown, &path);
    assert_ladder(&grown, 500, filesystem_mib(&path));
    let capacity = |scrape: &Scrape| of_claim(scrape, "kubelet_volume_stats_capacity_bytes");
    assert!(capacity(&grown) >= capacity(&before) + mib(170));
    for name in ["replica", "device", "filesystem"] {
        assert_eq!(raises(&grown, name), 1.0, "{name}");
        let sum = grown.value("trellis_growth_rung_seconds_sum", &[("rung", name)]);
        assert!(sum > 0.0, "{name}");
    }
    assert_eq!(grown.value("trellis_growth_seconds_count", &[]), 1.0);
    assert!(grown.value("trellis_growth_seconds_sum", &[]) > 0.0);
    assert_eq!(grown.sum("trellis_growths_total"), 1.0);
    assert!(grown.family("trellis_volume_held").is_empty());

    let pool = |state: &str| {
        let labels = [("pool", "default"), ("state", state)];
        grown.value("trellis_pool_bytes", &labels)
    };
    assert!(pool("total") > pool("free") && pool("free") > 0.0);
    assert!(pool("allocated") >= mib(32));
    assert_eq!(
        grown.value("trellis_pool_ready", &[("pool", "default")]),
        1.0
    );
    for (name, least) in [
        ("trellis_store_flushes_total", 3.0),
        ("trellis_store_writes_total", 3.0),
        ("trellis_store_flush_seconds_total", 0.0),
        ("process_cpu_seconds_total", 0.0),
        ("process_resident_memory_bytes", 1e6),
        ("process_virtual_memory_bytes", 1e6),
        ("process_start_time_seconds", 1.7e9),
        ("process_open_fds", 3.0),
        ("process_max_fds", 3.0),
    ] {
        assert!(grown.value(name, &[]) > least, "{name}");
    }
    let version = [("version", env!("CARGO_PKG_VERSION"))];
    assert_eq!(grown.value("trellis_build_info", &version), 1.0);
    assert_eq!(scraped(&service).series(), grown.series());

    service.trellis(&["umount", "data"]);
    let idle = service.wait("the idle filesystem is looked at", |service| {
        let scrape = scraped(service);
        let seen = scrape.family("trellis_volume_rung_bytes").len() == 3;
        seen.then_some(scrape)
    });
    assert_eq!(rung(&idle, "filesystem"), rung(&grown, "filesystem"));
    assert!(
        idle.family("kubelet_volume_stats_capacity_bytes")
            .is_empty()
    );
    service.stop();
    let told = service.data().join("metrics");
    assert!(!told.exists(), "nobody answers there any more");
}

// Fails if a growth that is stuck raises no metric, or a metric stays raised when it is not stuck any more.
#[test]
fn a_held_growth_shows_until_it_is_called_off() {
    let service = Service::start_told(UP);
    service.claim("data", "", "320Mi");
    service.mount("data");
    // More than any disk has.
    service.trellis(&["grow", "data", "1Pi"]);
    let held = service.wait("the growth is held", |service| {
        let scrape = scraped(service);
        (!scrape.family("trellis_volume_held").is_empty()).then_some(scrape)
    });
    let labels = [CLAIM, &[("reason", "NoSpaceInPool")]].concat();
    assert_eq!(held.value("trellis_volume_held", &labels), 1.0);
    assert_eq!(held.sum("trellis_volume_held"), 1.0);
    assert_eq!(result(&held, "Held", "NoSpaceInPool"), 1.0);
    let goal = held.value_with("trellis_volume_goal_bytes", CLAIM);
    assert_eq!(goal, exact(1 << 50));
    assert_eq!(rung(&held, "device"), mib(320));

    service.trellis(&["cancel", "data"]);
    let free = service.wait("the growth is called off", |service| {
        let scrape = scraped(service);
        let free = scrape.family("trellis_volume_held").is_empty();
        // Kubernetes takes no request back to the present size: a mebibyte more is asked for, and given.
        let over = ["Cancelled", "Succeeded"]
            .iter()
            .all(|each| result(&scrape, each, "") == 1.0);
        (free && over).then_some(scrape)
    });
    assert_eq!(result(&free, "Held", "NoSpaceInPool"), 1.0);
    assert_eq!(free.sum("trellis_growths_total"), 3.0);
    assert_eq!(free.value("trellis_growth_seconds_count", &[]), 1.0);
    let goal = free.value_with("trellis_volume_goal_bytes", CLAIM);
    assert_eq!(goal, mib(321));
}

// Fails if what a volume holds changes and those who can only read its status are never told, or are not
// told when that was measured.
#[test]
fn how_full_a_volume_is_reaches_its_status() {
    let service = Service::start();
    service.claim("data", "", "320Mi");
    let path = service.mount("data");
    let status = |service: &Service| {
        let attachments = service.objects("attachments.trellis.dev");
        attachments[0]["status"]["usage"].clone()
    };
    let used = |usage: &serde_json::Value| {
        let used = usage["used"].as_str().unwrap();
        used.parse::<Bytes>().unwrap()
    };
    let first = status(&service);
    write_file(&path.join("file"), FILE, 1);
    let later = service.wait("the status tells of the file", |service| {
        let usage = status(service);
        (usage != first).then_some(usage)
    });
    assert!(used(&later).get() >= used(&first).get() + Bytes::mib(32).get());
    assert!(later["observedAt"].as_str() > first["observedAt"].as_str());
    let wide = service.trellis(&["df", "data", "-o", "wide"]);
    assert!(wide.contains("IUSED") && wide.contains(" now "), "{wide}");
}

// Fails if a change of one volume, by its claim or behind the service's back, makes the service look at others.
#[test]
fn only_the_volume_that_changed_is_observed() {
    const VOLUMES: usize = 10;
    let service = Service::start_told(&[UP, &["--resync-seconds", "3600"]].concat());
    let name = |index: usize| format!("v{index}");
    for index in 0..VOLUMES {
        service.claim(&name(index), "", "320Mi");
        service.mount(&name(index));
    }
    let observed = || scraped(&service).value("trellis_volume_observations_total", &[]);
    let at_rest = || {
        let mut before = observed();
        service.wait("the service is at rest", |_| {
            std::thread::sleep(std::time::Duration::from_millis(400));
            let now = observed();
            (std::mem::replace(&mut before, now) == now).then_some(now)
        })
    };

    // As many looks as one volume needs, and fewer than one for each of the others.
    let before = at_rest();
    service.trellis(&["grow", "v3", "400Mi", "--wait"]);
    let for_a_growth = at_rest() - before;
    assert!(
        for_a_growth >= 1.0 && for_a_growth < exact(u64::try_from(VOLUMES - 1).unwrap()),
        "{for_a_growth} observations for the growth of one volume"
    );

    let before = at_rest();
    let mount = service.path("mnt-v5");
    let output = std::process::Command::new("umount")
        .arg(&mount)
        .output()
        .unwrap();
    assert!(output.status.success());
    service.wait("the missing mount is told", |service| {
        let attachments = service.objects("attachments.trellis.dev");
        let held = |each: &&serde_json::Value| each["status"]["hold"]["reason"] == "MountGone";
        attachments.iter().find(held).map(|each| {
            assert_eq!(each["spec"]["claimName"], "v5");
        })
    });
    let for_a_loss = at_rest() - before;
    assert!(
        for_a_loss >= 1.0 && for_a_loss < exact(u64::try_from(VOLUMES - 1).unwrap()),
        "{for_a_loss} observations for the loss of one mount"
    );
}

/// The labels of the claim `copies`, and more.
fn of_copies<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let claim = [
        ("namespace", "default"),
        ("persistentvolumeclaim", "copies"),
    ];
    [&claim, more].concat()
}

// Fails if the loss of a copy, its repair or a scrub is not told, a copy of a silent target is told to be well, or a rung
// that no claim has is told of.
#[test]
fn copies_repairs_and_scrubs_show_in_the_metrics() {
    use rustix::process::{Signal, kill_process};
    let service = Service::start_told(UP);
    for name in ["a", "b", "c"] {
        let pool = service.path(name);
        std::fs::create_dir(&pool).unwrap();
        service.trellis(&["pool", "add", name, pool.to_str().unwrap()]);
    }
    service.apply("apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata:\n  name: three\nprovisioner: trellis.dev\nparameters:\n  replicas: \"3\"\n  allowSharedDisk: \"true\"\n  pools: a,b,c\n");
    service.claim("copies", "three", "320Mi");
    let path = service.mount("copies");
    let in_sync = |scrape: &Scrape| {
        let is_in_sync = |series: &&&scrape::Series| {
            series.0 == "trellis_copy_state" && series.1["state"] == "InSync"
        };
        scrape.series().iter().filter(is_in_sync).count()
    };
    let value = |scrape: &Scrape, name: &str, more: &[(&str, &str)]| {
        scrape.value_with(name, &of_copies(more))
    };
    let whole = service.wait("all copies are whole", |service| {
        let scrape = scraped(service);
        (in_sync(&scrape) == 3).then_some(scrape)
    });
    for (name, expected) in [
        ("trellis_target_up", 1.0),
        ("trellis_volume_available", 1.0),
        ("trellis_volume_redundancy_met", 1.0),
    ] {
        assert_eq!(value(&whole, name, &[]), expected, "{name}");
    }
    for (which, count) in [("wanted", 3.0), ("needed", 2.0), ("in sync", 3.0)] {
        assert_eq!(
            value(&whole, "trellis_volume_copies", &[("which", which)]),
            count
        );
    }
    assert!(whole.family("trellis_scrub_result").is_empty());
    let is_of_nobody = |series: &&scrape::Series| {
        let rung = series.1.get("rung").map_or("", String::as_str);
        series.0.starts_with("trellis_growth_rung") && ["image", "disk", "guest"].contains(&rung)
    };
    assert!(!whole.series().iter().any(is_of_nobody));

    let volume = service.object("pvc", "copies")["spec"]["volumeName"].clone();
    let run = service.data().join("run").join(volume.as_str().unwrap());
    let signal = |name: &str, signal: Signal| {
        let text = std::fs::read_to_string(run.join(format!("{name}.lock"))).unwrap();
        let pid = rustix::process::Pid::from_raw(text.trim().parse().unwrap());
        kill_process(pid.unwrap(), signal).unwrap();
    };
    signal("0", Signal::STOP);
    write_file(&path.join("file"), FILE, 3);
    let hurt = service.wait("the loss of a copy is told", |service| {
        let scrape = scraped(service);
        let met = value(&scrape, "trellis_volume_redundancy_met", &[]);
        (met == 0.0 && in_sync(&scrape) == 2).then_some(scrape)
    });
    assert_eq!(value(&hurt, "trellis_volume_available", &[]), 1.0);
    signal("0", Signal::CONT);
    let mended = service.wait("the copy is repaired", |service| {
        let scrape = scraped(service);
        let left = scrape.sum("trellis_copy_repair_left_bytes");
        (in_sync(&scrape) == 3 && left == 0.0).then_some(scrape)
    });
    assert_eq!(mended.family("trellis_copy_repaired_bytes_total").len(), 3);
    assert_eq!(mended.sum("trellis_copy_full"), 0.0);

    service.trellis(&["volume", "scrub", "copies", "--wait"]);
    let scrubbed = scraped(&service);
    let at = value(&scrubbed, "trellis_scrub_finished_timestamp_seconds", &[]);
    assert!(at > 1.7e9, "{at}");
    for what in ["found", "mended", "differed", "skipped"] {
        assert_eq!(
            value(&scrubbed, "trellis_scrub_result", &[("what", what)]),
            0.0
        );
    }

    // Nobody knows how the copies of a frozen target are.
    signal("target", Signal::STOP);
    let silent = scraped(&service);
    signal("target", Signal::CONT);
    assert_eq!(value(&silent, "trellis_target_up", &[]), 0.0);
    assert_eq!(value(&silent, "trellis_volume_available", &[]), 0.0);
    assert!(silent.family("trellis_copy_state").is_empty());
}
