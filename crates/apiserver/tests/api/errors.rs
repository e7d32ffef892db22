//! Requests that cannot be answered, in Kubernetes' words.

use http::Method;
use serde_json::json;

use crate::support::{CLAIMS, MAPS, MERGE, Server, claim, config};

#[tokio::test]
async fn unknown_paths_methods_and_formats_are_refused_as_kubernetes_does() {
    // Fails if a client sees another code, reason or message than a cluster would give.
    let server = Server::new();
    for path in [
        "/api/v1/foo",
        "/api/v2/foo",
        "/nope",
        "/api/v1/namespaces/default/configmaps/x/foo",
    ] {
        server.get(path).await.refused(
            404,
            "NotFound",
            "the server could not find the requested resource",
        );
    }
    let not_allowed = "the server does not allow this method on the requested resource";
    server.post(&format!("{MAPS}/x"), json!({})).await.refused(
        405,
        "MethodNotAllowed",
        not_allowed,
    );
    server
        .put(MAPS, json!({}))
        .await
        .refused(405, "MethodNotAllowed", not_allowed);
    let absent = server.get(&format!("{MAPS}/x")).await.refused(
        404,
        "NotFound",
        "configmaps \"x\" not found",
    );
    assert_eq!(
        absent["details"],
        json!({ "name": "x", "kind": "configmaps" })
    );
    let reply = server
        .send(Method::POST, MAPS, "text/foo", b"{}".to_vec())
        .await;
    assert_eq!(reply.expect(415)["reason"], "UnsupportedMediaType");
    let reply = server
        .send(Method::POST, MAPS, "application/json", b"{".to_vec())
        .await;
    assert_eq!(reply.expect(400)["reason"], "BadRequest");
    let reply = server
        .send(Method::POST, MAPS, "application/yaml", b"a: [".to_vec())
        .await;
    assert_eq!(reply.expect(400)["reason"], "BadRequest");
    server.post(MAPS, config("x", "1")).await.expect(201);
    assert_eq!(
        server
            .patch(&format!("{MAPS}/x"), "application/foo", json!({}))
            .await
            .code,
        415
    );
    assert_eq!(
        server
            .patch(&format!("{MAPS}/x"), MERGE, json!([]))
            .await
            .code,
        400
    );
}

#[tokio::test]
async fn a_body_beyond_three_mebibytes_is_refused() {
    // Fails if a client can make the server hold as much as it likes to send.
    let server = Server::new();
    let reply = server
        .send(
            Method::POST,
            MAPS,
            "application/json",
            vec![b' '; (3 << 20) + 1],
        )
        .await;
    reply.refused(
        413,
        "RequestEntityTooLarge",
        "Request entity too large: limit is 3145728",
    );
}

#[tokio::test]
async fn yaml_is_as_good_as_json() {
    // Fails if a manifest in YAML is not understood, or is answered in another form.
    let server = Server::new();
    let yaml =
        b"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: from-yaml\ndata:\n  a: \"1\"\n"
            .to_vec();
    let made = server
        .send(Method::POST, MAPS, "application/yaml", yaml)
        .await
        .expect(201);
    assert_eq!(made["data"], json!({ "a": "1" }));
}

#[tokio::test]
async fn unknown_fields_are_refused_warned_about_or_dropped() {
    // Fails if a typo in a manifest passes unseen in strict mode, or is stored.
    let server = Server::new();
    let mut typo = claim("x", "1Gi");
    typo["spec"]["foo"] = json!([]);
    server.post(&format!("{CLAIMS}?fieldValidation=Strict"), typo.clone()).await.refused(
        400,
        "BadRequest",
        "PersistentVolumeClaim in version \"v1\" cannot be handled as a PersistentVolumeClaim: strict decoding error: unknown field \"spec.foo\"",
    );
    let warned = server
        .post(
            &format!("{CLAIMS}?fieldValidation=Warn&dryRun=All"),
            typo.clone(),
        )
        .await;
    assert_eq!(
        warned.warning.as_deref(),
        Some("299 - \"unknown field \\\"spec.foo\\\"\"")
    );
    let stored = server
        .post(&format!("{CLAIMS}?fieldValidation=Ignore"), typo)
        .await;
    assert_eq!(stored.warning, None);
    assert_eq!(stored.expect(201)["spec"].get("foo"), None);
    let fine =
        json!({ "metadata": { "name": "f", "labels": {}, "creationTimestamp": null }, "data": {} });
    server
        .post(&format!("{MAPS}?fieldValidation=Strict"), fine)
        .await
        .expect(201);
}

#[tokio::test]
async fn health_and_counters_are_served() {
    // Fails if a probe finds the server ill, or the counters cannot be read.
    let server = Server::new();
    for path in ["/healthz", "/livez", "/readyz"] {
        assert_eq!(server.get(path).await.expect(200), json!("ok"));
    }
    server.post(MAPS, config("x", "1")).await.expect(201);
    let stats = server.get("/debug/store").await.expect(200);
    assert!(stats["writes"].as_u64().unwrap() >= 3, "{stats}");
    assert!(stats["flushes"].as_u64().unwrap() >= 2, "{stats}");
}
