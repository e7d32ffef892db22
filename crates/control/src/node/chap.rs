//! What initiators of a volume must know to use it by iSCSI, as a Secret.
//!
//! It is made once, before there is a target that could ask for it, and belongs to its Volume. The node on which the
//! target runs reads it, and makes it if there is none. A node that had such a secret in a file, from before there were
//! Secrets for it, makes the Secret from that.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use trellis_api::kinds::{CHAP_SECRET, NODE_LABEL, SYSTEM_NAMESPACE, Volume, chap_secret_name};
use trellis_api::step::{self, Step};
use uuid::Uuid;

/// How long a secret is: 96 bits, which every initiator takes.
const SECRET_CHARS: usize = 24;
/// How many secrets are remembered.
const REMEMBERED_MAX: usize = 1024;

/// The entries of the Secret. The first two are what an initiator proves; the others are what the target proves to it,
/// if the volume asks for that.
const USER: &str = "username";
const PASSWORD: &str = "password";
const TARGET_USER: &str = "targetUsername";
const TARGET_PASSWORD: &str = "targetPassword";

/// Names and secrets for both directions.
#[derive(Clone, PartialEq, Eq)]
pub struct ChapSecret {
    /// What an initiator proves.
    pub initiator: String,
    /// What the target proves to an initiator.
    pub target: String,
}

/// Without the secrets.
impl fmt::Debug for ChapSecret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("ChapSecret(..)")
    }
}

impl ChapSecret {
    /// A new one, which keeps what initiators know already.
    fn make(known: Option<String>) -> ChapSecret {
        ChapSecret {
            initiator: known.unwrap_or_else(random),
            target: random(),
        }
    }

    fn read(secret: &Secret) -> Option<ChapSecret> {
        let data = secret.data.as_ref()?;
        let text = |name: &str| {
            let text = String::from_utf8(data.get(name)?.0.clone()).ok()?;
            Some(text).filter(|text| !text.is_empty())
        };
        Some(ChapSecret {
            initiator: text(PASSWORD)?,
            target: text(TARGET_PASSWORD)?,
        })
    }
}

fn random() -> String {
    let random = Uuid::new_v4().simple().to_string();
    random.get(..SECRET_CHARS).unwrap_or(&random).to_owned()
}

/// The user as which the target of a volume proves itself.
pub fn target_user(volume: &str) -> String {
    format!("{volume}-target")
}

/// The secrets of volumes whose targets run here. They do not change, so each is read once.
#[derive(Default)]
pub struct Secrets(Mutex<HashMap<String, ChapSecret>>);

impl Secrets {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, ChapSecret>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The secret of a volume, made if there is none. `known` is what initiators know already.
    pub async fn of(
        &self,
        client: &Client,
        node: &str,
        volume: &Volume,
        known: impl FnOnce() -> Option<String>,
    ) -> Result<ChapSecret, kube::Error> {
        let key = volume.identity();
        if let Some(secret) = self.lock().get(&key) {
            return Ok(secret.clone());
        }
        let secret = fetch(client, node, volume, known).await?;
        let mut all = self.lock();
        if all.len() >= REMEMBERED_MAX {
            all.clear();
        }
        all.insert(key, secret.clone());
        Ok(secret)
    }
}

async fn fetch(
    client: &Client,
    node: &str,
    volume: &Volume,
    known: impl FnOnce() -> Option<String>,
) -> Result<ChapSecret, kube::Error> {
    let name = chap_secret_name(&volume.name_any());
    let secrets = Api::<Secret>::namespaced(client.clone(), SYSTEM_NAMESPACE);
    let found = secrets.get_opt(&name).await?;
    if let Some(secret) = found.as_ref().and_then(ChapSecret::read) {
        return Ok(secret);
    }
    let made = ChapSecret::make(known());
    if let Some(mut found) = found {
        // Somebody has emptied it.
        found.data = object(node, volume, &made)?.data;
        secrets
            .replace(&name, &PostParams::default(), &found)
            .await?;
        return Ok(made);
    }
    match secrets
        .create(&PostParams::default(), &object(node, volume, &made)?)
        .await
    {
        Ok(_) => {
            step::reached(Step::ChapSecretWritten);
            Ok(made)
        }
        // Another node was first.
        Err(kube::Error::Api(status)) if status.is_already_exists() => {
            let there = secrets.get(&name).await?;
            Ok(ChapSecret::read(&there).unwrap_or(made))
        }
        Err(error) => Err(error),
    }
}

fn object(node: &str, volume: &Volume, secret: &ChapSecret) -> Result<Secret, kube::Error> {
    let name = volume.name_any();
    let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
    let object = json!({
        "apiVersion": "v1", "kind": "Secret", "type": CHAP_SECRET,
        "metadata": {
            "name": chap_secret_name(&name),
            "labels": { NODE_LABEL: node },
            "ownerReferences": [{
                "apiVersion": "trellis.dev/v1alpha1", "kind": "Volume", "name": name, "uid": volume.uid(),
            }],
        },
        "data": {
            USER: bytes(&name), PASSWORD: bytes(&secret.initiator),
            TARGET_USER: bytes(&target_user(&name)), TARGET_PASSWORD: bytes(&secret.target),
        },
    });
    serde_json::from_value(object).map_err(kube::Error::SerdeError)
}
