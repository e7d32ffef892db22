//! QEMU's own initiator: data, proofs and growth as a virtual machine would see them.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::{MIB, TARGET};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{ChildStdout, Command};
use tokio::time::timeout;
use trellis_iscsi::login::Chap;
use trellis_iscsi::{Access, Lun, Server, ServerConfig, Target};
use trellis_test_luns::{FileLun, RamLun};

const LIMIT: Duration = Duration::from_secs(60);

async fn serve(lun: Arc<dyn Lun>, access: Access) -> Server {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), ServerConfig::default()).unwrap();
    let target = Target::new(TARGET, access).unwrap();
    target.add_unit(0, lun).unwrap();
    server.portal().add_target(target).unwrap();
    server
}

async fn run(program: &str, args: &[&str]) -> Output {
    let run = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    timeout(LIMIT, run)
        .await
        .expect("the program ends")
        .expect("the program is installed")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_qemu_writes_it_reads_back() {
    // Fails if a pattern is lost or misplaced, in memory or in a file, in large or small pieces.
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, inline: bool| -> Arc<dyn Lun> {
        Arc::new(FileLun::open(&dir.path().join(name), 64 * MIB, 512, inline).unwrap())
    };
    let luns: [Arc<dyn Lun>; 3] = [
        Arc::new(RamLun::new("ram", 64 * MIB, 512)),
        file("disk", false),
        // Large reads are sent from where they lie.
        file("memory", true),
    ];
    for lun in luns {
        let server = serve(lun, Access::default()).await;
        let url = format!("iscsi://{}/{TARGET}/0", server.local_addr());
        let commands = [
            "write -P 0x11 0 1M",
            "write -P 0x22 1M 7M",
            "write -P 0x33 512 1k",
            "write -z -u 4M 64k",
            "discard 5M 1M",
            "flush",
            "read -P 0x11 0 512",
            "read -P 0x33 512 1k",
            "read -P 0x11 1536 1047040",
            "read -P 0x22 1M 3M",
            "read -P 0 4M 64k",
            "read -P 0 5M 1M",
            "read -P 0x22 6M 2M",
            "read -P 0 8M 56M",
        ];
        let mut args = vec!["-f", "raw"];
        commands
            .iter()
            .for_each(|command| args.extend(["-c", command]));
        args.push(&url);
        let output = run("qemu-io", &args).await;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.success() && !text.contains("failed"),
            "{text}{errors}"
        );
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_goes_in_comes_out_the_same() {
    // Fails if qemu-img finds a difference between an image and its copy on our target.
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let data: Vec<u8> = (0..24 * MIB)
        .map(|n| u8::try_from((n * n + n / 4096) % 253).unwrap())
        .collect();
    std::fs::write(&image, &data).unwrap();
    let server = serve(
        Arc::new(RamLun::new("ram", 24 * MIB, 512)),
        Access::default(),
    )
    .await;
    let url = format!("iscsi://{}/{TARGET}/0", server.local_addr());
    let image = image.to_str().unwrap();
    let copied = run(
        "qemu-img",
        &["convert", "-n", "-f", "raw", "-O", "raw", image, &url],
    )
    .await;
    assert!(copied.status.success(), "{copied:?}");
    let same = run(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "raw", image, &url],
    )
    .await;
    assert!(same.status.success(), "{same:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chap_lets_in_who_knows_the_secret() {
    // Fails if the right secret is refused, or a wrong one or none is let in.
    let access = Access {
        initiators: None,
        chap: Some(Chap::one_way("someone", "twelve or more").unwrap()),
    };
    let server = serve(Arc::new(RamLun::new("ram", MIB, 512)), access).await;
    let place = format!("{}/{TARGET}/0", server.local_addr());
    for (login, good) in [
        ("someone%twelve or more@", true),
        ("someone%twelve or less@", false),
        ("", false),
    ] {
        let url = format!("iscsi://{login}{place}");
        let output = run("qemu-io", &["-f", "raw", "-c", "read 0 4k", &url]).await;
        assert_eq!(output.status.success(), good, "{url}: {output:?}");
    }
    server.stop().await;
}

/// What qemu-io says until it asks for the next command.
async fn read_to_prompt(stdout: &mut ChildStdout) -> String {
    let mut said = Vec::new();
    while !said.ends_with(b"qemu-io> ") {
        let byte = timeout(LIMIT, stdout.read_u8()).await;
        let byte = byte.unwrap_or_else(|_| panic!("no prompt after {said:?}"));
        said.push(byte.expect("qemu-io lives"));
    }
    String::from_utf8_lossy(&said).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn qemu_sees_growth_without_a_new_login() {
    // Fails if QEMU, on the session that it has, cannot use the new space after the volume has grown.
    let lun = Arc::new(RamLun::new("ram", 64 * MIB, 512));
    let server = serve(lun.clone(), Access::default()).await;
    let url = format!("iscsi://{}/{TARGET}/0", server.local_addr());
    let mut child = Command::new("qemu-io")
        .args(["-f", "raw", &url])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    read_to_prompt(&mut stdout).await;
    // One command at a time: qemu-io forgets a second one that it reads together with the first until more
    // arrives.
    let mut ask = async |command: &str, answer: &str| {
        stdin
            .write_all(format!("{command}\n").as_bytes())
            .await
            .unwrap();
        let said = read_to_prompt(&mut stdout).await;
        assert!(said.contains(answer), "{command}: {said}");
        assert!(
            !said.contains("failed") && !said.contains("error"),
            "{command}: {said}"
        );
    };
    ask("write -P 0x41 0 64k", "wrote 65536/65536").await;
    ask("length", "64 MiB").await;
    lun.grow(128 * MIB);
    // The attention comes with the next command, which QEMU repeats.
    ask("write -P 0x42 32M 64k", "wrote 65536/65536").await;
    ask("truncate 128M", "").await;
    ask("length", "128 MiB").await;
    ask("write -P 0x43 100M 64k", "wrote 65536/65536").await;
    ask("read -P 0x43 100M 64k", "read 65536/65536").await;
    ask("read -P 0x41 0 64k", "read 65536/65536").await;
    assert_eq!(server.portal().session_count(), 1);
    stdin.write_all(b"quit\n").await.unwrap();
    timeout(LIMIT, child.wait()).await.unwrap().unwrap();
    server.stop().await;
}
