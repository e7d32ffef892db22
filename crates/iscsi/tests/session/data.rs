//! Numbers, order and data: what runs when, and what a write may make us hold.

use super::*;

#[test]
fn commands_run_in_the_order_of_their_numbers() {
    // Fails if a number outside the window is answered, or an early command does not wait for its turn.
    let portal = open_portal();
    let mut initiator = Initiator::logged_in(&portal, 1);
    for outside in [
        initiator.max_cmd_sn.wrapping_add(1),
        initiator.cmd_sn.wrapping_sub(1),
    ] {
        let right = initiator.cmd_sn;
        initiator.cmd_sn = outside;
        let itt = initiator.command([0; 16], 0, 0, &[]);
        assert_eq!(initiator.reply(itt, &[]), None);
        initiator.cmd_sn = right;
    }
    initiator.cmd_sn += 1;
    let second = initiator.command([0; 16], 0, 0, &[]);
    assert_eq!(initiator.reply(second, &[]), None, "the first has not come");
    initiator.cmd_sn -= 2;
    let first = initiator.command([0; 16], 0, 0, &[]);
    initiator.cmd_sn += 1;
    assert!(initiator.reply(first, &[]).unwrap().good());
    assert!(initiator.reply(second, &[]).unwrap().good());
    assert!(initiator.test_unit_ready().good());
}

#[test]
fn data_in_a_file_is_sent_as_it_was_written() {
    // Fails if what is sent from a file is another part of it, is cut, or has no checksum though one was agreed.
    let dir = tempfile::tempdir().unwrap();
    let file = FileLun::open(&dir.path().join("file"), 4 * MIB, 512, true).unwrap();
    let (portal, _) = portal(Arc::new(file), Access::default());
    let data: Vec<u8> = (0..(2 * MIB))
        .map(|n| u8::try_from(n * 7 % 251).unwrap())
        .collect();
    let mut writer = Initiator::logged_in(&portal, 1);
    assert!(writer.write(16, &data).good());
    for digest in ["None", "CRC32C"] {
        let mut reader = Initiator::local(&portal);
        reader.isid[5] = 2;
        let keys = keys(INITIATOR, Some(TARGET));
        let more = [
            ("DataDigest", digest),
            ("MaxRecvDataSegmentLength", "100000"),
            ("MaxBurstLength", "250000"),
        ];
        assert_eq!(reader.login_with(keys, &more), (0, 0));
        assert!(reader.read(16, data.len()).data == data, "{digest}");
        let part = reader.read(17, 64 << 10);
        assert!(part.data == data[512..512 + (64 << 10)], "{digest}");
        // Less room than the range has bytes, and no whole number of blocks.
        let (cdb, len) = cdb10(0x28, 16, 128 << 10);
        let cut = reader.run(cdb, 0x40, len - 1001, &[]);
        assert!(cut.data == data[..(128 << 10) - 1001], "{digest}");
        assert_eq!(cut.residual, 1001);
    }
}

#[test]
fn the_window_closes_while_the_volume_is_busy() {
    // Fails if more commands are taken than the window offers, or if it does not open again.
    let held = Arc::new(Held::default());
    let (portal, _) = portal(held.clone(), Access::default());
    let mut initiator = Initiator::logged_in(&portal, 1);
    let (cdb, len) = cdb10(0x2a, 0, 512);
    let window = usize::try_from(COMMAND_WINDOW).unwrap();
    for _ in 0..window + 10 {
        initiator.command(cdb, 0x20, len, &[1; 512]);
    }
    assert_eq!(held.held(), window);
    held.release();
    let mut answered = 0;
    while initiator.pull().is_some() {
        answered += 1;
    }
    assert_eq!(answered, window);
    initiator.cmd_sn -= 10;
    initiator.command(cdb, 0x20, len, &[1; 512]);
    assert_eq!(held.held(), 1);
}

#[test]
fn a_long_write_is_asked_for_in_bursts_and_arrives_whole() {
    // Fails if immediate data, unsolicited data or a burst goes missing or to the wrong place.
    let portal = open_portal();
    let data: Vec<u8> = (0..(3 * MIB))
        .map(|n| u8::try_from(n * 7 % 251).unwrap())
        .collect();
    for immediate in [true, false] {
        let mut initiator = Initiator::logged_in(&portal, 1);
        initiator.immediate = immediate;
        assert!(initiator.write(100, &data).good());
        assert!(initiator.read(100, data.len()).data == data);
        initiator.logout();
        assert_eq!(initiator.wire.ended, Some(Disconnect::LoggedOut));
    }
}

#[test]
fn write_data_that_a_connection_makes_us_hold_is_bounded() {
    // Fails if R2Ts are sent for more data than one connection may have on its way.
    let portal = open_portal();
    let mut initiator = Initiator::logged_in(&portal, 1);
    initiator.immediate = false;
    let (cdb, len) = cdb10(0x2a, 0, 8 << 20);
    for _ in 0..64 {
        initiator.command(cdb, 0x20, len, &[]);
    }
    let mut tasks = std::collections::HashSet::new();
    while let Some(pdu) = initiator.pull() {
        assert_eq!(pdu.opcode(), opcode::R2T);
        tasks.insert(
            trellis_iscsi::pdu::header::R2t::from_wire(&pdu.header)
                .itt
                .get(),
        );
    }
    assert_eq!(
        u64::try_from(tasks.len()).unwrap() * u64::from(len),
        DATA_OUT_BYTES_MAX
    );
}

#[test]
fn data_out_of_sequence_fails_the_command_and_writes_nothing() {
    // Fails if a write with a wrong DataSN succeeds, changes the volume, or ends the session.
    let portal = open_portal();
    let mut initiator = Initiator::logged_in(&portal, 1);
    initiator.immediate = false;
    let (cdb, len) = cdb10(0x2a, 0, 1024);
    let itt = initiator.command(cdb, 0x20, len, &[1; 1024]);
    let pdu = initiator.pull().unwrap();
    let r2t = *trellis_iscsi::pdu::header::R2t::from_wire(&pdu.header);
    let header = trellis_iscsi::pdu::header::DataOut {
        opcode: opcode::DATA_OUT,
        flags: 0x80,
        itt: itt.into(),
        ttt: r2t.ttt,
        data_sn: 27.into(),
        ..Default::default()
    };
    initiator.push(zerocopy::transmute!(header), &[1; 1024]);
    let reply = initiator.reply(itt, &[]).unwrap();
    assert_eq!(reply.sense, Some((0xb, 0x47, 0x05)));
    assert_eq!(initiator.read(0, 1024).data, vec![0; 1024]);
}

#[test]
fn an_ordered_command_waits_for_those_before_and_holds_those_after() {
    // Fails if an ordered command overtakes a write that still runs, or is overtaken.
    let held = Arc::new(Held::default());
    let (portal, _) = portal(held.clone(), Access::default());
    let mut initiator = Initiator::logged_in(&portal, 1);
    let (write, len) = cdb10(0x2a, 0, 512);
    let (read, _) = cdb10(0x28, 0, 512);
    let first = initiator.command(write, 0x20, len, &[1; 512]);
    let ordered = initiator.command(read, 0x40 | 2, len, &[]);
    let after = initiator.command(read, 0x40, len, &[]);
    assert!(initiator.pull().is_none());
    held.release();
    for itt in [first, ordered, after] {
        assert!(initiator.reply(itt, &[]).unwrap().good());
    }
}
