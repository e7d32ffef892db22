//! QEMU's command line, as a pure function of what the machine shall be.
//!
//! The machine starts without disks and without running (`-S`). Its disks are plugged through the monitor as open
//! files, those at start in the same way as those that come later. So QEMU never opens a path of a disk, needs no right
//! to do so, and runs as a user who has none. What cannot be added later is fixed here: controllers, spare ports,
//! consoles, the network. Their addresses follow from their kind and number, so they never move.
//!
//! Spare ports use ACPI hotplug. Native PCIe hotplug makes an unplug wait for six seconds.

pub mod accelerator;

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use trellis_api::Bytes;

pub use accelerator::Accelerator;

use crate::error::{Error, Result};

/// The program.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// The thread that does the disks' work.
pub(crate) const IOTHREAD: &str = "io0";
/// The name of the guest agent's channel, as the agent expects it.
const AGENT_CHANNEL: &str = "org.qemu.guest_agent.0";
/// How many disks fit on one scsi controller, one a target.
pub const SCSI_TARGETS_MAX: usize = 256;
/// How many scsi controllers a machine may have.
pub const SCSI_CONTROLLERS_MAX: u8 = 4;
/// How many spare ports a machine may have: eight slots of eight functions.
pub const SPARE_PORTS_MAX: u8 = 64;
const FUNCTIONS_PER_SLOT: u8 = 8;
/// How many processors QEMU gives a machine of this type.
const PROCESSORS_MAX: u16 = 255;
/// How many ports of the host a machine may be reached by.
const FORWARDS_MAX: usize = 64;
/// The longest path of a Unix socket.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Slots of the root bus. They are part of the machine's looks, so a number is never used for something else.
mod slot {
    pub const RNG: u8 = 1;
    pub const SERIAL: u8 = 2;
    pub const NETWORK: u8 = 3;
    pub const SCSI_FIRST: u8 = 4;
    pub const PORTS_FIRST: u8 = 16;
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmSpec {
    /// Its name, for people who look at processes.
    pub name: String,
    /// Its memory, in whole mebibytes.
    pub memory: Bytes,
    /// Its processors.
    pub processors: u16,
    /// How instructions are executed.
    pub accelerator: Accelerator,
    /// What it boots.
    pub boot: Boot,
    /// Where QEMU listens. The directory must be writable for [`VmSpec::user`].
    pub sockets: Sockets,
    /// Controllers for scsi disks.
    pub scsi_controllers: u8,
    /// Spare ports for virtio disks, fixed for the machine's life.
    pub spare_ports: u8,
    /// Its network, if it has one.
    pub network: Option<UserNetwork>,
    /// Who QEMU runs as. Whoever starts it sees to that.
    pub user: Option<RunAs>,
}

/// A user and a group without rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunAs {
    /// The user's number.
    pub uid: u32,
    /// The group's number.
    pub gid: u32,
}

/// What a machine boots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Boot {
    /// Whatever the firmware finds on the disks; QEMU's own firmware unless another is given.
    Disk {
        /// Another firmware, such as one for UEFI.
        firmware: Option<PathBuf>,
    },
    /// A Linux kernel.
    Kernel {
        /// The kernel.
        kernel: PathBuf,
        /// Its first filesystem.
        initrd: Option<PathBuf>,
        /// Its command line.
        command_line: String,
    },
}

/// Where QEMU listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sockets {
    /// The monitor.
    pub qmp: PathBuf,
    /// The guest agent's channel.
    pub agent: PathBuf,
    /// The serial console.
    pub console: PathBuf,
}

impl Sockets {
    /// The sockets in a directory.
    pub fn below(directory: &Path) -> Sockets {
        Sockets {
            qmp: directory.join("qmp"),
            agent: directory.join("agent"),
            console: directory.join("console"),
        }
    }
}

/// A network that QEMU makes without rights: the guest reaches others, and is reached by forwarded ports alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserNetwork {
    /// Ports of the host that lead to the guest.
    pub forwards: Vec<Forward>,
    /// Whether the guest is kept from reaching anybody.
    pub isolated: bool,
}

/// A port of the host that leads to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The host's address.
    pub host: Ipv4Addr,
    /// The host's port.
    pub host_port: u16,
    /// The guest's port.
    pub guest_port: u16,
}

/// What is to be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The program, to be found in the usual directories.
    pub program: &'static str,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Who it shall run as.
    pub user: Option<RunAs>,
}

/// The name of a scsi controller.
pub(crate) fn scsi_name(number: usize) -> String {
    format!("scsi{number}")
}

/// The name of a spare port, and of the bus behind it.
pub(crate) fn port_name(number: usize) -> String {
    format!("port{number}")
}

/// What to start for a machine.
pub fn launch(spec: &VmSpec) -> Result<Launch> {
    check(spec)?;
    let mut line = Line::default();
    line.option("-name", format!("guest={},debug-threads=on", spec.name));
    for flag in ["-nodefaults", "-no-user-config", "-S"] {
        line.flag(flag);
    }
    line.option("-display", "none");
    let denied = ["obsolete", "elevateprivileges", "spawn", "resourcecontrol"];
    let denied: String = denied.iter().map(|what| format!(",{what}=deny")).collect();
    line.option("-sandbox", format!("on{denied}"));
    line.option("-machine", "q35,usb=off,vmport=off");
    let acpi = "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=on";
    line.option("-global", acpi);
    line.option("-accel", spec.accelerator.argument());
    line.option("-cpu", spec.accelerator.processor());
    line.option("-smp", spec.processors.to_string());
    line.option("-m", format!("{}M", spec.memory.get() >> 20));
    line.option("-rtc", "base=utc");
    boot(&mut line, &spec.boot)?;
    channels(&mut line, &spec.sockets)?;
    buses(&mut line, spec);
    network(&mut line, spec.network.as_ref());
    Ok(Launch {
        program: PROGRAM,
        arguments: line.0,
        user: spec.user,
    })
}

fn check(spec: &VmSpec) -> Result<()> {
    let rules = [
        (
            !spec.name.is_empty()
                && spec
                    .name
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)),
            "a machine's name",
            "must be of letters, digits, '-', '_' and '.'",
        ),
        (
            spec.memory >= Bytes::MIB && spec.memory.get().is_multiple_of(Bytes::MIB.get()),
            "a machine's memory",
            "must be a whole number of mebibytes",
        ),
        (
            (1..=PROCESSORS_MAX).contains(&spec.processors),
            "the number of processors",
            "must be from 1 to 255",
        ),
        (
            spec.scsi_controllers <= SCSI_CONTROLLERS_MAX,
            "the number of scsi controllers",
            "must be at most 4",
        ),
        (
            spec.spare_ports <= SPARE_PORTS_MAX,
            "the number of spare ports",
            "must be at most 64",
        ),
        (
            spec.network
                .as_ref()
                .is_none_or(|network| network.forwards.len() <= FORWARDS_MAX),
            "the number of forwarded ports",
            "must be at most 64",
        ),
    ];
    for (holds, field, rule) in rules {
        if !holds {
            return Err(Error::Spec { field, rule });
        }
    }
    Ok(())
}

fn boot(line: &mut Line, boot: &Boot) -> Result<()> {
    match boot {
        Boot::Disk { firmware: None } => {}
        Boot::Disk {
            firmware: Some(path),
        } => line.option("-bios", text(path)?),
        Boot::Kernel {
            kernel,
            initrd,
            command_line,
        } => {
            line.option("-kernel", text(kernel)?);
            if let Some(initrd) = initrd {
                line.option("-initrd", text(initrd)?);
            }
            line.option("-append", command_line);
        }
    }
    Ok(())
}

/// The monitor, the console and the agent's channel.
fn channels(line: &mut Line, sockets: &Sockets) -> Result<()> {
    for (id, path) in [
        ("qmp", &sockets.qmp),
        ("console", &sockets.console),
        ("agent", &sockets.agent),
    ] {
        let path = text(path)?;
        if path.len() > SOCKET_PATH_BYTES_MAX {
            return Err(Error::Spec {
                field: "the path of a socket",
                rule: "must be at most 107 bytes long",
            });
        }
        let path = escaped(&path);
        line.option(
            "-chardev",
            format!("socket,id={id},path={path},server=on,wait=off"),
        );
    }
    line.option("-mon", "chardev=qmp,mode=control");
    line.option("-serial", "chardev:console");
    line.device("virtio-serial-pci", "serial0", slot::SERIAL, ",max_ports=4");
    line.option(
        "-device",
        format!("virtserialport,bus=serial0.0,nr=1,chardev=agent,name={AGENT_CHANNEL}"),
    );
    Ok(())
}

/// Controllers, spare ports, and the guest's source of random numbers.
fn buses(line: &mut Line, spec: &VmSpec) {
    line.option("-object", format!("iothread,id={IOTHREAD}"));
    line.option("-object", "rng-builtin,id=rng0");
    line.device("virtio-rng-pci", "entropy0", slot::RNG, ",rng=rng0");
    for number in 0..spec.scsi_controllers {
        line.device(
            "virtio-scsi-pci",
            &scsi_name(number.into()),
            slot::SCSI_FIRST + number,
            &format!(",iothread={IOTHREAD}"),
        );
    }
    for number in 0..spec.spare_ports {
        let slot = slot::PORTS_FIRST + number / FUNCTIONS_PER_SLOT;
        let function = number % FUNCTIONS_PER_SLOT;
        let name = port_name(number.into());
        let several = if function == 0 {
            ",multifunction=on"
        } else {
            ""
        };
        // A port asks for no I/O addresses, of which a machine has few.
        line.option(
            "-device",
            format!(
                "pcie-root-port,id={name},bus=pcie.0,addr={slot:#x}.{function:#x},chassis={},io-reserve=0{several}",
                u16::from(number) + 1
            ),
        );
    }
}

fn network(line: &mut Line, network: Option<&UserNetwork>) {
    let Some(network) = network else {
        return;
    };
    let mut value = "user,id=net0".to_owned();
    if network.isolated {
        value.push_str(",restrict=on");
    }
    for forward in &network.forwards {
        value.push_str(&format!(
            ",hostfwd=tcp:{}:{}-:{}",
            forward.host, forward.host_port, forward.guest_port
        ));
    }
    line.option("-netdev", value);
    // Nothing is booted from the network, so the firmware needs no driver for it.
    line.device(
        "virtio-net-pci",
        "network0",
        slot::NETWORK,
        ",netdev=net0,romfile=",
    );
}

/// Arguments in the making.
#[derive(Default)]
struct Line(Vec<String>);

impl Line {
    fn flag(&mut self, flag: &str) {
        self.0.push(flag.to_owned());
    }

    fn option(&mut self, option: &str, value: impl Into<String>) {
        self.0.extend([option.to_owned(), value.into()]);
    }

    fn device(&mut self, driver: &str, id: &str, slot: u8, more: &str) {
        self.option(
            "-device",
            format!("{driver},id={id},bus=pcie.0,addr={slot:#x}{more}"),
        );
    }
}

fn text(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or(Error::Spec {
        field: "a path of a machine",
        rule: "must be valid UTF-8",
    })
}

/// A value within a list of options: QEMU ends it at a comma unless that is doubled.
fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
