//! QMP's messages as they stand on the wire.

use serde::Deserialize;
use serde_json::Value;

use super::Version;

/// Something that happened in QEMU.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its name, such as `DEVICE_DELETED`. There are more than we know.
    pub name: String,
    /// What QEMU says about it; null if nothing.
    pub data: Value,
}

impl Event {
    /// A text among the event's data.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.data.get(key).and_then(Value::as_str)
    }
}

/// QEMU's description of an error.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(super) struct Refusal {
    pub class: String,
    #[serde(rename = "desc")]
    pub description: String,
}

/// What one line says.
#[derive(Debug, PartialEq)]
pub(super) enum Message {
    Answer {
        id: u64,
        answer: Result<Value, Refusal>,
    },
    Event(Event),
    Greeting(Version),
    /// JSON, but none of these.
    Unknown,
}

/// Reads a line, or answers `None` if it is not JSON.
pub(super) fn read(line: &[u8]) -> Option<Message> {
    let mut value: Value = serde_json::from_slice(line).ok()?;
    if let Some(name) = value.get("event").and_then(Value::as_str) {
        return Some(Message::Event(Event {
            name: name.to_owned(),
            data: value["data"].take(),
        }));
    }
    if let Some(greeting) = value.get("QMP") {
        let part = |name: &str| greeting["version"]["qemu"][name].as_u64().unwrap_or(0);
        return Some(Message::Greeting(Version {
            major: part("major"),
            minor: part("minor"),
            micro: part("micro"),
        }));
    }
    let id = value.get("id").and_then(Value::as_u64);
    let answer = match value.get_mut("return") {
        Some(returned) => Some(Ok(returned.take())),
        None => value
            .get_mut("error")
            .and_then(|error| serde_json::from_value(error.take()).ok())
            .map(Err),
    };
    Some(match (id, answer) {
        (Some(id), Some(answer)) => Message::Answer { id, answer },
        _ => Message::Unknown,
    })
}
