//! A real QEMU with a real guest, booted once: everything that only a guest can confirm.
//!
//! The steps share the boot and run in this order. Each leaves the machine without the disks that it plugged.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;
#[path = "common/linux.rs"]
mod linux;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{LoopDisk, PATIENCE, Qemu, Shelf, disk, extend, id, open};
use linux::{Inside, Linux};
use serde_json::json;
use sha2::{Digest, Sha256};
use trellis_api::Bytes;
use trellis_node::filesystem::Outcome;
use trellis_vm::Error;
use trellis_vm::agent::GuestAgent;
use trellis_vm::agent::script::{GuestHold, GuestUse, IfMounted};
use trellis_vm::driver::Vm;
use trellis_vm::driver::policy::{End, Pause, VmState};
use trellis_vm::graph::{Bus, DiskSpec, ImageFormat, OpenImage};
use trellis_vm::launch::VmSpec;

/// How much of the beginning of each disk is written and compared.
const MARK_KIB: u64 = 256;
/// How many disks one machine gets in the test of many.
const MANY: usize = 200;

#[tokio::test]
async fn disks_come_grow_and_go_under_a_running_guest() {
    // Fails if the guest sees another size than QEMU reports, if a growth or an unplug of one disk touches another, if
    // a new driver does not find what the old one had, or if a byte that was written is not read back.
    let linux = Linux::pack();
    let mut qemu = Qemu::start(|spec| VmSpec {
        boot: linux.boot(),
        spare_ports: 4,
        ..spec
    });
    let began = Instant::now();
    let vm = Vm::adopt(&qemu.sockets.qmp).await.unwrap();
    vm.start(Vec::new()).await.unwrap();
    let mut guest = Inside(GuestAgent::connect(&qemu.sockets.agent).await.unwrap());
    guest.0.ping(PATIENCE).await.unwrap();
    println!("the guest is up after {:.1?}", began.elapsed());
    drop(vm);

    for (name, step) in [
        ("sizes", Step::Sizes),
        ("refusals", Step::Refusals),
        ("filesystems", Step::Filesystems),
        ("no space", Step::NoSpace),
        ("many", Step::Many),
    ] {
        let began = Instant::now();
        match step {
            Step::Sizes => sizes_follow_in_any_order(&qemu, &mut guest).await,
            Step::Refusals => a_guest_that_keeps_a_disk_keeps_it(&qemu, &mut guest).await,
            Step::Filesystems => filesystems_grow_by_the_agent(&qemu, &mut guest).await,
            Step::NoSpace => a_guest_out_of_room_goes_on(&qemu, &mut guest).await,
            Step::Many => many_disks_fit(&qemu, &mut guest).await,
        }
        assert_eq!(guest.count().await, 0, "{name} left a disk");
        println!("{name}: {:.1?}", began.elapsed());
    }

    let vm = Vm::adopt(&qemu.sockets.qmp).await.unwrap();
    vm.stop(PATIENCE).await.unwrap();
    let end = vm.wait_for(VmState::is_over).await;
    assert_eq!(end, VmState::Stopped(End::Guest));
    assert!(qemu.ended().success());
    println!("all of it: {:.1?}", began.elapsed());
}

#[derive(Clone, Copy)]
enum Step {
    Sizes,
    Refusals,
    Filesystems,
    NoSpace,
    Many,
}

async fn adopt(qemu: &Qemu) -> Vm {
    Vm::adopt(&qemu.sockets.qmp).await.unwrap()
}

/// What a disk of a test is on.
enum Ground {
    Device(LoopDisk),
    File(PathBuf),
    Image(PathBuf),
}

struct Tried {
    name: &'static str,
    bus: Bus,
    ground: Ground,
    size: Bytes,
    /// The checksum of its beginning.
    sum: String,
}

impl Tried {
    fn spec(&self) -> DiskSpec {
        let (path, format) = match &self.ground {
            Ground::Device(device) => (device.path(), ImageFormat::RAW),
            Ground::File(path) => (path.as_path(), ImageFormat::RAW),
            Ground::Image(path) => (path.as_path(), ImageFormat::Qcow2),
        };
        disk(self.name, self.bus, path, format)
    }

    async fn grow(&mut self, vm: &Vm, to: Bytes) {
        let file = match &self.ground {
            Ground::Device(device) => {
                device.grow(to);
                None
            }
            Ground::File(path) => Some(open(path)),
            Ground::Image(_) => None,
        };
        let grown = vm.grow(&id(self.name), to, file).await.unwrap();
        let from = self.size;
        assert_eq!(grown, Outcome::Raised { from, to }, "{}", self.name);
        self.size = to;
    }
}

/// The first, the second and the third disk of each bus: each is plugged, written, grown alone, and taken out, in four
/// different orders, with another driver in between.
async fn sizes_follow_in_any_order(qemu: &Qemu, guest: &mut Inside) {
    let shelf = Shelf::new();
    let base = shelf.file("base", Bytes::mib(4));
    let first = Bytes::mib(8);
    let image = |name: &str| Ground::Image(shelf.qcow2(name, first, None));
    let device = |name: &str| Ground::Device(shelf.device(name, first));
    let file = |name: &str| Ground::File(shelf.file(name, first));
    let tried = |name, bus, ground| Tried {
        name,
        bus,
        ground,
        size: first,
        sum: String::new(),
    };
    let mut disks = [
        tried("s1", Bus::Scsi, device("s1")),
        tried("s2", Bus::Scsi, file("s2")),
        tried("s3", Bus::Scsi, image("s3")),
        tried("v1", Bus::Virtio, file("v1")),
        tried("v2", Bus::Virtio, device("v2")),
        tried("v3", Bus::Virtio, image("v3")),
    ];

    let vm = adopt(qemu).await;
    for each in &mut disks {
        let began = Instant::now();
        vm.plug(each.spec()).await.unwrap();
        guest.sees(each.name, Some(first.get())).await;
        println!(
            "{} is in the guest after {:.1?}",
            each.name,
            began.elapsed()
        );
        each.sum = guest.write(each.name, 0, MARK_KIB, each.name).await;
    }
    // An overlay on an image that QEMU was handed too.
    let overlay = shelf.qcow2("o", first, Some(&base));
    let mut spec = disk("o", Bus::Scsi, &overlay, ImageFormat::Qcow2);
    spec.backing = Some(OpenImage {
        file: std::fs::File::open(&base).unwrap().into(),
        format: ImageFormat::RAW,
    });
    vm.plug(spec).await.unwrap();
    guest.sees("o", Some(first.get())).await;
    drop(vm);

    // Grown: the second, the third, the first, and the other way round for the next size.
    let orders = [[1, 5, 2, 3, 0, 4], [4, 0, 3, 2, 5, 1]];
    for (round, order) in orders.into_iter().enumerate() {
        let vm = adopt(qemu).await;
        let to = Bytes::mib(16 << round);
        for index in order {
            disks[index].grow(&vm, to).await;
            let sizes = disks.iter().map(|each| (each.name, each.size));
            let all = sizes.chain([("o", first)]);
            guest
                .sees_all(
                    &all.map(|(name, size)| (name.to_owned(), size.get()))
                        .collect(),
                )
                .await;
        }
        for each in &disks {
            // The new end can be written, and the beginning is as it was.
            let end = (each.size.get() >> 10) - 64;
            let sum = guest.write(each.name, end, 64, "end").await;
            assert_eq!(guest.sum(each.name, end, 64).await, sum, "{}", each.name);
            assert_eq!(guest.sum(each.name, 0, MARK_KIB).await, each.sum);
        }
    }

    // A disk that was taken out and put back has what it had; the others do not notice.
    let vm = adopt(qemu).await;
    for index in [4, 1] {
        let name = disks[index].name;
        vm.unplug_with(&mut guest.0, &id(name), name, IfMounted::Refuse, PATIENCE)
            .await
            .unwrap();
        guest.sees(name, None).await;
        vm.plug(disks[index].spec()).await.unwrap();
        guest.sees(name, Some(disks[index].size.get())).await;
    }
    for each in &disks {
        assert_eq!(guest.sum(each.name, 0, MARK_KIB).await, each.sum);
    }
    drop(vm);

    // Taken out in another order than they came in, each by another driver.
    for index in [2, 3, 0, 5, 4, 1] {
        let vm = adopt(qemu).await;
        let each = &disks[index];
        let began = Instant::now();
        vm.unplug_with(
            &mut guest.0,
            &id(each.name),
            each.name,
            IfMounted::Refuse,
            PATIENCE,
        )
        .await
        .unwrap();
        println!("{} is gone after {:.1?}", each.name, began.elapsed());
        guest.sees(each.name, None).await;
        // Nobody holds the bytes now, and they are what the guest wrote.
        if let Ground::File(path) = &each.ground {
            let bytes = common::read_file(path);
            assert_eq!(hex(&bytes[..256 << 10]), each.sum);
            assert_eq!(Bytes::new(bytes.len().try_into().unwrap()), each.size);
        }
    }
    let vm = adopt(qemu).await;
    vm.unplug(&id("o"), PATIENCE).await.unwrap();
    guest.sees("o", None).await;
    assert!(vm.disks().await.unwrap().disks.is_empty());
}

fn hex(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A guest that does not answer keeps its disk, and one that uses it is not robbed.
async fn a_guest_that_keeps_a_disk_keeps_it(qemu: &Qemu, guest: &mut Inside) {
    let shelf = Shelf::new();
    let vm = adopt(qemu).await;
    for (name, bus) in [("keep-v", Bus::Virtio), ("keep-s", Bus::Scsi)] {
        let path = shelf.file(name, Bytes::mib(16));
        vm.plug(disk(name, bus, &path, ImageFormat::RAW))
            .await
            .unwrap();
        guest.sees(name, Some(16 << 20)).await;
        let device = guest.sh(&format!("disks name {name}")).await;
        let device = device.trim();
        guest
            .sh(&format!(
                "mkfs.ext4 -q /dev/{device} && mkdir -p '/mnt/{name} x' && mount /dev/{device} '/mnt/{name} x'"
            ))
            .await;
        let refused = vm
            .unplug_with(&mut guest.0, &id(name), name, IfMounted::Refuse, PATIENCE)
            .await
            .unwrap_err();
        let mounted = GuestUse::Mount(format!("/mnt/{name}\\040x"));
        assert!(
            matches!(&refused, Error::GuestUses { uses, .. } if *uses == [mounted]),
            "{refused}"
        );
        assert!(guest.0.freeze().await.unwrap() >= 1);
        assert!(guest.0.thaw().await.unwrap() >= 1);
    }
    let filesystems = guest.0.filesystems().await.unwrap();
    assert_eq!(filesystems.len(), 2, "{filesystems:?}");
    assert!(filesystems.iter().all(|each| each.kind == "ext4"));
    let disks = guest.0.disks().await.unwrap();
    assert_eq!(disks.iter().filter(|each| !each.partition).count(), 2);

    // A guest that does not run cannot let go of a virtio disk. The disk stays, and the machine too.
    vm.pause().await.unwrap();
    let late = vm.unplug(&id("keep-v"), Duration::from_millis(400)).await;
    assert!(
        matches!(late, Err(Error::UnplugTimedOut { .. })),
        "{late:?}"
    );
    assert_eq!(vm.disks().await.unwrap().disks.len(), 2);
    vm.resume().await.unwrap();
    // It lets go now, although it uses it: asked is asked. The driver clears up without being told.
    guest.sees("keep-v", None).await;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let disks = vm.disks().await.unwrap();
        if disks.disks.len() == 1 && disks.leftovers.is_empty() {
            break;
        }
        assert!(Instant::now() < deadline, "{disks:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    vm.unplug(&id("keep-v"), PATIENCE).await.unwrap();
    guest.try_sh("umount '/mnt/keep-v x'").await;

    vm.unplug_with(
        &mut guest.0,
        &id("keep-s"),
        "keep-s",
        IfMounted::Unmount,
        PATIENCE,
    )
    .await
    .unwrap();
    guest.sees("keep-s", None).await;
}

/// Partition tables and filesystems grow to their disk, or it is said why not.
async fn filesystems_grow_by_the_agent(qemu: &Qemu, guest: &mut Inside) {
    let shelf = Shelf::new();
    let vm = adopt(qemu).await;
    guest
        .sh("while read -r module; do insmod $module 2>/dev/null; done </etc/modules.slow; [ -d /sys/fs/btrfs ]")
        .await;
    let table = |label: &str, device: &str| {
        format!(
            "printf 'label: {label}\\nstart=2048,size=4096\\nstart=8192\\n' | sfdisk -q /dev/{device} && mkfs.ext4 -q /dev/{device}2 && mount /dev/{device}2 /mnt/$n"
        )
    };
    let (small, large) = (Bytes::mib(320), Bytes::mib(640));
    for (name, bus, kind, label) in [
        ("gpt", Bus::Scsi, "ext4", Some("gpt")),
        ("dos", Bus::Virtio, "ext4", Some("dos")),
        ("xfs", Bus::Virtio, "xfs", None),
        ("btrfs", Bus::Scsi, "btrfs", None),
    ] {
        let began = Instant::now();
        let path = shelf.file(name, small);
        vm.plug(disk(name, bus, &path, ImageFormat::RAW))
            .await
            .unwrap();
        guest.sees(name, Some(small.get())).await;
        let device = guest.sh(&format!("disks name {name}")).await;
        let device = device.trim();
        let held = guest.0.grow_filesystem(name, small).await.unwrap().held;
        assert_eq!(held, Some(GuestHold::NotMounted(device.to_owned())));
        let make = match label {
            Some(label) => table(label, device),
            None => {
                format!("mkfs.{kind} -q /dev/{device} && mount -t {kind} /dev/{device} /mnt/$n")
            }
        };
        guest
            .sh(&format!("n={name}; mkdir -p /mnt/$n; {make} && yes {name} | head -c 1000000 >/mnt/$n/f && sync"))
            .await;
        let held = guest.0.grow_filesystem(name, large).await.unwrap().held;
        assert_eq!(held, Some(GuestHold::DiskSmaller(small)));

        vm.grow(&id(name), large, Some(open(&path))).await.unwrap();
        guest.sees(name, Some(large.get())).await;
        let grown = guest.0.grow_filesystem(name, large).await.unwrap();
        assert_eq!(grown.held, None, "{grown:?}");
        assert_eq!(grown.disk, Some((device.to_owned(), large)));
        assert_eq!(grown.partition.is_some(), label.is_some());
        let filesystem = grown.filesystem.unwrap();
        assert_eq!(filesystem.kind, kind);
        assert_eq!(filesystem.mountpoint, format!("/mnt/{name}"));
        let Outcome::Raised { from, to } = filesystem.outcome else {
            panic!("{filesystem:?}")
        };
        assert!(from <= small && to > Bytes::mib(520), "{filesystem:?}");
        // Again is no change, and the content is whole.
        let again = guest.0.grow_filesystem(name, large).await.unwrap();
        let outcome = again.filesystem.unwrap().outcome;
        assert!(matches!(outcome, Outcome::Unchanged { .. }), "{outcome:?}");
        let same = format!("yes {name} | head -c 1000000 | cmp - /mnt/{name}/f");
        guest.sh(&same).await;
        vm.unplug_with(&mut guest.0, &id(name), name, IfMounted::Unmount, PATIENCE)
            .await
            .unwrap();
        guest.sees(name, None).await;
        println!("{name}: {:.1?}", began.elapsed());
    }
    let held = guest.0.grow_filesystem("none", small).await.unwrap().held;
    assert_eq!(held, Some(GuestHold::NoDisk));
}

/// A guest that writes more than there is room for stops, and goes on after a growth without having lost anything.
async fn a_guest_out_of_room_goes_on(qemu: &Qemu, guest: &mut Inside) {
    let shelf = Shelf::new();
    // An image of 64 MiB on a device of 4: it is thin.
    let size = Bytes::mib(64);
    let device = shelf.device("thin", Bytes::mib(4));
    let image = shelf.qcow2("image", size, None);
    let made = common::read_file(&image);
    std::io::Write::write_all(&mut open(device.path()), &made).unwrap();
    let vm = adopt(qemu).await;
    vm.plug(disk("thin", Bus::Scsi, device.path(), ImageFormat::Qcow2))
        .await
        .unwrap();
    guest.sees("thin", Some(size.get())).await;
    // It is not waited for: the guest stops in the middle of it.
    let write = json!({
        "path": "/bin/sh",
        "arg": ["-c", "disks write thin 0 6144 full >/run/thin.sum"],
    });
    guest
        .0
        .execute("guest-exec", write, PATIENCE)
        .await
        .unwrap();
    let paused = tokio::time::timeout(
        PATIENCE,
        vm.wait_for(|state| matches!(state, VmState::Paused(_))),
    );
    assert_eq!(paused.await.unwrap(), VmState::Paused(Pause::NoSpace));
    drop(vm);
    // Another driver finds the same, and which disk it is.
    let vm = adopt(qemu).await;
    assert_eq!(vm.state(), VmState::Paused(Pause::NoSpace));
    let disks = vm.disks().await.unwrap();
    assert!(disks.disk(&id("thin")).unwrap().out_of_space);
    device.grow(Bytes::mib(80));
    vm.grow(&id("thin"), size, None).await.unwrap();
    assert_eq!(vm.state(), VmState::Running);
    let wrote = guest
        .sh("while ! [ -s /run/thin.sum ]; do sleep 0.1; done; cat /run/thin.sum")
        .await;
    assert_eq!(guest.sum("thin", 0, 6144).await, wrote.trim());
    assert_eq!(vm.state(), VmState::Running);
    vm.unplug(&id("thin"), PATIENCE).await.unwrap();
    guest.sees("thin", None).await;
}

/// Many disks on one machine, one of which grows.
async fn many_disks_fit(qemu: &Qemu, guest: &mut Inside) {
    let shelf = Shelf::new();
    let vm = adopt(qemu).await;
    let names: Vec<String> = (0..MANY).map(|number| format!("m{number}")).collect();
    let began = Instant::now();
    for name in &names {
        let path = shelf.file(name, Bytes::MIB);
        vm.plug(disk(name, Bus::Scsi, &path, ImageFormat::RAW))
            .await
            .unwrap();
    }
    let plugged = began.elapsed();
    while guest.count().await < MANY {
        assert!(
            began.elapsed() < PATIENCE,
            "the guest does not see them all"
        );
    }
    println!(
        "{MANY} disks plugged in {plugged:.1?}, all in the guest after {:.1?}",
        began.elapsed()
    );
    let middle = &names[MANY / 2];
    let path = shelf.path(middle);
    extend(&path, Bytes::mib(2));
    let began = Instant::now();
    vm.grow(&id(middle), Bytes::mib(2), Some(open(&path)))
        .await
        .unwrap();
    println!("one of {MANY} grew in {:.1?}", began.elapsed());
    guest.sees(middle, Some(2 << 20)).await;
    drop(vm);

    let began = Instant::now();
    let vm = adopt(qemu).await;
    assert_eq!(vm.disks().await.unwrap().disks.len(), MANY);
    println!("a new driver has found {MANY} in {:.1?}", began.elapsed());
    // All at once, from the last to the first.
    let removals: Vec<_> = names
        .iter()
        .rev()
        .map(|name| {
            let (vm, id) = (vm.clone(), id(name));
            tokio::spawn(async move { vm.unplug(&id, PATIENCE).await })
        })
        .collect();
    for removal in removals {
        removal.await.unwrap().unwrap();
    }
    println!("all unplugged in {:.1?}", began.elapsed());
    let began = Instant::now();
    while guest.count().await > 0 {
        assert!(began.elapsed() < PATIENCE, "the guest still sees some");
    }
}
