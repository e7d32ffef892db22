//! CreateVolume: one Volume for one name, and the wait until it is served.
//!
//! A Volume for which there is no place is removed before the refusal is answered: a caller that takes the answer for
//! final never asks to delete what it believes was not made. An answer that may pass leaves the Volume, and the next call
//! of the same name goes on with it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams, Preconditions};
use serde_json::json;
use tokio::time::Instant;
use tonic::{Code, Status};
use trellis_api::kinds::{FSTYPE_PARAMETER, NODE_LABEL, VOLUME_FINALIZER, Volume, VolumeSpec};
use trellis_api::{Bytes, Hold, HoldReason};
use trellis_control::claim::class::Class;
use trellis_control::claim::provision::{require_filesystem_fits, volume_of_class};

use super::ControllerService;
use super::list::answer;
use super::modify::require_mutable;
use crate::capability::{Form, Usage};
use crate::codes;
use crate::names::volume_name;
use crate::objects::{Objects, follow, is_conflict, is_gone};
use crate::proto::csi::{self, CreateVolumeRequest, Topology};
use crate::range::Range;

/// The longest name that a CO may give a volume.
const NAME_MAX: usize = 1024;
/// The CO's own name of a volume.
const NAME_ANNOTATION: &str = "trellis.dev/csi-name";
/// What a provisioner tells of the claim, and the annotation that keeps it.
const METADATA: [(&str, &str); 3] = [
    ("csi.storage.k8s.io/pvc/name", "trellis.dev/pvc-name"),
    (
        "csi.storage.k8s.io/pvc/namespace",
        "trellis.dev/pvc-namespace",
    ),
    ("csi.storage.k8s.io/pv/name", "trellis.dev/pv-name"),
];

/// A volume as it is asked for.
struct Wanted {
    /// The name of the object.
    name: String,
    annotations: BTreeMap<String, String>,
    range: Range,
    spec: VolumeSpec,
}

/// Makes the volume, or finds the one that an earlier call has made, and waits until it is served.
pub async fn create(
    service: &ControllerService,
    request: &CreateVolumeRequest,
    until: Instant,
) -> Result<csi::Volume, Status> {
    let wanted = read(request)?;
    let _turn = service.turns.take(&wanted.name)?;
    let objects = &service.objects;
    let topology = request.accessibility_requirements.as_ref();
    let is_bound = topology.is_some() && !wanted.spec.is_behind_target();
    let mut choices = match topology.filter(|_| is_bound) {
        Some(asked) => choices(objects, &wanted.spec, &asked.preferred, &asked.requisite).await?,
        None => vec![wanted.spec.pools.clone()],
    }
    .into_iter();
    let mut volume = match objects.find_volume(&wanted.name).await? {
        Some(found) => require_same(found, &wanted)?,
        None => make(objects, &wanted, choices.next()).await?,
    };
    loop {
        let hold = match served(objects, &volume, until).await? {
            Served::Yes(volume) => return Ok(answer(&volume)),
            Served::NoPlace(hold) => hold,
        };
        if !take_back(objects, &volume, until).await? {
            // Somebody has changed it meanwhile; most likely it has a place now.
            volume = objects.volume(&wanted.name).await?;
            continue;
        }
        let Some(pools) = choices.next() else {
            // Told so, a provisioner has the scheduler try another node.
            let code = match is_bound {
                true => Code::ResourceExhausted,
                false => codes::code(hold.reason),
            };
            return Err(codes::refused_as(code, &hold));
        };
        volume = make(objects, &wanted, Some(pools)).await?;
    }
}

fn read(request: &CreateVolumeRequest) -> Result<Wanted, Status> {
    if request.name.is_empty() || request.name.len() > NAME_MAX {
        return Err(codes::invalid(format!(
            "A volume needs a name of at most {NAME_MAX} bytes."
        )));
    }
    let usages = Usage::read_all(&request.volume_capabilities)?;
    if request.volume_content_source.is_some() {
        let message = "The volume is to be filled from a snapshot or from another volume.";
        let hold = Hold::new(HoldReason::DataSourceUnsupported, message);
        return Err(codes::refused(&hold));
    }
    let class = class(&request.parameters, &request.mutable_parameters, &usages)?;
    let is_block = is_block(&usages)?;
    let range = Range::read(request.capacity_range.as_ref())?;
    let size = range.size()?;
    let kind = (!is_block).then_some(class.filesystem);
    require_filesystem_fits(kind, size).map_err(|hold| codes::refused(&hold))?;
    let modes: BTreeSet<&str> = usages.iter().map(Usage::access_mode).collect();
    let modes = modes.into_iter().map(str::to_owned).collect();
    let told = METADATA.iter().filter_map(|(parameter, annotation)| {
        let value = request.parameters.get(*parameter)?;
        Some(((*annotation).to_owned(), value.clone()))
    });
    let named = (NAME_ANNOTATION.to_owned(), request.name.clone());
    Ok(Wanted {
        name: volume_name(&request.name),
        annotations: told.chain([named]).collect(),
        range,
        spec: volume_of_class(&class, size, is_block, modes),
    })
}

/// The class that the parameters are of. The kind of filesystem and the mount options come with the capabilities.
pub fn class(
    parameters: &HashMap<String, String>,
    mutable: &HashMap<String, String>,
    usages: &[Usage],
) -> Result<Class, Status> {
    require_mutable(mutable)?;
    let mut all: BTreeMap<String, String> = parameters.clone().into_iter().collect();
    all.extend(mutable.clone());
    let mut flags: Vec<String> = Vec::new();
    for usage in usages {
        let Form::Mount {
            filesystem,
            options,
        } = &usage.form
        else {
            continue;
        };
        if let Some(kind) = filesystem {
            all.insert(FSTYPE_PARAMETER.to_owned(), kind.name().to_owned());
        }
        for option in options {
            if !flags.contains(option) {
                flags.push(option.clone());
            }
        }
    }
    Class::of("The request", &all, &flags).map_err(|hold| codes::refused(&hold))
}

fn is_block(usages: &[Usage]) -> Result<bool, Status> {
    let blocks = usages
        .iter()
        .filter(|each| each.form == Form::Block)
        .count();
    if blocks != 0 && blocks != usages.len() {
        let message = "A volume is a filesystem or a device, and both are asked for.";
        let hold = Hold::new(HoldReason::ConsumerUnfit, message);
        return Err(codes::refused(&hold));
    }
    Ok(blocks > 0)
}

/// The pools to try, one list after the other, for a volume that is used where its only copy lies: first those of the
/// node that is preferred most, then those of all nodes that are allowed.
async fn choices(
    objects: &Objects,
    spec: &VolumeSpec,
    preferred: &[Topology],
    requisite: &[Topology],
) -> Result<Vec<Vec<String>>, Status> {
    let pools = objects.pools().await?;
    let on = |nodes: Option<Vec<&str>>| -> Vec<String> {
        let named = |name: &String| spec.pools.is_empty() || spec.pools.contains(name);
        let here = |node: &str| nodes.as_ref().is_none_or(|nodes| nodes.contains(&node));
        let fitting = pools.iter().filter(|pool| here(&pool.spec.node));
        fitting.map(ResourceExt::name_any).filter(named).collect()
    };
    let all = match requisite {
        [] => preferred,
        some => some,
    };
    let mut choices = vec![
        on(nodes_of(preferred.get(..1).unwrap_or_default())),
        on(nodes_of(all)),
    ];
    // A list without names would mean any pool.
    choices.retain(|pools| !pools.is_empty());
    choices.dedup();
    if choices.is_empty() {
        let message = "No pool is on a node that the volume has to be on.";
        let hold = Hold::new(HoldReason::PoolNotFound, message);
        return Err(codes::refused_as(Code::ResourceExhausted, &hold));
    }
    Ok(choices)
}

/// The nodes of these topologies; none if one of them names no node, and so means all.
fn nodes_of(topologies: &[Topology]) -> Option<Vec<&str>> {
    if topologies.is_empty() {
        return None;
    }
    let nodes = topologies.iter().map(|each| each.segments.get(NODE_LABEL));
    nodes.map(|node| node.map(String::as_str)).collect()
}

async fn make(
    objects: &Objects,
    wanted: &Wanted,
    pools: Option<Vec<String>>,
) -> Result<Volume, Status> {
    let mut spec = wanted.spec.clone();
    spec.pools = pools.unwrap_or_default();
    let mut volume = Volume::new(&wanted.name, spec);
    volume.metadata.annotations = Some(wanted.annotations.clone());
    volume.metadata.finalizers = Some(vec![VOLUME_FINALIZER.to_owned()]);
    let made = objects
        .volumes()
        .create(&PostParams::default(), &volume)
        .await;
    made.map_err(|error| codes::from_api(&error, &format!("volume {}", wanted.name)))
}

/// The volume of that name, if it is what is asked for. Size, copies and intervals may have changed since it was made.
fn require_same(found: Volume, wanted: &Wanted) -> Result<Volume, Status> {
    let name = &wanted.name;
    if found.metadata.deletion_timestamp.is_some() {
        let message = format!("Volume {name} is being deleted.");
        let hold = Hold::new(HoldReason::OperationRunning, message);
        return Err(codes::refused(&hold));
    }
    let named = |volume: &BTreeMap<String, String>| volume.get(NAME_ANNOTATION).cloned();
    let other = |what: String| {
        Err(Status::already_exists(format!(
            "Volume {name} exists, {what}."
        )))
    };
    if named(found.annotations()) != named(&wanted.annotations) {
        return other("and was not made for this name".to_owned());
    }
    if !wanted.range.has(found.spec.capacity) {
        return other(format!(
            "and has {}, which is not what is asked for",
            found.spec.capacity
        ));
    }
    let (has, asks) = (&found.spec, &wanted.spec);
    let is_same = has.filesystem == asks.filesystem
        && has.access_modes == asks.access_modes
        && has.via == asks.via
        && has.thick == asks.thick
        && has.checksums == asks.checksums
        && has.iscsi == asks.iscsi;
    if !is_same {
        return other("and was made with other parameters or capabilities".to_owned());
    }
    Ok(found)
}

enum Served {
    Yes(Box<Volume>),
    /// Its copies have no place.
    NoPlace(Hold),
}

/// Waits until the volume is served, or has no place.
async fn served(objects: &Objects, volume: &Volume, until: Instant) -> Result<Served, Status> {
    let (name, uid) = (volume.name_any(), volume.uid());
    let mut last: Option<Hold> = None;
    let judged = follow(objects.volumes(), &name, until, |seen: Option<Volume>| {
        let Some(seen) = seen.filter(|seen| seen.uid() == uid) else {
            let message = format!("volume {name} was deleted while it was made");
            return Some(Err(Status::aborted(message)));
        };
        let status = seen.status.clone().unwrap_or_default();
        if status.capacity.is_some_and(|served| served > Bytes::ZERO) {
            return Some(Ok(Served::Yes(Box::new(seen))));
        }
        last = status.hold;
        let hold = last.clone()?;
        let is_unplaced =
            seen.spec.placement.is_empty() && codes::is_final(codes::code(hold.reason));
        is_unplaced.then_some(Ok(Served::NoPlace(hold)))
    });
    match judged.await {
        Some(judged) => judged,
        None => Err(late(objects, &name, last).await),
    }
}

/// It takes longer than the caller waits. It goes on, and the next call finds it.
async fn late(objects: &Objects, name: &str, held: Option<Hold>) -> Status {
    let copies = objects.copies(name).await.unwrap_or_default();
    let mut copies = copies.into_iter();
    let hold = held.or_else(|| copies.find_map(|copy| copy.status?.hold));
    match hold {
        Some(hold) => codes::refused_as(Code::Unavailable, &hold),
        None => Status::unavailable(format!("volume {name} is being made and is not served yet")),
    }
}

/// Removes a volume that nothing was ever stored for. Answers whether it was still the version that was looked at.
async fn take_back(objects: &Objects, volume: &Volume, until: Instant) -> Result<bool, Status> {
    let name = volume.name_any();
    let Some(now) = objects.find_volume(&name).await? else {
        return Ok(true);
    };
    if !now.spec.placement.is_empty() || now.uid() != volume.uid() {
        return Ok(false);
    }
    let body = json!({
        "metadata": { "uid": now.uid(), "resourceVersion": now.resource_version() },
        "spec": { "discard": true },
    });
    match objects.patch_volume(&name, &body).await {
        Ok(_) => {}
        Err(error) if is_conflict(&error) => return Ok(false),
        Err(error) if is_gone(&error) => return Ok(true),
        Err(error) => return Err(codes::from_api(&error, &format!("volume {name}"))),
    }
    remove(objects, &now, until).await?;
    Ok(true)
}

/// Deletes a volume that says that its bytes go with it, and waits until it is gone.
pub async fn remove(objects: &Objects, volume: &Volume, until: Instant) -> Result<(), Status> {
    let (name, uid) = (volume.name_any(), volume.uid());
    let only = DeleteParams {
        preconditions: Some(Preconditions {
            uid: uid.clone(),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    match objects.volumes().delete(&name, &only).await {
        Ok(_) => {}
        Err(error) if is_gone(&error) || is_conflict(&error) => return Ok(()),
        Err(error) => return Err(codes::from_api(&error, &format!("volume {name}"))),
    }
    let gone = follow(objects.volumes(), &name, until, |seen: Option<Volume>| {
        let is_there = seen.is_some_and(|seen| seen.uid() == uid);
        (!is_there).then_some(())
    });
    gone.await.ok_or_else(|| {
        let message = format!("Volume {name} is being deleted, and is not gone yet.");
        codes::refused(&Hold::new(HoldReason::OperationRunning, message))
    })
}
