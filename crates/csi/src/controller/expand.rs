//! ControllerExpandVolume: raises what the Volume wants, and waits until every use was measured larger.
//!
//! Then the kubelet has nothing to do, and the claim is finished within this one call. If the volume itself has grown and
//! a use has not yet, the answer is that the node has to do its part: it does so anyway, and NodeExpandVolume waits for it.

use kube::ResourceExt;
use serde_json::json;
use tokio::time::Instant;
use tonic::Status;
use trellis_api::kinds::{GrowthRequest, Volume, VolumeStatus};
use trellis_api::{Bytes, Hold, HoldReason};
use trellis_control::stored::now;

use super::{ControllerService, required};
use crate::capability::Usage;
use crate::codes;
use crate::objects::{CONFLICTS_MAX, Objects, follow, is_conflict};
use crate::proto::csi::{ControllerExpandVolumeRequest, ControllerExpandVolumeResponse};
use crate::range::{Range, wire};

/// Who asked for a growth, in the history of a volume.
const REQUESTER: &str = "csi";

/// Grows the volume.
pub async fn expand(
    service: &ControllerService,
    request: &ControllerExpandVolumeRequest,
    until: Instant,
) -> Result<ControllerExpandVolumeResponse, Status> {
    let id = required(&request.volume_id)?;
    if request.capacity_range.is_none() {
        return Err(codes::invalid("The request has no capacity range."));
    }
    let range = Range::read(request.capacity_range.as_ref())?;
    let size = range.size()?;
    let objects = &service.objects;
    let volume = objects.volume(id).await?;
    if request.volume_capability.is_some() {
        let usage = Usage::read(request.volume_capability.as_ref())?;
        if let Some(hold) = usage.refusal(&volume) {
            return Err(codes::refused(&hold));
        }
    }
    let _turn = service.turns.take(id)?;
    let wished = wish(objects, id, size, &range).await?;
    let mut last = wished.volume.status.clone().unwrap_or_default();
    let judged = follow(objects.volumes(), id, until, |seen: Option<Volume>| {
        let Some(seen) = seen else {
            return Some(Err(codes::no_volume(id)));
        };
        last = seen.status.unwrap_or_default();
        wished.judge(&last)
    });
    match judged.await {
        Some(judged) => judged,
        None => wished.late(id, &last),
    }
}

/// A growth that was asked for.
struct Wished {
    size: Bytes,
    /// The volume as it was stored with the wish.
    volume: Volume,
    /// Whether the volume wants something else since.
    is_new: bool,
}

/// Has the volume want the size. What it has can only be kept, so that a request that was lowered after a growth that
/// could not be is met as far as it can be.
async fn wish(objects: &Objects, id: &str, size: Bytes, range: &Range) -> Result<Wished, Status> {
    for _ in 0..CONFLICTS_MAX {
        let volume = objects.volume(id).await?;
        let status = volume.status.as_ref();
        let served = status
            .and_then(|status| status.capacity)
            .unwrap_or_default();
        let size = size.max(served);
        if !range.has(size) {
            let message = format!("Volume {id} has {served} already, and nothing is ever shrunk.");
            let hold = Hold::new(HoldReason::SizeTooLarge, message);
            return Err(codes::refused(&hold));
        }
        if volume.spec.capacity == size {
            let is_new = false;
            return Ok(Wished {
                size,
                volume,
                is_new,
            });
        }
        let growth = (size > served).then(|| GrowthRequest {
            by: REQUESTER.to_owned(),
            at: now(),
            from: served,
        });
        let body = json!({
            "metadata": { "uid": volume.uid(), "resourceVersion": volume.resource_version() },
            "spec": { "capacity": size, "growth": growth },
        });
        match objects.patch_volume(id, &body).await {
            Ok(volume) => {
                let is_new = true;
                return Ok(Wished {
                    size,
                    volume,
                    is_new,
                });
            }
            Err(error) if is_conflict(&error) => {}
            Err(error) => return Err(codes::from_api(&error, &format!("volume {id}"))),
        }
    }
    let message = format!("Volume {id} is changed by others all the time.");
    let hold = Hold::new(HoldReason::OperationRunning, message);
    Err(codes::refused(&hold))
}

impl Wished {
    /// Whether the growth is over: every use has the size, or there is no room for it.
    fn judge(
        &self,
        status: &VolumeStatus,
    ) -> Option<Result<ControllerExpandVolumeResponse, Status>> {
        if status.usable >= Some(self.size) {
            return Some(Ok(self.answer(false)));
        }
        // A status that was written before the wish says nothing about it. The volume room writes only about the version
        // that it has looked at, so any other status than that one is about the wish.
        let is_about_wish = !self.is_new || Some(status) != self.volume.status.as_ref();
        let is_refused = is_about_wish && status.granted < Some(self.size);
        let hold = status.hold.as_ref().filter(|_| is_refused)?;
        let is_final = codes::is_final(codes::code(hold.reason));
        is_final.then(|| Err(codes::refused(hold)))
    }

    /// What is said when the time is over.
    fn late(
        &self,
        id: &str,
        status: &VolumeStatus,
    ) -> Result<ControllerExpandVolumeResponse, Status> {
        if status.capacity >= Some(self.size) {
            return Ok(self.answer(true));
        }
        match &status.hold {
            Some(hold) => Err(codes::refused(hold)),
            None => {
                let has = status.capacity.unwrap_or_default();
                let message = format!("Volume {id} has {has} of {} and grows.", self.size);
                Err(Status::unavailable(message))
            }
        }
    }

    fn answer(&self, node_expansion_required: bool) -> ControllerExpandVolumeResponse {
        ControllerExpandVolumeResponse {
            capacity_bytes: wire(self.size),
            node_expansion_required,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use tonic::Code;

    fn status(value: Value) -> VolumeStatus {
        serde_json::from_value(value).expect("a status")
    }

    fn wished(before: Value, is_new: bool) -> Wished {
        let volume = json!({
            "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume", "metadata": { "name": "v" },
            "spec": { "capacity": "2Gi", "class": "", "replicas": 1 },
            "status": before,
        });
        Wished {
            size: Bytes::gib(2),
            volume: serde_json::from_value(volume).expect("a volume"),
            is_new,
        }
    }

    fn refused(message: &str) -> Value {
        json!({
            "granted": "1Gi", "capacity": "1Gi", "usable": "1Gi",
            "hold": { "reason": "NoSpaceInPool", "message": message },
        })
    }

    // Fails if a refusal of an earlier, larger request is taken for one of the lowered request, or if the refusal of
    // this one is not told at once.
    #[test]
    fn an_earlier_refusal_does_not_count_for_a_lowered_request() {
        let lowered = wished(refused("9Gi is asked for"), true);
        let code = |judged: Option<Result<_, Status>>| {
            judged.map(|judged| judged.map(drop).map_err(|status| status.code()))
        };
        assert_eq!(
            code(lowered.judge(&status(refused("9Gi is asked for")))),
            None
        );
        let about_this = lowered.judge(&status(refused("2Gi is asked for")));
        assert_eq!(code(about_this), Some(Err(Code::OutOfRange)));
        let repeated = wished(refused("2Gi is asked for"), false);
        let again = repeated.judge(&status(refused("2Gi is asked for")));
        assert_eq!(code(again), Some(Err(Code::OutOfRange)));
    }

    // Fails if a growth counts as done before every use has the size, or needs the node although every use has it.
    #[test]
    fn the_node_is_needed_only_while_a_use_lacks_the_size() {
        let wished = wished(json!({}), true);
        let grown = json!({ "granted": "2Gi", "capacity": "2Gi", "usable": "2Gi" });
        let judged = wished.judge(&status(grown)).expect("done").expect("grown");
        assert!(!judged.node_expansion_required);
        assert_eq!(judged.capacity_bytes, 2 << 30);
        let half = status(json!({ "granted": "2Gi", "capacity": "2Gi", "usable": "1Gi" }));
        assert!(wished.judge(&half).is_none());
        assert!(
            wished
                .late("v", &half)
                .expect("grown below")
                .node_expansion_required
        );
        let none = status(json!({ "granted": "2Gi", "capacity": "1Gi", "usable": "1Gi" }));
        let late = wished.late("v", &none).expect_err("not grown");
        assert_eq!(late.code(), Code::Unavailable);
    }
}
