//! Nodes as users: their tokens, what these allow, and how they end.

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use k8s_openapi::api::core::v1::{Node, Secret};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use trellis_apiserver::users::{Caller, NodeToken, secret_name};
use trellis_apiserver::{ApiBody, Visit};

use crate::support::{APPLY, MERGE, Reply, Server};

const POOLS: &str = "/apis/trellis.dev/v1alpha1/pools";
const NODES: &str = "/api/v1/nodes";
const SECRETS: &str = "/api/v1/namespaces/kube-system/secrets";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

/// Makes a node and its token; the token.
async fn add(server: &Server, name: &str) -> String {
    let node = json!({ "metadata": { "name": name } });
    let node = server.post(NODES, node).await.expect(201);
    let token = NodeToken::make(name).unwrap();
    let secret = token.secret(&serde_json::from_value(node).unwrap());
    let secret = serde_json::to_value(secret).unwrap();
    server.post(SECRETS, secret).await.expect(201);
    token.text().to_owned()
}

fn known(server: &Server, token: &str) -> Caller {
    let caller = server.api.node_with_token(token.as_bytes());
    caller.expect("the token counts")
}

async fn ask(
    server: &Server,
    caller: &Caller,
    method: Method,
    path: &str,
    (how, body): (&str, Value),
) -> http::Response<ApiBody> {
    let body = match body {
        Value::Null => Bytes::new(),
        body => Bytes::from(body.to_string()),
    };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", how)
        .header("user-agent", "node/1.0")
        .body(Full::new(body))
        .unwrap();
    let visit = Visit {
        caller: caller.clone(),
        request,
    };
    server.api.receive(visit).await
}

async fn send(
    server: &Server,
    caller: &Caller,
    method: Method,
    path: &str,
    body: (&str, Value),
) -> Reply {
    let response = ask(server, caller, method, path, body).await;
    let code = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    Reply {
        code,
        body: serde_json::from_slice(&bytes).unwrap(),
        warning: None,
    }
}

fn pool(name: &str, node: &str) -> Value {
    json!({ "metadata": { "name": name }, "spec": { "node": node, "path": "/p", "overcommitPercent": 100 } })
}

fn full() -> Value {
    json!({ "status": { "conditions": [] } })
}

const JSON: &str = "application/json";
const NOTHING: (&str, Value) = (JSON, Value::Null);

#[tokio::test]
async fn a_node_writes_what_is_its_own_and_is_refused_the_rest_in_kubernetes_words() {
    // Fails when a node can write another's pool by any verb, or is kept from its own.
    let server = Server::new();
    let b = known(&server, &add(&server, "b").await);
    add(&server, "a").await;
    server.post(POOLS, pool("of-a", "a")).await.expect(201);
    let send = async |method, path: String, body| send(&server, &b, method, &path, body).await;

    send(Method::POST, POOLS.into(), (JSON, pool("of-b", "b")))
        .await
        .expect(201);
    send(
        Method::PATCH,
        format!("{POOLS}/of-b/status"),
        (MERGE, full()),
    )
    .await
    .expect(200);
    let refused = send(
        Method::PATCH,
        format!("{POOLS}/of-a/status"),
        (MERGE, full()),
    )
    .await;
    let words = r#"pools.trellis.dev "of-a" is forbidden: User "system:node:b" cannot patch resource "pools/status" in API group "trellis.dev" at the cluster scope"#;
    refused.refused(403, "Forbidden", words);

    let mut there = server.get(&format!("{POOLS}/of-a")).await.expect(200);
    there["spec"]["node"] = json!("b");
    let refused = send(Method::PUT, format!("{POOLS}/of-a"), (JSON, there)).await;
    let words = r#"pools.trellis.dev "of-a" is forbidden: User "system:node:b" cannot update resource "pools" in API group "trellis.dev" at the cluster scope"#;
    refused.refused(403, "Forbidden", words);
    for (method, path, body) in [
        (Method::POST, POOLS.to_owned(), (JSON, pool("third", "a"))),
        (Method::DELETE, format!("{POOLS}/of-a"), NOTHING),
        (Method::DELETE, POOLS.to_owned(), NOTHING),
        (Method::PATCH, format!("{POOLS}/of-a"), (MERGE, json!({}))),
        (Method::DELETE, format!("{NODES}/b"), NOTHING),
        (
            Method::PATCH,
            format!("{NODES}/a"),
            (MERGE, json!({ "metadata": { "labels": { "x": "y" } } })),
        ),
        (Method::GET, format!("{SECRETS}/node-token.b"), NOTHING),
        (Method::GET, "/api/v1/secrets?watch=1".to_owned(), NOTHING),
        (Method::GET, "/debug/backup".to_owned(), NOTHING),
    ] {
        let reply = send(method.clone(), path.clone(), body).await;
        assert_eq!(reply.code, 403, "{method} {path}: {}", reply.body);
    }
    // Server-side apply makes what is not there, and is held to the same rules.
    let apply = |name: &str, node: &str| {
        let mut pool = pool(name, node);
        pool["apiVersion"] = json!("trellis.dev/v1alpha1");
        pool["kind"] = json!("Pool");
        (format!("{POOLS}/{name}?fieldManager=b"), (APPLY, pool))
    };
    for (name, node, code) in [("fourth", "a", 403), ("fifth", "b", 201)] {
        let (path, body) = apply(name, node);
        assert_eq!(send(Method::PATCH, path, body).await.code, code, "{name}");
    }
    send(Method::DELETE, format!("{POOLS}/of-b"), NOTHING)
        .await
        .expect(200);
    let names = server.get(POOLS).await.expect(200);
    let names = names["items"].as_array().unwrap().iter();
    let names: Vec<&str> = names
        .map(|each| each["metadata"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["fifth", "of-a"]);
}

#[tokio::test]
async fn a_node_cannot_say_who_owns_which_field() {
    // Fails when a node can hand a field to a manager of its choice, which would then be in the controllers' way.
    let server = Server::new();
    let b = known(&server, &add(&server, "b").await);
    let made = server.post(POOLS, pool("of-b", "b")).await.expect(201);
    let mut taken = made.clone();
    taken["metadata"]["managedFields"][0]["manager"] = json!("mine");
    taken["metadata"]["labels"] = json!({ "x": "y" });
    let reply = send(
        &server,
        &b,
        Method::PUT,
        &format!("{POOLS}/of-b"),
        (JSON, taken),
    )
    .await;
    let managers = reply.expect(200)["metadata"]["managedFields"].clone();
    let managers: Vec<&str> = managers
        .as_array()
        .unwrap()
        .iter()
        .map(|each| each["manager"].as_str().unwrap())
        .collect();
    assert_eq!(managers, ["tester", "node"]);
}

#[tokio::test]
async fn a_request_for_a_certificate_has_the_name_of_who_made_it() {
    // Fails when a node can ask for a certificate in another's name, or read another's request.
    let server = Server::new();
    let (a, b) = (add(&server, "a").await, add(&server, "b").await);
    let (a, b) = (known(&server, &a), known(&server, &b));
    let request = json!({ "metadata": { "name": "r" }, "spec": {
        "request": "eA==", "signerName": "trellis.dev/node", "usages": ["client auth"],
        "username": "system:node:a", "groups": ["system:masters"],
    }});
    let made = send(&server, &b, Method::POST, REQUESTS, (JSON, request))
        .await
        .expect(201);
    assert_eq!(made["spec"]["username"], "system:node:b");
    assert_eq!(
        made["spec"]["groups"],
        json!(["system:nodes", "system:authenticated"])
    );
    let path = format!("{REQUESTS}/r");
    assert_eq!(
        send(&server, &b, Method::GET, &path, NOTHING).await.code,
        200
    );
    assert_eq!(
        send(&server, &a, Method::GET, &path, NOTHING).await.code,
        403
    );
    assert_eq!(
        send(&server, &b, Method::GET, REQUESTS, NOTHING).await.code,
        403
    );
    for part in ["status", "approval"] {
        let approval =
            json!({ "status": { "conditions": [{ "type": "Approved", "status": "True" }] } });
        let path = format!("{path}/{part}");
        let approved = send(&server, &b, Method::PATCH, &path, (MERGE, approval)).await;
        assert_eq!(approved.code, 403, "{part}");
    }

    // By its name, a node lists and watches its own request, and sees nothing of another's.
    let by_name = format!("{REQUESTS}?fieldSelector=metadata.name%3Dr");
    let watch = format!("{by_name}&watch=1&timeoutSeconds=1");
    for (who, count) in [(&b, 1), (&a, 0)] {
        let listed = send(&server, who, Method::GET, &by_name, NOTHING).await;
        assert_eq!(listed.expect(200)["items"].as_array().unwrap().len(), count);
        let watched = ask(&server, who, Method::GET, &watch, NOTHING).await;
        let watched = watched.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(watched.split(|byte| *byte == b'\n').count(), count + 1);
    }
}

#[tokio::test]
async fn a_node_can_ask_who_it_is_and_what_it_may_do() {
    // Fails when `kubectl auth whoami` or `can-i` say something else than what a request would be answered.
    let server = Server::new();
    let b = known(&server, &add(&server, "b").await);
    server.post(POOLS, pool("of-a", "a")).await.expect(201);
    server.post(POOLS, pool("of-b", "b")).await.expect(201);
    let review = async |path: &str, body| {
        send(&server, &b, Method::POST, path, (JSON, body))
            .await
            .expect(201)
    };
    let who = review(
        "/apis/authentication.k8s.io/v1/selfsubjectreviews",
        json!({}),
    )
    .await;
    let info =
        json!({ "username": "system:node:b", "groups": ["system:nodes", "system:authenticated"] });
    assert_eq!(who["status"]["userInfo"], info);
    let access = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    for (verb, resource, name, allowed) in [
        ("update", "pools", "of-b", true),
        ("update", "pools", "of-a", false),
        ("create", "pools", "", true),
        ("list", "pools", "", true),
        ("delete", "volumes", "", false),
        ("*", "pools", "", false),
    ] {
        let asked =
            json!({ "verb": verb, "group": "trellis.dev", "resource": resource, "name": name });
        let answer = review(access, json!({ "spec": { "resourceAttributes": asked } })).await;
        assert_eq!(
            answer["status"]["allowed"], allowed,
            "{verb} {resource} {name}"
        );
    }
    let path =
        json!({ "spec": { "nonResourceAttributes": { "path": "/debug/backup", "verb": "get" } } });
    assert_eq!(review(access, path).await["status"]["allowed"], false);
    let rules = review(
        "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
        json!({ "spec": { "namespace": "default" } }),
    )
    .await;
    assert_eq!(rules["status"]["incomplete"], true);
    // Which Secrets it may see depends on the Secret; never may it list, change in part or delete any.
    let secrets: Vec<&Value> = rules["status"]["resourceRules"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|rule| rule["resources"].to_string().contains("secrets"))
        .collect();
    assert_eq!(secrets.len(), 1, "{rules}");
    assert_eq!(secrets[0]["verbs"], json!(["get", "create", "update"]));
}

#[tokio::test]
async fn a_token_is_stored_as_a_hash_and_survives_a_restart_and_a_backup() {
    // Fails when the store or a backup has the token itself, or when a node has to join again after either.
    let server = Server::new();
    let token = add(&server, "b").await;
    let backup = server.api.backup();
    let text = String::from_utf8(backup.text()).unwrap();
    let secret = token.rsplit('.').next().unwrap();
    assert!(text.contains("node-token.b") && !text.contains(secret));
    for wrong in [
        "b",
        "b.",
        ".",
        &format!("a.{secret}"),
        &format!("{token}0"),
        secret,
        &format!("B.{secret}"),
    ] {
        assert!(
            server.api.node_with_token(wrong.as_bytes()).is_none(),
            "{wrong}"
        );
    }
    let server = server.reopened();
    known(&server, &token);
    let restored = server.dir.path().join("restored");
    backup.restore(&restored).unwrap();
    let api = trellis_apiserver::EmbeddedApi::open(&restored).unwrap();
    assert!(api.node_with_token(token.as_bytes()).is_some());
}

#[tokio::test]
async fn a_token_ends_with_its_secret_with_its_node_and_with_another_token() {
    // Fails when a node that was removed, or whose token was replaced, can still read, write or watch.
    for way in ["secret", "node", "orphan", "rotation"] {
        let server = Server::new();
        let token = add(&server, "b").await;
        let b = known(&server, &token);
        let watch = ask(
            &server,
            &b,
            Method::GET,
            &format!("{POOLS}?watch=1"),
            NOTHING,
        )
        .await;
        let mut watch = watch.into_body();
        server.post(POOLS, pool("x", "a")).await.expect(201);
        assert!(watch.frame().await.is_some());
        let ended = tokio::spawn(async move { watch.frame().await.is_none() });
        let secrets: Api<Secret> = Api::namespaced(server.api.client(), "kube-system");
        let nodes: Api<Node> = Api::all(server.api.client());
        match way {
            "secret" => drop(
                secrets
                    .delete(&secret_name("b"), &DeleteParams::default())
                    .await
                    .unwrap(),
            ),
            "node" => drop(nodes.delete("b", &DeleteParams::default()).await.unwrap()),
            "orphan" => drop(nodes.delete("b", &DeleteParams::orphan()).await.unwrap()),
            _ => {
                let node = nodes.get("b").await.unwrap();
                let secret = NodeToken::make("b").unwrap().secret(&node);
                let params = PatchParams::apply("test").force();
                let mut secret = serde_json::to_value(secret).unwrap();
                secret["apiVersion"] = json!("v1");
                secret["kind"] = json!("Secret");
                drop(
                    secrets
                        .patch(&secret_name("b"), &params, &Patch::Apply(secret))
                        .await
                        .unwrap(),
                );
            }
        }
        assert!(ended.await.unwrap(), "{way}: the watch goes on");
        assert!(
            server.api.node_with_token(token.as_bytes()).is_none(),
            "{way}"
        );
        // Somebody who was let in before is not let through after.
        let late = send(&server, &b, Method::POST, POOLS, (JSON, pool("late", "b"))).await;
        late.refused(401, "Unauthorized", "Unauthorized");
        if way == "node" {
            assert_eq!(
                server.get(&format!("{SECRETS}/node-token.b")).await.code,
                404
            );
        }
    }
}
