//! `trellis volume scrub`: compares all copies of a claim with their checksums, and with each other.

use std::time::Duration;

use anyhow::bail;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use trellis_api::kinds::ScrubSeen;
use trellis_control::stored::StoredClaim;

use super::patience::answered;
use super::volume::{patch, volume_of};
use crate::cli::Global;
use crate::connect::{Service, connect};
use crate::exit::{Ended, refuse, unless_interrupted};
use crate::load::load;
use crate::output::{self, human};

/// How often `--wait` looks at the progress.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// Compares all copies with their checksums.
pub async fn scrub(global: &Global, claim: &str, wait: bool) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let look = load(&service, claim).await?;
    let volume = volume_of(&look, claim)?;
    if !volume.spec.is_behind_target() {
        return refuse(format!(
            "claim {claim:?} has a single copy that is used where it lies, which has no sums"
        ));
    }
    if !volume.spec.checksums {
        return refuse(format!(
            "claim {claim:?} is of a class with checksums: \"false\"; there is nothing to compare with"
        ));
    }
    let request = Timestamp::now().to_string();
    let body = json!({ "spec": { "scrubRequested": request } });
    patch(&service, volume, claim, &body).await?;
    if !wait {
        return output::print(&format!(
            "the copies of claim {claim:?} are being compared with their sums; see `trellis volume show {claim} \
             --watch`\n"
        ));
    }
    let goes_on = format!("the comparison goes on; see `trellis volume show {claim} --watch`");
    let waiting = unless_interrupted(&goes_on, finished(&service, claim, &request));
    match global.timeout {
        None => waiting.await,
        Some(limit) => match tokio::time::timeout(limit, waiting).await {
            Ok(done) => done,
            Err(_) => {
                let text = format!("the copies are not compared after {limit:?}; {goes_on}");
                Err(Ended::TimedOut(text).into())
            }
        },
    }
}

/// Shows the progress of the scrub that `request` asked for until it is done, and says what it found.
async fn finished(service: &Service, claim: &str, request: &str) -> anyhow::Result<()> {
    let mut told = None;
    loop {
        let look = answered(load(service, claim)).await?;
        let seen = scrub_of(&look).unwrap_or_default();
        if seen.request.as_deref() == Some(request) {
            output::print(&format!("{}\n", result(&seen)))?;
            if seen.found > seen.mended {
                bail!(
                    "{} blocks cannot be mended: no copy is right",
                    seen.found - seen.mended
                );
            }
            return Ok(());
        }
        if seen.running_percent.is_some() && seen.running_percent != told {
            told = seen.running_percent;
            output::say(&format!("{} %", told.unwrap_or_default()));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// What scrubs have found, as the target reported.
fn scrub_of(look: &StoredClaim) -> Option<ScrubSeen> {
    look.stored.target.as_ref()?.status.as_ref()?.scrub.clone()
}

/// What a scrub has found, in a sentence.
pub(super) fn result(seen: &ScrubSeen) -> String {
    let mut text = format!(
        "{} compared with the sums: {} blocks did not match, {} were mended",
        human(seen.checked),
        seen.found,
        seen.mended
    );
    if seen.differed > 0 {
        text.push_str(&format!("; copies differed in {} regions", seen.differed));
    }
    if seen.skipped > 0 {
        text.push_str(&format!("; {} regions could not be compared", seen.skipped));
    }
    text
}
