//! A real QEMU without a guest: the protocol, the graph, growth and the driver.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::path::Path;
use std::time::Duration;

use common::{LoopDisk, PATIENCE, Qemu, Shelf, disk, extend, id, open, spec};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};
use trellis_api::Bytes;
use trellis_node::filesystem::Outcome;
use trellis_vm::Error;
use trellis_vm::disks::{Inventory, Storage};
use trellis_vm::driver::Vm;
use trellis_vm::driver::policy::{End, VmLoss, VmState};
use trellis_vm::error::Blocker;
use trellis_vm::graph::{Bus, DiskLimits, ImageFormat, OpenImage};
use trellis_vm::grow::grow;
use trellis_vm::launch::{
    Boot, Forward, SCSI_TARGETS_MAX, SPARE_PORTS_MAX, UserNetwork, VmSpec, launch,
};
use trellis_vm::plug::{Plugged, Removal, plug, release, request_removal};
use trellis_vm::qmp::{Client, Notice};

const MIB: Bytes = Bytes::MIB;

async fn connect(qemu: &Qemu) -> Client {
    Client::connect(&qemu.sockets.qmp).await.unwrap().0
}

async fn size(qmp: &Client, name: &str) -> Bytes {
    let inventory = Inventory::ask(qmp).await.unwrap();
    inventory.disk(&id(name)).unwrap().size
}

#[tokio::test]
async fn commands_events_and_errors_of_a_real_monitor() {
    // Fails if the greeting, an answer, an error or an event of QEMU itself is misread.
    let mut qemu = Qemu::empty();
    let (qmp, mut events) = Client::connect(&qemu.sockets.qmp).await.unwrap();
    println!("QEMU {:?}", qmp.version());
    assert!(qmp.version().major >= 7);
    let status = qmp.execute("query-status", Value::Null).await.unwrap();
    assert_eq!(status["status"], "prelaunch");
    let missing = qmp.execute("device_del", json!({ "id": "nothing" })).await;
    assert!(
        matches!(&missing, Err(Error::Refused { class, .. }) if class == "DeviceNotFound"),
        "{missing:?}"
    );
    qmp.execute("cont", Value::Null).await.unwrap();
    let Notice::Event(event) = events.next().await else {
        panic!("no event")
    };
    assert_eq!(event.name, "RESUME");
    qemu.kill();
    let error = qmp.execute("query-status", Value::Null).await.unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error}");
    assert_eq!(events.next().await, Notice::Closed);
}

#[tokio::test]
async fn qemu_uses_what_it_was_handed_and_cannot_open_anything_else() {
    // Fails if QEMU runs with rights that it does not need, or if a disk reaches it by its path.
    let qemu = Qemu::empty();
    let qmp = connect(&qemu).await;
    let shelf = Shelf::new();
    let path = shelf.file("secret", MIB);
    let by_path = json!({ "driver": "file", "node-name": "x", "filename": path });
    let refused = qmp.execute("blockdev-add", by_path).await.unwrap_err();
    assert!(
        refused.to_string().contains("Permission denied"),
        "{refused}"
    );
    let spec = disk("a", Bus::Scsi, &path, ImageFormat::RAW);
    assert_eq!(plug(&qmp, &spec).await.unwrap(), Plugged::Added);
    assert_eq!(size(&qmp, "a").await, MIB);
    // The process has the user's numbers, and no way back.
    let status = std::fs::read_to_string(format!("/proc/{}/status", qemu.pid())).unwrap();
    let uids = status.lines().find(|line| line.starts_with("Uid:"));
    assert_eq!(uids, Some("Uid:\t65534\t65534\t65534\t65534"));
    let seccomp = status.lines().find(|line| line.starts_with("Seccomp:"));
    assert_eq!(seccomp, Some("Seccomp:\t2"), "the sandbox is not on");
}

#[tokio::test]
async fn every_machine_that_can_be_described_starts() {
    // Fails if QEMU refuses an argument of ours: the largest machine, every option, another firmware.
    let qemu = Qemu::start(|spec| VmSpec {
        scsi_controllers: 4,
        spare_ports: SPARE_PORTS_MAX,
        processors: 4,
        boot: Boot::Disk {
            firmware: Some("/usr/share/seabios/bios-256k.bin".into()),
        },
        network: Some(UserNetwork {
            forwards: vec![Forward {
                host: std::net::Ipv4Addr::LOCALHOST,
                host_port: 0,
                guest_port: 22,
            }],
            isolated: true,
        }),
        ..spec
    });
    let qmp = connect(&qemu).await;
    qmp.execute("cont", Value::Null).await.unwrap();
    let shelf = Shelf::new();
    for number in 0..usize::from(SPARE_PORTS_MAX) {
        let name = format!("v{number}");
        let spec = disk(
            &name,
            Bus::Virtio,
            &shelf.file(&name, MIB),
            ImageFormat::RAW,
        );
        plug(&qmp, &spec).await.unwrap();
    }
    let spec = disk(
        "more",
        Bus::Virtio,
        &shelf.file("more", MIB),
        ImageFormat::RAW,
    );
    let error = plug(&qmp, &spec).await.unwrap_err();
    let limit = usize::from(SPARE_PORTS_MAX);
    assert!(
        matches!(error, Error::BusFull { bus: Bus::Virtio, limit: found } if found == limit),
        "{error}"
    );
    let inventory = Inventory::ask(&qmp).await.unwrap();
    assert_eq!(inventory.disks.len(), limit);
    assert!(
        inventory.leftovers.is_empty(),
        "a refused plug left something"
    );
    assert!(qemu.said().is_empty(), "{}", qemu.said());
}

#[tokio::test]
async fn a_bus_holds_what_it_says_and_a_failed_plug_leaves_nothing() {
    // Fails if the 257th disk does not go to the second controller, if a full or missing bus is not told in our words,
    // or if a plug that failed in the middle leaves nodes, limits or descriptors.
    let qemu = Qemu::start(|spec| VmSpec {
        scsi_controllers: 2,
        spare_ports: 0,
        ..spec
    });
    let qmp = connect(&qemu).await;
    let shelf = Shelf::new();
    let path = shelf.file("all", MIB);
    for number in 0..=SCSI_TARGETS_MAX {
        // One file for all: they are read-only, so they may share it.
        let mut spec = disk(&format!("d{number}"), Bus::Scsi, &path, ImageFormat::RAW);
        spec.source.file = std::fs::File::open(&path).unwrap().into();
        spec.read_only = true;
        plug(&qmp, &spec).await.unwrap();
    }
    let none = disk("v", Bus::Virtio, &shelf.file("v", MIB), ImageFormat::RAW);
    let error = plug(&qmp, &none).await.unwrap_err();
    assert!(matches!(error, Error::BusFull { limit: 0, .. }), "{error}");
    let inventory = Inventory::ask(&qmp).await.unwrap();
    assert_eq!(inventory.disks.len(), SCSI_TARGETS_MAX + 1);
    let last = json!({ "path": "/machine/peripheral/dev-d256", "property": "parent_bus" });
    let bus = qmp.execute("qom-get", last).await.unwrap();
    assert!(bus.as_str().unwrap().ends_with("scsi1.0"), "{bus}");

    // A disk that QEMU locks already is refused at blockdev-add, after limits and descriptor are there.
    let qemu = Qemu::empty();
    let qmp = connect(&qemu).await;
    qmp.execute("cont", Value::Null).await.unwrap();
    let path = shelf.file("twice", MIB);
    plug(&qmp, &disk("a", Bus::Scsi, &path, ImageFormat::RAW))
        .await
        .unwrap();
    let error = plug(&qmp, &disk("b", Bus::Scsi, &path, ImageFormat::RAW)).await;
    assert!(matches!(error, Err(Error::Refused { .. })), "{error:?}");
    let inventory = Inventory::ask(&qmp).await.unwrap();
    assert_eq!(inventory.disks.len(), 1);
    assert!(inventory.leftovers.is_empty(), "{inventory:?}");
    let objects = qmp
        .execute("qom-list", json!({ "path": "/objects" }))
        .await
        .unwrap();
    assert!(!objects.to_string().contains("limits-b"), "{objects}");
}

#[tokio::test]
async fn each_kind_of_storage_grows_by_its_own_rule() {
    // Fails if a device is not looked at again, a file is cut, an image shrinks, or a size is reported unmeasured.
    let qemu = Qemu::empty();
    let qmp = connect(&qemu).await;
    let shelf = Shelf::new();
    let device = shelf.device("device", Bytes::mib(8));
    let offset = ImageFormat::Raw {
        offset: Bytes::new(512),
    };
    let behind = shelf.device("behind", Bytes::mib(8));
    let file = shelf.file("file", Bytes::mib(8));
    let shifted = shelf.file("shifted", Bytes::mib(9));
    let base = shelf.file("base", Bytes::mib(4));
    let image = shelf.qcow2("image", Bytes::mib(8), None);
    let overlay = shelf.qcow2("overlay", Bytes::mib(8), Some(&base));
    for (name, path, format) in [
        ("device", device.path(), ImageFormat::RAW),
        ("behind", behind.path(), offset),
        ("file", &file, ImageFormat::RAW),
        ("shifted", &shifted, ImageFormat::Raw { offset: MIB }),
        ("image", &image, ImageFormat::Qcow2),
        ("overlay", &overlay, ImageFormat::Qcow2),
    ] {
        let mut spec = disk(name, Bus::Scsi, path, format);
        spec.direct = name == "device";
        if name == "overlay" {
            spec.backing = Some(OpenImage {
                file: std::fs::File::open(&base).unwrap().into(),
                format: ImageFormat::RAW,
            });
        }
        plug(&qmp, &spec).await.unwrap();
    }
    let inventory = Inventory::ask(&qmp).await.unwrap();
    let storage = |name: &str| inventory.disk(&id(name)).unwrap().storage;
    assert_eq!(storage("behind"), Storage::Device);
    assert_eq!(storage("shifted"), Storage::File);
    assert_eq!(storage("overlay"), Storage::Qcow2);
    assert_eq!(size(&qmp, "shifted").await, Bytes::mib(8));
    assert_eq!(size(&qmp, "behind").await.get(), (8 << 20) - 512);

    // A device that has not grown is said so, and one that has is seen.
    let want = Bytes::mib(16);
    let error = grow(&qmp, &id("device"), want, None).await.unwrap_err();
    assert!(matches!(error, Error::NotGrown { .. }), "{error}");
    device.grow(want);
    behind.grow(want);
    let raised = grow(&qmp, &id("device"), want, None).await.unwrap();
    let from = Bytes::mib(8);
    assert_eq!(raised, Outcome::Raised { from, to: want });
    let beyond = Bytes::new((16 << 20) - 512);
    assert_eq!(
        grow(&qmp, &id("behind"), beyond, None)
            .await
            .unwrap()
            .size(),
        beyond
    );

    // A file that was extended by somebody else keeps all of it, whatever is asked for.
    extend(&file, Bytes::mib(32));
    let grown = grow(&qmp, &id("file"), want, Some(&open(&file))).await;
    assert_eq!(grown.unwrap().size(), Bytes::mib(32));
    let grown = grow(&qmp, &id("shifted"), want, Some(&open(&shifted))).await;
    assert_eq!(grown.unwrap().size(), want);
    assert_eq!(std::fs::metadata(&shifted).unwrap().len(), 17 << 20);
    let error = grow(&qmp, &id("file"), Bytes::mib(64), None).await;
    assert!(matches!(error, Err(Error::FileNeeded { .. })), "{error:?}");

    for name in ["image", "overlay"] {
        let grown = grow(&qmp, &id(name), want, None).await.unwrap();
        assert_eq!(grown, Outcome::Raised { from, to: want });
        let again = grow(&qmp, &id(name), Bytes::new(0), None).await.unwrap();
        assert_eq!(again, Outcome::Unchanged { size: want });
        let error = grow(&qmp, &id(name), Bytes::new(want.get() + 1), None).await;
        assert!(matches!(error, Err(Error::Unaligned { .. })), "{error:?}");
    }
}

#[tokio::test]
async fn a_growth_that_a_job_or_an_export_blocks_says_so_and_works_later() {
    // Fails if a passing obstacle is told as a failure for good, or by a text that differs between versions.
    let qemu = Qemu::empty();
    let qmp = connect(&qemu).await;
    let shelf = Shelf::new();
    let a = shelf.qcow2("a", Bytes::mib(8), None);
    plug(&qmp, &disk("a", Bus::Scsi, &a, ImageFormat::Qcow2))
        .await
        .unwrap();
    // A mirror stays until it is told to end.
    let sink = json!({ "driver": "null-co", "node-name": "sink", "size": 8 << 20 });
    qmp.execute("blockdev-add", sink).await.unwrap();
    let mirror = json!({
        "job-id": "copy", "device": "vol-a", "target": "sink", "sync": "full",
    });
    let mut events = qmp.subscribe();
    qmp.execute("blockdev-mirror", mirror).await.unwrap();
    let want = Bytes::mib(16);
    let error = grow(&qmp, &id("a"), want, None).await.unwrap_err();
    assert!(
        matches!(&error, Error::Busy { by: Blocker::Job(job), .. } if job == "copy"),
        "{error}"
    );
    qmp.execute("job-cancel", json!({ "id": "copy" }))
        .await
        .unwrap();
    // Cancelled jobs end with this event, before or after their target was whole.
    loop {
        match events.next().await {
            Notice::Event(event)
                if event.name == "BLOCK_JOB_CANCELLED" || event.name == "BLOCK_JOB_COMPLETED" =>
            {
                break;
            }
            Notice::Closed => panic!("QEMU ended"),
            _ => {}
        }
    }
    let nbd =
        json!({ "addr": { "type": "unix", "data": { "path": qemu.dir.path().join("nbd") } } });
    qmp.execute("nbd-server-start", nbd).await.unwrap();
    let export = json!({ "type": "nbd", "id": "out", "node-name": "vol-a", "name": "a" });
    qmp.execute("block-export-add", export).await.unwrap();
    let error = grow(&qmp, &id("a"), want, None).await.unwrap_err();
    assert!(
        matches!(&error, Error::Busy { by: Blocker::Export(export), .. } if export == "out"),
        "{error}"
    );
    qmp.execute("block-export-del", json!({ "id": "out" }))
        .await
        .unwrap();
    // The export ends a moment later.
    let deadline = std::time::Instant::now() + PATIENCE;
    let raised = loop {
        match grow(&qmp, &id("a"), want, None).await {
            Err(Error::Busy { .. }) if std::time::Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            other => break other.unwrap(),
        }
    };
    assert_eq!(raised.size(), want);
}

#[tokio::test]
async fn an_unplugged_disk_can_come_back_and_a_half_plugged_one_is_cleared() {
    // Fails if parts of a disk stay after its removal, or if a plug that was cut off blocks the next one.
    let qemu = Qemu::empty();
    let shelf = Shelf::new();
    let path = shelf.file("a", MIB);
    let (qmp, mut events) = Client::connect(&qemu.sockets.qmp).await.unwrap();
    qmp.execute("cont", Value::Null).await.unwrap();
    for round in 0..3 {
        let spec = disk("a", Bus::Scsi, &path, ImageFormat::RAW);
        assert_eq!(plug(&qmp, &spec).await.unwrap(), Plugged::Added, "{round}");
        assert_eq!(plug(&qmp, &spec).await.unwrap(), Plugged::Unchanged);
        assert_eq!(
            request_removal(&qmp, &spec.id).await.unwrap(),
            Removal::Asked
        );
        let deleted = loop {
            match events.next().await {
                Notice::Event(event) if event.name == "DEVICE_DELETED" => break event,
                Notice::Event(_) => {}
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(deleted.text("device"), Some("dev-a"));
        // The bytes are still held: nobody else may have them before this.
        assert_eq!(Inventory::ask(&qmp).await.unwrap().leftovers.len(), 1);
        release(&qmp, &spec.id).await.unwrap();
        let sets = qmp.execute("query-fdsets", Value::Null).await.unwrap();
        assert_eq!(sets, json!([]));
        assert_eq!(
            request_removal(&qmp, &spec.id).await.unwrap(),
            Removal::Gone
        );
    }
    // A driver that died after device_del leaves everything but the device. The next one clears up.
    plug(&qmp, &disk("a", Bus::Scsi, &path, ImageFormat::RAW))
        .await
        .unwrap();
    request_removal(&qmp, &id("a")).await.unwrap();
    drop((qmp, events));
    let vm = Vm::adopt(&qemu.sockets.qmp).await.unwrap();
    let inventory = vm.disks().await.unwrap();
    assert!(inventory.disks.is_empty() && inventory.leftovers.is_empty());
    let spec = disk("a", Bus::Scsi, &path, ImageFormat::RAW);
    assert_eq!(vm.plug(spec).await.unwrap(), Plugged::Added);
    // QEMU closes no descriptor while the guest is paused. The driver has it do so afterwards.
    vm.pause().await.unwrap();
    vm.unplug(&id("a"), PATIENCE).await.unwrap();
    assert_eq!(vm.disks().await.unwrap().leftovers.len(), 1);
    vm.resume().await.unwrap();
    let deadline = std::time::Instant::now() + PATIENCE;
    while !vm.disks().await.unwrap().leftovers.is_empty() {
        assert!(std::time::Instant::now() < deadline, "the descriptor stays");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn limits_change_while_the_disk_is_in_use() {
    // Fails if a limit set later does not reach QEMU.
    let qemu = Qemu::empty();
    let shelf = Shelf::new();
    let vm = Vm::adopt(&qemu.sockets.qmp).await.unwrap();
    vm.plug(disk(
        "a",
        Bus::Scsi,
        &shelf.file("a", MIB),
        ImageFormat::RAW,
    ))
    .await
    .unwrap();
    let limits = DiskLimits {
        iops_total: 500,
        bps_total: 1 << 20,
    };
    vm.limit(&id("a"), limits).await.unwrap();
    let none = vm.limit(&id("b"), limits).await;
    assert!(matches!(none, Err(Error::NotPlugged { .. })), "{none:?}");
    drop(vm);
    let qmp = connect(&qemu).await;
    let group = json!({ "path": "/objects/limits-a", "property": "limits" });
    let found = qmp.execute("qom-get", group).await.unwrap();
    assert_eq!(found["iops-total"], 500);
    assert_eq!(found["bps-total"], 1 << 20);
}

#[tokio::test]
async fn the_state_follows_qemu_to_its_end() {
    // Fails if the driver shows a state that QEMU is not in, accepts what it cannot do, or misses QEMU's death.
    let mut qemu = Qemu::empty();
    let shelf = Shelf::new();
    let vm = Vm::adopt(&qemu.sockets.qmp).await.unwrap();
    assert_eq!(vm.state(), VmState::Starting);
    let early = vm.pause().await;
    assert!(matches!(early, Err(Error::NotNow(_))), "{early:?}");
    let first = disk("a", Bus::Scsi, &shelf.file("a", MIB), ImageFormat::RAW);
    vm.start(vec![first]).await.unwrap();
    assert_eq!(vm.state(), VmState::Running);
    vm.pause().await.unwrap();
    assert!(matches!(vm.state(), VmState::Paused(_)));
    vm.resume().await.unwrap();
    // Another driver finds the same.
    drop(vm);
    let vm = Vm::adopt(&qemu.sockets.qmp).await.unwrap();
    assert_eq!(vm.state(), VmState::Running);
    assert_eq!(vm.disks().await.unwrap().disks.len(), 1);
    qemu.kill();
    let end = vm.wait_for(VmState::is_over).await;
    assert_eq!(end, VmState::Failed(VmLoss::QemuGone));
    let late = vm.grow(&id("a"), MIB, None).await;
    assert!(
        matches!(late, Err(Error::NotNow(_) | Error::DriverGone)),
        "{late:?}"
    );

    // There is no guest that could switch itself off: the deadline ends it.
    let mut qemu = Qemu::empty();
    let vm = Vm::adopt(&qemu.sockets.qmp).await.unwrap();
    vm.start(Vec::new()).await.unwrap();
    vm.stop(Duration::from_millis(300)).await.unwrap();
    assert_eq!(vm.state(), VmState::Stopping);
    let end = vm.wait_for(VmState::is_over).await;
    assert_eq!(end, VmState::Stopped(End::Host));
    assert!(qemu.ended().success());
}

/// A step of a random history.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Ask for a size, of so many KiB.
    Grow(u64),
    /// Extend the file from outside.
    Extend(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kib = prop_oneof![Just(0), 0u64..4096];
    let step = prop_oneof![
        3 => kib.clone().prop_map(Step::Grow),
        1 => (1u64..4096).prop_map(Step::Extend),
    ];
    prop::collection::vec(step, 1..12)
}

/// Bytes of a file as its owner sees them.
fn raw_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

#[test]
fn no_order_of_sizes_shrinks_any_kind_of_storage() {
    // Fails if any sequence of wishes and outside growth makes a disk or a file smaller, or loses what is in it.
    let qemu = Qemu::empty();
    let shelf = Shelf::new();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let qmp = runtime.block_on(connect(&qemu));
    let counter = std::cell::Cell::new(0u32);
    let mut runner = TestRunner::new(Config {
        cases: 24,
        failure_persistence: None,
        ..Config::default()
    });
    let outcome = runner.run(&steps(), |steps| {
        counter.set(counter.get() + 1);
        let number = counter.get();
        runtime.block_on(history(&qmp, &shelf, number, &steps));
        Ok(())
    });
    outcome.unwrap();
    println!("{} histories", counter.get());
}

async fn history(qmp: &Client, shelf: &Shelf, number: u32, steps: &[Step]) {
    let first = Bytes::mib(1);
    let mark = common::pattern(7, 4096);
    let file = shelf.file(&format!("f{number}"), first);
    common::write_file(&file, &mark);
    extend(&file, first);
    let device: LoopDisk = shelf.device(&format!("l{number}"), first);
    let image = shelf.qcow2(&format!("q{number}"), first, None);
    let names = ["f", "l", "q"].map(|kind| format!("{kind}{number}"));
    let [f, l, q] = names.each_ref().map(|name| id(name));
    for (name, path, format) in [
        (&names[0], file.as_path(), ImageFormat::RAW),
        (&names[1], device.path(), ImageFormat::RAW),
        (&names[2], image.as_path(), ImageFormat::Qcow2),
    ] {
        plug(qmp, &disk(name, Bus::Scsi, path, format))
            .await
            .unwrap();
    }
    let mut known = [first; 3];
    for step in steps {
        match *step {
            Step::Extend(kib) => {
                let to = Bytes::new(raw_bytes(&file).max(kib << 10));
                extend(&file, to);
                device.grow(to);
            }
            Step::Grow(kib) => {
                let want = Bytes::new(kib << 10);
                let before = raw_bytes(&file);
                grow(qmp, &f, want, Some(&open(&file))).await.unwrap();
                assert!(raw_bytes(&file) >= before, "{steps:?} cut the file");
                // A device that is too small is an answer too.
                let _ = grow(qmp, &l, want, None).await;
                grow(qmp, &q, want, None).await.unwrap();
            }
        }
        let inventory = Inventory::ask(qmp).await.unwrap();
        for (index, disk) in [&f, &l, &q].into_iter().enumerate() {
            let now = inventory.disk(disk).unwrap().size;
            assert!(now >= known[index], "{steps:?} shrank {disk}");
            known[index] = now;
        }
    }
    assert_eq!(common::read_file(&file)[..mark.len()], mark);
    for disk in [&f, &l, &q] {
        request_removal(qmp, disk).await.unwrap();
        release(qmp, disk).await.unwrap();
    }
}

#[test]
fn the_same_machine_has_the_same_command_line() {
    // Fails if the arguments depend on anything but the machine: a restart would then change its looks.
    let sockets = trellis_vm::launch::Sockets::below(Path::new("/run/x"));
    let (one, two) = (launch(&spec(sockets.clone())), launch(&spec(sockets)));
    assert_eq!(one.unwrap(), two.unwrap());
}
