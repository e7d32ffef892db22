//! Links between nodes: a real service on one node, and another node that the test plays, with certificates of the
//! service's own authority.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use trellis_api::NodeName;
use trellis_engine::drive::{
    Address, Credentials, Failure, Refusal, ReplicaServer, ReplicaSettings, Volume, VolumeSettings,
};
use trellis_engine::proto::{Config, ReplicaId};
use trellis_engine::replica::{Identity, Pool, Provisioning};
use trellis_pki::{Asked, Authority, Home, NodeKey, SIGNER, sign};

use crate::harness::{PATIENCE, Service, checksum, write_file};

/// The node that the test plays.
const OTHER: &str = "other";
const OTHER_AT: &str = "tls:other@127.0.0.3:0";
const SERVICE_AT: &str = "127.0.0.2";

/// A service that other nodes can reach, with two pools of its own and one of the other node, which has `free` bytes.
fn start(free: &str) -> Service {
    let service = Service::start_told(&["--link-address", SERVICE_AT]);
    service.apply(&format!(
        "apiVersion: v1\nkind: Node\nmetadata: {{name: {OTHER}}}\n---\napiVersion: trellis.dev/v1alpha1\nkind: Pool\nmetadata: {{name: far}}\nspec: {{node: {OTHER}, path: {}}}\n---\napiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: three}}\nprovisioner: trellis.dev\nallowVolumeExpansion: true\nparameters: {{replicas: \"3\", allowSharedDisk: \"true\", pools: \"a,b,far\"}}\n",
        service.path("far").display()
    ));
    let now = jiff::Timestamp::now();
    let status = json!({ "status": {
        "id": "far", "filesystem": "far",
        "capacity": { "total": free, "free": free, "allocated": "0", "observedAt": now },
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "Measured", "message": "", "lastTransitionTime": now,
        }],
    }});
    patch_status(&service, "pools.trellis.dev", "far", &status);
    for pool in ["a", "b"] {
        let path = service.path(pool);
        std::fs::create_dir_all(&path).unwrap();
        service.trellis(&["pool", "add", pool, path.to_str().unwrap()]);
    }
    service
}

fn patch_status(service: &Service, kind: &str, name: &str, body: &Value) {
    let body = body.to_string();
    let merge = [
        "patch",
        kind,
        name,
        "--subresource=status",
        "--type=merge",
        "-p",
    ];
    service.kubectl(&[&merge[..], &[&body]].concat());
}

/// Credentials of a node that this authority has signed, for an hour.
fn credentials(authority: &Authority, dir: &Path, node: &str) -> Credentials {
    let name: NodeName = node.parse().unwrap();
    let key = NodeKey::make(&name).unwrap();
    let request = key.request().unwrap();
    let asked = Asked {
        user: &name.user(),
        signer: SIGNER,
        usages: &[],
        request: &request,
        life: None,
    };
    let home = Home {
        authority,
        nodes: &[name.clone()].into(),
        keys: &BTreeMap::new(),
        life: Duration::from_secs(3600),
    };
    let certificate = sign(&asked, &home, SystemTime::now()).unwrap();
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("node.pem"), key.with(&certificate).unwrap()).unwrap();
    std::fs::write(dir.join("ca.crt"), authority.certificate()).unwrap();
    Credentials::read(dir).unwrap()
}

fn authority(service: &Service) -> Authority {
    let text = std::fs::read_to_string(service.data().join("pki/authority.pem")).unwrap();
    Authority::read(&text).unwrap()
}

/// The copies of the only volume, on one node.
fn copies(service: &Service, node: &str) -> Vec<Value> {
    let mut all = service.objects("replicas.trellis.dev");
    all.retain(|each| each["spec"]["node"] == node);
    all
}

fn identity(replica: &Value) -> Identity {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let named = text(&replica["spec"]["replicaId"]);
    let uid = text(&replica["metadata"]["uid"]);
    let id = if named.is_empty() { uid } else { named };
    Identity {
        volume: text(&replica["spec"]["volumeId"]).parse().unwrap(),
        replica: id.parse().unwrap(),
    }
}

// Fails if copies are not reached at their node's address, if they let in anybody but the node of their target, if a
// person is not told who was refused and why, or if a node that is removed keeps its link.
#[test]
fn copies_let_in_the_node_of_their_target_until_it_is_removed() {
    // The pool of the other node has the most room, so it gets the first copy, and the target.
    let service = start("1099511627776");
    service.apply(&crate::harness::claim("data", "three", "320Mi"));
    let links = service.wait("the copies have links", |service| {
        let copies = copies(service, "test-node");
        let link = |copy: &Value| Some(copy["status"]["link"].as_str()?.to_owned());
        let links: Vec<String> = copies.iter().filter_map(link).collect();
        (links.len() == 2).then_some(links)
    });
    let prefix = format!("tls:test-node@{SERVICE_AT}:");
    assert!(
        links.iter().all(|link| link.starts_with(&prefix)),
        "{links:?}"
    );
    let target = &service.objects("targets.trellis.dev")[0];
    assert_eq!(target["spec"]["node"], OTHER);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _runtime = runtime.enter();
    let near: Vec<Identity> = copies(&service, "test-node").iter().map(identity).collect();
    let far = identity(&copies(&service, OTHER)[0]);
    let members: BTreeSet<ReplicaId> = near.iter().chain([&far]).map(|it| it.replica).collect();
    let found = links.iter().map(|link| link.parse::<Address>().unwrap());
    let addresses: BTreeMap<ReplicaId, Address> =
        near.iter().map(|it| it.replica).zip(found).collect();
    let volume = |credentials: Credentials| {
        let mut addresses = addresses.clone();
        addresses.insert(far.replica, Address::Unix(service.path("nobody")));
        Volume::start(VolumeSettings {
            credentials: Some(credentials),
            ..VolumeSettings::new(far.volume, Config::majority(members.clone()), addresses)
        })
    };
    let own = authority(&service);
    let reason = |words: &str| {
        service.wait(words, |service| {
            let said = service.trellis(&["volume", "show", "data"]);
            let is_told = said.contains("LinkRefused") && said.contains(words);
            is_told.then_some(())
        });
    };

    let third = volume(credentials(&own, &service.path("third"), "third"));
    let found: NodeName = "third".parse().unwrap();
    let refusal = Failure::RefusedUs(Refusal::OtherNode { found });
    runtime.block_on(only(&third, &addresses, &refusal));
    reason("belongs to node third");
    runtime.block_on(third.stop());
    let strange = Authority::make(SystemTime::now()).unwrap();
    let stranger = volume(credentials(&strange, &service.path("strange"), OTHER));
    let refusal = Failure::Refused(Refusal::OtherHome);
    runtime.block_on(only(&stranger, &addresses, &refusal));
    reason("not signed by the authority of this home");
    runtime.block_on(stranger.stop());

    let sound = volume(credentials(&own, &service.path("sound"), OTHER));
    runtime.block_on(async {
        let ready = tokio::time::timeout(PATIENCE, sound.ready()).await;
        assert!(ready.unwrap().is_ok());
        let page = |byte: u8| vec![bytes::Bytes::from(vec![byte; 4096])];
        sound.write(0, page(7), true).await.unwrap();
        assert!(sound.read(0, 4096).await.unwrap().concat() == [7; 4096]);
    });
    service.kubectl(&["delete", "node", OTHER]);
    let found: NodeName = OTHER.parse().unwrap();
    let refusal = Failure::RefusedUs(Refusal::OtherNode { found });
    runtime.block_on(only(&sound, &addresses, &refusal));
    reason("belongs to node other");
    runtime.block_on(sound.stop());
}

/// Waits until every copy with a link shows that failure.
async fn only(volume: &Volume, linked: &BTreeMap<ReplicaId, Address>, failure: &Failure) {
    let began = Instant::now();
    loop {
        let troubles = volume.troubles();
        let fails = |id: &ReplicaId| troubles.get(id).is_some_and(|it| it.failure == *failure);
        if linked.keys().all(fails) {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{failure:?}: {troubles:#?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The copy of the other node, served by the test.
struct FarCopy {
    path: PathBuf,
    identity: Identity,
}

impl FarCopy {
    fn make(service: &Service, replica: &Value) -> FarCopy {
        let name = replica["metadata"]["name"].as_str().unwrap();
        let size = replica["spec"]["capacity"].as_str().unwrap().parse();
        let path = service.path("far");
        std::fs::create_dir_all(&path).unwrap();
        let pool = Pool::open(&path).unwrap();
        let identity = identity(replica);
        pool.create(name, identity, size.unwrap(), Provisioning::Thin)
            .unwrap();
        FarCopy {
            path: path.join("replicas").join(name),
            identity,
        }
    }

    fn serve(&self, listen: &Address, credentials: &Credentials) -> ReplicaServer {
        let settings = ReplicaSettings {
            path: self.path.clone(),
            pool: None,
            identity: self.identity,
            provisioning: Provisioning::Thin,
            checksums: true,
        };
        let allowed = [NodeName::clone(&"test-node".parse().unwrap())].into();
        ReplicaServer::start_tls(settings, listen, credentials, allowed).unwrap()
    }
}

// Fails if a target does not use a copy on another node, if it lacks what was written, if a copy that shows another
// home's certificate is used, or if nobody can see why it is not.
#[test]
fn a_target_uses_a_copy_on_another_node_and_says_why_it_cannot() {
    // The pools of the service have more room, so the target is there.
    let service = start("1073741824");
    let own = authority(&service);
    service.apply(&crate::harness::claim("data", "three", "320Mi"));
    let replica = service.wait("the other node gets a copy", |service| {
        copies(service, OTHER).into_iter().next()
    });
    let far = FarCopy::make(&service, &replica);
    let sound = credentials(&own, &service.path("sound"), OTHER);
    let server = far.serve(&OTHER_AT.parse().unwrap(), &sound);
    let at = server.address().clone();
    let status = json!({ "status": {
        "phase": "Ready", "capacity": replica["spec"]["capacity"],
        "address": "unix:/nowhere", "link": at.to_string(), "path": far.path,
    }});
    let name = replica["metadata"]["name"].as_str().unwrap();
    patch_status(&service, "replicas.trellis.dev", name, &status);
    service.wait_bound("data");
    let path = service.mount("data");
    let sum = write_file(&path.join("file"), 8 << 20, 5);
    let state = |words: &'static str| {
        service.wait(words, |service| {
            let said = service.trellis(&["volume", "show", "data"]);
            let line = said.lines().find(|line| line.starts_with("far "));
            let line = line.unwrap_or_default().to_owned();
            line.contains(words).then_some(line)
        })
    };
    state("InSync");

    drop(server);
    let strange = Authority::make(SystemTime::now()).unwrap();
    let strange = credentials(&strange, &service.path("strange"), OTHER);
    let server = far.serve(&at, &strange);
    let line = state("Refused");
    assert!(line.contains("LinkRefused"), "{line}");
    assert!(
        line.contains("not signed by the authority of this home"),
        "{line}"
    );
    let more = write_file(&path.join("more"), 8 << 20, 6);
    drop(server);
    let server = far.serve(&at, &sound);
    state("InSync");
    assert_eq!(checksum(&path.join("file")), sum);
    assert_eq!(checksum(&path.join("more")), more);
    service.trellis(&["umount", "data"]);
    let near = copies(&service, "test-node");
    let near = Path::new(near[0]["status"]["path"].as_str().unwrap()).to_owned();
    let far = far.path.join(near.file_name().unwrap());
    service.wait("both copies are the same", |_| {
        (checksum(&near) == checksum(&far)).then_some(())
    });
    drop(server);
}
