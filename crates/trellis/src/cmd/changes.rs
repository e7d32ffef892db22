//! `--watch`: prints the answer again whenever something changes.

use std::future::Future;
use std::time::Duration;

use futures::stream::{BoxStream, select_all};
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use trellis_api::kinds::{Attachment, Pool, Replica, Target, Volume};

use super::patience::answered;
use crate::cli::{Format, Output};
use crate::exit::Ended;
use crate::output;

/// Changes that come within this time of the first are shown together.
const BURST: Duration = Duration::from_millis(50);

/// How often to look although nothing has changed: no watch tells how full a volume is, and a frozen service says
/// nothing.
const LOOK_EVERY: Duration = Duration::from_secs(2);

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
    let mut last = answered(answer()).await?;
    output::print(&framed(how.output, &last, true))?;
    let mut is_silent = false;
    loop {
        let is_change = tokio::select! {
            change = changes.next() => change.is_some(),
            () = tokio::time::sleep(LOOK_EVERY) => false,
        };
        if is_change {
            tokio::time::sleep(BURST).await;
            while let Some(Some(())) = changes.next().now_or_never() {}
        }
        let text = match answered(answer()).await {
            // A service that restarts comes back, and its watches with it. Until then nobody should take what is shown
            // for the present state.
            Err(error) if is_away(&error) => {
                if !is_silent {
                    output::say(&format!("{error:#}; what is shown is from before"));
                }
                is_silent = true;
                continue;
            }
            other => other?,
        };
        if std::mem::take(&mut is_silent) {
            output::say("the service answers again");
        }
        let is_news = if is_change || output::terminal() {
            text != last
        } else {
            without_times(&text) != without_times(&last)
        };
        if is_news {
            output::print(&framed(how.output, &text, false))?;
            last = text;
        }
    }
}

/// Whether nobody answers.
fn is_away(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(Ended::Unreachable(_) | Ended::TimedOut(_))
    )
}

/// The text without what changes by itself: how long ago something was measured, and when.
fn without_times(text: &str) -> String {
    let mut kept = String::new();
    for line in text.lines().filter(|line| !line.contains("observedAt")) {
        let words = line.split_whitespace().collect::<Vec<_>>();
        let is_age = |index: usize| words.get(index + 1) == Some(&"ago");
        let rest = words.iter().enumerate();
        let rest = rest
            .filter(|(index, _)| !is_age(*index))
            .map(|(_, word)| *word);
        kept.push_str(&rest.collect::<Vec<_>>().join(" "));
        kept.push('\n');
    }
    kept
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
