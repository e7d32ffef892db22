//! When a volume is scrubbed: when somebody asks, and automatically at intervals. The result is kept next to the
//! volume's sockets, so that a successor knows when the last scrub was.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use trellis_api::Bytes;
use trellis_api::kinds::ScrubSeen;
use trellis_control::node::machine::ScrubWish;
use trellis_engine::coordinator::{ScrubResult, ScrubStatus};

use super::Target;
use crate::serve::message::Settings;

/// How often to look whether a scrub is due.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The agent is told the progress of a scrub in steps of so many hundredths.
const PROGRESS_STEP: u64 = 5;

/// What is remembered about scrubs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Remembered {
    /// When the last one ended, or the volume was first served.
    since: Option<Timestamp>,
    /// The last request that was met.
    request: Option<String>,
    finished: Option<Timestamp>,
    checked: u64,
    found: u64,
    mended: u64,
    differed: u64,
    skipped: u64,
}

impl Remembered {
    /// What is known of the last scrub from its report.
    fn reported(wish: &ScrubWish) -> Remembered {
        let time = |text: &String| text.parse::<Timestamp>().ok();
        let last = wish.last.clone().unwrap_or_default();
        Remembered {
            since: wish.since.as_ref().and_then(time),
            request: last.request,
            finished: last.finished.as_ref().and_then(time),
            checked: last.checked.get(),
            found: last.found,
            mended: last.mended,
            differed: last.differed,
            skipped: last.skipped,
        }
    }
}

/// The scrubs of a volume.
pub struct Scrubs {
    path: PathBuf,
    remembered: Mutex<Remembered>,
}

impl Scrubs {
    /// What an earlier target has left here, or has reported from another node. If it cannot be read, no harm is done: a
    /// scrub comes sooner then.
    pub fn remembered(path: PathBuf, wish: &ScrubWish) -> Scrubs {
        let text = std::fs::read(&path).unwrap_or_default();
        let left = serde_json::from_slice(&text);
        let mut remembered: Remembered = left.unwrap_or_else(|_| Remembered::reported(wish));
        remembered.since = remembered.since.or_else(|| Some(Timestamp::now()));
        let scrubs = Scrubs {
            path,
            remembered: Mutex::new(remembered),
        };
        scrubs.keep();
        scrubs
    }

    fn lock(&self) -> MutexGuard<'_, Remembered> {
        self.remembered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Records what is remembered, as a whole or not at all.
    fn keep(&self) {
        let remembered = self.lock().clone();
        let write = || -> std::io::Result<()> {
            let text = serde_json::to_vec(&remembered)?;
            let making = self.path.with_extension("new");
            let file = std::fs::File::create(&making)?;
            std::io::Write::write_all(&mut &file, &text)?;
            file.sync_all()?;
            std::fs::rename(&making, &self.path)
        };
        if let Err(error) = write() {
            tracing::warn!("{} could not be written: {error}", self.path.display());
        }
    }

    /// The state of scrubs, in the words of the objects; none if there was none.
    pub fn seen(&self, status: &ScrubStatus) -> Option<ScrubSeen> {
        let remembered = self.lock().clone();
        let percent = |done: u64, of: u64| {
            let percent = done.saturating_mul(100) / of.max(1);
            u32::try_from(percent / PROGRESS_STEP * PROGRESS_STEP).unwrap_or(100)
        };
        let rotten = status.rotten_blocks.iter();
        let seen = ScrubSeen {
            running_percent: status.running.map(|it| percent(it.done, it.of)),
            finished: remembered.finished.map(|at| at.to_string()),
            request: remembered.request,
            checked: Bytes::new(remembered.checked),
            found: remembered.found,
            mended: remembered.mended,
            differed: remembered.differed,
            skipped: remembered.skipped,
            rotten: rotten
                .map(|(id, blocks)| (id.to_string(), *blocks))
                .collect(),
        };
        (seen != ScrubSeen::default()).then_some(seen)
    }

    /// Which request would be met by a scrub now, if one is due.
    fn due(&self, settings: &Settings, is_quiet: bool) -> Option<Option<String>> {
        let remembered = self.lock();
        let wish = &settings.scrub;
        if wish.requested.is_some() && wish.requested != remembered.request {
            return Some(wish.requested.clone());
        }
        let interval = i64::try_from(wish.interval_seconds).unwrap_or(i64::MAX);
        let since = remembered.since.unwrap_or_default();
        let elapsed = Timestamp::now().duration_since(since);
        let is_late = elapsed >= SignedDuration::from_secs(interval);
        (interval > 0 && is_late && is_quiet).then(|| remembered.request.clone())
    }

    fn finished(&self, request: Option<String>, result: ScrubResult) {
        let now = Timestamp::now();
        *self.lock() = Remembered {
            since: Some(now),
            request,
            finished: Some(now),
            checked: result.bytes,
            found: result.found,
            mended: result.mended,
            differed: result.differed,
            skipped: result.skipped,
        };
        self.keep();
    }
}

/// Starts scrubs when they are due, as long as the process lives.
pub async fn run(target: Arc<Target>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let status = target.volume.status();
        // An automatic scrub does not run while copies are away or being repaired: it would find less.
        let is_quiet = status.redundancy_met;
        let due = target.scrubs.due(&target.settings(), is_quiet);
        let Some(request) = due.filter(|_| status.available) else {
            continue;
        };
        let number = status.scrub.last.map_or(0, |last| last.number);
        target.volume.scrub().await;
        // A new coordinator knows nothing of it, and is asked again.
        let generation = status.generation;
        let done = target.volume.until(|status| {
            let last = status.scrub.last.map_or(0, |last| last.number);
            last > number || status.generation != generation
        });
        let Ok(status) = done.await else { return };
        let is_same = status.generation == generation;
        if let Some(result) = status.scrub.last.filter(|_| is_same) {
            if result.found > 0 || result.differed > 0 {
                tracing::warn!(
                    ?result,
                    "a scrub has found blocks that are not what was written"
                );
            }
            target.scrubs.finished(request, result);
            target.tell();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn settings(scrub: &ScrubWish) -> Settings {
        serde_json::from_value(serde_json::json!({
            "volume": "v", "volumeId": "", "iqn": "", "addresses": {},
            "members": { "version": 1, "consistencyFactor": 2, "replicas": [] },
            "scrub": scrub,
        }))
        .unwrap()
    }

    // Fails if a scrub runs by itself before its time, or while copies are away or being repaired, or if one that
    // somebody asks for waits for that, or is run twice.
    #[test]
    fn an_automatic_scrub_waits_for_its_time_and_for_whole_copies() {
        let directory = tempfile::tempdir().unwrap();
        let hour_ago = Timestamp::now() - SignedDuration::from_hours(1);
        let wish = |interval_seconds: u64, requested: Option<&str>| ScrubWish {
            interval_seconds,
            requested: requested.map(str::to_owned),
            since: Some(hour_ago.to_string()),
            last: None,
        };
        let scrubs = Scrubs::remembered(directory.path().join("scrubbed"), &wish(0, None));
        let due = |wish: ScrubWish, is_quiet: bool| scrubs.due(&settings(&wish), is_quiet);
        assert_eq!(due(wish(1800, None), true), Some(None));
        assert_eq!(due(wish(1800, None), false), None);
        assert_eq!(due(wish(7200, None), true), None);
        assert_eq!(due(wish(0, None), true), None);
        let asked = Some("now".to_owned());
        assert_eq!(due(wish(7200, Some("now")), false), Some(asked.clone()));
        scrubs.finished(asked, ScrubResult::default());
        assert_eq!(due(wish(1800, Some("now")), true), None);
    }
}
