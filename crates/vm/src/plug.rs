//! Puts disks into a machine, and takes them out.
//!
//! Plug: limits, descriptors, nodes, device, in this order. If a step fails, the steps before it are undone. If this
//! process dies in between, the next one finds the parts without a device and removes them first.
//!
//! Unplug: ask for the device's removal, wait until QEMU says that it is gone, and only then let go of nodes and
//! descriptors. The waiting is not done here: [`crate::driver`] waits for all of them at once. A guest that does not
//! answer keeps its disk. Nothing is ever forced.
//!
//! On the scsi bus a removal does not wait for the guest: QEMU says that the device is gone although the guest may have
//! the disk mounted. Only [`crate::agent`] can protect that guest, before.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use serde_json::{Value, json};

use crate::disks::{self, PERIPHERAL};
use crate::error::{Context, Error, Result};
use crate::graph::{Bus, DiskId, DiskLimits, DiskSpec, OpenImage};
use crate::launch::{SCSI_TARGETS_MAX, port_name, scsi_name};
use crate::qmp::Client;

/// How often the deletion of a node that is still in use is tried, and the pause in between: two seconds in all.
const DELETE_ATTEMPTS_MAX: u32 = 200;
const DELETE_PAUSE: Duration = Duration::from_millis(10);

/// What a plug did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plugged {
    /// The disk is there now.
    Added,
    /// It was there already.
    Unchanged,
}

/// Plugs a disk.
pub async fn plug(qmp: &Client, disk: &DiskSpec) -> Result<Plugged> {
    disk.check()?;
    let devices = disks::devices(qmp).await?;
    if devices.contains_key(&disk.id.device()) {
        return Ok(Plugged::Unchanged);
    }
    release(qmp, &disk.id).await?;
    let bus = free_bus(qmp, disk.bus, &devices).await?;
    match add(qmp, disk, &bus).await {
        Ok(()) => Ok(Plugged::Added),
        Err(error) => {
            // The first error is what the caller has to know. What this leaves is found by the next attempt.
            if let Err(left) = release(qmp, &disk.id).await {
                tracing::warn!(disk = %disk.id, %left, "a failed plug left parts behind");
            }
            Err(error)
        }
    }
}

async fn add(qmp: &Client, disk: &DiskSpec, bus: &str) -> Result<()> {
    qmp.execute(
        "object-add",
        json!({
            "qom-type": "throttle-group",
            "id": disk.id.throttle_group(),
            "limits": disk.limits.json(),
        }),
    )
    .await?;
    let set = qmp
        .add_fd(duplicate(&disk.source)?, &disk.id.opaque())
        .await?;
    let backing_set = match &disk.backing {
        None => None,
        Some(backing) => Some(
            qmp.add_fd(duplicate(backing)?, &disk.id.opaque_backing())
                .await?,
        ),
    };
    qmp.execute("blockdev-add", disk.nodes(set, backing_set)?)
        .await?;
    qmp.execute("device_add", disk.device(bus)).await?;
    Ok(())
}

fn duplicate(part: &OpenImage) -> Result<OwnedFd> {
    let path = std::path::Path::new("the descriptor of a disk");
    part.file.try_clone().context("duplicate", path)
}

/// A bus of the machine with a free place. QEMU chooses the place on it.
async fn free_bus(
    qmp: &Client,
    kind: Bus,
    devices: &BTreeMap<String, Option<Bus>>,
) -> Result<String> {
    let mut places = 0;
    for number in 0..devices.len() {
        let (device, bus, below, capacity) = match kind {
            Bus::Scsi => {
                let name = scsi_name(number);
                let bus = format!("{name}.0");
                let below = format!("virtio-backend/{bus}");
                (name, bus, below, SCSI_TARGETS_MAX)
            }
            Bus::Virtio => {
                let name = port_name(number);
                (name.clone(), name.clone(), name, 1)
            }
        };
        if !devices.contains_key(&device) {
            break;
        }
        places += capacity;
        let taken = disks::children(qmp, &format!("{PERIPHERAL}/{device}/{below}")).await?;
        let taken = taken
            .iter()
            .filter(|entry| entry.name.starts_with("child["));
        if taken.count() < capacity {
            return Ok(bus);
        }
    }
    Err(Error::BusFull {
        bus: kind,
        limit: places,
    })
}

/// How far the removal of a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// QEMU was asked, and will say when the device is gone.
    Asked,
    /// There is no device.
    Gone,
}

/// Asks QEMU to remove a disk's device. Asking again is harmless.
pub async fn request_removal(qmp: &Client, id: &DiskId) -> Result<Removal> {
    if !has_device(qmp, id).await? {
        return Ok(Removal::Gone);
    }
    let answer = qmp
        .execute("device_del", json!({ "id": id.device() }))
        .await;
    match answer {
        Ok(_) => Ok(Removal::Asked),
        // It may have gone at this very moment, or QEMU may be on it since an earlier request. In both cases there is
        // nothing more to ask for, and the deadline of whoever waits decides.
        Err(Error::Refused { description, .. }) => {
            tracing::debug!(disk = %id, description, "QEMU did not take a request for removal");
            if has_device(qmp, id).await? {
                Ok(Removal::Asked)
            } else {
                Ok(Removal::Gone)
            }
        }
        Err(error) => Err(error),
    }
}

/// Whether a disk's device is there. QEMU takes it out of its tree when it is really gone.
pub async fn has_device(qmp: &Client, id: &DiskId) -> Result<bool> {
    Ok(disks::devices(qmp).await?.contains_key(&id.device()))
}

/// Removes everything of a disk but its device, which must be gone. What is not there is passed over.
pub async fn release(qmp: &Client, id: &DiskId) -> Result<()> {
    let sets = disks::sets_of(qmp, id).await?;
    let objects = disks::children(qmp, "/objects").await?;
    let group = id.throttle_group();
    let has_group = objects.iter().any(|object| object.name == group);
    if sets.is_empty() && !has_group {
        return Ok(());
    }
    delete_nodes(qmp, id).await?;
    if has_group {
        qmp.execute("object-del", json!({ "id": group })).await?;
    }
    for set in sets {
        qmp.execute("remove-fd", json!({ "fdset-id": set })).await?;
    }
    Ok(())
}

/// Deletes a disk's nodes. Those below the top belong to it and go with it.
///
/// A device leaves QEMU's tree a moment before it lets go of its node. So a refusal is not final at once.
async fn delete_nodes(qmp: &Client, id: &DiskId) -> Result<()> {
    let mut attempt = 1;
    loop {
        let node = json!({ "node-name": id.top_node() });
        match qmp.execute("blockdev-del", node).await {
            Ok(_) => return Ok(()),
            // Asking for all nodes costs most where there are many disks, so it is asked only now.
            Err(Error::Refused { .. }) if !has_nodes(qmp, id).await? => return Ok(()),
            Err(Error::Refused { .. }) if attempt < DELETE_ATTEMPTS_MAX => {
                attempt += 1;
                tokio::time::sleep(DELETE_PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

async fn has_nodes(qmp: &Client, id: &DiskId) -> Result<bool> {
    Ok(disks::nodes(qmp).await?.contains_key(&id.top_node()))
}

/// Sets new limits on a disk's use, at once.
pub async fn limit(qmp: &Client, id: &DiskId, limits: DiskLimits) -> Result<()> {
    if !has_device(qmp, id).await? {
        return Err(Error::NotPlugged { id: id.clone() });
    }
    let set: Value = json!({
        "path": format!("/objects/{}", id.throttle_group()),
        "property": "limits",
        "value": limits.json(),
    });
    qmp.execute("qom-set", set).await.map(drop)
}
