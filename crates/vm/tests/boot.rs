//! What the firmware boots when the disks came through the monitor.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::time::Duration;

use common::{PATIENCE, Qemu, Shelf, disk};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use trellis_api::Bytes;
use trellis_vm::driver::Vm;
use trellis_vm::graph::{Bus, ImageFormat};

/// A boot sector that writes one letter to the serial port and halts.
fn boot_sector(letter: u8) -> Vec<u8> {
    let mut sector = vec![
        0xba, 0xf8, 0x03, // movw $0x3f8, %dx
        0xb0, letter, // movb $letter, %al
        0xee,   // outb %al, %dx
        0xf4,   // hlt
        0xeb, 0xfd, // jmp back to it
    ];
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    sector
}

#[tokio::test]
async fn the_firmware_boots_the_first_in_order_of_the_disks_that_were_plugged_before_the_start() {
    // Fails if disks that are plugged before the first instruction come too late for the firmware, or if their order is
    // not told to it.
    for (bus, first) in [
        (Bus::Scsi, 'A'),
        (Bus::Scsi, 'B'),
        (Bus::Virtio, 'A'),
        (Bus::Virtio, 'B'),
    ] {
        let qemu = Qemu::empty();
        let shelf = Shelf::new();
        let vm = Vm::adopt(&qemu.sockets.qmp).await.unwrap();
        let mut console = UnixStream::connect(&qemu.sockets.console).await.unwrap();
        let disks = ['A', 'B'].map(|letter| {
            let path = shelf.file(&letter.to_string(), Bytes::MIB);
            common::write_file(&path, &boot_sector(u8::try_from(letter).unwrap()));
            common::extend(&path, Bytes::MIB);
            let mut spec = disk(
                &letter.to_lowercase().to_string(),
                bus,
                &path,
                ImageFormat::RAW,
            );
            spec.boot_index = Some(if letter == first { 1 } else { 2 });
            spec
        });
        vm.start(disks.into()).await.unwrap();
        let mut said = [0; 1];
        tokio::time::timeout(PATIENCE, console.read_exact(&mut said))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(char::from(said[0]), first, "{bus}");
        vm.stop(Duration::ZERO).await.unwrap();
    }
}
