//! This node's certificate: asked for, kept, and renewed in time.
//!
//! The key is made for each request and stays in memory until there is a certificate for it. Then both go into one
//! file at once. So a crash at any moment leaves the certificate that was there, or none, and the next start asks
//! again; there is never a key without its certificate.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use futures::{Stream, StreamExt};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::PostParams;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client, ResourceExt};
use trellis_api::NodeName;
use trellis_api::kinds::{AUTHORITY, AUTHORITY_ENTRY, SYSTEM_NAMESPACE};
use trellis_api::step::{self, Step};
use trellis_pki::{Lifetime, NodeKey, SIGNER, USAGES, chains_to};

use super::of_node;

/// Key and certificate, and whom to believe.
const OWN: &str = "node.pem";
const TRUSTED: &str = "ca.crt";

/// How long somebody may take to sign.
const SIGNING_TIME_MAX: Duration = Duration::from_secs(60);
/// The pause after a failure: at first, and at most.
const PAUSE_FIRST: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// The longest sleep: the clock may be set meanwhile.
const SLEEP_MAX: Duration = Duration::from_secs(60 * 60);

/// This node, which asks for certificates.
struct Node {
    client: Client,
    name: NodeName,
    own: PathBuf,
    trusted: PathBuf,
}

/// Keeps the files of the node's certificate as they should be, for ever. `client` asks as the node.
pub async fn keep(client: Client, name: NodeName, data: PathBuf) {
    let directory = of_node(&data);
    let node = Node {
        own: directory.join(OWN),
        trusted: directory.join(TRUSTED),
        client,
        name,
    };
    let mut pause = PAUSE_FIRST;
    loop {
        let began = Instant::now();
        let Err(error) = node.keep(&directory).await;
        tracing::warn!("the certificate of this node cannot be kept: {error:#}; it is tried again");
        if began.elapsed() > PAUSE_MAX {
            pause = PAUSE_FIRST;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

impl Node {
    async fn keep(&self, directory: &Path) -> anyhow::Result<Infallible> {
        trellis_files::make_private_directory(directory)
            .with_context(|| format!("{} cannot be made", directory.display()))?;
        let maps = Api::<ConfigMap>::namespaced(self.client.clone(), SYSTEM_NAMESPACE);
        let mut published = pin!(watch_object(maps, AUTHORITY).default_backoff());
        let mut trusted = self.next(&mut published).await?;
        loop {
            write(&self.trusted, &trusted)?;
            let kept = self.kept()?.filter(|text| chains_to(text, &trusted));
            let life = kept.as_deref().and_then(Lifetime::of);
            let left = |life: Lifetime| life.renew_at().duration_since(SystemTime::now()).ok();
            match life.and_then(left).filter(|left| !left.is_zero()) {
                Some(left) => tokio::select! {
                    () = tokio::time::sleep(left.min(SLEEP_MAX)) => {}
                    next = self.next(&mut published) => trusted = next?,
                },
                None => self.renew().await?,
            }
        }
    }

    /// The next certificates of the authority that are published.
    async fn next(
        &self,
        published: &mut (impl Stream<Item = kube::runtime::watcher::Result<Option<ConfigMap>>> + Unpin),
    ) -> anyhow::Result<String> {
        while let Some(found) = published.next().await {
            let found = found.context("the authority's certificate cannot be watched")?;
            let text = found.and_then(|map| map.data?.remove(AUTHORITY_ENTRY));
            if let Some(text) = text {
                return Ok(text);
            }
        }
        bail!("the authority's certificate cannot be watched any more")
    }

    fn kept(&self) -> anyhow::Result<Option<String>> {
        trellis_files::read_whole(&self.own, |_| true)
            .with_context(|| format!("{} cannot be read", self.own.display()))
    }

    /// Gets a certificate for a new key.
    async fn renew(&self) -> anyhow::Result<()> {
        let key = NodeKey::make(&self.name).context("no key can be made")?;
        let request = key.request().context("no request can be made")?;
        let certificate = tokio::time::timeout(SIGNING_TIME_MAX, self.ask(&request))
            .await
            .context("nobody has signed it in time")??;
        let text = key
            .with(&certificate)
            .context("what was signed cannot be used")?;
        write(&self.own, &text)?;
        step::reached(Step::CertificateStored);
        tracing::info!(node = %self.name, "this node has a new certificate");
        Ok(())
    }

    /// Asks for a certificate and waits until it is signed or refused.
    async fn ask(&self, request: &str) -> anyhow::Result<String> {
        let requests = Api::<CertificateSigningRequest>::all(self.client.clone());
        let mut asked = CertificateSigningRequest {
            spec: CertificateSigningRequestSpec {
                request: ByteString(request.as_bytes().to_vec()),
                signer_name: SIGNER.to_owned(),
                usages: Some(USAGES.map(str::to_owned).to_vec()),
                ..CertificateSigningRequestSpec::default()
            },
            ..CertificateSigningRequest::default()
        };
        asked.metadata.generate_name = Some(format!("trellis-{}-", self.name));
        let made = requests.create(&PostParams::default(), &asked).await;
        let name = made.context("it cannot be asked for")?.name_any();
        step::reached(Step::CertificateRequested);
        let mut changes = pin!(watch_object(requests, &name).default_backoff());
        while let Some(change) = changes.next().await {
            let request = change
                .context("the request cannot be watched")?
                .with_context(|| format!("request {name} was removed"))?;
            if let Some(certificate) = answer(&request)? {
                return Ok(certificate);
            }
        }
        bail!("request {name} cannot be watched any more")
    }
}

/// The certificate, once it is there, or why there will be none.
fn answer(request: &CertificateSigningRequest) -> anyhow::Result<Option<String>> {
    let Some(status) = &request.status else {
        return Ok(None);
    };
    let conditions = status.conditions.iter().flatten();
    let refused = |kind: &str| matches!(kind, "Denied" | "Failed");
    if let Some(condition) = conditions.into_iter().find(|each| refused(&each.type_)) {
        let why = condition.message.as_deref().unwrap_or_default();
        bail!("it was refused: {why}");
    }
    let Some(certificate) = &status.certificate else {
        return Ok(None);
    };
    String::from_utf8(certificate.0.clone())
        .map(Some)
        .context("the certificate is no text")
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    trellis_files::ensure(path, text.as_bytes())
        .map(drop)
        .with_context(|| format!("{} cannot be written", path.display()))
}
