//! A store whose filesystem is full: writes are refused for as long as it is, and not a moment longer.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use trellis_apiserver::EmbeddedApi;

use crate::support::{MAPS, Server, config};

/// What is left free on the full filesystem, in pages: commits then fail in different places.
const PAGES_LEFT: std::ops::Range<u64> = 0..12;
const PAGE_BYTES: u64 = 4096;
/// A write that no full filesystem has room for, since the store must grow by it.
const LARGE: usize = 200_000;
/// Writes until one must have failed: all of them together are larger than the filesystem.
const WRITES_MAX: usize = 40;

/// A tmpfs of a few mebibytes, which goes with its guard, also when a test panics.
struct Small {
    home: tempfile::TempDir,
}

impl Small {
    fn new() -> Small {
        let small = Small {
            home: tempfile::tempdir().unwrap(),
        };
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=6m,mode=0700", "tmpfs"])
            .arg(small.home.path())
            .status()
            .unwrap();
        assert!(
            mounted.success(),
            "this test mounts a tmpfs, so it must run as root"
        );
        small
    }

    fn store(&self) -> PathBuf {
        self.home.path().join("store")
    }

    fn filler(&self) -> PathBuf {
        self.home.path().join("filler")
    }

    fn open(&self) -> Server {
        Server {
            api: EmbeddedApi::open(&self.store()).unwrap(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// Takes all space but some pages.
    fn fill(&self, pages_left: u64) {
        let mut filler = File::create(self.filler()).unwrap();
        let page = vec![1; usize::try_from(PAGE_BYTES).unwrap()];
        loop {
            match filler.write_all(&page) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => break,
                Err(error) => panic!("{error}"),
            }
        }
        let taken = filler.metadata().unwrap().len();
        filler
            .set_len(taken.saturating_sub(pages_left * PAGE_BYTES))
            .unwrap();
    }

    fn free(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily, so that a store which a panic left open does not keep it mounted.
        let unmounted = Command::new("umount")
            .arg("-l")
            .arg(self.home.path())
            .status();
        if !unmounted.is_ok_and(|status| status.success()) && !std::thread::panicking() {
            panic!("{} is still mounted", self.home.path().display());
        }
    }
}

/// Writes until one is refused for want of space; returns the name that was refused, and why.
async fn until_refused(server: &Server, small: &Small, prefix: &str) -> (String, String) {
    for index in 0..WRITES_MAX {
        let name = format!("{prefix}-{index}");
        let reply = server.post(MAPS, config(&name, &"v".repeat(LARGE))).await;
        if reply.code == 201 {
            continue;
        }
        let body = reply.expect(500);
        assert_eq!(body["kind"], "Status");
        assert_eq!(body["reason"], "InternalError");
        let message = body["message"].as_str().unwrap();
        assert!(
            message.contains(small.store().to_str().unwrap()),
            "{message}"
        );
        assert!(message.contains("free space"), "{message}");
        return (name, message.to_owned());
    }
    panic!("a full filesystem took every write");
}

async fn maps(server: &Server) -> Value {
    server.get(MAPS).await.expect(200)["items"].clone()
}

#[tokio::test]
async fn a_full_disk_stops_writes_only_while_it_is_full() {
    // Fails if one failed commit ends all writing, loses what was acknowledged, or leaves what was refused.
    for pages_left in PAGES_LEFT {
        let small = Small::new();
        let server = small.open();
        server.post(MAPS, config("first", "1")).await.expect(201);
        small.fill(pages_left);
        let (refused, why) = until_refused(&server, &small, "a").await;
        assert!(why.contains("the write was not made"), "{why}");
        let held = maps(&server).await;
        for _ in 0..3 {
            let reply = server
                .post(MAPS, config(&refused, &"v".repeat(LARGE)))
                .await;
            assert_eq!(reply.code, 500, "{pages_left} pages left");
            assert_eq!(maps(&server).await, held, "{pages_left} pages left");
        }
        small.free();
        server.post(MAPS, config("next", "2")).await.expect(201);
        let path = format!("{MAPS}/{refused}");
        assert_eq!(server.get(&path).await.code, 404, "{pages_left} pages left");
        server
            .delete(&format!("{MAPS}/first"), serde_json::json!({}))
            .await
            .expect(200);
        server.post(MAPS, config(&refused, "3")).await.expect(201);
        let before = maps(&server).await;
        assert_eq!(
            before.as_array().unwrap().len(),
            held.as_array().unwrap().len() + 1
        );
        drop(server);
        assert_eq!(maps(&small.open()).await, before, "{pages_left} pages left");
    }
}

#[tokio::test]
async fn a_store_that_cannot_be_opened_again_at_once_is_opened_by_a_later_write() {
    // Fails if a file that is out of reach after a failed commit is made anew, or is given up for good.
    let small = Small::new();
    let server = small.open();
    server.post(MAPS, config("first", "1")).await.expect(201);
    small.fill(0);
    let away = small.home.path().join("away");
    std::fs::rename(small.store(), &away).unwrap();
    let (_, why) = until_refused(&server, &small, "a").await;
    assert!(why.contains("it is not certain"), "{why}");
    let held = maps(&server).await;
    small.free();
    let closed = server.post(MAPS, config("second", "2")).await.expect(500);
    let message = closed["message"].as_str().unwrap();
    assert!(message.contains("the write was not made"), "{message}");
    assert!(message.contains("could not be opened again"), "{message}");
    assert!(!small.store().exists());
    assert_eq!(maps(&server).await, held);
    std::fs::rename(&away, small.store()).unwrap();
    server.post(MAPS, config("second", "2")).await.expect(201);
    let before = maps(&server).await;
    assert_eq!(
        before.as_array().unwrap().len(),
        held.as_array().unwrap().len() + 1
    );
    drop(server);
    assert_eq!(maps(&small.open()).await, before);
}
