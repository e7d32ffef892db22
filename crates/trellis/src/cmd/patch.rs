//! Changes the size that a claim asks for, without losing anybody else's change.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use trellis_api::Bytes;
use trellis_control::claim::status;

use crate::connect::Service;
use crate::exit::{Ended, from_service};

/// How often to retry a write that met another write of the same claim. Each try looks at the claim again, and only a
/// status that changed in between is a reason for one.
const TRIES_MAX: u32 = 8;

/// The longest user name that is sent to the service, which takes 128 characters in all.
const USER_CHARS_MAX: usize = 100;

/// Asks for `to` instead of what `claim` asks for. With `dry_run` the service only says whether it would.
pub async fn request(
    service: &Service,
    claim: &PersistentVolumeClaim,
    to: Bytes,
    dry_run: bool,
) -> anyhow::Result<PersistentVolumeClaim> {
    let name = claim.name_any();
    let what = format!("claim {}/{name}", service.namespace);
    let api = Api::<PersistentVolumeClaim>::namespaced(service.client.clone(), &service.namespace);
    let params = PatchParams {
        dry_run,
        field_manager: Some(manager()),
        ..PatchParams::default()
    };
    let expected = status::requested(claim);
    let mut version = claim.resource_version();
    let mut tries = 1;
    loop {
        let body = json!({
            "metadata": { "resourceVersion": version },
            "spec": { "resources": { "requests": { "storage": to.to_quantity() } } },
        });
        match api.patch(&name, &params, &Patch::Merge(&body)).await {
            Err(kube::Error::Api(answer)) if answer.is_conflict() && tries < TRIES_MAX => {
                tries += 1
            }
            other => return other.map_err(|error| from_service(error, &what)),
        }
        let now = api
            .get(&name)
            .await
            .map_err(|error| from_service(error, &what))?;
        if status::requested(&now) != expected || now.uid() != claim.uid() {
            let text = format!(
                "{what} was changed by someone else at the same time; look at it and try again"
            );
            return Err(Ended::Refused(text).into());
        }
        version = now.resource_version();
    }
}

/// Who asks, as the history will show.
pub fn manager() -> String {
    let id = rustix::process::getuid().as_raw();
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let user = user_name(&users, id).unwrap_or_else(|| id.to_string());
    let user: String = user.chars().take(USER_CHARS_MAX).collect();
    format!("trellis-cli:{user}")
}

fn user_name(users: &str, id: u32) -> Option<String> {
    let fields = users
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>());
    let mut named = fields.filter_map(|fields| match fields[..] {
        [name, _, number, ..] if number.parse() == Ok(id) => Some(name.to_owned()),
        _ => None,
    });
    named.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a growth would be put down to somebody else.
    #[test]
    fn the_user_is_found_by_number() {
        let users = "root:x:0:0:root:/root:/bin/sh\n\nbroken\nada:x:1000:1000::/home/ada:/bin/sh\n";
        assert_eq!(user_name(users, 1000).as_deref(), Some("ada"));
        assert_eq!(user_name(users, 0).as_deref(), Some("root"));
        assert_eq!(user_name(users, 100), None);
    }
}
