//! What a request asks for: its path, its query and its body.

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::Value;

use crate::kind::{Kind, Part};
use crate::protobuf_body;
use crate::status::Status;

/// The largest body that is read; as in Kubernetes.
pub(crate) const BODY_BYTES_MAX: usize = 3 << 20;

/// The objects that a path names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Index of the kind.
    pub(crate) kind: usize,
    /// The namespace; `None` means all of them, or that the kind has none.
    pub(crate) namespace: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) part: Part,
}

impl Target {
    /// Reads `/api/v1/namespaces/NS/PLURAL/NAME/status` and its relatives.
    pub(crate) fn parse(kinds: &[Kind], path: &str) -> Option<Target> {
        let segments: Vec<String> = path
            .trim_matches('/')
            .split('/')
            .map(|part| percent_decoded(part, false))
            .collect();
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        let (group, version, rest) = match segments.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return None,
        };
        let find = |plural: &str| {
            kinds.iter().position(|kind| {
                kind.group == group && kind.version == version && kind.plural == plural
            })
        };
        let (namespace, plural, rest) = match rest {
            ["namespaces", namespace, plural, rest @ ..]
                if find(plural).is_some_and(|kind| kinds[kind].namespaced) =>
            {
                (Some((*namespace).to_owned()), *plural, rest)
            }
            [plural, rest @ ..] => (None, *plural, rest),
            [] => return None,
        };
        let kind = find(plural)?;
        let (name, part) = match rest {
            [] => (None, Part::Main),
            [name] => (Some((*name).to_owned()), Part::Main),
            [name, "status"] if kinds[kind].status => (Some((*name).to_owned()), Part::Status),
            [name, "approval"] if kinds[kind].approval => {
                (Some((*name).to_owned()), Part::Approval)
            }
            _ => return None,
        };
        if name.is_some() && kinds[kind].namespaced && namespace.is_none() {
            return None;
        }
        Some(Target {
            kind,
            namespace,
            name,
            part,
        })
    }

    /// The namespace as it stands in keys.
    pub(crate) fn namespace_key(&self) -> &str {
        self.namespace.as_deref().unwrap_or_default()
    }
}

/// The query parameters.
#[derive(Clone, Debug, Default)]
pub(crate) struct Query {
    pairs: Vec<(String, String)>,
}

impl Query {
    pub(crate) fn parse(query: &str) -> Query {
        let pairs = query
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| {
                let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                (percent_decoded(key, true), percent_decoded(value, true))
            });
        Query {
            pairs: pairs.collect(),
        }
    }

    /// A parameter; empty if it is not there.
    pub(crate) fn get(&self, name: &str) -> &str {
        let found = self.pairs.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str()).unwrap_or_default()
    }

    /// A parameter that is true when it is there, unless it says otherwise.
    pub(crate) fn flag(&self, name: &str) -> bool {
        let there = self.pairs.iter().any(|(key, _)| key == name);
        there
            && !matches!(
                self.get(name),
                "0" | "false" | "False" | "f" | "F" | "FALSE"
            )
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<u64>, Status> {
        match self.get(name) {
            "" => Ok(None),
            text if text.starts_with('-') => Ok(None),
            text => text.parse().map(Some).map_err(|_| {
                Status::bad_request(format!(
                    "invalid resource version: {name}: Invalid value: {text:?}: strconv.ParseUint: parsing {text:?}: invalid syntax"
                ))
            }),
        }
    }

    /// Whether the write is only to be tried.
    pub(crate) fn dry_run(&self) -> Result<bool, Status> {
        match self.get("dryRun") {
            "" => Ok(false),
            "All" => Ok(true),
            other => Err(Status::bad_request(format!(
                "dryRun: Unsupported value: {other:?}: supported values: \"All\""
            ))),
        }
    }
}

fn percent_decoded(text: &str, plus_is_space: bool) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let digit = |byte: u8| {
            char::from(byte)
                .to_digit(16)
                .and_then(|digit| u8::try_from(digit).ok())
        };
        rest = tail;
        match (first, tail) {
            (b'%', [high, low, after @ ..]) => match (digit(*high), digit(*low)) {
                (Some(high), Some(low)) => {
                    bytes.push(high * 16 + low);
                    rest = after;
                }
                _ => bytes.push(b'%'),
            },
            (b'+', _) if plus_is_space => bytes.push(b' '),
            (byte, _) => bytes.push(*byte),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Reads a body, up to its largest size.
pub(crate) async fn read_body<B>(body: B) -> Result<Bytes, Status>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    match Limited::new(body, BODY_BYTES_MAX).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.downcast_ref::<LengthLimitError>().is_some() => {
            Err(Status::too_large(BODY_BYTES_MAX))
        }
        Err(error) => Err(Status::bad_request(format!(
            "the body of the request broke off: {error}"
        ))),
    }
}

/// Reads a JSON or YAML body, or a protobuf one of the kinds that kubectl sends so.
pub(crate) fn parse_body(content_type: &str, body: &[u8]) -> Result<Value, Status> {
    let unsupported = || Status::unsupported_media_type(&["application/json", "application/yaml"]);
    match media_type(content_type) {
        "" | "application/json" | "*/*" => serde_json::from_slice(body).map_err(|error| {
            Status::bad_request(format!(
                "couldn't get version/kind; json parse error: {error}"
            ))
        }),
        "application/yaml" | "application/x-yaml" => parse_yaml(body),
        "application/vnd.kubernetes.protobuf" => {
            protobuf_body::decode(body).ok_or_else(unsupported)
        }
        _ => Err(unsupported()),
    }
}

/// Reads YAML, of which JSON is a part.
pub(crate) fn parse_yaml(body: &[u8]) -> Result<Value, Status> {
    if let Ok(value) = serde_json::from_slice(body) {
        return Ok(value);
    }
    serde_saphyr::from_slice(body)
        .map_err(|error| Status::bad_request(format!("error decoding YAML: {error}")))
}

/// The media type without its parameters.
pub(crate) fn media_type(content_type: &str) -> &str {
    content_type.split(';').next().unwrap_or_default().trim()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_what_kubernetes_says_they_name() {
        // Fails if a path reaches another object, or an unknown path reaches any.
        let kinds = crate::kinds::all();
        let parse = |path: &str| {
            Target::parse(kinds, path).map(|target| {
                (
                    kinds[target.kind].plural,
                    target.namespace,
                    target.name,
                    target.part,
                )
            })
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(
            parse("/api/v1/namespaces/a"),
            Some(("namespaces", None, some("a"), Part::Main))
        );
        assert_eq!(
            parse("/api/v1/namespaces/a/status"),
            Some(("namespaces", None, some("a"), Part::Status))
        );
        assert_eq!(
            parse("/api/v1/pods"),
            Some(("pods", None, None, Part::Main))
        );
        assert_eq!(
            parse("/api/v1/namespaces/a/pods/b%2Dc/status"),
            Some(("pods", some("a"), some("b-c"), Part::Status))
        );
        assert_eq!(
            parse("/apis/storage.k8s.io/v1/storageclasses/x"),
            Some(("storageclasses", None, some("x"), Part::Main))
        );
        let request = "/apis/certificates.k8s.io/v1/certificatesigningrequests/x/approval";
        assert_eq!(
            parse(request),
            Some((
                "certificatesigningrequests",
                None,
                some("x"),
                Part::Approval
            ))
        );
        for wrong in [
            "/api/v1/namespaces/a/approval",
            "/",
            "/api",
            "/api/v1",
            "/api/v2/pods",
            "/api/v1/foo",
            "/api/v1/pods/x",
            "/api/v1/namespaces/a/pods/b/log",
            "/apis/x/v1/pods",
            "/api/v1/namespaces/a/nodes/b",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn queries_are_decoded() {
        // Fails if an escaped selector arrives mangled.
        let query =
            Query::parse("labelSelector=a+in+%28b%2Cc%29&watch=1&x=%zz&limit=-1&watch2=false");
        assert_eq!(query.get("labelSelector"), "a in (b,c)");
        assert!(query.flag("watch"));
        assert!(!query.flag("watch2"));
        assert_eq!(query.get("x"), "%zz");
        assert_eq!(query.number("limit").unwrap(), None);
    }
}
