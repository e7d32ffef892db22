//! The file: group commit, crashes, damage, second openers.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;
use trellis_apiserver::{EmbeddedApi, Error};

use crate::support::{MAPS, MERGE, Server, config};

const CHILD: &str = "TRELLIS_STORE_OF_A_CHILD";
/// Acknowledged writes after which the child is killed.
const ACKNOWLEDGED: usize = 300;

#[tokio::test]
async fn writers_that_come_together_share_flushes() {
    // Fails if every writer waits for a flush of its own.
    let server = Server::new();
    server.post(MAPS, config("x", "0")).await.expect(201);
    let before = server.api.stats();
    let writers = (0..400).map(|index| server.post(MAPS, config(&format!("c{index}"), "1")));
    for reply in futures::future::join_all(writers).await {
        reply.expect(201);
    }
    let after = server.api.stats();
    assert_eq!(after.writes - before.writes, 400);
    assert!(
        after.flushes - before.flushes < 40,
        "{} flushes",
        after.flushes - before.flushes
    );
}

#[tokio::test]
async fn a_refused_write_does_not_disturb_its_neighbours() {
    // Fails if one bad write takes the rest of its batch with it, or leaves a trace.
    let server = Server::new();
    let writers = (0..50).map(|index| {
        let name = if index % 2 == 0 {
            format!("good{index}")
        } else {
            format!("Bad{index}")
        };
        server.post(MAPS, config(&name, "1"))
    });
    let codes: Vec<u16> = futures::future::join_all(writers)
        .await
        .into_iter()
        .map(|reply| reply.code)
        .collect();
    assert_eq!(codes, [201, 422].repeat(25));
    let list = server.get(MAPS).await.expect(200);
    assert_eq!(list["items"].as_array().unwrap().len(), 25);
}

#[tokio::test]
async fn writers_of_one_object_see_each_other_within_a_batch() {
    // Fails if two writers of a batch both believe to have the newest version.
    let server = Server::new();
    let made = server.post(MAPS, config("x", "0")).await.expect(201);
    let version = &made["metadata"]["resourceVersion"];
    let writers = (0..20).map(|index| {
        let patch = json!({ "metadata": { "resourceVersion": version }, "data": { "key": format!("v{index}") } });
        let server = &server;
        async move { server.patch(&format!("{MAPS}/x"), MERGE, patch).await.code }
    });
    let codes = futures::future::join_all(writers).await;
    assert_eq!(codes.iter().filter(|code| **code == 200).count(), 1);
    assert_eq!(codes.iter().filter(|code| **code == 409).count(), 19);
}

#[tokio::test]
async fn a_second_opener_is_told_so() {
    // Fails if two programs can write one file.
    let server = Server::new();
    let path = server.dir.path().join("store");
    assert!(matches!(EmbeddedApi::open(&path), Err(Error::InUse { .. })));
    let server = server.reopened();
    server.get("/api/v1/namespaces/default").await.expect(200);
}

#[tokio::test]
async fn everything_is_there_after_a_restart_and_versions_go_on() {
    // Fails if a restart loses an object or hands out a version twice.
    let server = Server::new();
    let made = server.post(MAPS, config("x", "1")).await.expect(201);
    server.post(MAPS, config("y", "1")).await.expect(201);
    server
        .delete(&format!("{MAPS}/y"), json!({}))
        .await
        .expect(200);
    let server = server.reopened();
    assert_eq!(server.get(&format!("{MAPS}/x")).await.expect(200), made);
    assert_eq!(server.get(&format!("{MAPS}/y")).await.code, 404);
    let list = server.get(MAPS).await.expect(200);
    let next = server.post(MAPS, config("z", "1")).await.expect(201);
    let number = |value: &serde_json::Value| {
        value["metadata"]["resourceVersion"]
            .as_str()
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    assert!(number(&next) > number(&list));
}

/// Not a test by itself: the program that the next test kills.
#[tokio::test]
async fn storm_of_a_child() {
    // Fails if the child cannot write at all.
    let Ok(path) = std::env::var(CHILD) else {
        return;
    };
    let api = EmbeddedApi::open(Path::new(&path)).unwrap();
    let server = Server {
        api,
        dir: tempfile::tempdir().unwrap(),
    };
    for round in 0_u64.. {
        let names: Vec<String> = (0..8).map(|index| format!("r{round}-{index}")).collect();
        let writes = names
            .iter()
            .map(|name| server.post(MAPS, config(name, "1")));
        for (name, reply) in names.iter().zip(futures::future::join_all(writes).await) {
            reply.expect(201);
            let mut out = std::io::stdout().lock();
            writeln!(out, "ack {name}").unwrap();
            out.flush().unwrap();
        }
    }
}

#[tokio::test]
async fn what_was_acknowledged_survives_a_kill() {
    // Fails if a write is acknowledged before it is durable, or if a killed store cannot be opened.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "durability::storm_of_a_child", "--nocapture"])
        .env(CHILD, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut acknowledged = Vec::new();
    let mut killed = false;
    for line in lines {
        let Ok(line) = line else { break };
        if let Some((_, name)) = line.split_once("ack ") {
            acknowledged.push(name.to_owned());
        }
        if acknowledged.len() >= ACKNOWLEDGED && !killed {
            child.kill().unwrap();
            killed = true;
        }
    }
    child.wait().unwrap();
    assert!(acknowledged.len() >= ACKNOWLEDGED);
    let server = Server {
        api: EmbeddedApi::open(&path).unwrap(),
        dir,
    };
    for name in acknowledged {
        server.get(&format!("{MAPS}/{name}")).await.expect(200);
    }
}

/// A closed store with some content.
async fn closed_store() -> (tempfile::TempDir, Vec<u8>) {
    let server = Server::new();
    for index in 0..50 {
        server
            .post(MAPS, config(&format!("c{index}"), &"v".repeat(500)))
            .await
            .expect(201);
    }
    let Server { api, dir } = server;
    drop(api);
    let bytes = std::fs::read(dir.path().join("store")).unwrap();
    (dir, bytes)
}

#[tokio::test]
async fn a_foreign_or_truncated_file_is_refused_and_left_alone() {
    // Fails if a file that is not a whole store is opened, changed, or makes the server panic.
    let (dir, bytes) = closed_store().await;
    let path = dir.path().join("store");
    let half = bytes.len() / 2;
    let mut cases: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"hello".to_vec(),
        vec![0; 10_000],
        b"SQLite format 3\0".repeat(1000),
    ];
    cases.extend(
        [
            5,
            100,
            320,
            511,
            4096,
            10_000,
            half,
            bytes.len() - 4096,
            bytes.len() - 1,
        ]
        .map(|len| bytes[..len].to_vec()),
    );
    for case in cases {
        std::fs::write(&path, &case).unwrap();
        let error = EmbeddedApi::open(&path).unwrap_err();
        assert!(
            matches!(error, Error::Foreign { .. } | Error::Damaged { .. }),
            "{} bytes: {error}",
            case.len()
        );
        let text = error.to_string();
        assert!(
            text.contains(path.to_str().unwrap()) && text.contains("left as it is"),
            "{text}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), case);
    }
    std::fs::write(&path, &bytes).unwrap();
    EmbeddedApi::open(&path).unwrap();
}

#[tokio::test]
async fn a_damaged_file_is_refused_and_left_alone_or_whole() {
    // Fails if a flipped byte makes the server panic, or lose an object without a word.
    let (dir, bytes) = closed_store().await;
    let path = dir.path().join("store");
    let step = bytes.len() / 97;
    let mut refused = 0;
    for at in (0..bytes.len())
        .step_by(step)
        .chain([9, 12, 70, 80, 200, 210, 4096, 4100])
    {
        let mut damaged = bytes.clone();
        for byte in &mut damaged[at..(at + 16).min(bytes.len())] {
            *byte ^= 0xA5;
        }
        std::fs::write(&path, &damaged).unwrap();
        match EmbeddedApi::open(&path) {
            Err(error) => {
                refused += 1;
                assert!(
                    matches!(error, Error::Foreign { .. } | Error::Damaged { .. }),
                    "at {at}: {error}"
                );
                assert_eq!(std::fs::read(&path).unwrap(), damaged, "at {at}");
            }
            Ok(api) => {
                let server = Server {
                    api,
                    dir: tempfile::tempdir().unwrap(),
                };
                let list = server.get(MAPS).await.expect(200);
                assert_eq!(list["items"].as_array().unwrap().len(), 50, "at {at}");
                for item in list["items"].as_array().unwrap() {
                    assert_eq!(item["data"]["key"], "v".repeat(500), "at {at}");
                }
            }
        }
    }
    assert!(refused > 5, "only {refused} of the damages were seen");
}

#[tokio::test]
async fn nobody_sees_a_write_before_it_is_durable() {
    // Fails if a watcher is told of a write that a crash at that moment would undo.
    let server = Server::new();
    let mut watch = server.watch(&format!("{MAPS}?watch=1")).await;
    let seen = async {
        for _ in 0..50 {
            let event = watch.next().await.unwrap();
            let name = event["object"]["metadata"]["name"]
                .as_str()
                .unwrap()
                .to_owned();
            // A copy of the file at this moment is what a crash would leave.
            let dir = tempfile::tempdir().unwrap();
            let copy = dir.path().join("store");
            std::fs::copy(server.dir.path().join("store"), &copy).unwrap();
            let then = Server {
                api: EmbeddedApi::open(&copy).unwrap(),
                dir,
            };
            then.get(&format!("{MAPS}/{name}")).await.expect(200);
        }
    };
    let writes = async {
        for index in 0..50 {
            server
                .post(MAPS, config(&format!("c{index}"), "1"))
                .await
                .expect(201);
            tokio::task::yield_now().await;
        }
    };
    futures::join!(seen, writes);
}
