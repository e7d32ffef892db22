//! What disks a machine has, as QEMU itself says.
//!
//! Nothing about a disk is remembered in this process. Four questions, however many disks there are: which descriptors
//! QEMU holds, with our words beside them; which devices there are; which nodes; and what each device uses.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Value, json};
use trellis_api::Bytes;

use crate::error::{Error, Result};
use crate::graph::{Bus, DiskId};
use crate::qmp::Client;

/// Where QEMU keeps devices that have a name.
pub(crate) const PERIPHERAL: &str = "/machine/peripheral";

/// How QEMU reaches a disk's bytes. It decides how the disk may be resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A block device, raw. It has the size that the device has.
    Device,
    /// A regular file, raw.
    File,
    /// A qcow2 image, on whatever.
    Qcow2,
}

/// A disk that a machine has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluggedDisk {
    /// Its identity.
    pub id: DiskId,
    /// How it is connected.
    pub bus: Bus,
    /// What QEMU shows to the guest.
    pub size: Bytes,
    /// How QEMU reaches its bytes.
    pub storage: Storage,
    /// How many bytes of the file or device are before the disk.
    pub offset: Bytes,
    /// Whether a write of the guest waits because there is no room for it.
    pub out_of_space: bool,
}

/// All that QEMU says about its disks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The disks that the guest can see.
    pub disks: BTreeMap<DiskId, PluggedDisk>,
    /// Disks without a device: a plug that was not finished, an unplug whose end nobody saw, or one while the guest was
    /// stopped, in which time QEMU closes no descriptor.
    pub leftovers: BTreeSet<DiskId>,
    /// Disks whose device uses a node of somebody else, and that node.
    pub foreign: BTreeMap<DiskId, String>,
}

impl Inventory {
    /// Asks QEMU.
    pub async fn ask(qmp: &Client) -> Result<Inventory> {
        let ids = disk_ids(qmp).await?;
        let devices = devices(qmp).await?;
        let nodes = nodes(qmp).await?;
        let uses = uses(qmp).await?;
        let mut found = Inventory::default();
        for id in ids {
            let Some(bus) = devices.get(&id.device()).copied().flatten() else {
                found.leftovers.insert(id);
                continue;
            };
            let used = uses.get(&id.device());
            match (used, plugged(&id, bus, &nodes)) {
                (Some(used), Some(disk)) if used.node == id.top_node() => {
                    let out_of_space = used.out_of_space;
                    found.disks.insert(
                        id,
                        PluggedDisk {
                            out_of_space,
                            ..disk
                        },
                    );
                }
                (used, _) => {
                    let node = used.map_or_else(|| "none".to_owned(), |used| used.node.clone());
                    found.foreign.insert(id, node);
                }
            }
        }
        Ok(found)
    }

    /// The disk of that identity.
    pub fn disk(&self, id: &DiskId) -> Result<&PluggedDisk> {
        if let Some(node) = self.foreign.get(id) {
            return Err(Error::ForeignGraph {
                id: id.clone(),
                node: node.clone(),
            });
        }
        let found = self.disks.get(id);
        found.ok_or_else(|| Error::NotPlugged { id: id.clone() })
    }
}

fn plugged(id: &DiskId, bus: Bus, nodes: &BTreeMap<String, Node>) -> Option<PluggedDisk> {
    let top = nodes.get(&id.top_node())?;
    let format = nodes.get(&id.format_node())?;
    let protocol = nodes.get(&id.protocol_node())?;
    let storage = match (format.driver.as_str(), protocol.driver.as_str()) {
        ("qcow2", _) => Storage::Qcow2,
        ("raw", "host_device") => Storage::Device,
        ("raw", "file") => Storage::File,
        _ => return None,
    };
    let offset = match storage {
        Storage::Qcow2 => Bytes::ZERO,
        // QEMU refreshes both together, so their difference is what is before the disk.
        Storage::Device | Storage::File => protocol.size.saturating_sub(format.size),
    };
    Some(PluggedDisk {
        id: id.clone(),
        bus,
        size: top.size,
        storage,
        offset,
        out_of_space: false,
    })
}

/// The disks whose descriptors QEMU holds.
pub(crate) async fn disk_ids(qmp: &Client) -> Result<BTreeSet<DiskId>> {
    let sets = sets(qmp).await?;
    Ok(sets
        .iter()
        .flat_map(|set| &set.fds)
        .filter_map(|fd| DiskId::from_opaque(fd.opaque.as_deref()?))
        .collect())
}

/// The numbers of a disk's sets of descriptors.
pub(crate) async fn sets_of(qmp: &Client, id: &DiskId) -> Result<Vec<u64>> {
    let ours = [id.opaque(), id.opaque_backing()];
    let sets = sets(qmp).await?;
    let is_ours = |fd: &SetFd| fd.opaque.as_ref().is_some_and(|words| ours.contains(words));
    Ok(sets
        .iter()
        .filter(|set| set.fds.iter().any(is_ours))
        .map(|set| set.number)
        .collect())
}

async fn sets(qmp: &Client) -> Result<Vec<Set>> {
    const COMMAND: &str = "query-fdsets";
    read(
        COMMAND,
        qmp.execute(COMMAND, Value::Null).await?,
        "list of sets",
    )
}

#[derive(Deserialize)]
struct Set {
    #[serde(rename = "fdset-id")]
    number: u64,
    fds: Vec<SetFd>,
}

#[derive(Deserialize)]
struct SetFd {
    opaque: Option<String>,
}

/// Every named device, and the bus that it is on if it is a disk.
pub(crate) async fn devices(qmp: &Client) -> Result<BTreeMap<String, Option<Bus>>> {
    let entries = children(qmp, PERIPHERAL).await?;
    Ok(entries
        .into_iter()
        .map(|entry| {
            let bus = match entry.kind.as_str() {
                "child<scsi-hd>" => Some(Bus::Scsi),
                "child<virtio-blk-pci>" => Some(Bus::Virtio),
                _ => None,
            };
            (entry.name, bus)
        })
        .collect())
}

/// An entry of QEMU's tree of objects.
#[derive(Deserialize)]
pub(crate) struct Child {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
}

/// What is at a place in QEMU's tree of objects.
pub(crate) async fn children(qmp: &Client, path: &str) -> Result<Vec<Child>> {
    const COMMAND: &str = "qom-list";
    let answer = qmp.execute(COMMAND, json!({ "path": path })).await?;
    read(COMMAND, answer, "list of objects")
}

/// A block node.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub driver: String,
    pub size: Bytes,
}

/// Every named block node.
pub(crate) async fn nodes(qmp: &Client) -> Result<BTreeMap<String, Node>> {
    const COMMAND: &str = "query-named-block-nodes";
    #[derive(Deserialize)]
    struct Entry {
        #[serde(rename = "node-name")]
        name: String,
        drv: String,
        image: Image,
    }
    #[derive(Deserialize)]
    struct Image {
        #[serde(rename = "virtual-size")]
        size: u64,
    }
    let answer = qmp.execute(COMMAND, json!({ "flat": true })).await?;
    let entries: Vec<Entry> = read(COMMAND, answer, "list of nodes")?;
    Ok(entries
        .into_iter()
        .map(|entry| {
            let node = Node {
                driver: entry.drv,
                size: Bytes::new(entry.image.size),
            };
            (entry.name, node)
        })
        .collect())
}

struct Use {
    node: String,
    out_of_space: bool,
}

/// What each device uses.
async fn uses(qmp: &Client) -> Result<BTreeMap<String, Use>> {
    const COMMAND: &str = "query-block";
    #[derive(Deserialize)]
    struct Entry {
        qdev: Option<String>,
        #[serde(rename = "io-status")]
        io_status: Option<String>,
        inserted: Option<Inserted>,
    }
    #[derive(Deserialize)]
    struct Inserted {
        #[serde(rename = "node-name")]
        node: Option<String>,
    }
    let answer = qmp.execute(COMMAND, Value::Null).await?;
    let entries: Vec<Entry> = read(COMMAND, answer, "list of devices")?;
    let mut found = BTreeMap::new();
    for entry in entries {
        let (Some(device), Some(node)) = (
            entry.qdev.as_deref().and_then(device_of),
            entry.inserted.and_then(|inserted| inserted.node),
        ) else {
            continue;
        };
        let out_of_space = entry.io_status.as_deref() == Some("nospace");
        found.insert(device.to_owned(), Use { node, out_of_space });
    }
    Ok(found)
}

/// The name of a device by what QEMU calls it: the name itself, or a path to a part of it.
fn device_of(qdev: &str) -> Option<&str> {
    match qdev.strip_prefix(PERIPHERAL) {
        Some(rest) => rest.trim_start_matches('/').split('/').next(),
        None => Some(qdev),
    }
}

fn read<T: for<'a> Deserialize<'a>>(
    command: &'static str,
    answer: Value,
    what: &'static str,
) -> Result<T> {
    serde_json::from_value(answer).map_err(|_| Error::Answer { command, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_by_both_of_its_names() {
        // Fails if virtio disks are not found, which QEMU names by a path.
        assert_eq!(device_of("dev-a"), Some("dev-a"));
        let path = "/machine/peripheral/dev-a/virtio-backend";
        assert_eq!(device_of(path), Some("dev-a"));
    }
}
