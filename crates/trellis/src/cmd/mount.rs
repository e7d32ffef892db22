//! `trellis mount` and `trellis umount`: an attachment is made or deleted, and waited for.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use futures::StreamExt;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use kube::{Api, ResourceExt};
use trellis_api::kinds::{
    ATTACHMENT_FINALIZER, AtPath, Attachment, AttachmentPhase, AttachmentSpec, Consumer,
};
use trellis_api::{Hold, HoldReason};
use trellis_control::view::held;

use super::patience::passes;
use crate::cli::{Global, Mount, Umount};
use crate::connect::{Service, connect, own_node};
use crate::exit::{Ended, from_service, refuse, unless_interrupted};
use crate::load::load;
use crate::{incarnation, output};

/// How long the service may take to forget a mount that failed, or to tell why.
const ANSWER_TIME_MAX: Duration = Duration::from_millis(500);

/// Makes a claim appear at a path.
pub async fn mount(global: &Global, verb: &Mount) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let what = format!("claim {}/{}", service.namespace, verb.claim);
    let claims =
        Api::<PersistentVolumeClaim>::namespaced(service.client.clone(), &service.namespace);
    let claim = claims
        .get(&verb.claim)
        .await
        .map_err(|error| from_service(error, &what))?;
    let path = absolute(&verb.path)?;
    let node = own_node(&service).await?;
    let name = attachment_name(&verb.claim, &path);
    let spec = AttachmentSpec {
        claim_name: Some(verb.claim.clone()),
        volume: None,
        node,
        consumer: consumer(&claim, &path, verb.read_only),
    };
    let mut attachment = Attachment::new(&name, spec);
    attachment.metadata.finalizers = Some(vec![ATTACHMENT_FINALIZER.to_owned()]);
    let api = Api::<Attachment>::namespaced(service.client.clone(), &service.namespace);
    let is_new = match api.create(&PostParams::default(), &attachment).await {
        Ok(_) => true,
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            let there = api
                .get(&name)
                .await
                .map_err(|error| from_service(error, &what))?;
            if there.spec.consumer.read_only() != verb.read_only {
                return refuse(format!(
                    "{what} is already mounted at {} in the other mode; unmount it first",
                    path.display()
                ));
            }
            false
        }
        Err(error) => return Err(from_service(error, &what)),
    };
    let goes_on = format!(
        "the mount goes on; `trellis umount {}` calls it off",
        verb.claim
    );
    let waiting = attached(&api, &name, &global.data, global.patience());
    let waited = unless_interrupted(&goes_on, waiting).await;
    let waited = match waited {
        Err(error) => Err(with_reason(&service, &verb.claim, error).await),
        there => there,
    };
    match waited {
        Ok(attached) => {
            let status = attached.status.unwrap_or_default();
            let size = status
                .capacity
                .map(|size| size.to_string())
                .unwrap_or_default();
            output::print(&format!(
                "{} is {size} of {what}, by {}\n",
                path.display(),
                status.device.unwrap_or_default()
            ))
        }
        Err(error) if matches!(error.downcast_ref(), Some(Ended::Interrupted(_))) => Err(error),
        // Somebody asked for it before, and may be using it.
        Err(error) if !is_new => Err(error),
        Err(error) => {
            // A mount that failed leaves nothing behind that would appear later by surprise.
            let delete = DeleteParams::default();
            let deleted = tokio::time::timeout(ANSWER_TIME_MAX, api.delete(&name, &delete)).await;
            if !matches!(deleted, Ok(Ok(_))) {
                output::say(&format!(
                    "the request for the mount could not be taken back and stands; `trellis umount {}` does that",
                    verb.claim
                ));
            }
            Err(error)
        }
    }
}

/// A directory for a claim with a filesystem, a device file for a block claim.
fn consumer(claim: &PersistentVolumeClaim, path: &Path, read_only: bool) -> Consumer {
    let mode = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.volume_mode.as_deref());
    let at = AtPath {
        path: path.display().to_string(),
        read_only,
    };
    match mode {
        Some("Block") => Consumer::Device(at),
        _ => Consumer::Mount(at),
    }
}

/// The error as it is, or, if the claim is not bound, the reason for that.
async fn with_reason(service: &Service, claim: &str, error: anyhow::Error) -> anyhow::Error {
    let is_unbound = matches!(
        error.downcast_ref(),
        Some(Ended::Held(hold)) if hold.reason == HoldReason::ClaimNotBound
    );
    if !is_unbound {
        return error;
    }
    let look = tokio::time::timeout(ANSWER_TIME_MAX, load(service, claim)).await;
    match look
        .ok()
        .and_then(Result::ok)
        .as_ref()
        .and_then(|look| held(look, Timestamp::now()))
    {
        Some(held) => Ended::Held(held.hold).into(),
        None => error,
    }
}

/// Waits until the attachment is there. A service that has just started may still report a mount of a run that is over;
/// that does not count. A hold that passes by itself is waited for, and so is a service that restarts. Any other hold is
/// final for this verb.
async fn attached(
    api: &Api<Attachment>,
    name: &str,
    data: &Path,
    limit: Duration,
) -> anyhow::Result<Attachment> {
    let mut last: Option<Hold> = None;
    let mut is_of_earlier = false;
    let waiting = async {
        let mut changes = watch_object(api.clone(), name).default_backoff().boxed();
        while let Some(change) = changes.next().await {
            let Ok(Some(attachment)) = change else {
                continue;
            };
            let status = attachment.status.clone().unwrap_or_default();
            if status.phase == AttachmentPhase::Attached {
                let run = status.boot_id.unwrap_or_default();
                is_of_earlier = incarnation::is_over(data, &run);
                if is_of_earlier {
                    continue;
                }
                return Ok(attachment);
            }
            match status.hold {
                Some(hold) if !passes(hold.reason) => {
                    return Err(Ended::Held(hold).into());
                }
                hold => last = hold,
            }
        }
        bail!("the service ended the watch")
    };
    match tokio::time::timeout(limit, waiting).await {
        Ok(result) => result,
        Err(_) if is_of_earlier => Err(Ended::TimedOut(format!(
            "the claim was mounted before `trellis down --all` or `trellis restore`, and was not brought back within \
             {limit:?}; see `trellis explain`"
        ))
        .into()),
        Err(_) => match last {
            Some(hold) => Err(Ended::Held(hold).into()),
            None => Err(Ended::TimedOut(format!("the mount was not done within {limit:?}")).into()),
        },
    }
}

/// Takes a claim away from a path, or from all its paths on this machine.
pub async fn umount(global: &Global, verb: &Umount) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let node = own_node(&service).await?;
    let by_path = verb.claim_or_path.contains('/');
    let path = if by_path {
        absolute(Path::new(&verb.claim_or_path))?
            .display()
            .to_string()
    } else {
        String::new()
    };
    let everywhere = Api::<Attachment>::all(service.client.clone());
    let all = everywhere
        .list(&ListParams::default())
        .await
        .map_err(|error| from_service(error, "the list"))?;
    let wanted = |each: &Attachment| {
        let here = each.spec.node == node;
        let named = each.namespace().as_deref() == Some(&service.namespace)
            && each.spec.claim_name.as_ref() == Some(&verb.claim_or_path);
        here && if by_path {
            each.spec.consumer.path() == path
        } else {
            named
        }
    };
    let found: Vec<Attachment> = all.into_iter().filter(wanted).collect();
    if found.is_empty() {
        return Err(Ended::NotFound(format!("{} is not mounted here", verb.claim_or_path)).into());
    }
    for attachment in found {
        let api = Api::<Attachment>::namespaced(
            service.client.clone(),
            &attachment.namespace().unwrap_or_default(),
        );
        let name = attachment.name_any();
        match api.delete(&name, &DeleteParams::default()).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.is_not_found() => continue,
            Err(error) => return Err(from_service(error, &name)),
        }
        let waiting = detached(&api, &name, global.patience());
        unless_interrupted("the unmount goes on", waiting).await?;
        output::print(&format!(
            "{} is unmounted\n",
            attachment.spec.consumer.path()
        ))?;
    }
    Ok(())
}

/// Waits until the attachment is gone, or something keeps it.
async fn detached(api: &Api<Attachment>, name: &str, limit: Duration) -> anyhow::Result<()> {
    let waiting = async {
        let mut changes = watch_object(api.clone(), name).default_backoff().boxed();
        while let Some(change) = changes.next().await {
            // A service that restarts comes back.
            let Ok(change) = change else { continue };
            let Some(attachment) = change else {
                return Ok(());
            };
            let status = attachment.status.unwrap_or_default();
            if status.phase == AttachmentPhase::Detaching
                && let Some(hold) = status.hold
            {
                return Err(Ended::Held(hold).into());
            }
        }
        bail!("the service ended the watch")
    };
    match tokio::time::timeout(limit, waiting).await {
        Ok(result) => result,
        Err(_) => Err(Ended::TimedOut(format!("the unmount was not done within {limit:?}")).into()),
    }
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("{} is not a usable path", path.display()))
}

/// One name for one claim at one path, so that mounting twice is mounting once.
fn attachment_name(claim: &str, path: &Path) -> String {
    let claim: String = claim.chars().take(200).collect();
    format!("{claim}-{:016x}", fnv1a(path.as_os_str().as_bytes()))
}

/// A hash that is the same in every version: the name must be found again after an upgrade.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if an upgrade would make a second attachment for a mount that is there already.
    #[test]
    fn the_name_of_an_attachment_never_changes() {
        assert_eq!(
            attachment_name("data", Path::new("/mnt/data")),
            "data-98c9bb081ee5e44c"
        );
        assert_ne!(
            attachment_name("data", Path::new("/mnt/a")),
            attachment_name("data", Path::new("/mnt/b"))
        );
    }
}
