//! The client against a guest that says what it likes.

#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::UnixListener;

use super::*;

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(30);

async fn connected() -> (TempDir, BufReader<UnixStream>, GuestAgent) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent");
    let listener = UnixListener::bind(&path).unwrap();
    let (accepted, agent) = tokio::join!(listener.accept(), GuestAgent::connect(&path));
    (dir, BufReader::new(accepted.unwrap().0), agent.unwrap())
}

/// What the agent is asked next.
async fn hear(guest: &mut BufReader<UnixStream>) -> Value {
    let mut line = Vec::new();
    guest.read_until(b'\n', &mut line).await.unwrap();
    let begin = line.iter().rposition(|byte| *byte == DELIMITER);
    serde_json::from_slice(&line[begin.map_or(0, |at| at + 1)..]).unwrap()
}

async fn say(guest: &mut BufReader<UnixStream>, bytes: &[u8]) {
    guest.get_mut().write_all(bytes).await.unwrap();
}

async fn synchronized(guest: &mut BufReader<UnixStream>) {
    let asked = hear(guest).await;
    assert_eq!(asked["execute"], "guest-sync-delimited");
    let mut answer = vec![DELIMITER];
    answer.extend(format!("{}\n", json!({ "return": asked["arguments"]["id"] })).into_bytes());
    say(guest, &answer).await;
}

#[tokio::test]
async fn what_was_said_before_is_not_taken_for_the_answer() {
    // Fails if the answer to a command of another time is given to this one.
    let (_dir, mut guest, mut agent) = connected().await;
    let script = async {
        say(&mut guest, b"{\"return\": \"stale\"}\nhalf a li").await;
        let stale = [&[DELIMITER][..], b"{\"return\": 4711}\n"].concat();
        say(&mut guest, &stale).await;
        synchronized(&mut guest).await;
        assert_eq!(hear(&mut guest).await["execute"], "guest-ping");
        say(&mut guest, b"{\"return\": {}}\n").await;
    };
    let (answer, ()) = tokio::join!(agent.ping(LONG), script);
    answer.unwrap();
}

#[tokio::test]
async fn a_guest_without_an_agent_is_an_error_in_time_and_may_have_one_later() {
    // Fails if a command waits for ever, or if a late answer spoils the next command.
    let (_dir, mut guest, mut agent) = connected().await;
    let error = agent.ping(SHORT).await.unwrap_err();
    assert!(matches!(error, Error::AgentSilent { .. }), "{error}");
    let script = async {
        hear(&mut guest).await;
        synchronized(&mut guest).await;
        hear(&mut guest).await;
        say(&mut guest, b"{\"error\":{\"desc\":\"not now\"}}\n").await;
    };
    let (answer, ()) = tokio::join!(agent.ping(LONG), script);
    let error = answer.unwrap_err();
    assert!(error.to_string().contains("not now"), "{error}");
}

#[tokio::test]
async fn a_guest_that_floods_costs_bounded_memory_and_an_error() {
    // Fails if the client collects what a guest sends without end, before or instead of an answer.
    for before in [true, false] {
        let (_dir, mut guest, mut agent) = connected().await;
        let script = async {
            if before {
                hear(&mut guest).await;
            } else {
                synchronized(&mut guest).await;
                hear(&mut guest).await;
            }
            let noise = vec![b'x'; 1 << 20];
            while guest.get_mut().write_all(&noise).await.is_ok() {}
        };
        let asked = async {
            let answer = agent.ping(LONG).await;
            let kept = agent.lines.kept_bytes();
            drop(agent);
            (answer, kept)
        };
        let ((answer, kept), ()) = tokio::join!(asked, script);
        // A buffer that grows by doubling may have twice what it holds.
        assert!(kept <= 2 * (ANSWER_BYTES_MAX + READ_BYTES), "{kept}");
        let error = answer.unwrap_err();
        assert!(matches!(error, Error::AgentFlood { .. }), "{error}");
    }
}
