#![allow(clippy::unwrap_used)]

use super::*;

fn spec() -> VmSpec {
    VmSpec {
        name: "web-1".to_owned(),
        memory: Bytes::mib(512),
        processors: 2,
        accelerator: Accelerator::Tcg,
        boot: Boot::Disk { firmware: None },
        sockets: Sockets::below(Path::new("/run/a,b")),
        scsi_controllers: 2,
        spare_ports: 10,
        network: Some(UserNetwork {
            forwards: vec![Forward {
                host: Ipv4Addr::LOCALHOST,
                host_port: 2222,
                guest_port: 22,
            }],
            isolated: false,
        }),
        user: Some(RunAs {
            uid: 65534,
            gid: 65534,
        }),
    }
}

fn line(spec: &VmSpec) -> String {
    launch(spec).unwrap().arguments.join(" ")
}

#[test]
fn a_machine_starts_paused_locked_in_and_without_what_nobody_asked_for() {
    // Fails if a default device appears, the sandbox is open, or the guest runs before its disks are there.
    let line = line(&spec());
    for part in [
        "-nodefaults",
        "-no-user-config",
        "-S",
        "-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "acpi-pci-hotplug-with-bridge-support=on",
        "hostfwd=tcp:127.0.0.1:2222-:22",
        "-m 512M",
    ] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
    assert!(!line.contains("-drive") && !line.contains("-blockdev"));
}

#[test]
fn a_comma_in_a_path_does_not_end_it() {
    // Fails if a path could smuggle in an option.
    assert!(line(&spec()).contains("path=/run/a,,b/qmp,server=on"));
}

#[test]
fn addresses_do_not_move_when_something_is_added() {
    // Fails if the slot of a device depends on how many others there are: guests tie settings to addresses.
    let devices = |spec: &VmSpec| -> Vec<String> {
        let arguments = launch(spec).unwrap().arguments;
        arguments
            .into_iter()
            .filter(|argument| argument.contains("bus=pcie.0"))
            .collect()
    };
    let few = devices(&VmSpec {
        network: None,
        scsi_controllers: 1,
        spare_ports: 1,
        ..spec()
    });
    let many = devices(&VmSpec {
        scsi_controllers: SCSI_CONTROLLERS_MAX,
        spare_ports: SPARE_PORTS_MAX,
        ..spec()
    });
    assert!(few.iter().all(|device| many.contains(device)));
    let mut addresses: Vec<_> = many
        .iter()
        .map(|device| device.split("addr=").nth(1).unwrap().split(',').next())
        .collect();
    addresses.sort();
    let count = addresses.len();
    addresses.dedup();
    assert_eq!(addresses.len(), count, "an address is used twice: {many:?}");
}

#[test]
fn what_qemu_would_refuse_or_misread_is_refused_before() {
    // Fails if a machine that cannot be built is started, and the reason stands only in QEMU's output.
    let bad = [
        VmSpec {
            name: "a,b".to_owned(),
            ..spec()
        },
        VmSpec {
            memory: Bytes::new(1),
            ..spec()
        },
        VmSpec {
            processors: 0,
            ..spec()
        },
        VmSpec {
            scsi_controllers: 5,
            ..spec()
        },
        VmSpec {
            spare_ports: 65,
            ..spec()
        },
        VmSpec {
            sockets: Sockets::below(Path::new(&"/long".repeat(30))),
            ..spec()
        },
    ];
    for spec in bad {
        assert!(
            matches!(launch(&spec), Err(Error::Spec { .. })),
            "{spec:?} was taken"
        );
    }
}
