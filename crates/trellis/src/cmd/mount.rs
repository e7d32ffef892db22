//! `trellis mount` and `trellis umount`: an attachment is made or deleted, and waited for.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::watcher::watch_object;
use kube::{Api, ResourceExt};
use trellis_api::kinds::{ATTACHMENT_FINALIZER, Attachment, AttachmentPhase, AttachmentSpec};
use trellis_api::{Hold, HoldReason};

use crate::cli::{Global, Mount, Umount};
use crate::connect::{connect, own_node};
use crate::exit::{Ended, from_service};

/// Makes a claim appear at a path.
pub async fn mount(global: &Global, verb: &Mount) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let what = format!("claim {}/{}", service.namespace, verb.claim);
    let claims =
        Api::<PersistentVolumeClaim>::namespaced(service.client.clone(), &service.namespace);
    claims
        .get(&verb.claim)
        .await
        .map_err(|error| from_service(error, &what))?;
    let path = absolute(&verb.path)?;
    let node = own_node(&service.client).await?;
    let name = attachment_name(&verb.claim, &path);
    let spec = AttachmentSpec {
        claim_name: verb.claim.clone(),
        node,
        path: path.display().to_string(),
        read_only: verb.read_only,
    };
    let mut attachment = Attachment::new(&name, spec);
    attachment.metadata.finalizers = Some(vec![ATTACHMENT_FINALIZER.to_owned()]);
    let api = Api::<Attachment>::namespaced(service.client, &service.namespace);
    match api.create(&PostParams::default(), &attachment).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            let there = api
                .get(&name)
                .await
                .map_err(|error| from_service(error, &what))?;
            if there.spec.read_only != verb.read_only {
                bail!(
                    "{what} is already mounted at {} in the other mode; unmount it first",
                    path.display()
                );
            }
        }
        Err(error) => return Err(from_service(error, &what)),
    }
    match attached(&api, &name, verb.timeout).await {
        Ok(attached) => {
            let status = attached.status.unwrap_or_default();
            let size = status
                .capacity
                .map(|size| size.to_string())
                .unwrap_or_default();
            println!(
                "{} is {size} of {what}, by {}",
                path.display(),
                status.device.unwrap_or_default()
            );
            Ok(())
        }
        Err(error) => {
            // A mount that failed leaves nothing behind that would appear later by surprise.
            let _ = api.delete(&name, &DeleteParams::default()).await;
            Err(error)
        }
    }
}

/// Waits until the attachment is there. A claim that is not bound yet may still become so; any other
/// hold is final for this verb.
async fn attached(
    api: &Api<Attachment>,
    name: &str,
    limit: Duration,
) -> anyhow::Result<Attachment> {
    let mut last: Option<Hold> = None;
    let waiting = async {
        let mut changes = watch_object(api.clone(), name).boxed();
        while let Some(change) = changes
            .try_next()
            .await
            .context("the service stopped answering")?
        {
            let Some(attachment) = change else { continue };
            let status = attachment.status.clone().unwrap_or_default();
            if status.phase == AttachmentPhase::Attached {
                return Ok(attachment);
            }
            match status.hold {
                Some(hold) if hold.reason != HoldReason::ClaimNotBound => {
                    return Err(Ended::Held(hold).into());
                }
                hold => last = hold,
            }
        }
        bail!("the service ended the watch")
    };
    match tokio::time::timeout(limit, waiting).await {
        Ok(result) => result,
        Err(_) => match last {
            Some(hold) => Err(Ended::Held(hold).into()),
            None => Err(Ended::TimedOut(format!("the mount was not done within {limit:?}")).into()),
        },
    }
}

/// Takes a claim away from a path, or from all its paths on this machine.
pub async fn umount(global: &Global, verb: &Umount) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let node = own_node(&service.client).await?;
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
            && each.spec.claim_name == verb.claim_or_path;
        here && if by_path {
            each.spec.path == path
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
        detached(&api, &name, verb.timeout).await?;
        println!("{} is unmounted", attachment.spec.path);
    }
    Ok(())
}

/// Waits until the attachment is gone, or something keeps it.
async fn detached(api: &Api<Attachment>, name: &str, limit: Duration) -> anyhow::Result<()> {
    let waiting = async {
        let mut changes = watch_object(api.clone(), name).boxed();
        while let Some(change) = changes
            .try_next()
            .await
            .context("the service stopped answering")?
        {
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
