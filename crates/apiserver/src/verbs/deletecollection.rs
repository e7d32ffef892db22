//! DELETE of a list: every object that it selects.

use bytes::Bytes;
use serde_json::json;

use super::delete::Options;
use super::{Answer, Call};
use crate::cascade::Sweep;
use crate::meta;
use crate::selector::Selector;
use crate::status::Status;

pub(crate) async fn delete_collection(call: Call<'_>, body: Bytes) -> Result<Answer, Status> {
    let kind = call.kind();
    if kind.plural == "namespaces" || (kind.namespaced && call.target.namespace.is_none()) {
        return Err(Status::method_not_allowed());
    }
    let options = Options::read(&call.query, call.header(http::header::CONTENT_TYPE), &body)?;
    let selector = Selector::parse(
        kind,
        call.query.get("labelSelector"),
        call.query.get("fieldSelector"),
    )?;
    let index = call.target.kind;
    let namespace = call.target.namespace.clone();
    let now = meta::time(jiff::Timestamp::now());
    let json = call.store.write(move |txn| {
        let mut sweep = Sweep::new(&now);
        let mut items = Vec::new();
        for (id, stored) in txn.list(index, namespace.as_deref()) {
            if selector.matches(&id.place, &stored)
                && let Some((last, _)) = sweep.delete(txn, &id, options.propagation)
            {
                items.push(last.value());
            }
        }
        sweep.run(txn);
        if options.dry_run {
            txn.discard();
        }
        let list = json!({
            "kind": format!("{}List", kind.kind),
            "apiVersion": kind.api_version(),
            "metadata": {},
            "items": items,
        });
        Ok(Bytes::from(list.to_string()))
    });
    Ok(Answer::ok(json.await?))
}
