//! `trellis pool rm`: a pool goes when it has no copies. With `--drain` the copies move to other pools first.
//!
//! The service moves the copies, as for `trellis volume replace`: a copy on a drained pool goes when another one holds
//! everything. This verb only says what is wanted and shows the progress, so it can be interrupted and run again.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use trellis_api::kinds::{Pool, Replica, Target, Volume};
use trellis_api::{Bytes, Hold, HoldReason};
use trellis_control::claim::status::COPIES;

use crate::cli::Global;
use crate::cmd::patience::answered;
use crate::connect::connect;
use crate::exit::{Ended, from_service, unless_interrupted};
use crate::load::list;
use crate::output::{self, human};

/// How often the progress is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How many copies are named in a sentence.
const NAMED_MAX: usize = 10;

/// Removes a pool.
pub async fn remove(global: &Global, name: &str, drain: bool) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let client = &service.client;
    let pools = Api::<Pool>::all(client.clone());
    let what = format!("pool {name}");
    let found = async {
        let found = pools.get(name).await;
        found.map_err(|error| from_service(error, &what))
    };
    let pool = answered(found).await?;
    let copies = answered(Copies::on(client, name)).await?;
    if !drain && !copies.is_empty() {
        return Err(copies.refuse(name).into());
    }
    if let Some(refusal) = copies.immovable(name) {
        return Err(refusal.into());
    }
    let removal = async {
        if drain {
            empty(client, &pools, name).await?;
        }
        delete(&pools, name).await
    };
    let goes_on = if drain {
        format!("the move goes on by itself, and `trellis pool rm {name} --drain` waits again")
    } else {
        format!("see `trellis pool ls` whether {what} is gone")
    };
    let removal = unless_interrupted(&goes_on, removal);
    match global.timeout {
        None => removal.await?,
        Some(limit) => tokio::time::timeout(limit, removal).await.map_err(|_| {
            let text = format!(
                "{what} is not gone after {limit:?}; it goes on by itself, and `trellis pool rm {name}{}` waits again",
                if drain { " --drain" } else { "" }
            );
            Ended::TimedOut(text)
        })??,
    }
    let unknown = pool.status.as_ref().map_or(0, |it| it.unknown_count);
    let kept = match unknown {
        0 => String::new(),
        count => format!("; {count} copies that no object names are kept in it"),
    };
    output::print(&format!(
        "{what} is removed, and {} is let go of{kept}\n",
        pool.spec.path
    ))
}

/// Makes every copy move away, and shows the progress until none is left.
async fn empty(client: &Client, pools: &Api<Pool>, name: &str) -> anyhow::Result<()> {
    let body = json!({ "spec": { "drain": true } });
    pools
        .patch(name, &PatchParams::default(), &Patch::Merge(&body))
        .await
        .map_err(|error| from_service(error, &format!("pool {name}")))?;
    let mut said = String::new();
    loop {
        let copies = answered(Copies::on(client, name)).await?;
        if copies.is_empty() {
            return Ok(());
        }
        if let Some(refusal) = copies.immovable(name) {
            return Err(refusal.into());
        }
        let progress = copies.progress(name);
        if progress != said {
            output::print(&progress)?;
            said = progress;
        }
        if let Some(hold) = copies.held() {
            let message = format!(
                "{} Pool {name:?} gets no new copies meanwhile; the move goes on by itself when this is lifted.",
                hold.message
            );
            return Err(Ended::Held(Hold::new(hold.reason, message)).into());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Deletes the object and waits until its node has released the directory.
async fn delete(pools: &Api<Pool>, name: &str) -> anyhow::Result<()> {
    match pools.delete(name, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_not_found() => return Ok(()),
        Err(error) => return Err(from_service(error, &format!("pool {name}"))),
    }
    let mut said = String::new();
    loop {
        let look = async {
            let there = pools.get_opt(name).await;
            there.map_err(|error| from_service(error, &format!("pool {name}")))
        };
        let Some(pool) = answered(look).await? else {
            return Ok(());
        };
        let conditions = pool.status.map(|status| status.conditions);
        let mut conditions = conditions.unwrap_or_default().into_iter();
        let waits = conditions.find(|each| each.type_ == "Removable");
        if let Some(waits) = waits.filter(|waits| waits.message != said) {
            output::print(&format!("{}\n", waits.message))?;
            said = waits.message;
        }
        tokio::time::sleep(LOOK_EVERY / 5).await;
    }
}

/// The copies on a pool, with what belongs to them.
struct Copies {
    copies: Vec<Copy>,
}

struct Copy {
    name: String,
    /// The claim, as `NAMESPACE/NAME`, or the volume if there is none.
    of: String,
    /// Whether it is one of several behind a target.
    is_movable: bool,
    leaves: bool,
    /// What the copies that are to take its place still lack.
    repair_left: Bytes,
    held: Option<Hold>,
}

impl Copies {
    async fn on(client: &Client, pool: &str) -> anyhow::Result<Copies> {
        let all = ListParams::default();
        let (replicas, volumes, targets, claims) = tokio::try_join!(
            list(Api::<Replica>::all(client.clone()), &all),
            list(Api::<Volume>::all(client.clone()), &all),
            list(Api::<Target>::all(client.clone()), &all),
            list(Api::<PersistentVolumeClaim>::all(client.clone()), &all),
        )
        .context("the copies on the pool cannot be listed")?;
        let copy = |replica: &Replica| {
            let key = &replica.spec.volume;
            let volume = volumes.iter().find(|each| each.name_any() == *key);
            let target = targets.iter().find(|each| each.spec.volume == *key);
            let claim = volume.and_then(|volume| volume.spec.claim.as_ref());
            let found = claim.and_then(|claim| {
                let is_it = |each: &&PersistentVolumeClaim| each.uid().as_ref() == Some(&claim.uid);
                claims.iter().find(is_it)
            });
            let seen = target.and_then(|target| target.status.as_ref());
            let seen = seen.map_or(&[][..], |status| status.replicas.as_slice());
            Copy {
                name: replica.name_any(),
                of: claim.map_or_else(
                    || format!("volume {key}"),
                    |claim| format!("claim {}/{}", claim.namespace, claim.name),
                ),
                is_movable: volume.is_none_or(|volume| volume.spec.is_behind_target()),
                leaves: replica.metadata.deletion_timestamp.is_some(),
                repair_left: seen.iter().map(|each| each.repair_left).sum(),
                held: found.and_then(hold_of),
            }
        };
        let there = replicas.iter().filter(|each| each.spec.pool == pool);
        let mut copies: Vec<Copy> = there.map(copy).collect();
        copies.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(Copies { copies })
    }

    fn is_empty(&self) -> bool {
        self.copies.is_empty()
    }

    fn named<'a>(copies: impl Iterator<Item = &'a Copy>) -> String {
        let mut named: Vec<&str> = copies.map(|copy| copy.of.as_str()).collect();
        let count = named.len();
        named.truncate(NAMED_MAX);
        if count > NAMED_MAX {
            named.push("and more");
        }
        named.join(", ")
    }

    /// Copies are there, and nobody said that they may move.
    fn refuse(&self, pool: &str) -> Ended {
        let reason = HoldReason::PoolInUse;
        Ended::Refused(format!(
            "{reason}: pool {pool:?} is in use; {} copies are on it: {}\n  what to do: `trellis pool rm {pool} --drain` \
             moves those of volumes with several copies to other pools first; delete the claims of the others",
            self.copies.len(),
            Self::named(self.copies.iter())
        ))
    }

    /// Copies that cannot move, because each is the only one and is used in place.
    fn immovable(&self, pool: &str) -> Option<Ended> {
        let fixed = || self.copies.iter().filter(|copy| !copy.is_movable);
        (fixed().count() > 0).then(|| {
            Ended::Refused(format!(
                "{}: pool {pool:?} holds the only copy of {}, which is used where it lies and cannot move\n  what to do: \
                 copy the data to a new claim and delete the old one; nothing was moved",
                HoldReason::PoolInUse,
                Self::named(fixed())
            ))
        })
    }

    fn progress(&self, pool: &str) -> String {
        let moving = self.copies.iter().filter(|copy| copy.leaves).count();
        let left: Bytes = self.copies.iter().map(|copy| copy.repair_left).sum();
        let mut text = format!(
            "pool {pool}: {} copies left, {moving} of them on the move",
            self.copies.len()
        );
        if left > Bytes::ZERO {
            text.push_str(&format!(", {} to copy", human(left)));
        }
        text.push('\n');
        text
    }

    /// What holds a copy that has not begun to move. One that already moves gets on, or says by itself what holds it.
    fn held(&self) -> Option<&Hold> {
        self.copies.iter().find_map(|copy| copy.held.as_ref())
    }
}

fn hold_of(claim: &PersistentVolumeClaim) -> Option<Hold> {
    let conditions = claim.status.as_ref()?.conditions.as_ref()?;
    let held = conditions.iter().find(|each| each.type_ == COPIES)?;
    let code = held.reason.as_deref()?;
    let reason = HoldReason::ALL.iter().find(|each| each.code() == code)?;
    Some(Hold::new(*reason, held.message.clone().unwrap_or_default()))
}
