//! A store that an earlier release wrote. It has a mounted claim with one copy, a block claim in use, and a mounted
//! claim with three copies.

use std::path::Path;
use std::time::{Duration, Instant};

use kube::api::ListParams;
use kube::{Api, ResourceExt};
use trellis_api::kinds::{AtPath, Attachment, Consumer, Volume};
use trellis_apiserver::backup::Backup;
use trellis_apiserver::{EmbeddedApi, Error};

const EARLIER: &[u8] = include_bytes!("stores/before-typed-specs.json");

/// All objects of the kind, by the claim that they are for.
async fn all<K>(api: &EmbeddedApi, claim: impl Fn(&K) -> String) -> Vec<(String, K)>
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let kind = Api::<K>::all(api.client());
    let list = kind.list(&ListParams::default()).await.unwrap();
    let mut all: Vec<(String, K)> = list
        .items
        .into_iter()
        .map(|each| (claim(&each), each))
        .collect();
    all.sort_by(|one, other| one.0.cmp(&other.0));
    all
}

/// Opens the store, which the last one to have it may still be closing.
fn opened(path: &Path) -> EmbeddedApi {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match EmbeddedApi::open(path) {
            Err(Error::InUse { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            opened => return opened.unwrap(),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_earlier_release_stored_is_read_in_the_present_form() {
    // Fails if a volume of an earlier release forgets where its copies are, how it is carried, or how it may be used;
    // or if an attachment forgets its path.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store.redb");
    let backup = Backup::read(EARLIER, Path::new("earlier")).unwrap();
    backup.restore(&path).unwrap();
    // Twice: what was converted stays as it is.
    for _ in 0..2 {
        let api = opened(&path);
        let volumes = all::<Volume>(&api, |each| each.spec.claim.clone().unwrap().name).await;
        let shown: Vec<_> = volumes
            .iter()
            .map(|(claim, volume)| {
                let places = volume.spec.placement.iter();
                let places: Vec<String> = places
                    .map(|each| format!("{}@{}", each.pool, each.node))
                    .collect();
                let via = volume.spec.via.map(|via| via.name());
                (claim.as_str(), places.join(" "), via)
            })
            .collect();
        assert_eq!(shown[0], ("one", "a@n1".to_owned(), None));
        assert_eq!(shown[1].0, "raw");
        assert_eq!(
            shown[2],
            ("three", "a@n1 b@n1 c@n1".to_owned(), Some("fuse"))
        );
        let [(_, one), (_, raw), (_, three)] = &volumes[..] else {
            panic!("three volumes");
        };
        assert_eq!(one.spec.access_modes, ["ReadWriteOnce"]);
        assert_eq!(raw.spec.access_modes, ["ReadWriteMany"]);
        assert_eq!(three.spec.mount_options, ["noatime"]);
        assert_eq!(three.spec.pools, ["a", "b", "c"]);
        assert!(one.spec.pools.is_empty() && one.annotations().is_empty());
        let uses = all::<Attachment>(&api, |each| {
            each.spec.claim_name.clone().unwrap_or_default()
        })
        .await;
        let consumers: Vec<&Consumer> = uses.iter().map(|(_, each)| &each.spec.consumer).collect();
        let at = |path: &str, read_only| AtPath {
            path: path.to_owned(),
            read_only,
        };
        assert_eq!(
            consumers,
            [
                &Consumer::Mount(at("/tmp/fx/mnt-one", false)),
                &Consumer::Device(at("/tmp/fx/dev-raw", true)),
                &Consumer::Mount(at("/tmp/fx/mnt-three", false)),
            ]
        );
    }
}
