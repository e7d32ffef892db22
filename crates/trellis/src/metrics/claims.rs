//! The families about claims, growths and pools.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use trellis_api::{Bytes, Rung};
use trellis_control::claim::class::Class;
use trellis_control::metrics::Counted;
use trellis_control::node::machine::PoolMeasured;
use trellis_control::stored::StoredClaim;
use trellis_control::usage::{Fill, InUse};
use trellis_control::view::{goal, held, rungs as rungs_of};
use trellis_control::world::{World, volume_name};

use super::text::{Family, Labels, Value};

/// The labels of every metric of a claim, as the kubelet names them.
const CLAIM: &[&str] = &["namespace", "persistentvolumeclaim"];

/// Every claim that is ours or could become so.
pub fn looks(world: &World) -> Vec<StoredClaim> {
    let claims = world.claims.all();
    let looks = claims
        .iter()
        .filter_map(|claim| Some(StoredClaim::gather(world, &volume_name(claim)?)));
    looks
        .filter(|look| {
            look.stored.volume.is_some() || look.class.as_deref().is_none_or(Class::is_ours)
        })
        .collect()
}

pub fn labels_of(look: &StoredClaim) -> Option<Labels> {
    let claim = look.claim.as_ref()?;
    Some(vec![
        claim.namespace().unwrap_or_default(),
        claim.name_any(),
    ])
}

/// Sizes of the rungs, the goals, and what is held.
pub fn ladders(looks: &[StoredClaim], now: Timestamp) -> Vec<Family> {
    let mut rungs = Family::gauge(
        "trellis_volume_rung_bytes",
        "Measured size of a layer of the claim; of several copies or uses, the smallest.",
        &["namespace", "persistentvolumeclaim", "volume", "rung"],
    );
    let mut goals = Family::gauge(
        "trellis_volume_goal_bytes",
        "The size that every layer shall have once the claim's request is met.",
        &["namespace", "persistentvolumeclaim", "volume"],
    );
    let mut holds = Family::gauge(
        "trellis_volume_held",
        "1 while something keeps the claim from what is asked of it; the reason is a code of docs/holds.md.",
        &["namespace", "persistentvolumeclaim", "reason"],
    );
    for look in looks {
        let Some(labels) = labels_of(look) else {
            continue;
        };
        let and = |more: &[&str]| {
            let more = more.iter().map(|each| (*each).to_owned());
            labels.iter().cloned().chain(more).collect::<Labels>()
        };
        for (rung, size) in smallest(look, now) {
            rungs.put(
                and(&[&look.stored.key, rung.name()]),
                Value::Whole(size.get()),
            );
        }
        if look.stored.volume.is_some() {
            goals.put(and(&[&look.stored.key]), Value::Whole(goal(look).get()));
        }
        if let Some(held) = held(look, now) {
            holds.put(and(&[held.hold.reason.code()]), Value::Whole(1));
        }
    }
    vec![rungs, goals, holds]
}

/// The smallest measured size of each rung. The ladder shows what was never measured as empty.
fn smallest(look: &StoredClaim, now: Timestamp) -> BTreeMap<Rung, Bytes> {
    let mut sizes = BTreeMap::new();
    for rung in rungs_of(look, now) {
        if rung.size == Bytes::ZERO {
            continue;
        }
        let size: &mut Bytes = sizes.entry(rung.rung).or_insert(rung.size);
        *size = rung.size.min(*size);
    }
    sizes
}

/// What was counted since the process started.
pub fn growths(counted: Counted) -> Vec<Family> {
    let raises = counted
        .raises
        .into_iter()
        .map(|(rung, times)| (vec![rung.name().to_owned()], times));
    let mut results = Family::counter(
        "trellis_growths_total",
        "Growths by how they ended, and growths that came to be held, by the reason's code.",
        &["result", "reason"],
    );
    for ((result, reason), count) in counted.results {
        results.put(
            vec![result.to_owned(), reason.to_owned()],
            Value::Whole(count),
        );
    }
    vec![
        results,
        Family::histogram(
            "trellis_growth_rung_seconds",
            "Time that a raise of one layer took.",
            &["rung"],
            raises,
        ),
        Family::histogram(
            "trellis_growth_seconds",
            "Time from the request to the last layer measured at the new size, of growths that succeeded.",
            &[],
            [(Vec::new(), counted.growths)],
        ),
    ]
}

/// The kubelet's names, for the claims that are mounted on this node.
pub fn usage(claims: &BTreeMap<(String, String), InUse>) -> Vec<Family> {
    type Read = fn(&Fill) -> u64;
    let stats: [(&'static str, &'static str, Read); 6] = [
        (
            "kubelet_volume_stats_capacity_bytes",
            "Capacity in bytes of the volume's filesystem.",
            |fill| fill.capacity.get(),
        ),
        (
            "kubelet_volume_stats_available_bytes",
            "Bytes that can still be written to the volume.",
            |fill| fill.available.get(),
        ),
        (
            "kubelet_volume_stats_used_bytes",
            "Bytes in use on the volume.",
            |fill| fill.used.get(),
        ),
        (
            "kubelet_volume_stats_inodes",
            "Inodes of the volume's filesystem.",
            |fill| fill.inodes,
        ),
        (
            "kubelet_volume_stats_inodes_free",
            "Inodes that are free on the volume.",
            |fill| fill.inodes_free,
        ),
        (
            "kubelet_volume_stats_inodes_used",
            "Inodes in use on the volume.",
            |fill| fill.inodes_used,
        ),
    ];
    let labels = |(namespace, claim): &(String, String)| vec![namespace.clone(), claim.clone()];
    let mut families = Vec::new();
    for (name, help, read) in stats {
        let mut family = Family::gauge(name, help, CLAIM);
        for (claim, in_use) in claims {
            if let Some(fill) = &in_use.fill {
                family.put(labels(claim), Value::Whole(read(fill)));
            }
        }
        families.push(family);
    }
    let mut unmeasured = Family::gauge(
        "trellis_volume_usage_unmeasured",
        "1 if the filesystem of a claim in use on this node did not tell in time how full it is, or is not mounted.",
        CLAIM,
    );
    for (claim, in_use) in claims {
        let value = u64::from(in_use.fill.is_none());
        unmeasured.put(labels(claim), Value::Whole(value));
    }
    families.push(unmeasured);
    families
}

/// One pool as it was just measured, and how much of it is promised.
pub struct PoolSample {
    /// Its name.
    pub name: String,
    /// Its sizes; none if it could not be measured in time.
    pub measured: Option<PoolMeasured>,
    /// What replicas have been promised.
    pub promised: Bytes,
}

/// The pools of this node.
pub fn pools(pools: &[PoolSample]) -> Vec<Family> {
    let mut sizes = Family::gauge(
        "trellis_pool_bytes",
        "Sizes of the pool: its filesystem, what is free on it, what replicas take, what they were promised.",
        &["pool", "state"],
    );
    let mut ready = Family::gauge(
        "trellis_pool_ready",
        "1 if the pool could be measured, else 0.",
        &["pool"],
    );
    for pool in pools {
        let measured = pool.measured.as_ref();
        ready.put(
            vec![pool.name.clone()],
            Value::Whole(u64::from(measured.is_some())),
        );
        let mut put = |state: &str, size: Bytes| {
            sizes.put(
                vec![pool.name.clone(), state.to_owned()],
                Value::Whole(size.get()),
            );
        };
        put("promised", pool.promised);
        if let Some(measured) = measured {
            put("total", measured.total);
            put("free", measured.free);
            put("allocated", measured.allocated);
        }
    }
    vec![sizes, ready]
}

#[cfg(test)]
mod tests {
    use super::super::text::encode;
    use super::*;
    use trellis_control::view::scenario;

    // Fails if a rung, a goal or a hold of any kind of claim is lost, or told of one that was never measured.
    #[test]
    fn every_kind_of_claim_has_its_samples() {
        let mut held = scenario::refused();
        let mut idle = scenario::idle();
        let mut pending = scenario::pending();
        let named = [
            (&mut held, "held"),
            (&mut idle, "idle"),
            (&mut pending, "pending"),
        ];
        for (look, name) in named {
            let claim = look.claim.as_mut().expect("a claim");
            std::sync::Arc::make_mut(claim).metadata.name = Some(name.to_owned());
        }
        let looks = [scenario::mounted(1, 2), held, idle, pending];
        insta::assert_snapshot!(encode(ladders(&looks, scenario::now())));
    }

    // Fails if the smaller of two copies, which is what can be relied on, is hidden by the larger.
    #[test]
    fn of_several_copies_the_smallest_counts() {
        let mut look = scenario::mounted(2, 2);
        let mut second = (*look.stored.replicas[0]).clone();
        if let Some(status) = &mut second.status {
            status.capacity = Some(Bytes::gib(1));
        }
        look.stored.replicas.push(std::sync::Arc::new(second));
        assert_eq!(
            smallest(&look, scenario::now()).get(&Rung::Replica),
            Some(&Bytes::gib(1))
        );
    }

    fn in_use(fill: Option<Fill>) -> InUse {
        InUse {
            fill,
            ..InUse::default()
        }
    }

    // Fails if the kubelet's names or labels are off, two numbers change places, or a volume that could not
    // be measured is shown as empty.
    #[test]
    fn usage_has_the_names_of_the_kubelet() {
        let fill = Fill {
            capacity: Bytes::new(1_000),
            used: Bytes::new(300),
            available: Bytes::new(650),
            inodes: 50,
            inodes_used: 4,
            inodes_free: 46,
        };
        let claim = |name: &str| ("default".to_owned(), name.to_owned());
        let claims = BTreeMap::from([
            (claim("well"), in_use(Some(fill))),
            (claim("hung"), in_use(None)),
        ]);
        insta::assert_snapshot!(encode(usage(&claims)));
    }

    // Fails if a pool that cannot be measured is shown as full or empty, or its promises are lost.
    #[test]
    fn a_pool_that_cannot_be_measured_is_not_ready() {
        let measured = PoolMeasured {
            id: String::new(),
            filesystem: String::new(),
            total: Bytes::new(10),
            free: Bytes::new(7),
            allocated: Bytes::new(2),
            copies: Vec::new(),
        };
        let pool = |name: &str, measured| PoolSample {
            name: name.to_owned(),
            measured,
            promised: Bytes::new(5),
        };
        let all = [pool("well", Some(measured)), pool("gone", None)];
        insta::assert_snapshot!(encode(pools(&all)));
    }
}
