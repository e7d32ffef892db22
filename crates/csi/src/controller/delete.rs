//! DeleteVolume: says that the bytes go, and waits until the Volume is gone.

use kube::ResourceExt;
use serde_json::json;
use tokio::time::Instant;
use tonic::Status;
use trellis_api::kinds::Volume;
use trellis_api::{Hold, HoldReason};

use super::ControllerService;
use super::create::remove;
use crate::codes;
use crate::objects::is_gone;

/// Deletes the volume and its bytes. One that does not exist is deleted.
pub async fn delete(service: &ControllerService, id: &str, until: Instant) -> Result<(), Status> {
    let objects = &service.objects;
    if objects.find_volume(id).await?.is_none() {
        return Ok(());
    }
    let _turn = service.turns.take(id)?;
    let Some(volume) = objects.find_volume(id).await? else {
        return Ok(());
    };
    let users = objects.uses(id).await?;
    let user = users.first().map(|each| {
        let at = each.spec.consumer.path();
        format!("node {} uses it at {at}", each.spec.node)
    });
    if let Some(why) = user.or_else(|| wanted_by(&volume)) {
        let message = format!("Volume {id} cannot be deleted: {why}.");
        return Err(codes::refused(&Hold::new(HoldReason::InUse, message)));
    }
    if !volume.spec.discard {
        let body = json!({
            "metadata": { "uid": volume.uid() },
            "spec": { "discard": true },
        });
        match objects.patch_volume(id, &body).await {
            Ok(_) => {}
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error) => return Err(codes::from_api(&error, &format!("volume {id}"))),
        }
    }
    remove(objects, &volume, until).await
}

/// Who still wants the volume.
fn wanted_by(volume: &Volume) -> Option<String> {
    let spec = &volume.spec;
    if let Some(published) = &spec.published_to {
        return Some(format!("it is published to node {}", published.node));
    }
    let claim = spec.claim.as_ref().filter(|_| !volume.is_released())?;
    Some(format!("claim {}/{} has it", claim.namespace, claim.name))
}
