//! `trellis volume recover`: what each copy holds, and how to go on when too many are lost for good.
//!
//! Looking changes nothing. To go on, the operator names every copy that is given up. The decision is stored with the
//! volume, and the controllers carry it out.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde::Serialize;
use serde_json::json;
use trellis_api::kinds::{Recovery, Volume};
use trellis_api::{Hold, HoldReason};
use trellis_control::stored::{StoredClaim, now};
use trellis_engine::drive::{Address, SurveyFault, survey};
use trellis_engine::proto::{Lineage, ReplicaId, Surveyed};
use uuid::Uuid;

use super::patch::manager;
use super::volume::volume_of;
use crate::cli::{Format, Global};
use crate::connect::{Service, connect};
use crate::exit::{Ended, from_service};
use crate::load::load;
use crate::output::{self, Table, Tone, UNKNOWN};

/// How long a copy may take to say what it holds.
const SURVEY_TIME_MAX: Duration = Duration::from_secs(10);

/// Shows what each copy holds, and gives up those on the pools of `accept_loss`.
pub async fn run(
    global: &Global,
    claim: &str,
    accept_loss: &[String],
    consistency: Option<u32>,
    format: Option<Format>,
) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let look = load(&service, claim).await?;
    let volume = volume_of(&look, claim)?;
    if !volume.spec.is_behind_target() {
        let text = format!("claim {claim:?} has a single copy; there is none to go on with");
        return Err(Ended::Refused(text).into());
    }
    let findings = Findings::of(&look, volume).await?;
    if accept_loss.is_empty() {
        output::print(&output::text(format, &findings, |_| {
            findings.render(claim, output::colours())
        })?)?;
        return findings.verdict(claim);
    }
    let recovery = findings.decide(claim, volume, accept_loss, consistency)?;
    store(&service, claim, volume, &recovery, consistency).await?;
    output::print(&format!(
        "claim {claim:?} goes on with {} of its copies; the others are given up and replaced as far as there are pools; \
         see `trellis volume show {claim} --watch`\n",
        recovery.survivors.len()
    ))
}

async fn store(
    service: &Service,
    claim: &str,
    volume: &Volume,
    recovery: &Recovery,
    consistency: Option<u32>,
) -> anyhow::Result<()> {
    let factor = consistency.unwrap_or(volume.spec.consistency_factor);
    // Only for the volume that was looked at: somebody else may have decided meanwhile.
    let body = json!({
        "metadata": { "resourceVersion": volume.resource_version() },
        "spec": { "recovery": recovery, "consistencyFactor": factor },
    });
    let volumes = Api::<Volume>::all(service.client.clone());
    let params = PatchParams {
        field_manager: Some(manager()),
        ..PatchParams::default()
    };
    let patched = volumes
        .patch(&volume.name_any(), &params, &Patch::Merge(body))
        .await;
    patched.map_err(|error| from_service(error, claim))?;
    Ok(())
}

/// What was found of a volume's copies.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Findings {
    volume: String,
    /// I/O is served.
    available: bool,
    consistency_factor: u32,
    copies: Vec<Copy>,
    #[serde(skip)]
    lineages: Vec<Lineage>,
}

/// One copy.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Copy {
    pool: String,
    id: String,
    /// It counts.
    counts: bool,
    /// It is there, and can prove what it holds.
    is_left: bool,
    /// How far it got: the epoch and the number of its last entry. The larger is the later.
    key: Option<(u64, u64)>,
    written_at: Option<String>,
    /// Regions of a mebibyte that are behind.
    stale: Option<u64>,
    regions: Option<u64>,
    lineage: Option<String>,
    note: Option<String>,
}

impl Findings {
    async fn of(look: &StoredClaim, volume: &Volume) -> anyhow::Result<Findings> {
        let id: Uuid = volume.identity().parse()?;
        let mut addresses = BTreeMap::new();
        for replica in &look.stored.replicas {
            let status = replica.status.as_ref();
            let address = status.and_then(|status| status.address.as_ref());
            if let Some(address) = address {
                let id = replica.identity().parse::<ReplicaId>()?;
                addresses.insert(id, address.parse::<Address>()?);
            }
        }
        let found = survey(id, addresses, None, SURVEY_TIME_MAX).await;
        let status = look
            .stored
            .target
            .as_ref()
            .and_then(|target| target.status.clone());
        let status = status.unwrap_or_default();
        let members = status.members.unwrap_or_default();
        let is_true = |kind: &str| {
            let mut conditions = status.conditions.iter();
            conditions.any(|each| each.type_ == kind && each.status == "True")
        };
        let copies = look.stored.replicas.iter().map(|replica| {
            let id = replica.identity();
            let surveyed = id.parse().ok().and_then(|id: ReplicaId| found.get(&id));
            let counts = members.replicas.contains(&id);
            Copy::of(&replica.spec.pool, id, counts, surveyed)
        });
        let known = volume.spec.recovery.as_ref();
        let known = known.and_then(|recovery| recovery.lineage.parse().ok());
        let told = found.values().flatten().map(|it| it.view.lineage);
        Ok(Findings {
            volume: volume.name_any(),
            available: is_true("Available"),
            consistency_factor: members.consistency_factor.max(1),
            copies: copies.collect(),
            lineages: told.chain(known).collect(),
        })
    }

    fn members(&self) -> impl Iterator<Item = &Copy> {
        self.copies.iter().filter(|copy| copy.counts)
    }

    /// Whether a write that was acknowledged may be missing in so many copies. As many copies as the factor have such a
    /// write, so only the others can lack it.
    fn may_miss(&self, survivors: usize) -> bool {
        let factor = usize::try_from(self.consistency_factor).unwrap_or(usize::MAX);
        survivors + factor <= self.members().count()
    }

    fn verdict(&self, claim: &str) -> anyhow::Result<()> {
        if self.available {
            return Ok(());
        }
        let there = self.members().filter(|copy| copy.is_left).count();
        let message = format!(
            "{there} of {} copies of claim {claim:?} are there and can say what they hold.",
            self.members().count()
        );
        Err(Ended::Held(Hold::new(HoldReason::TooFewReplicas, message)).into())
    }

    /// The decision to give up the copies on these pools.
    fn decide(
        &self,
        claim: &str,
        volume: &Volume,
        pools: &[String],
        consistency: Option<u32>,
    ) -> anyhow::Result<Recovery> {
        let refused = |text: String| anyhow::Error::from(Ended::Refused(text));
        if self.available {
            let text =
                format!("claim {claim:?} is served; use `trellis volume replace` to move a copy");
            return Err(refused(text));
        }
        if let Some(pool) = pools
            .iter()
            .find(|pool| self.copies.iter().all(|copy| copy.pool != **pool))
        {
            let text = format!("claim {claim:?} has no copy on pool {pool:?}");
            return Err(Ended::NotFound(text).into());
        }
        let is_named = |copy: &&Copy| pools.contains(&copy.pool);
        let unnamed = self
            .members()
            .filter(|copy| !copy.is_left && !is_named(copy));
        let unnamed: Vec<&str> = unnamed.map(|copy| copy.pool.as_str()).collect();
        if !unnamed.is_empty() {
            let text = format!(
                "the copies on these pools are not there either, and a volume goes on only with copies that are: {}; \
                 bring them back, or give them up too with --accept-loss",
                unnamed.join(", ")
            );
            return Err(refused(text));
        }
        let survivors: Vec<String> = self
            .members()
            .filter(|copy| copy.is_left && !is_named(copy))
            .map(|copy| copy.id.clone())
            .collect();
        let count = u32::try_from(survivors.len()).unwrap_or(u32::MAX);
        if count == 0 {
            return Err(refused(format!("no copy of claim {claim:?} would be left")));
        }
        let factor = consistency.unwrap_or(self.consistency_factor.min(count));
        if factor > count {
            return Err(refused(format!(
                "{factor} copies cannot have a write if {count} are left"
            )));
        }
        let lineage = Lineage::after(self.lineages.iter().copied())
            .ok_or_else(|| refused("the volume was recovered too often".to_owned()))?;
        let before = volume
            .spec
            .recovery
            .iter()
            .flat_map(|it| it.given_up.clone());
        let given_up = self
            .copies
            .iter()
            .filter(is_named)
            .map(|copy| copy.id.clone());
        let mut given_up: Vec<String> = before.chain(given_up).collect();
        given_up.sort_unstable();
        given_up.dedup();
        Ok(Recovery {
            lineage: lineage.to_string(),
            survivors,
            given_up,
            consistency_factor: factor,
            by: manager(),
            at: now(),
        })
    }

    fn render(&self, claim: &str, colours: bool) -> String {
        let mut table = Table::toned(
            &[
                "POOL",
                "COUNTS",
                "HOLDS",
                "LAST WRITTEN",
                "BEHIND",
                "HISTORY",
                "NOTE",
            ],
            "COUNTS",
        );
        for copy in &self.copies {
            let known = |text: Option<String>| text.unwrap_or_else(|| UNKNOWN.to_owned());
            let behind = copy.stale.zip(copy.regions);
            let tone = if copy.is_left { Tone::Good } else { Tone::Bad };
            let cells = vec![
                copy.pool.clone(),
                if copy.counts { "yes" } else { "no" }.to_owned(),
                known(copy.key.map(|(epoch, number)| format!("{epoch}/{number}"))),
                known(copy.written_at.clone()),
                known(behind.map(|(stale, of)| format!("{stale} of {of} Mi"))),
                known(copy.lineage.clone()),
                known(copy.note.clone()),
            ];
            table.row(cells, Some(tone));
        }
        let mut text = table.render(colours);
        text.push_str(&self.advice(claim));
        text
    }

    fn advice(&self, claim: &str) -> String {
        let missing: Vec<&str> = self
            .members()
            .filter(|copy| !copy.is_left)
            .map(|copy| copy.pool.as_str())
            .collect();
        if self.available {
            return format!("claim {claim:?} is served; nothing has to be recovered\n");
        }
        if missing.is_empty() {
            return "every copy that counts is there; the volume is served in a moment\n"
                .to_owned();
        }
        let left = self.members().count() - missing.len();
        if left == 0 {
            return "no copy that counts is there; bring one back\n".to_owned();
        }
        let cost = if self.may_miss(left) {
            "writes that were acknowledged MAY BE LOST: only the missing copies may have them"
        } else {
            "no write that was acknowledged is lost: every one is in a copy that is there"
        };
        let flags: Vec<String> = missing
            .iter()
            .map(|pool| format!("--accept-loss {pool}"))
            .collect();
        format!(
            "if the missing copies are lost for good, the volume can go on without them; {cost}\n  trellis volume \
             recover {claim} {}\n",
            flags.join(" ")
        )
    }
}

impl Copy {
    fn of(
        pool: &str,
        id: String,
        counts: bool,
        surveyed: Option<&Result<Surveyed, SurveyFault>>,
    ) -> Copy {
        let blank = Copy {
            pool: pool.to_owned(),
            id,
            counts,
            is_left: false,
            key: None,
            written_at: None,
            stale: None,
            regions: None,
            lineage: None,
            note: None,
        };
        match surveyed {
            None => Copy {
                note: Some("it has never been served".to_owned()),
                ..blank
            },
            Some(Err(fault)) => Copy {
                note: Some(fault.to_string()),
                ..blank
            },
            Some(Ok(found)) => Copy {
                is_left: found.is_proven(),
                key: Some((found.key.epoch.get(), found.key.seq)),
                written_at: found
                    .written_at
                    .and_then(|seconds| Timestamp::from_second(i64::try_from(seconds).ok()?).ok())
                    .map(|at| at.strftime("%Y-%m-%d %H:%M:%SZ").to_string()),
                stale: Some(found.stale),
                regions: Some(found.regions),
                lineage: Some(found.view.lineage.to_string()),
                note: (!found.is_proven())
                    .then(|| "it has lost its memory and cannot prove what it holds".to_owned()),
                ..blank
            },
        }
    }
}
