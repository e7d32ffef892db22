//! `trellis grow`: asks for a larger size, and on request waits until every layer has it.

mod forecast;
mod screen;
mod wait;

use std::time::Duration;

use anyhow::Context;
use kube::Api;
use kube::api::ListParams;
use serde::Serialize;
use tokio::time::Instant;
use trellis_api::kinds::{Pool, Replica};
use trellis_api::quantity::{Growth, QuantityError};
use trellis_api::{Bytes, Hold, Rung};
use trellis_control::view::View;

use self::forecast::Forecast;
use self::screen::Screen;
use self::wait::Follow;
use super::patch;
use crate::claim_view::ladder::{RungView, rungs};
use crate::claim_view::{self, bound, growing, load, reported, requested};
use crate::cli::{Global, Grow};
use crate::connect::{Service, connect};
use crate::exit::{Ended, unless_interrupted};
use crate::output::{self, precise, took};

/// Grows a claim.
pub async fn run(global: &Global, verb: &Grow) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let view = load(&service, &verb.claim).await?;
    let asked = asked(&verb.claim, verb.size, &view)?;
    match asked {
        Asked::Larger(to) if verb.dry_run => dry_run(&service, verb, &view, to).await,
        Asked::Larger(to) if verb.wait => {
            wait_for(&service, verb, view, Some(to), global.patience()).await
        }
        Asked::Larger(to) => {
            let claim = view.claim.as_deref().context("the claim was not loaded")?;
            patch::request(&service, claim, to, false).await?;
            tell(&service, verb, &view, to, None, &[])
        }
        Asked::Already(_) if verb.wait && !verb.dry_run && growing(&view) => {
            wait_for(&service, verb, view, None, global.patience()).await
        }
        Asked::Already(size) => tell(&service, verb, &view, size, None, &[]),
    }
}

/// What a growth means for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// It asks for that size already.
    Already(Bytes),
    /// It is to ask for this size.
    Larger(Bytes),
}

/// An increase counts from the size that is asked for, or from the size that the claim has if that is larger: `+1Gi`
/// twice is `+2Gi`, whether or not the first was done by then.
fn asked(claim: &str, growth: Growth, view: &View) -> Result<Asked, Ended> {
    if !view.claim.as_deref().is_some_and(bound) {
        return Err(Ended::Refused(format!(
            "claim {claim} has no volume yet, and Kubernetes changes the request of bound claims only; `trellis explain {claim}` says what it waits for"
        )));
    }
    let request = requested(view).unwrap_or_default();
    let base = match growth {
        Growth::To(_) => request,
        Growth::By(_) | Growth::ByPercent(_) => request.max(reported(view).unwrap_or_default()),
    };
    match growth.apply(base) {
        Ok(size) if size == request => Ok(Asked::Already(size)),
        Ok(size) => Ok(Asked::Larger(size)),
        Err(QuantityError::BelowCurrent { .. }) if growing(view) => Err(Ended::Refused(format!(
            "claim {claim} asks for {request} already, and a growth never makes smaller; call that growth off first with `trellis cancel {claim}`"
        ))),
        Err(QuantityError::BelowCurrent { .. }) => Err(Ended::Refused(format!(
            "claim {claim} has {request} already, and volumes never shrink; `trellis cancel {claim}` calls off a growth that is not done, and none is under way"
        ))),
        Err(error) => Err(Ended::Refused(error.to_string())),
    }
}

/// The answer, for programs.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    claim: &'a str,
    namespace: &'a str,
    /// The size that it had.
    from: Option<Bytes>,
    /// The size that it asks for.
    to: Bytes,
    /// Whether the request had to be changed.
    changed: bool,
    /// From the request to the measured size; absent if it was not waited for.
    #[serde(skip_serializing_if = "Option::is_none")]
    took_micros: Option<u64>,
    /// The rungs as they were measured last; empty if it was not waited for.
    rungs: &'a [RungView],
}

fn tell(
    service: &Service,
    verb: &Grow,
    view: &View,
    to: Bytes,
    waited: Option<Duration>,
    rungs: &[RungView],
) -> anyhow::Result<()> {
    let from = reported(view);
    let changed = requested(view) != Some(to);
    let took_micros = waited.map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    let answer = Answer {
        claim: &verb.claim,
        namespace: &service.namespace,
        from,
        to,
        changed,
        took_micros,
        rungs,
    };
    let had = from.unwrap_or_default();
    let text = output::text(verb.output, &answer, |_| match took_micros {
        Some(micros) => format!(
            "claim {}: {had} -> {to} in {}\n{}",
            verb.claim,
            took(micros),
            behind(rungs, to)
        ),
        None if changed => {
            format!(
                "claim {}: {had} -> {to} asked for; see `trellis ladder {}`\n",
                verb.claim, verb.claim
            )
        }
        None if growing(view) => format!(
            "claim {} asks for {to} already and has {had} so far; see `trellis explain {}`\n",
            verb.claim, verb.claim
        ),
        None => format!("claim {} already has {to}\n", verb.claim),
    })?;
    output::print(&text)
}

/// Which copies have not grown with the claim. They do not stop a growth, but the claim is not whole without them.
fn behind(rungs: &[RungView], to: Bytes) -> String {
    let copies = rungs
        .iter()
        .filter(|rung| rung.rung == Rung::Replica && rung.size < to);
    let line = |rung: &RungView| {
        let (pool, copy) = (rung.pool.as_deref(), rung.copy.as_deref());
        format!(
            "the copy on pool {} is behind with {} ({}); it is raised when it is back\n",
            pool.unwrap_or_default(),
            precise(rung.size),
            copy.unwrap_or("unknown")
        )
    };
    copies.map(line).collect()
}

/// Waits until every layer was measured at the size; `to` is asked for first unless it already was.
async fn wait_for(
    service: &Service,
    verb: &Grow,
    view: View,
    to: Option<Bytes>,
    patience: Duration,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + patience;
    let mut screen = Screen::new(verb.output, &rungs(&view));
    let mut follow = Follow::start(service, &view);
    follow.listed(deadline, patience).await?;
    let started = Instant::now();
    let goal = match to {
        Some(to) => {
            let claim = view.claim.as_deref().context("the claim was not loaded")?;
            patch::request(service, claim, to, false).await?;
            to
        }
        None => requested(&view).unwrap_or_default(),
    };
    let goes_on = format!(
        "the growth goes on; see `trellis ladder {claim}`, or call it off with `trellis cancel {claim}`",
        claim = verb.claim
    );
    let growing = follow.reached(goal, deadline, patience, &mut screen);
    let grown = unless_interrupted(&goes_on, growing).await;
    screen.end();
    let grown = grown?;
    tell(
        service,
        verb,
        &view,
        goal,
        Some(grown.at.duration_since(started)),
        &grown.rungs,
    )
}

/// Says what would happen. It asks the service whether it would accept the request, and judges the rest by the rules of
/// the controllers.
async fn dry_run(service: &Service, verb: &Grow, view: &View, to: Bytes) -> anyhow::Result<()> {
    let claim = view.claim.as_deref().context("the claim was not loaded")?;
    patch::request(service, claim, to, true).await?;
    if let Some(class) = view
        .class
        .as_deref()
        .filter(|class| class.allow_volume_expansion != Some(true))
    {
        let name = class.metadata.name.as_deref().unwrap_or_default();
        let text = format!(
            "StorageClass {name} does not allow growth: its allowVolumeExpansion is not true"
        );
        return Err(Ended::Refused(text).into());
    }
    let client = &service.client;
    let all = ListParams::default();
    let (pools, replicas) = tokio::try_join!(
        claim_view::list(Api::<Pool>::all(client.clone()), &all),
        claim_view::list(Api::<Replica>::all(client.clone()), &all),
    )?;
    let forecast = Forecast::new(view, pools, &replicas, to);
    let text = output::text(verb.output, &forecast, |_| {
        forecast.render(output::colours())
    })?;
    output::print(&text)?;
    match forecast.hold {
        Some(hold) => Err(held(hold)),
        None => Ok(()),
    }
}

fn held(hold: Hold) -> anyhow::Error {
    Ended::Held(hold).into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::claim_view::samples;

    fn of(view: &View, growth: &str) -> Result<Asked, String> {
        asked("data", growth.parse().unwrap(), view).map_err(|ended| ended.to_string())
    }

    // Fails if a growth is computed from another size than the one that is asked for.
    #[test]
    fn growth_counts_from_the_request() {
        let growing = samples::mounted(1, 2);
        assert_eq!(of(&growing, "+1Gi"), Ok(Asked::Larger(Bytes::gib(3))));
        assert_eq!(of(&growing, "+50%"), Ok(Asked::Larger(Bytes::gib(3))));
        assert_eq!(of(&growing, "5Gi"), Ok(Asked::Larger(Bytes::gib(5))));
        assert_eq!(of(&growing, "2Gi"), Ok(Asked::Already(Bytes::gib(2))));
    }

    // Fails if a claim that has more than it asked for would be grown to less than was meant.
    #[test]
    fn growth_counts_from_the_capacity_if_that_is_larger() {
        let larger = samples::claimed(1, 2);
        assert_eq!(of(&larger, "+1Gi"), Ok(Asked::Larger(Bytes::gib(3))));
        assert_eq!(of(&larger, "2Gi"), Ok(Asked::Larger(Bytes::gib(2))));
    }

    // Fails if a smaller size is taken, or the way to call a growth off is not named.
    #[test]
    fn smaller_is_refused_with_the_way_out() {
        let refusal = of(&samples::mounted(1, 2), "1Gi").unwrap_err();
        assert!(refusal.contains("trellis cancel data"), "{refusal}");
        let refusal = of(&samples::mounted(2, 2), "1Gi").unwrap_err();
        assert!(refusal.contains("never shrink"), "{refusal}");
    }

    // Fails if a claim without a volume is said to have a size, or its owner is not told where to look.
    #[test]
    fn a_claim_without_a_volume_cannot_grow() {
        let refusal = of(&samples::pending(), "2Gi").unwrap_err();
        assert!(refusal.contains("trellis explain data"), "{refusal}");
    }
}
