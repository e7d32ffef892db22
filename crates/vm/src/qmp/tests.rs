//! The client against a scripted peer, which says what no QEMU would.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Seek, SeekFrom, Write};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::*;

const GREETING: &[u8] =
    br#"{"QMP":{"version":{"qemu":{"major":7,"minor":2,"micro":22},"package":""},"capabilities":["oob"]}}"#;
const SHORT: Duration = Duration::from_millis(200);

/// A socket, and the peer's side of it.
struct Peer {
    stream: BufReader<UnixStream>,
}

impl Peer {
    async fn say(&mut self, line: &[u8]) {
        let stream = self.stream.get_mut();
        // The client may have gone because of what was said before.
        let _ = stream.write_all(line).await;
        let _ = stream.write_all(b"\n").await;
    }

    /// The next command, and its id.
    async fn hear(&mut self) -> (String, Value) {
        let mut line = String::new();
        self.stream.read_line(&mut line).await.unwrap();
        let message: Value = serde_json::from_str(&line).unwrap();
        let name = message["execute"].as_str().unwrap().to_owned();
        (name, message["id"].clone())
    }

    async fn answer(&mut self, id: &Value, what: Value) {
        let line = json!({ "return": what, "id": id }).to_string();
        self.say(line.as_bytes()).await;
    }

    async fn accept(listener: &UnixListener) -> Peer {
        let (stream, _) = listener.accept().await.unwrap();
        Peer {
            stream: BufReader::new(stream),
        }
    }

    async fn greet(listener: &UnixListener) -> Peer {
        let mut peer = Peer::accept(listener).await;
        peer.say(GREETING).await;
        let (name, id) = peer.hear().await;
        assert_eq!(name, "qmp_capabilities");
        peer.answer(&id, json!({})).await;
        peer
    }
}

fn listen() -> (TempDir, UnixListener) {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("qmp")).unwrap();
    (dir, listener)
}

async fn connected() -> (TempDir, Peer, Client, Events) {
    let (dir, listener) = listen();
    let path = dir.path().join("qmp");
    let (peer, client) = tokio::join!(Peer::greet(&listener), Client::connect(&path));
    let (client, events) = client.unwrap();
    (dir, peer, client, events)
}

#[tokio::test]
async fn answers_find_their_commands_in_any_order() {
    // Fails if an answer is given to the command that was sent first instead of the one with its id.
    let (_dir, mut peer, client, _events) = connected().await;
    assert_eq!(client.version().minor, 2);
    let script = async {
        let (first, second) = (peer.hear().await, peer.hear().await);
        peer.answer(&second.1, json!(second.0)).await;
        peer.answer(&first.1, json!(first.0)).await;
    };
    let (one, two, ()) = tokio::join!(
        client.execute("one", Value::Null),
        client.execute("two", json!({ "a": 1 })),
        script
    );
    assert_eq!((one.unwrap(), two.unwrap()), (json!("one"), json!("two")));
}

#[tokio::test]
async fn events_keep_their_order_and_may_have_any_shape() {
    // Fails if an event is lost or reordered, or if one of unknown shape ends the connection.
    let (_dir, mut peer, client, mut events) = connected().await;
    peer.say(br#"{"event":"STOP","timestamp":{"seconds":1,"microseconds":2}}"#)
        .await;
    peer.say(br#"{"event":{"of":"the future"}}"#).await;
    peer.say(br#"[1,2,3]"#).await;
    peer.say(br#"{"event":"NEVER_HEARD_OF","data":[1]}"#).await;
    let script = async {
        let (_, id) = peer.hear().await;
        peer.answer(&json!(4711), json!("to nobody")).await;
        peer.answer(&id, json!("to us")).await;
    };
    let (answer, ()) = tokio::join!(client.execute("ask", Value::Null), script);
    assert_eq!(answer.unwrap(), json!("to us"));
    for (name, data) in [("STOP", Value::Null), ("NEVER_HEARD_OF", json!([1]))] {
        let name = name.to_owned();
        assert_eq!(events.next().await, Notice::Event(Event { name, data }));
    }
}

#[tokio::test]
async fn a_slow_subscriber_is_told_what_it_missed() {
    // Fails if a subscriber that does not read makes the client keep every event, or loses some without a word.
    let (_dir, mut peer, client, mut events) = connected().await;
    for number in 0..EVENTS_MAX + 10 {
        let event = json!({ "event": "E", "data": { "number": number } });
        peer.say(event.to_string().as_bytes()).await;
    }
    let script = async {
        let (_, id) = peer.hear().await;
        peer.answer(&id, json!({})).await;
    };
    let (answer, ()) = tokio::join!(client.execute("ask", Value::Null), script);
    answer.unwrap();
    assert_eq!(events.next().await, Notice::Missed(10));
    let Notice::Event(event) = events.next().await else {
        panic!("an event was expected")
    };
    assert_eq!(event.data["number"], 10);
}

#[tokio::test]
async fn an_error_carries_the_class_and_the_sentence() {
    // Fails if QEMU's reason is lost.
    let (_dir, mut peer, client, _events) = connected().await;
    let script = async {
        let (_, id) = peer.hear().await;
        let error = json!({ "error": { "class": "DeviceNotFound", "desc": "no x" }, "id": id });
        peer.say(error.to_string().as_bytes()).await;
    };
    let (answer, ()) = tokio::join!(client.execute("device_del", Value::Null), script);
    let error = answer.unwrap_err();
    assert!(
        matches!(&error, Error::Refused { class, description, .. }
            if class == "DeviceNotFound" && description == "no x"),
        "{error}"
    );
}

#[tokio::test]
async fn no_answer_is_an_error_in_time_and_the_late_one_is_dropped() {
    // Fails if a command waits for ever, or if its late answer is taken for another command's.
    let (_dir, mut peer, client, _events) = connected().await;
    let error = client
        .execute_within("slow", Value::Null, SHORT)
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Deadline {
                command: "slow",
                ..
            }
        ),
        "{error}"
    );
    let script = async {
        let (_, late) = peer.hear().await;
        let (_, id) = peer.hear().await;
        peer.answer(&late, json!("late")).await;
        peer.answer(&id, json!("in time")).await;
    };
    let (answer, ()) = tokio::join!(client.execute("next", Value::Null), script);
    assert_eq!(answer.unwrap(), json!("in time"));
}

#[tokio::test]
async fn a_closed_connection_fails_every_command_that_waits() {
    // Fails if one of the commands hangs, or if the reason is not said.
    let (_dir, mut peer, client, mut events) = connected().await;
    let script = async {
        peer.hear().await;
        peer.hear().await;
        drop(peer);
    };
    let (one, two, ()) = tokio::join!(
        client.execute("one", Value::Null),
        client.execute("two", Value::Null),
        script
    );
    for answer in [one, two, client.execute("three", Value::Null).await] {
        let fault = match answer.unwrap_err() {
            Error::Connection { fault, .. } => fault,
            other => panic!("{other}"),
        };
        assert_eq!(fault, ConnectionEnd::Closed);
    }
    assert_eq!(events.next().await, Notice::Closed);
}

#[tokio::test]
async fn an_endless_line_and_garbage_end_the_connection() {
    // Fails if a peer can make the client collect without bound, or if nonsense is passed over.
    let endless = vec![b'x'; LINE_BYTES_MAX + 2];
    for (said, expected) in [
        (endless.as_slice(), ConnectionEnd::LineTooLong),
        (b"{\"return\": ", ConnectionEnd::Garbage),
    ] {
        let (_dir, mut peer, client, _events) = connected().await;
        let script = async {
            peer.hear().await;
            peer.say(said).await;
            // Its own side stays open, so that only the line can be the cause.
            let mut rest = Vec::new();
            let _ = peer.stream.read_to_end(&mut rest).await;
        };
        let (answer, ()) = tokio::join!(
            async {
                let answer = client.execute("ask", Value::Null).await;
                drop(client);
                answer
            },
            script
        );
        let error = answer.unwrap_err();
        assert!(
            matches!(error, Error::Connection { fault, .. } if fault == expected),
            "{error}"
        );
    }
}

#[tokio::test]
async fn whoever_is_not_qemu_is_told_from_one_who_says_nothing() {
    // Fails if another service's answer is taken for a greeting.
    for said in [&b"HTTP/1.1 400 Bad Request"[..], b"{\"hello\":1}"] {
        let (dir, listener) = listen();
        let path = dir.path().join("qmp");
        let script = async {
            let mut peer = Peer::accept(&listener).await;
            peer.say(said).await;
            peer
        };
        let (answer, _peer) = tokio::join!(Client::connect(&path), script);
        assert!(matches!(answer, Err(Error::NotQmp { .. })));
    }
}

#[tokio::test]
async fn a_descriptor_travels_with_its_command() {
    // Fails if the descriptor is not sent with the very message that is about it.
    let (_dir, peer, client, _events) = connected().await;
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"content").unwrap();
    let script = async {
        let stream = peer.stream.into_inner();
        stream.readable().await.unwrap();
        let received = stream
            .try_io(tokio::io::Interest::READABLE, || {
                Ok(trellis_node::sys::fdpass::receive(&stream, 4096)?)
            })
            .unwrap();
        let message: Value = serde_json::from_slice(&received.message).unwrap();
        assert_eq!(message["execute"], "add-fd");
        assert_eq!(message["arguments"]["opaque"], "ours");
        let mut content = String::new();
        let mut received = std::fs::File::from(received.descriptors.into_iter().next().unwrap());
        received.seek(SeekFrom::Start(0)).unwrap();
        received.read_to_string(&mut content).unwrap();
        assert_eq!(content, "content");
        let mut peer = Peer {
            stream: BufReader::new(stream),
        };
        peer.answer(&message["id"], json!({ "fdset-id": 7, "fd": 20 }))
            .await;
    };
    let (set, ()) = tokio::join!(client.add_fd(file.into(), "ours"), script);
    assert_eq!(set.unwrap(), 7);
}
