//! Metrics for Prometheus: what is measured and counted, gathered again for every scrape.
//!
//! The happy path: a client connects and asks for `/metrics`, the caches are read, the mounted filesystems and the
//! pools of this node are measured, and the result is written as text. A measurement that takes too long is left out
//! and reported as missing, so a disk that does not answer costs its own samples and no others. Scrapes are served one
//! after the other.

mod claims;
mod copies;
mod process;
mod serve;
mod text;

use std::path::Path;
use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use trellis_api::kinds::Pool;
use trellis_apiserver::EmbeddedApi;
use trellis_control::node::machine::Pools;
use trellis_control::stored::StoredClaim;
use trellis_control::timely::Timely;
use trellis_control::usage::{self, Gauge, MEASURE_TIME_MAX};
use trellis_control::world::World;

use crate::machine::ThisMachine;
use claims::PoolSample;
use copies::Served;
use text::{Family, Value};

pub use serve::serve;

/// How many pools are measured at the same time.
const POOLS_AT_ONCE: usize = 4;

/// How many targets are asked at the same time.
const TARGETS_AT_ONCE: usize = 16;

/// Where the samples come from.
pub struct Sources {
    world: Arc<World>,
    node: String,
    api: EmbeddedApi,
    machine: Arc<ThisMachine>,
    started: Timestamp,
    volumes: Timely,
    pools: Timely,
    targets: Timely,
    repaired: copies::Repaired,
    /// Held by the running scrape: two at a time would take each other's measurements for hung.
    turn: tokio::sync::Mutex<()>,
}

impl Sources {
    /// The samples of this process on node `node`.
    pub fn new(
        world: Arc<World>,
        node: String,
        api: EmbeddedApi,
        machine: Arc<ThisMachine>,
        started: Timestamp,
    ) -> Sources {
        Sources {
            world,
            node,
            api,
            machine,
            started,
            volumes: Timely::new(MEASURE_TIME_MAX),
            pools: Timely::new(MEASURE_TIME_MAX),
            targets: Timely::new(MEASURE_TIME_MAX),
            repaired: copies::Repaired::default(),
            turn: tokio::sync::Mutex::default(),
        }
    }

    /// Everything, as it is now.
    async fn scrape(&self) -> String {
        let _turn = self.turn.lock().await;
        let gauge: Arc<dyn Gauge> = self.machine.clone();
        let usage = usage::measure(&self.world, &self.node, &gauge, &self.volumes);
        let looks = claims::looks(&self.world);
        let (usage, pools, served) =
            tokio::join!(usage, self.measure_pools(), self.ask_targets(&looks));
        let mut families = claims::ladders(&looks, Timestamp::now());
        families.extend(copies::families(&served, &self.repaired));
        families.extend(claims::growths(self.world.growths.counted()));
        families.extend(claims::usage(&usage));
        families.extend(claims::pools(&pools));
        families.push(observations());
        families.extend(self.store());
        families.extend(process::families(self.started));
        families.push(build());
        text::encode(families)
    }

    /// Asks the targets of volumes with several copies.
    async fn ask_targets(&self, looks: &[StoredClaim]) -> Vec<Served> {
        let is_served = |look: &&StoredClaim| {
            look.stored
                .volume
                .as_ref()
                .is_some_and(|it| it.spec.is_behind_target())
        };
        let volumes = looks.iter().filter(is_served).cloned();
        futures::stream::iter(volumes)
            .map(|look| async {
                if !is_asked(&look, &self.node) {
                    let target = copies::reported(&look);
                    return Served {
                        is_asked: false,
                        look,
                        target,
                    };
                }
                let (machine, volume) = (self.machine.clone(), look.stored.key.clone());
                let ask = move || machine.target_status(&volume);
                let target = self.targets.measure(&look.stored.key, ask).await.flatten();
                Served {
                    is_asked: true,
                    look,
                    target,
                }
            })
            .buffer_unordered(TARGETS_AT_ONCE)
            .collect()
            .await
    }

    async fn measure_pools(&self) -> Vec<PoolSample> {
        let pools = self.world.pools.all();
        let here = pools.into_iter().filter(|pool| pool.spec.node == self.node);
        futures::stream::iter(here)
            .map(|pool| self.measure_pool(pool))
            .buffer_unordered(POOLS_AT_ONCE)
            .collect()
            .await
    }

    async fn measure_pool(&self, pool: Arc<Pool>) -> PoolSample {
        let name = pool.name_any();
        let promised = self.world.ledger.open().reserved_beside(&name, "");
        let id = pool.status.as_ref().and_then(|status| status.id.clone());
        let measured = match id {
            // A pool without an identity gets one from the agent, which opens it first.
            None => None,
            Some(id) => {
                let machine = self.machine.clone();
                let measure = move || machine.measure_pool(Path::new(&pool.spec.path), Some(&id));
                let measured = self.pools.measure(&name, measure).await;
                measured.and_then(Result::ok)
            }
        };
        PoolSample {
            name,
            measured,
            promised,
        }
    }

    fn store(&self) -> Vec<Family> {
        let stats = self.api.stats();
        let in_flushes = std::time::Duration::from_nanos(stats.flush_ns).as_secs_f64();
        let counter = |name, help, value| Family::counter(name, help, &[]).with(Vec::new(), value);
        vec![
            counter(
                "trellis_store_flushes_total",
                "Commits of the store that waited for the disk.",
                Value::Whole(stats.flushes),
            ),
            counter(
                "trellis_store_flush_seconds_total",
                "Time spent in those commits.",
                Value::Real(in_flushes),
            ),
            counter(
                "trellis_store_writes_total",
                "Versions of objects that were stored or removed.",
                Value::Whole(stats.writes),
            ),
        ]
    }
}

fn observations() -> Family {
    Family::counter(
        "trellis_volume_observations_total",
        "How often a volume was looked at in the kernel, over all volumes of this node.",
        &[],
    )
    .with(
        Vec::new(),
        Value::Whole(trellis_node::volume::observations()),
    )
}

fn build() -> Family {
    let version = vec![env!("CARGO_PKG_VERSION").to_owned()];
    Family::gauge("trellis_build_info", "1, with the version.", &["version"])
        .with(version, Value::Whole(1))
}

/// Whether the target of a volume is one that this node can ask: it runs here.
fn is_asked(look: &StoredClaim, node: &str) -> bool {
    let target = look.stored.target.as_ref();
    target.is_none_or(|target| target.spec.node == node && !target.spec.rests)
}
