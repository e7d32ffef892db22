//! `trellis grow`: asks for a larger size, and on request waits until every layer has it.

mod forecast;
mod screen;
mod wait;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, Client};
use serde::Serialize;
use tokio::time::Instant;
use trellis_api::kinds::{Pool, Replica, Volume};
use trellis_api::quantity::{Growth, QuantityError};
use trellis_api::{Bytes, Hold, Rung};
use trellis_control::stored::{StoredClaim, now};
use trellis_control::view::{
    Forecast, RungView, Stock, is_bound, is_growing, reported, requested, rungs,
};

use self::screen::Screen;
use self::wait::Follow;
use super::patch;
use crate::cli::{Global, Grow};
use crate::connect::{Service, connect};
use crate::exit::{Ended, unless_interrupted};
use crate::load::{list, load};
use crate::output::{self, precise, took};

/// Grows a claim.
pub async fn run(global: &Global, verb: &Grow) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let look = load(&service, &verb.claim).await?;
    let asked = asked(&verb.claim, verb.size, &look)?;
    match asked {
        Asked::Larger(to) if verb.dry_run => dry_run(&service, verb, &look, to).await,
        Asked::Larger(to) if verb.wait => {
            wait_for(&service, verb, look, Some(to), global.patience()).await
        }
        Asked::Larger(to) => {
            let claim = look.claim.as_deref().context("the claim was not loaded")?;
            patch::request(&service, claim, to, false).await?;
            tell(&service, verb, &look, to, None, &[])
        }
        Asked::Already(_) if verb.wait && !verb.dry_run && is_growing(&look) => {
            wait_for(&service, verb, look, None, global.patience()).await
        }
        Asked::Already(size) => tell(&service, verb, &look, size, None, &[]),
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
fn asked(claim: &str, growth: Growth, look: &StoredClaim) -> Result<Asked, Ended> {
    if !look.claim.as_deref().is_some_and(is_bound) {
        return Err(Ended::Refused(format!(
            "claim {claim} has no volume yet, and Kubernetes changes the request of bound claims only; `trellis explain {claim}` says what it waits for"
        )));
    }
    let request = requested(look).unwrap_or_default();
    let base = match growth {
        Growth::To(_) => request,
        Growth::By(_) | Growth::ByPercent(_) => request.max(reported(look).unwrap_or_default()),
    };
    match growth.apply(base) {
        Ok(size) if size == request => Ok(Asked::Already(size)),
        Ok(size) => Ok(Asked::Larger(size)),
        Err(QuantityError::BelowCurrent { .. }) if is_growing(look) => {
            Err(Ended::Refused(format!(
                "claim {claim} asks for {request} already, and a growth never makes smaller; call that growth off first with `trellis cancel {claim}`"
            )))
        }
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
    look: &StoredClaim,
    to: Bytes,
    waited: Option<Duration>,
    rungs: &[RungView],
) -> anyhow::Result<()> {
    let from = reported(look);
    let changed = requested(look) != Some(to);
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
        None if is_growing(look) => format!(
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
    look: StoredClaim,
    to: Option<Bytes>,
    patience: Duration,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + patience;
    let mut screen = Screen::new(verb.output, &rungs(&look, Timestamp::now()));
    let mut follow = Follow::start(service, &look);
    follow.listed(deadline, patience).await?;
    let started = Instant::now();
    let goal = match to {
        Some(to) => {
            let claim = look.claim.as_deref().context("the claim was not loaded")?;
            patch::request(service, claim, to, false).await?;
            to
        }
        None => requested(&look).unwrap_or_default(),
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
        &look,
        goal,
        Some(grown.at.duration_since(started)),
        &grown.rungs,
    )
}

/// Says what would happen. It asks the service whether it would accept the request, and judges the rest by the rules of
/// the controllers.
async fn dry_run(
    service: &Service,
    verb: &Grow,
    look: &StoredClaim,
    to: Bytes,
) -> anyhow::Result<()> {
    let claim = look.claim.as_deref().context("the claim was not loaded")?;
    patch::request(service, claim, to, true).await?;
    if let Some(class) = look
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
    let stock = stock(&service.client).await?;
    let forecast = Forecast::of(look, &stock, to, &now());
    let text = output::text(verb.output, &forecast, |_| {
        forecast::render(&forecast, output::colours())
    })?;
    output::print(&text)?;
    match forecast.hold {
        Some(hold) => Err(held(hold)),
        None => Ok(()),
    }
}

/// What has a say in the room on pools.
async fn stock(client: &Client) -> anyhow::Result<Stock> {
    let all = ListParams::default();
    let (pools, replicas, volumes) = tokio::try_join!(
        list(Api::<Pool>::all(client.clone()), &all),
        list(Api::<Replica>::all(client.clone()), &all),
        list(Api::<Volume>::all(client.clone()), &all),
    )?;
    Ok(Stock {
        pools: pools.into_iter().map(Arc::new).collect(),
        replicas: replicas.into_iter().map(Arc::new).collect(),
        volumes: volumes.into_iter().map(Arc::new).collect(),
    })
}

fn held(hold: Hold) -> anyhow::Error {
    Ended::Held(hold).into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use trellis_control::view::scenario;

    fn of(look: &StoredClaim, growth: &str) -> Result<Asked, String> {
        asked("data", growth.parse().unwrap(), look).map_err(|ended| ended.to_string())
    }

    // Fails if a growth is computed from another size than the one that is asked for.
    #[test]
    fn growth_counts_from_the_request() {
        let growing = scenario::mounted(1, 2);
        assert_eq!(of(&growing, "+1Gi"), Ok(Asked::Larger(Bytes::gib(3))));
        assert_eq!(of(&growing, "+50%"), Ok(Asked::Larger(Bytes::gib(3))));
        assert_eq!(of(&growing, "5Gi"), Ok(Asked::Larger(Bytes::gib(5))));
        assert_eq!(of(&growing, "2Gi"), Ok(Asked::Already(Bytes::gib(2))));
    }

    // Fails if a claim that has more than it asked for would be grown to less than was meant.
    #[test]
    fn growth_counts_from_the_capacity_if_that_is_larger() {
        let larger = scenario::claimed(1, 2);
        assert_eq!(of(&larger, "+1Gi"), Ok(Asked::Larger(Bytes::gib(3))));
        assert_eq!(of(&larger, "2Gi"), Ok(Asked::Larger(Bytes::gib(2))));
    }

    // Fails if a smaller size is taken, or the way to call a growth off is not named.
    #[test]
    fn smaller_is_refused_with_the_way_out() {
        let refusal = of(&scenario::mounted(1, 2), "1Gi").unwrap_err();
        assert!(refusal.contains("trellis cancel data"), "{refusal}");
        let refusal = of(&scenario::mounted(2, 2), "1Gi").unwrap_err();
        assert!(refusal.contains("never shrink"), "{refusal}");
    }

    // Fails if a claim without a volume is said to have a size, or its owner is not told where to look.
    #[test]
    fn a_claim_without_a_volume_cannot_grow() {
        let refusal = of(&scenario::pending(), "2Gi").unwrap_err();
        assert!(refusal.contains("trellis explain data"), "{refusal}");
    }
}
