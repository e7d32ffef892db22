//! `trellis node`: the machines that volumes live on.

mod add;
mod remove;

pub use add::add;
pub use remove::remove;

use std::collections::BTreeMap;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use trellis_api::kinds::{Attachment, Pool, Replica, Target};
use trellis_apiserver::users::{NODE_LEASES_NAMESPACE, NODE_TOKENS_NAMESPACE, secret_name};

use super::changes;
use crate::cli::{Global, Output};
use crate::connect::connect;
use crate::load::list;
use crate::output::{self, Table, UNKNOWN, age};

/// Shows the nodes.
pub async fn show(global: &Global, how: &Output) -> anyhow::Result<()> {
    let service = connect(global).await?;
    let client = &service.client;
    changes::show(client, how, || async {
        let lines = Contents::read(client).await?.lines();
        output::text(how.output, &lines, |wide| {
            render(&lines, wide, Timestamp::now(), output::colours())
        })
    })
    .await
}

/// The objects that say what is on which node.
struct Contents {
    nodes: Vec<Node>,
    leases: Vec<Lease>,
    /// The names of the nodes' tokens; `None` if whoever asks may not know.
    tokens: Option<Vec<String>>,
    pools: Vec<Pool>,
    replicas: Vec<Replica>,
    targets: Vec<Target>,
    attachments: Vec<Attachment>,
}

impl Contents {
    async fn read(client: &Client) -> anyhow::Result<Contents> {
        let all = ListParams::default();
        let system = Api::<Secret>::namespaced(client.clone(), NODE_TOKENS_NAMESPACE);
        let (nodes, leases, pools, replicas, targets, attachments) = tokio::try_join!(
            list(Api::<Node>::all(client.clone()), &all),
            list(
                Api::<Lease>::namespaced(client.clone(), NODE_LEASES_NAMESPACE),
                &all
            ),
            list(Api::<Pool>::all(client.clone()), &all),
            list(Api::<Replica>::all(client.clone()), &all),
            list(Api::<Target>::all(client.clone()), &all),
            list(Api::<Attachment>::all(client.clone()), &all),
        )?;
        let tokens = system.list(&all).await.ok();
        let name = |secret: Secret| secret.name_any();
        Ok(Contents {
            nodes,
            leases,
            tokens: tokens.map(|tokens| tokens.items.into_iter().map(name).collect()),
            pools,
            replicas,
            targets,
            attachments,
        })
    }

    /// What is on the node.
    fn line(&self, node: &str) -> Line {
        let lease = self.leases.iter().find(|lease| lease.name_any() == node);
        let tokens = self.tokens.as_ref();
        let on = |of: &String| of == node;
        Line {
            name: node.to_owned(),
            is_known: self.nodes.iter().any(|each| each.name_any() == node),
            heard_at: lease.and_then(|lease| lease.spec.as_ref()?.renew_time.clone()),
            has_token: tokens.map(|tokens| tokens.contains(&secret_name(node))),
            pools: named(&self.pools, |pool| on(&pool.spec.node)),
            copies: named(&self.replicas, |replica| on(&replica.spec.node)),
            targets: named(&self.targets, |target| on(&target.spec.node)),
            uses: named(&self.attachments, |use_of| on(&use_of.spec.node)),
        }
    }

    /// Every node that there is, or that an object names.
    fn lines(&self) -> Vec<Line> {
        let known = self.nodes.iter().map(ResourceExt::name_any);
        let of_pools = self.pools.iter().map(|pool| pool.spec.node.clone());
        let of_copies = self.replicas.iter().map(|each| each.spec.node.clone());
        let of_uses = self.attachments.iter().map(|each| each.spec.node.clone());
        let names = known.chain(of_pools).chain(of_copies).chain(of_uses);
        let names: BTreeMap<String, ()> = names.map(|name| (name, ())).collect();
        names.keys().map(|name| self.line(name)).collect()
    }
}

fn named<K>(objects: &[K], is_there: impl Fn(&K) -> bool) -> Vec<String>
where
    K: kube::Resource,
{
    let there = objects.iter().filter(|object| is_there(object));
    there.map(ResourceExt::name_any).collect()
}

/// One node, as programs read it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    name: String,
    /// Whether there is a Node object.
    is_known: bool,
    /// When it last renewed its lease.
    heard_at: Option<MicroTime>,
    /// Whether a token lets it in; unknown if whoever asks may not know.
    has_token: Option<bool>,
    pools: Vec<String>,
    copies: Vec<String>,
    targets: Vec<String>,
    /// The attachments on it.
    uses: Vec<String>,
}

fn render(lines: &[Line], wide: bool, now: Timestamp, colours: bool) -> String {
    let mut header = vec![
        "NAME", "HEARD", "TOKEN", "POOLS", "COPIES", "TARGETS", "USES",
    ];
    if wide {
        header.extend(["POOL NAMES"]);
    }
    let mut table = Table::new(&header);
    for line in lines {
        let heard = line.heard_at.as_ref();
        let token = match (line.is_known, line.has_token) {
            (false, _) => "removed",
            (true, Some(true)) => "yes",
            (true, Some(false)) => "no",
            (true, None) => UNKNOWN,
        };
        let count = |names: &[String]| names.len().to_string();
        let cells = vec![
            line.name.clone(),
            heard.map_or_else(|| UNKNOWN.to_owned(), |at| format!("{} ago", age(at, now))),
            token.to_owned(),
            count(&line.pools),
            count(&line.copies),
            count(&line.targets),
            count(&line.uses),
            line.pools.join(","),
        ];
        table.row(cells, None);
    }
    table.render(colours)
}

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_api::Bytes;
    use trellis_control::view::scenario;

    // Fails if a node is left out that only its pools still name, or if what is on a node is counted for another.
    #[test]
    fn a_node_shows_what_is_on_it() {
        let node = |name: &str| {
            let mut node = Node::default();
            node.metadata.name = Some(name.to_owned());
            node
        };
        let mut lease = Lease::default();
        lease.metadata.name = Some("b".to_owned());
        lease.spec.get_or_insert_default().renew_time = Some(MicroTime(scenario::now()));
        let mut pool = scenario::pool(Bytes::gib(1), 100);
        "b".clone_into(&mut pool.spec.node);
        let mut lost = pool.clone();
        "gone".clone_into(&mut lost.spec.node);
        let contents = Contents {
            nodes: vec![node("a"), node("b")],
            leases: vec![lease],
            tokens: Some(vec![secret_name("b")]),
            pools: vec![pool, lost],
            replicas: vec![scenario::replica(1, None)],
            targets: Vec::new(),
            attachments: Vec::new(),
        };
        insta::assert_snapshot!(render(&contents.lines(), true, scenario::now(), false));
    }
}
