//! ControllerModifyVolume: how many copies, how many of them must have a write, and how often they are compared.

use std::collections::{BTreeMap, HashMap};

use kube::ResourceExt;
use serde_json::{Map, Value, json};
use tokio::time::Instant;
use tonic::{Code, Status};
use trellis_api::kinds::{COPIES_HELD, Target, Volume};
use trellis_api::{Hold, HoldReason};
use trellis_control::claim::class::Class;

use super::{ControllerService, required};
use crate::codes;
use crate::objects::{CONFLICTS_MAX, Objects, follow, is_conflict};
use crate::proto::csi::ControllerModifyVolumeRequest;

/// The parameters that can be changed.
const MUTABLE: [&str; 3] = ["replicas", "consistencyFactor", "scrubInterval"];

/// Refuses a parameter that cannot be changed, and so cannot be given as one that can.
pub fn require_mutable(parameters: &HashMap<String, String>) -> Result<(), Status> {
    let other = parameters
        .keys()
        .find(|each| !MUTABLE.contains(&each.as_str()));
    let Some(other) = other else { return Ok(()) };
    let message = format!(
        "{other:?} is given as a parameter that can be changed; these can: {}.",
        MUTABLE.join(", ")
    );
    Err(codes::refused(&Hold::new(
        HoldReason::ClassInvalid,
        message,
    )))
}

/// Changes the volume, and waits until it is what is asked for.
pub async fn modify(
    service: &ControllerService,
    request: &ControllerModifyVolumeRequest,
    until: Instant,
) -> Result<(), Status> {
    let id = required(&request.volume_id)?;
    let objects = &service.objects;
    objects.volume(id).await?;
    let _turn = service.turns.take(id)?;
    for _ in 0..CONFLICTS_MAX {
        let volume = objects.volume(id).await?;
        let class = wanted(&volume, &request.mutable_parameters)?;
        if let Some(change) = change(&volume, &class)? {
            let body = json!({
                "metadata": { "uid": volume.uid(), "resourceVersion": volume.resource_version() },
                "spec": change,
            });
            match objects.patch_volume(id, &body).await {
                Ok(_) => {}
                Err(error) if is_conflict(&error) => continue,
                Err(error) => return Err(codes::from_api(&error, &format!("volume {id}"))),
            }
        }
        if volume.spec.is_behind_target() {
            let copies = (class.replicas, class.consistency_factor);
            has_copies_now(objects, id, copies, until).await?;
        }
        return Ok(());
    }
    let message = format!("Volume {id} is changed by others all the time.");
    let hold = Hold::new(HoldReason::OperationRunning, message);
    Err(codes::refused(&hold))
}

/// What is to be written into the volume; none if it wants all of it already.
fn change(volume: &Volume, class: &Class) -> Result<Option<Value>, Status> {
    let spec = &volume.spec;
    let mut change = Map::new();
    let has = (spec.replicas, spec.consistency_factor);
    if has != (class.replicas, class.consistency_factor) {
        require_target(volume)?;
        let factor = json!(class.consistency_factor);
        change.insert("replicas".to_owned(), json!(class.replicas));
        change.insert("consistencyFactor".to_owned(), factor);
    }
    if spec.scrub_interval_seconds != class.scrub_interval_seconds {
        let seconds = json!(class.scrub_interval_seconds);
        change.insert("scrubIntervalSeconds".to_owned(), seconds);
    }
    Ok((!change.is_empty()).then_some(Value::Object(change)))
}

/// What the parameters make of the volume. If the number of copies changes and nothing is said of the factor, it is a
/// majority of them again.
fn wanted(volume: &Volume, parameters: &HashMap<String, String>) -> Result<Class, Status> {
    require_mutable(parameters)?;
    let spec = &volume.spec;
    let mut all: BTreeMap<String, String> = parameters.clone().into_iter().collect();
    if !all.contains_key("replicas") {
        let factor = spec.consistency_factor.to_string();
        all.entry("consistencyFactor".to_owned()).or_insert(factor);
    }
    let replicas = spec.replicas.to_string();
    all.entry("replicas".to_owned()).or_insert(replicas);
    let class = Class::of("The request", &all, &[]);
    let mut class = class.map_err(|hold| codes::refused(&hold))?;
    if !all.contains_key("scrubInterval") {
        class.scrub_interval_seconds = spec.scrub_interval_seconds;
    }
    Ok(class)
}

fn require_target(volume: &Volume) -> Result<(), Status> {
    if volume.spec.is_behind_target() {
        return Ok(());
    }
    let message = format!(
        "Volume {} has a single copy that is used where it lies; only one that was made with several replicas, or with via, \
         can have more or fewer.",
        volume.name_any()
    );
    Err(codes::refused(&Hold::new(
        HoldReason::ClassInvalid,
        message,
    )))
}

/// Waits until the target has the copies that are asked for, and each of them holds everything.
async fn has_copies_now(
    objects: &Objects,
    id: &str,
    wanted: (u32, u32),
    until: Instant,
) -> Result<(), Status> {
    let done = follow(objects.targets(), id, until, |seen: Option<Target>| {
        let seen = seen?;
        let copies = &seen.spec.copies;
        let is_told = (copies.count, copies.consistency_factor) == wanted;
        let status = seen.status.as_ref()?;
        let is_heard = seen.spec.rests || status.observed_generation >= seen.metadata.generation;
        let mut conditions = status.conditions.iter();
        let is_met = conditions.any(|each| each.type_ == "RedundancyMet" && each.status == "True");
        let members = status.members.as_ref();
        let counts = members.is_some_and(|members| members.consistency_factor == wanted.1);
        (is_told && is_heard && is_met && counts).then_some(())
    });
    if done.await.is_some() {
        return Ok(());
    }
    let volume = objects.volume(id).await?;
    let status = volume.status.unwrap_or_default();
    let mut conditions = status.conditions.iter();
    let held = conditions.find(|each| each.type_ == COPIES_HELD && each.status == "True");
    let held = held.and_then(|each| {
        let reason = HoldReason::of_code(&each.reason)?;
        Some(Hold::new(reason, each.message.clone()))
    });
    match held.or(status.hold) {
        Some(hold) => Err(codes::refused(&hold)),
        None => {
            let message = format!(
                "Volume {id} gets {} copies, and they are not whole yet.",
                wanted.0
            );
            let hold = Hold::new(HoldReason::RedundancyLow, message);
            Err(codes::refused_as(Code::Unavailable, &hold))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(replicas: u32, factor: u32) -> Volume {
        let volume = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume", "metadata": { "name": "v" },
            "spec": {
                "capacity": "2Gi", "class": "", "replicas": replicas, "consistencyFactor": factor,
                "scrubIntervalSeconds": 3600, "via": "fuse",
            },
        });
        serde_json::from_value(volume).expect("a volume")
    }

    fn changed(given: &[(&str, &str)]) -> Result<(u32, u32, u64), Code> {
        let given = given.iter();
        let given = given.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let class = wanted(&volume(3, 3), &given.collect());
        let class = class.map_err(|status| status.code())?;
        Ok((
            class.replicas,
            class.consistency_factor,
            class.scrub_interval_seconds,
        ))
    }

    // Fails if what is not mentioned changes, if the factor does not follow the copies, or if nonsense is taken.
    #[test]
    fn only_what_is_given_changes() {
        assert_eq!(changed(&[]), Ok((3, 3, 3600)));
        assert_eq!(changed(&[("replicas", "5")]), Ok((5, 3, 3600)));
        assert_eq!(changed(&[("replicas", "2")]), Ok((2, 2, 3600)));
        assert_eq!(changed(&[("consistencyFactor", "2")]), Ok((3, 2, 3600)));
        assert_eq!(changed(&[("scrubInterval", "12h")]), Ok((3, 3, 43_200)));
        for bad in [
            ("replicas", "9"),
            ("consistencyFactor", "4"),
            ("thick", "true"),
            ("scrubInterval", "soon"),
        ] {
            assert_eq!(changed(&[bad]), Err(Code::InvalidArgument), "{bad:?}");
        }
    }
}
