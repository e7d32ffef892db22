//! ListVolumes and ControllerGetVolume: what is stored about volumes.

use std::collections::BTreeSet;

use kube::ResourceExt;
use tonic::Status;
use trellis_api::kinds::{Attachment, NODE_LABEL, Volume};

use crate::codes;
use crate::condition;
use crate::objects::Objects;
use crate::proto::csi::controller_get_volume_response::VolumeStatus;
use crate::proto::csi::list_volumes_response::{Entry, VolumeStatus as ListedStatus};
use crate::proto::csi::{
    self, ControllerGetVolumeResponse, ListVolumesRequest, ListVolumesResponse, Topology,
};
use crate::range::wire;

/// How a token of ours begins. The name of the last volume of a page follows: a page begins behind it, also if that
/// volume is gone by then.
const TOKEN: &str = "after:";

/// One page of volumes, by name.
pub async fn list(
    objects: &Objects,
    request: &ListVolumesRequest,
) -> Result<ListVolumesResponse, Status> {
    let Ok(most) = usize::try_from(request.max_entries) else {
        return Err(codes::invalid(
            "The request asks for fewer than no entries.",
        ));
    };
    let after = after(&request.starting_token)?;
    let mut volumes = objects.all_volumes().await?;
    volumes.retain(|each| each.metadata.deletion_timestamp.is_none());
    volumes.retain(|each| after.is_none_or(|after| each.name_any().as_str() > after));
    volumes.sort_by_key(ResourceExt::name_any);
    let is_cut = most != 0 && volumes.len() > most;
    if is_cut {
        volumes.truncate(most);
    }
    let uses = objects.all_uses().await?;
    let next = volumes.last().filter(|_| is_cut);
    let next_token = next.map(|last| format!("{TOKEN}{}", last.name_any()));
    let entry = |volume: &Volume| Entry {
        volume: Some(answer(volume)),
        status: Some(ListedStatus {
            published_node_ids: published(volume, &uses),
            volume_condition: Some(condition::of(volume)),
        }),
    };
    Ok(ListVolumesResponse {
        entries: volumes.iter().map(entry).collect(),
        next_token: next_token.unwrap_or_default(),
    })
}

/// The name behind which a page begins; none at the first page. Anything that is no token of ours is told so.
fn after(token: &str) -> Result<Option<&str>, Status> {
    if token.is_empty() {
        return Ok(None);
    }
    let name = token.strip_prefix(TOKEN).filter(|name| !name.is_empty());
    let unknown = || Status::aborted(format!("{token:?} is no token of this driver; begin anew"));
    name.map(Some).ok_or_else(unknown)
}

/// One volume, with how it is.
pub async fn get(objects: &Objects, id: &str) -> Result<ControllerGetVolumeResponse, Status> {
    let volume = objects.volume(id).await?;
    let uses = objects.uses(id).await?;
    Ok(ControllerGetVolumeResponse {
        volume: Some(answer(&volume)),
        status: Some(VolumeStatus {
            published_node_ids: published(&volume, &uses),
            volume_condition: Some(condition::of(&volume)),
        }),
    })
}

/// The nodes that use the volume or may.
fn published(volume: &Volume, uses: &[Attachment]) -> Vec<String> {
    let name = volume.name_any();
    let uses = uses.iter().filter(|each| each.volume() == Some(&name));
    let using = uses.map(|each| each.spec.node.clone());
    let told = volume.spec.published_to.as_ref();
    let told = told.map(|each| each.node.clone());
    let nodes: BTreeSet<String> = using.chain(told).collect();
    nodes.into_iter().collect()
}

/// A volume in CSI's words. One that is used where its only copy lies can be used on that node alone.
pub fn answer(volume: &Volume) -> csi::Volume {
    let spec = &volume.spec;
    let places = spec.placement.iter().filter(|_| !spec.is_behind_target());
    let topology = places.map(|place| Topology {
        segments: [(NODE_LABEL.to_owned(), place.node.clone())].into(),
    });
    let served = volume.status.as_ref().and_then(|status| status.capacity);
    csi::Volume {
        capacity_bytes: wire(served.unwrap_or(spec.capacity)),
        volume_id: volume.name_any(),
        volume_context: Default::default(),
        content_source: None,
        accessible_topology: topology.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a token of somebody else is taken for one of ours, or ours for none.
    #[test]
    fn only_our_own_tokens_are_understood() {
        assert_eq!(after("").ok(), Some(None));
        assert_eq!(after("after:pvc-1").ok(), Some(Some("pvc-1")));
        for bad in ["invalid-token", "after:", "7"] {
            let refused = after(bad).expect_err("refused");
            assert_eq!(refused.code(), tonic::Code::Aborted, "{bad}");
        }
    }
}
