//! OpenAPI version 2 as protobuf, in the messages of gnostic's `openapi.v2.Document`.
//!
//! Only what our documents contain is encoded; every number below is a field number of that schema.

use serde_json::{Map, Value};

/// The document as bytes.
pub(super) fn encode(document: &Value) -> Vec<u8> {
    let mut out = Message::default();
    out.string(1, &document["swagger"]);
    out.message(2, |info| {
        info.string(1, &document["info"]["title"]);
        info.string(2, &document["info"]["version"]);
    });
    out.message(8, |paths| {
        for (path, item) in entries(&document["paths"]) {
            paths.named(2, path, |out| path_item(out, item));
        }
    });
    out.message(9, |definitions| {
        for (name, definition) in entries(&document["definitions"]) {
            definitions.named(1, name, |out| schema(out, definition));
        }
    });
    out.0
}

fn path_item(out: &mut Message, item: &Value) {
    const METHODS: [(&str, u32); 5] = [
        ("get", 2),
        ("put", 3),
        ("post", 4),
        ("delete", 5),
        ("patch", 8),
    ];
    for (method, field) in METHODS {
        if let Some(found) = item.get(method) {
            out.message(field, |out| operation(out, found));
        }
    }
    for found in items(&item["parameters"]) {
        out.message(9, |out| parameters_item(out, found));
    }
}

fn operation(out: &mut Message, operation: &Value) {
    out.strings(1, &operation["tags"]);
    out.string(5, &operation["operationId"]);
    out.strings(6, &operation["produces"]);
    out.strings(7, &operation["consumes"]);
    for found in items(&operation["parameters"]) {
        out.message(8, |out| parameters_item(out, found));
    }
    out.message(9, |responses| {
        for (code, response) in entries(&operation["responses"]) {
            // NamedResponseValue, whose value is one of: a response, a reference.
            responses.named(1, code, |value| {
                value.message(1, |out| {
                    out.string(1, &response["description"]);
                    if let Some(found) = response.get("schema") {
                        out.message(2, |item| item.message(1, |out| schema(out, found)));
                    }
                });
            });
        }
    });
    out.strings(10, &operation["schemes"]);
    out.extensions(13, operation);
}

fn parameters_item(out: &mut Message, parameter: &Value) {
    // ParametersItem is one of: a parameter, a reference. A parameter is one of: body, non-body.
    out.message(1, |out| match parameter["in"].as_str() {
        Some("body") => out.message(1, |body| {
            body.string(2, &parameter["name"]);
            body.string(3, &parameter["in"]);
            body.bool(4, &parameter["required"]);
            body.message(5, |out| schema(out, &parameter["schema"]));
        }),
        place => out.message(2, |non_body| {
            // In a path the type is field 5, in a query it is field 6.
            let (kind, r#type, unique) = if place == Some("path") {
                (4, 5, 19)
            } else {
                (3, 6, 20)
            };
            non_body.message(kind, |out| {
                out.bool(1, &parameter["required"]);
                out.string(2, &parameter["in"]);
                out.string(3, &parameter["description"]);
                out.string(4, &parameter["name"]);
                out.string(r#type, &parameter["type"]);
                out.bool(unique, &parameter["uniqueItems"]);
            });
        }),
    });
}

fn schema(out: &mut Message, found: &Value) {
    out.string(1, &found["$ref"]);
    out.string(2, &found["format"]);
    out.string(4, &found["description"]);
    out.double(7, &found["maximum"]);
    out.double(9, &found["minimum"]);
    out.int(11, &found["maxLength"]);
    out.int(12, &found["minLength"]);
    out.string(13, &found["pattern"]);
    out.int(14, &found["maxItems"]);
    out.int(15, &found["minItems"]);
    out.bool(16, &found["uniqueItems"]);
    out.strings(19, &found["required"]);
    for value in items(&found["enum"]) {
        out.message(20, |out| any(out, value));
    }
    match &found["additionalProperties"] {
        Value::Bool(allowed) => out.message(21, |item| item.varint(2, u64::from(*allowed))),
        below @ Value::Object(_) => {
            out.message(21, |item| item.message(1, |out| schema(out, below)))
        }
        _ => {}
    }
    if found["type"].is_string() {
        out.message(22, |item| item.string(1, &found["type"]));
    }
    if found["items"].is_object() {
        out.message(23, |item| {
            item.message(1, |out| schema(out, &found["items"]))
        });
    }
    if found["properties"].is_object() {
        out.message(25, |properties| {
            for (name, property) in entries(&found["properties"]) {
                properties.named(1, name, |out| schema(out, property));
            }
        });
    }
    out.extensions(31, found);
}

/// A free value travels as YAML text, and JSON is YAML.
fn any(out: &mut Message, value: &Value) {
    out.bytes(2, value.to_string().as_bytes());
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flat_map(Map::iter)
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// A protobuf message that is being written. Absent values write nothing.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    const VARINT: u32 = 0;
    const FIXED64: u32 = 1;
    const LENGTH_DELIMITED: u32 = 2;

    fn tag(&mut self, field: u32, wire_type: u32) {
        self.raw_varint(u64::from(field << 3 | wire_type));
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7f | 0x80).to_le_bytes()[0]);
            value >>= 7;
        }
        self.0.push(value.to_le_bytes()[0]);
    }

    fn varint(&mut self, field: u32, value: u64) {
        self.tag(field, Self::VARINT);
        self.raw_varint(value);
    }

    fn bytes(&mut self, field: u32, bytes: &[u8]) {
        self.tag(field, Self::LENGTH_DELIMITED);
        self.raw_varint(u64::try_from(bytes.len()).expect("a length in memory fits 64 bits"));
        self.0.extend_from_slice(bytes);
    }

    fn message(&mut self, field: u32, write: impl FnOnce(&mut Message)) {
        let mut below = Message::default();
        write(&mut below);
        self.bytes(field, &below.0);
    }

    /// An entry of a map, as gnostic has them: a name (1) and a value (2).
    fn named(&mut self, field: u32, name: &str, write: impl FnOnce(&mut Message)) {
        self.message(field, |entry| {
            entry.bytes(1, name.as_bytes());
            entry.message(2, write);
        });
    }

    fn string(&mut self, field: u32, value: &Value) {
        if let Some(text) = value.as_str().filter(|text| !text.is_empty()) {
            self.bytes(field, text.as_bytes());
        }
    }

    fn strings(&mut self, field: u32, list: &Value) {
        for item in items(list) {
            self.string(field, item);
        }
    }

    fn bool(&mut self, field: u32, value: &Value) {
        if value == &Value::Bool(true) {
            self.varint(field, 1);
        }
    }

    fn int(&mut self, field: u32, value: &Value) {
        if let Some(number) = value.as_u64() {
            self.varint(field, number);
        }
    }

    fn double(&mut self, field: u32, value: &Value) {
        if let Some(number) = value.as_f64() {
            self.tag(field, Self::FIXED64);
            self.0.extend_from_slice(&number.to_le_bytes());
        }
    }

    fn extensions(&mut self, field: u32, object: &Value) {
        for (name, value) in entries(object).filter(|(name, _)| name.starts_with("x-")) {
            self.named(field, name, |out| any(out, value));
        }
    }
}
