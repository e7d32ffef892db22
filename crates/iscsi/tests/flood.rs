//! Many connections that never log in.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{Initiator, MIB, TARGET, ram};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use trellis_iscsi::session::Times;
use trellis_iscsi::{Access, Server, ServerConfig, Target};

const WANTED: usize = 10_000;
/// Descriptors that the test itself, the runtime and the server's side need.
const SPARE: u64 = 1_500;
const HALF_OPEN_MAX: usize = 512;

#[test]
fn ten_thousand_half_open_connections_do_not_stop_a_session() {
    // Fails if a session that is logged in, or a new login, has no answer while the flood goes on, or if
    // the server keeps more half-open connections than it may.
    let limit = getrlimit(Resource::Nofile);
    let hard = limit.maximum.unwrap_or(u64::MAX);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(hard),
            maximum: limit.maximum,
        },
    )
    .unwrap();
    let room = usize::try_from(hard.saturating_sub(SPARE)).unwrap_or(WANTED);
    let count = WANTED.min(room);
    if count < WANTED {
        // Past the capture of the test runner: a smaller flood must not pass for the whole one.
        let told =
            format!("flood: {count} of {WANTED} connections, for want of descriptors ({hard})\n");
        std::io::stderr().write_all(told.as_bytes()).unwrap();
    }
    assert!(
        count >= HALF_OPEN_MAX * 2,
        "too few descriptors for a flood"
    );

    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let times = Times {
        login: Duration::from_secs(300),
        ..Times::default()
    };
    let config = ServerConfig {
        half_open_max: HALF_OPEN_MAX,
        times,
        ..ServerConfig::default()
    };
    let server = runtime
        .block_on(async { Server::bind("127.0.0.1:0".parse().unwrap(), config) })
        .unwrap();
    let target = Target::new(TARGET, Access::default()).unwrap();
    target.add_unit(0, ram(64 * MIB)).unwrap();
    server.portal().add_target(target).unwrap();
    let address = server.local_addr();

    let mut session = Initiator::connect(address);
    session.login_plain();
    assert!(session.write(0, &[7; 4096]).good());
    let mut flood = Vec::with_capacity(count);
    let mut slowest = Duration::ZERO;
    for n in 0..count {
        flood.push(TcpStream::connect(address).unwrap());
        if n % 100 == 0 {
            let start = Instant::now();
            assert_eq!(
                session.read(0, 4096).data,
                vec![7; 4096],
                "after {n} connections"
            );
            slowest = slowest.max(start.elapsed());
        }
    }
    let mut late = Initiator::connect(address);
    late.isid[5] = 2;
    late.login_plain();
    assert_eq!(late.read(0, 4096).data, vec![7; 4096]);
    assert!(session.test_unit_ready().good());
    assert!(
        server.half_open() <= HALF_OPEN_MAX,
        "{}",
        server.half_open()
    );
    assert_eq!(server.portal().session_count(), 2);
    println!("slowest read beside the flood: {slowest:?}");
    drop(flood);
    session.logout();
    late.logout();
    runtime.block_on(server.stop());
}

#[test]
fn a_connection_that_does_not_log_in_is_closed() {
    // Fails if a connection without a login is kept for longer than a login may take.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let times = Times {
        login: Duration::from_millis(100),
        ..Times::default()
    };
    let config = ServerConfig {
        times,
        ..ServerConfig::default()
    };
    let server = runtime
        .block_on(async { Server::bind("127.0.0.1:0".parse().unwrap(), config) })
        .unwrap();
    let mut idle = Initiator::connect(server.local_addr());
    assert!(idle.pull().is_none());
    runtime.block_on(server.stop());
}

#[test]
fn an_orderly_stop_asks_sessions_to_log_out() {
    // Fails if a session is cut off without being asked, or a stop does not end when it has logged out.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let server = runtime
        .block_on(async { Server::bind("127.0.0.1:0".parse().unwrap(), ServerConfig::default()) })
        .unwrap();
    let target = Target::new(TARGET, Access::default()).unwrap();
    target.add_unit(0, ram(MIB)).unwrap();
    server.portal().add_target(target).unwrap();
    let mut session = Initiator::connect(server.local_addr());
    session.login_plain();
    let stopping = runtime.spawn(server.stop());
    let pdu = session.pull().unwrap();
    assert_eq!(pdu.opcode(), trellis_iscsi::pdu::opcode::ASYNC);
    assert_eq!(
        trellis_iscsi::pdu::header::Async::from_wire(&pdu.header).event,
        1
    );
    session.logout();
    assert_eq!(
        session.pull().unwrap().opcode(),
        trellis_iscsi::pdu::opcode::LOGOUT_RESPONSE
    );
    assert!(session.pull().is_none());
    runtime.block_on(stopping).unwrap();
}
