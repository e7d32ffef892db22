//! A server on a file of its own, and short ways to ask it.

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tempfile::TempDir;
use trellis_apiserver::{ApiBody, EmbeddedApi};

pub(crate) const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
pub(crate) const MAPS: &str = "/api/v1/namespaces/default/configmaps";
pub(crate) const CLASSES: &str = "/apis/storage.k8s.io/v1/storageclasses";
pub(crate) const MERGE: &str = "application/merge-patch+json";
pub(crate) const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub(crate) const JSON_PATCH: &str = "application/json-patch+json";
pub(crate) const APPLY: &str = "application/apply-patch+yaml";

/// A server, and the directory that goes with it.
pub(crate) struct Server {
    pub(crate) api: EmbeddedApi,
    pub(crate) dir: TempDir,
}

/// A status code and a body.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) code: u16,
    pub(crate) body: Value,
    pub(crate) warning: Option<String>,
}

impl Server {
    pub(crate) fn new() -> Server {
        let dir = tempfile::tempdir().unwrap();
        let api = EmbeddedApi::open(&dir.path().join("store")).unwrap();
        Server { api, dir }
    }

    /// Closes the file and opens it again.
    pub(crate) fn reopened(self) -> Server {
        let Server { api, dir } = self;
        drop(api);
        let api = EmbeddedApi::open(&dir.path().join("store")).unwrap();
        Server { api, dir }
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Vec<u8>,
    ) -> Reply {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", content_type)
            .header("user-agent", "tester/1.0")
            .body(Full::new(Bytes::from(body)))
            .unwrap();
        let response = self.api.handle(request).await;
        let code = response.status().as_u16();
        let warning = response
            .headers()
            .get("warning")
            .map(|value| value.to_str().unwrap().to_owned());
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        let body = serde_json::from_slice(&bytes)
            .unwrap_or_else(|_| Value::from(String::from_utf8_lossy(&bytes).into_owned()));
        Reply {
            code,
            body,
            warning,
        }
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.send(Method::GET, path, "application/json", Vec::new())
            .await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Reply {
        self.send(
            Method::POST,
            path,
            "application/json",
            body.to_string().into_bytes(),
        )
        .await
    }

    pub(crate) async fn put(&self, path: &str, body: Value) -> Reply {
        self.send(
            Method::PUT,
            path,
            "application/json",
            body.to_string().into_bytes(),
        )
        .await
    }

    pub(crate) async fn patch(&self, path: &str, how: &str, body: Value) -> Reply {
        self.send(Method::PATCH, path, how, body.to_string().into_bytes())
            .await
    }

    pub(crate) async fn delete(&self, path: &str, options: Value) -> Reply {
        self.send(
            Method::DELETE,
            path,
            "application/json",
            options.to_string().into_bytes(),
        )
        .await
    }

    pub(crate) async fn watch(&self, path: &str) -> Watching {
        let request = Request::get(path).body(Full::new(Bytes::new())).unwrap();
        let response = self.api.handle(request).await;
        assert_eq!(response.status().as_u16(), 200);
        Watching {
            body: response.into_body(),
            lines: Vec::new(),
        }
    }
}

impl Reply {
    #[track_caller]
    pub(crate) fn expect(self, code: u16) -> Value {
        assert_eq!(self.code, code, "{}", self.body);
        self.body
    }

    /// Checks an error's code, reason and message.
    #[track_caller]
    pub(crate) fn refused(self, code: u16, reason: &str, message: &str) -> Value {
        assert_eq!(self.body["kind"], "Status", "{}", self.body);
        assert_eq!(self.body["message"], message);
        assert_eq!(self.body["reason"].as_str().unwrap_or_default(), reason);
        assert_eq!(self.body["code"], self.code);
        assert_eq!(self.code, code);
        self.body
    }
}

/// An open watch.
pub(crate) struct Watching {
    body: ApiBody,
    lines: Vec<Value>,
}

impl Watching {
    /// The next event, or `None` when the watch has ended.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        while self.lines.is_empty() {
            let frame = self.body.frame().await?.unwrap().into_data().unwrap();
            let text = std::str::from_utf8(&frame).unwrap();
            self.lines = text
                .lines()
                .rev()
                .map(|line| serde_json::from_str(line).unwrap())
                .collect();
        }
        self.lines.pop()
    }

    /// The next event as (type, name).
    pub(crate) async fn event(&mut self) -> (String, String) {
        let event = self.next().await.unwrap();
        let text = |pointer: &str| event.pointer(pointer).unwrap().as_str().unwrap().to_owned();
        (text("/type"), text("/object/metadata/name"))
    }
}

pub(crate) fn claim(name: &str, size: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "grows",
            "resources": { "requests": { "storage": size } },
        },
    })
}

pub(crate) fn config(name: &str, value: &str) -> Value {
    json!({ "metadata": { "name": name }, "data": { "key": value } })
}
