//! Where the authority of a home is kept and found.

use std::time::SystemTime;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Secret};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use trellis_api::kinds::{AUTHORITY, AUTHORITY_ENTRY, SYSTEM_NAMESPACE};
use trellis_api::step::{self, Step};
use trellis_pki::{Authority, AuthorityFault};

/// Who writes the certificates of the authority.
const MANAGER: &str = "trellis-authority";
/// The entry of the Secret with the key and the certificate.
const ENTRY: &str = "authority.pem";
/// The entry of the Secret with authorities from before, which are believed until they end.
pub const EARLIER_ENTRY: &str = "authority-earlier.pem";

/// Why there is no authority from a Secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It cannot be read or written.
    #[error("the Secret {SYSTEM_NAMESPACE}/{AUTHORITY} cannot be used")]
    Store(#[from] kube::Error),
    /// It is not one.
    #[error(
        "the Secret {SYSTEM_NAMESPACE}/{AUTHORITY} is no authority: {0}; remove its entry {ENTRY} to have another made"
    )]
    Bad(AuthorityFault),
    /// None can be made.
    #[error("an authority could not be made")]
    NotMade,
}

/// The authority in the home's Secret, made if there is none, and the certificates of earlier ones.
pub async fn from_secret(client: &Client) -> Result<(Authority, String), SecretError> {
    ensure_namespace(client).await?;
    let secrets = Api::<Secret>::namespaced(client.clone(), SYSTEM_NAMESPACE);
    // At the second look another holder may have made it.
    for _ in 0..2 {
        let found = secrets.get_opt(AUTHORITY).await?;
        let entry = |name: &str| {
            let data = found.as_ref()?.data.as_ref()?;
            String::from_utf8(data.get(name)?.0.clone()).ok()
        };
        let earlier = entry(EARLIER_ENTRY).unwrap_or_default();
        if let Some(text) = entry(ENTRY) {
            let authority = Authority::read(&text).map_err(SecretError::Bad)?;
            return Ok((authority, earlier));
        }
        let made = Authority::make(SystemTime::now()).map_err(|_| SecretError::NotMade)?;
        let data = json!({ ENTRY: ByteString(made.text().into_bytes()) });
        let written = match &found {
            Some(found) => {
                let version = &found.metadata.resource_version;
                let body = json!({ "metadata": { "resourceVersion": version }, "data": data });
                let how = PatchParams::default();
                secrets.patch(AUTHORITY, &how, &Patch::Merge(body)).await
            }
            None => {
                let secret = json!({
                    "apiVersion": "v1", "kind": "Secret", "metadata": { "name": AUTHORITY },
                    "type": "Opaque", "data": data,
                });
                let secret = serde_json::from_value(secret).map_err(kube::Error::SerdeError)?;
                secrets.create(&PostParams::default(), &secret).await
            }
        };
        match written {
            Ok(_) => {
                step::reached(Step::AuthorityMade);
                return Ok((made, earlier));
            }
            Err(kube::Error::Api(status)) if status.is_already_exists() || status.is_conflict() => {
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(SecretError::NotMade)
}

/// Makes the certificates known to every node.
pub async fn publish(client: &Client, trusted: &str) -> Result<(), kube::Error> {
    ensure_namespace(client).await?;
    let maps = Api::<ConfigMap>::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": AUTHORITY },
        "data": { AUTHORITY_ENTRY: trusted },
    });
    let how = PatchParams::apply(MANAGER).force();
    maps.patch(AUTHORITY, &how, &Patch::Apply(map)).await?;
    step::reached(Step::AuthorityPublished);
    Ok(())
}

/// Makes the namespace of what belongs to no claim, if there is none.
pub async fn ensure_namespace(client: &Client) -> Result<(), kube::Error> {
    let namespaces = Api::<Namespace>::all(client.clone());
    if namespaces.get_opt(SYSTEM_NAMESPACE).await?.is_some() {
        return Ok(());
    }
    let mut namespace = Namespace::default();
    namespace.metadata.name = Some(SYSTEM_NAMESPACE.to_owned());
    match namespaces.create(&PostParams::default(), &namespace).await {
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        made => made.map(drop),
    }
}
