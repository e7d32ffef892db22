//! Events: what a person sees under `kubectl describe`.
//!
//! Events are sent on the side. They never delay a growth, and if they come faster than they can be stored, the surplus
//! is dropped.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures::future::join_all;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::mpsc;

use crate::plan::Note;
use crate::write::Object;

/// How many events may wait to be stored.
const WAITING_MAX: usize = 1024;
/// How many objects' last events are remembered, so that the same one is not repeated.
const REMEMBERED_MAX: usize = 4096;

/// How long the first of several events waits for the others.
const GATHER: Duration = Duration::from_millis(50);

/// How long a stored event lives. After that, the same one is sent again.
const EVENTS_LIVE: Duration = Duration::from_secs(3600);

/// Takes notes and stores them as events. Clones share it.
#[derive(Clone)]
pub struct Recorder {
    sender: mpsc::Sender<Note>,
}

impl Recorder {
    /// A recorder and the task that stores what it is told.
    pub fn new(client: Client, host: String) -> (Self, impl Future<Output = ()>) {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        (Recorder { sender }, store(client, host, receiver))
    }

    /// Takes one note.
    pub fn note(&self, note: Note) {
        if self.sender.try_send(note).is_err() {
            tracing::debug!("an event was dropped because too many wait");
        }
    }
}

async fn store(client: Client, host: String, mut notes: mpsc::Receiver<Note>) {
    let mut told = Told::default();
    let mut waiting = Vec::new();
    while notes.recv_many(&mut waiting, WAITING_MAX).await > 0 {
        // An event that is stored a moment later shares its flush with the rest, and does not delay a growth.
        tokio::time::sleep(GATHER).await;
        while let Ok(note) = notes.try_recv() {
            waiting.push(note);
        }
        let fresh = waiting.drain(..).filter(|note| told.is_news(note));
        let fresh: Vec<Note> = fresh.collect();
        join_all(fresh.iter().map(|note| store_one(&client, &host, note))).await;
    }
}

/// The last event of each object and reason, so that the same one is not repeated.
#[derive(Default)]
struct Told(HashMap<(Option<String>, String, &'static str), (String, Instant)>);

impl Told {
    fn is_news(&mut self, note: &Note) -> bool {
        let key = (note.uid.clone(), note.about.name.clone(), note.reason);
        let same = self
            .0
            .get(&key)
            .is_some_and(|(message, at)| *message == note.message && at.elapsed() < EVENTS_LIVE);
        if same {
            return false;
        }
        if self.0.len() >= REMEMBERED_MAX {
            self.0.clear();
        }
        self.0.insert(key, (note.message.clone(), Instant::now()));
        true
    }
}

async fn store_one(client: &Client, host: &str, note: &Note) {
    let namespace = Some(note.about.namespace.clone()).filter(|each| !each.is_empty());
    let namespace = namespace.unwrap_or_else(|| "default".to_owned());
    let api = Api::<Event>::namespaced(client.clone(), &namespace);
    let event = event(note, &namespace, host);
    if let Err(error) = api.create(&PostParams::default(), &event).await {
        tracing::debug!(%error, reason = note.reason, "an event could not be stored");
    }
}

fn event(note: &Note, namespace: &str, host: &str) -> Event {
    let now = Time(Timestamp::now());
    let (api_version, kind) = match note.about.object {
        Object::Claim => ("v1", "PersistentVolumeClaim"),
        Object::PersistentVolume => ("v1", "PersistentVolume"),
        Object::Volume => ("trellis.dev/v1alpha1", "Volume"),
        Object::Target => ("trellis.dev/v1alpha1", "Target"),
        Object::Replica => ("trellis.dev/v1alpha1", "Replica"),
        Object::Attachment => ("trellis.dev/v1alpha1", "Attachment"),
        Object::Pool => ("trellis.dev/v1alpha1", "Pool"),
        Object::Pod => ("v1", "Pod"),
        Object::Secret => ("v1", "Secret"),
    };
    Event {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}.", note.about.name)),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some(api_version.to_owned()),
            kind: Some(kind.to_owned()),
            name: Some(note.about.name.clone()),
            namespace: Some(note.about.namespace.clone()).filter(|each| !each.is_empty()),
            uid: note.uid.clone(),
            ..ObjectReference::default()
        },
        reason: Some(note.reason.to_owned()),
        message: Some(note.message.clone()),
        type_: Some(if note.warning { "Warning" } else { "Normal" }.to_owned()),
        source: Some(EventSource {
            component: Some("trellis".to_owned()),
            host: Some(host.to_owned()),
        }),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        count: Some(1),
        reporting_component: Some("trellis".to_owned()),
        reporting_instance: Some(host.to_owned()),
        ..Event::default()
    }
}
