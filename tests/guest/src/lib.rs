//! A guest: a Debian cloud kernel in QEMU, with an initramfs of our own, in which named scenarios run as root with
//! every capability.
//!
//! It exists because the machine that the tests run on may lack what they need: CAP_SYS_RESOURCE, without which ext3
//! and ext4 do not grow online, or an iSCSI initiator in its kernel.
//!
//! The steps of a run: [`artifacts`] has cargo build the programs, [`trellis_guest_parts`] fetches the kernel, [`image`] packs both
//! with the filesystems' tools and their libraries, [`qemu`] starts the machine, and [`run`] sends one [`scenario`]
//! after the other to process 1 of the guest (`guest-init`), over a virtio-serial port that speaks [`protocol`].
//!
//! What can go wrong: a scenario that does not end is killed at its limit. What it leaves behind is cleaned up and
//! counts against it. A scenario that cannot even be killed, or a kernel that dies, costs the guest, and the remaining
//! scenarios run in the next one. QEMU dies with the process that started it, and its files are gone as soon as it has
//! opened them.

pub mod artifacts;
pub mod error;
pub mod image;
pub mod protocol;
pub mod qemu;
pub mod run;
pub mod scenario;

pub use error::{Error, Result};
pub use trellis_guest_parts::{target, workspace};
