//! `--watch`: an answer is given again whenever something changes.

use std::future::Future;
use std::time::Duration;

use futures::stream::{BoxStream, select_all};
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use trellis_api::kinds::{Attachment, Pool, Replica, Target, Volume};

use crate::cli::{Format, Output};
use crate::exit::Ended;
use crate::output;

/// Changes that come within this time of the first are shown together.
const BURST: Duration = Duration::from_millis(50);

/// Moves a terminal's cursor home and clears what follows.
const CLEAR: &str = "\u{1b}[H\u{1b}[2J";

/// Prints what `answer` gives: once, or again after every change until Ctrl-C.
pub async fn show<Answer, Given>(
    client: &Client,
    how: &Output,
    answer: Answer,
) -> anyhow::Result<()>
where
    Answer: Fn() -> Given,
    Given: Future<Output = anyhow::Result<String>>,
{
    if !how.watch {
        return output::print(&answer().await?);
    }
    tokio::select! {
        shown = follow(client, how, answer) => shown,
        interrupted = tokio::signal::ctrl_c() => Ok(interrupted?),
    }
}

async fn follow<Answer, Given>(client: &Client, how: &Output, answer: Answer) -> anyhow::Result<()>
where
    Answer: Fn() -> Given,
    Given: Future<Output = anyhow::Result<String>>,
{
    let mut changes = changes(client);
    let mut last = answer().await?;
    output::print(&framed(how.output, &last, true))?;
    while changes.next().await.is_some() {
        tokio::time::sleep(BURST).await;
        while let Some(Some(())) = changes.next().now_or_never() {}
        let text = match answer().await {
            // A service that restarts comes back, and its watches with it.
            Err(error) if matches!(error.downcast_ref(), Some(Ended::Unreachable(_))) => continue,
            other => other?,
        };
        if text != last {
            output::print(&framed(how.output, &text, false))?;
            last = text;
        }
    }
    Ok(())
}

/// On a terminal the new answer takes the place of the old one; in a pipe it follows it.
fn framed(format: Option<Format>, text: &str, first: bool) -> String {
    match format {
        None | Some(Format::Wide) if output::terminal() => format!("{CLEAR}{text}"),
        Some(Format::Yaml) if !first => format!("---\n{text}"),
        _ => text.to_owned(),
    }
}

/// One item for every change of an object that a verb shows.
fn changes(client: &Client) -> BoxStream<'static, ()> {
    let kinds = vec![
        changes_of::<PersistentVolumeClaim>(client),
        changes_of::<Volume>(client),
        changes_of::<Target>(client),
        changes_of::<Replica>(client),
        changes_of::<Attachment>(client),
        changes_of::<Pool>(client),
    ];
    select_all(kinds).boxed()
}

fn changes_of<K>(client: &Client) -> BoxStream<'static, ()>
where
    K: kube::Resource<DynamicType = ()>,
    K: Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let config = watcher::Config::default().any_semantic();
    let events = watcher(Api::<K>::all(client.clone()), config).default_backoff();
    let changes = events.filter_map(|event| async {
        let event = event.ok()?;
        let changed = matches!(
            event,
            watcher::Event::Apply(_) | watcher::Event::Delete(_) | watcher::Event::InitDone
        );
        changed.then_some(())
    });
    changes.boxed()
}
