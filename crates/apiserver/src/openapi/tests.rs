use super::*;
use crate::kind::Origin;
use crate::kinds;

fn document(path: &str) -> Value {
    let (media_type, bytes) = respond(kinds::all(), path, "application/json").unwrap();
    assert_eq!(media_type, JSON);
    serde_json::from_slice(&bytes).unwrap()
}

fn v3(kind: &Kind) -> Value {
    document(&format!(
        "/openapi/v3/{}",
        group_version_path(kind.group, kind.version)
    ))
}

/// Every reference in a document.
fn references(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
            map.values().for_each(|below| references(below, found));
        }
        Value::Array(list) => list.iter().for_each(|below| references(below, found)),
        _ => {}
    }
}

#[test]
fn every_kind_has_a_definition_with_its_group_version_kind() {
    // Fails when kubectl explain or kubectl apply cannot find the schema of a kind of the table.
    let v2 = document("/openapi/v2");
    for kind in kinds::all() {
        let gvk = json!([{"group": kind.group, "version": kind.version, "kind": kind.kind}]);
        let has_it = |schemas: &Value| {
            let schema = &schemas[schemas::component_name(kind)];
            assert_eq!(schema["x-kubernetes-group-version-kind"], gvk, "{kind:?}");
            for field in ["apiVersion", "kind", "metadata"] {
                assert!(
                    schema["properties"][field].is_object(),
                    "{kind:?} has no {field}"
                );
            }
        };
        has_it(&v3(kind)["components"]["schemas"]);
        has_it(&v2["definitions"]);
    }
}

#[test]
fn every_reference_leads_somewhere() {
    // Fails when a definition is renamed in one place only.
    for path in group_versions(kinds::all())
        .iter()
        .map(|(group, version)| group_version_path(group, version))
    {
        let document = document(&format!("/openapi/v3/{path}"));
        let mut found = Vec::new();
        references(&document, &mut found);
        for reference in found {
            assert!(
                document
                    .pointer(reference.strip_prefix('#').unwrap())
                    .is_some(),
                "{path}: {reference}"
            );
        }
    }
    let v2 = document("/openapi/v2");
    let mut found = Vec::new();
    references(&v2, &mut found);
    for reference in found {
        assert!(
            v2.pointer(reference.strip_prefix('#').unwrap()).is_some(),
            "v2: {reference}"
        );
    }
}

#[test]
fn a_patch_takes_the_parameters_that_kubectl_looks_for() {
    // Fails when kubectl falls back to validation on its own side, or refuses --dry-run=server.
    for kind in kinds::all().iter().filter(|kind| kind.answer.is_none()) {
        let place = if kind.namespaced {
            "/namespaces/{namespace}"
        } else {
            ""
        };
        let root = group_version_path(kind.group, kind.version);
        let path = format!("/{root}{place}/{}/{{name}}", kind.plural);
        let document = v3(kind);
        let patch = &document["paths"][&path]["patch"];
        assert_eq!(
            patch["x-kubernetes-group-version-kind"],
            schemas::group_version_kind(kind),
            "{path}"
        );
        let names: Vec<&str> = patch["parameters"]
            .as_array()
            .unwrap()
            .iter()
            .map(|parameter| parameter["name"].as_str().unwrap())
            .collect();
        assert_eq!(
            names,
            ["dryRun", "fieldManager", "fieldValidation", "force"],
            "{path}"
        );
        let strategic = patch["requestBody"]["content"]
            .get("application/strategic-merge-patch+json")
            .is_some();
        assert_eq!(strategic, kind.origin != Origin::Custom, "{path}");
    }
}

#[test]
fn lists_that_the_server_merges_by_key_say_so() {
    // Fails when kubectl would replace a list of which the server merges the entries, or the other way round.
    let mut marked = 0;
    for kind in kinds::all() {
        let document = v3(kind);
        let mut schemas = document["components"]["schemas"]
            .as_object()
            .unwrap()
            .clone();
        for (path, keys) in kind.keyed_lists {
            let list = schemas::property(&mut schemas, &schemas::component_name(kind), path);
            let list = list.unwrap_or_else(|| panic!("{kind:?} has no field {path}"));
            assert_eq!(
                list["x-kubernetes-list-map-keys"],
                json!(keys),
                "{kind:?} {path}"
            );
            assert_eq!(
                list["x-kubernetes-patch-merge-key"],
                json!(keys[0]),
                "{kind:?} {path}"
            );
            marked += 1;
        }
        for path in kind.atomic_maps {
            let map = schemas::property(&mut schemas, &schemas::component_name(kind), path);
            let map = map.unwrap_or_else(|| panic!("{kind:?} has no field {path}"));
            assert_eq!(map["x-kubernetes-map-type"], "atomic", "{kind:?} {path}");
        }
    }
    assert!(marked > 0);
}

#[test]
fn sizes_are_quantities_and_enums_are_strings() {
    // Fails when a schema that a Rust type gives reaches kubectl as it is.
    let document = document("/openapi/v3/apis/trellis.dev/v1alpha1");
    let schemas = &document["components"]["schemas"];
    let capacity = &schemas["dev.trellis.v1alpha1.VolumeSpec"]["properties"]["capacity"];
    assert_eq!(
        capacity["allOf"],
        json!([schemas::reference(schemas::QUANTITY)])
    );
    assert_eq!(
        schemas[schemas::QUANTITY]["oneOf"],
        json!([{"type": "string"}, {"type": "number"}])
    );
    let phase = &schemas["dev.trellis.v1alpha1.VolumePhase"];
    assert_eq!(phase["type"], "string");
    assert!(
        phase["enum"]
            .as_array()
            .unwrap()
            .contains(&json!("Resizing"))
    );
    assert!(!document.to_string().contains("x-kubernetes-int-or-string"));
}

#[test]
fn the_index_points_to_documents_and_names_their_content() {
    // Fails when kubectl's cache cannot tell a new document from an old one, or finds none.
    let index = document("/openapi/v3");
    let paths = index["paths"].as_object().unwrap();
    assert_eq!(paths.len(), group_versions(kinds::all()).len());
    for (path, entry) in paths {
        let (url, hash) = entry["serverRelativeURL"]
            .as_str()
            .unwrap()
            .split_once("?hash=")
            .unwrap();
        assert_eq!(url, format!("/openapi/v3/{path}"));
        assert_eq!(hash.len(), 16);
        assert!(respond(kinds::all(), url, "").is_some());
    }
    assert!(respond(kinds::all(), "/openapi/v3/apis/apps/v1", "").is_none());
    assert!(respond(kinds::all(), "/openapi/v4", "").is_none());
}

#[test]
fn old_kubectl_gets_protobuf_and_everyone_else_json() {
    // Fails when client-go's names for the encoding are not recognised.
    for (accept, protobuf) in [
        (
            "application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
            true,
        ),
        (
            "application/com.github.proto-openapi.spec.v2@v1.0.protobuf",
            true,
        ),
        (
            "application/com.github.proto-openapi.spec.v2.v1.0+protobuf, application/json",
            true,
        ),
        (
            "application/json, application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
            false,
        ),
        ("*/*", false),
        ("", false),
    ] {
        assert_eq!(wants_protobuf(accept), protobuf, "{accept}");
    }
}

/// One field of a protobuf message.
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

/// Decodes one message, without knowing its type: its fields by number.
fn decode(mut bytes: &[u8]) -> Vec<(u64, Field)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (first, rest) = bytes.split_first().unwrap();
            *bytes = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                return value;
            }
        }
        panic!("a number longer than 64 bits");
    }
    fn take(bytes: &mut &[u8], length: usize) -> Vec<u8> {
        let (taken, rest) = bytes.split_at(length);
        *bytes = rest;
        taken.to_vec()
    }
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut bytes)),
            1 => Field::Bytes(take(&mut bytes, 8)),
            2 => {
                let length = varint(&mut bytes);
                Field::Bytes(take(&mut bytes, usize::try_from(length).unwrap()))
            }
            other => panic!("wire type {other} is never written"),
        };
        fields.push((tag >> 3, field));
    }
    fields
}

/// All messages or strings in a field.
fn all(bytes: &[u8], number: u64) -> Vec<Vec<u8>> {
    let of_number = |(found, field): (u64, Field)| match field {
        Field::Bytes(bytes) if found == number => Some(bytes),
        _ => None,
    };
    decode(bytes).into_iter().filter_map(of_number).collect()
}

fn one(bytes: &[u8], number: u64) -> Vec<u8> {
    all(bytes, number).into_iter().next().unwrap_or_default()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

#[test]
fn the_protobuf_says_what_the_json_says() {
    // Fails when a field number is wrong, or a definition, a property or an extension is lost on the way.
    let accept = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf";
    let (media_type, bytes) = respond(kinds::all(), "/openapi/v2", accept).unwrap();
    assert_eq!(media_type, V2_PROTOBUF);
    let json = document("/openapi/v2");
    assert_eq!(text(one(&bytes, 1)), "2.0");

    let definitions = all(&one(&bytes, 9), 1);
    assert_eq!(
        definitions.len(),
        json["definitions"].as_object().unwrap().len()
    );
    for definition in definitions {
        let (name, schema) = (text(one(&definition, 1)), one(&definition, 2));
        let wanted = &json["definitions"][&name];
        assert_eq!(
            text(one(&schema, 4)),
            wanted["description"].as_str().unwrap_or_default(),
            "{name}"
        );
        assert_eq!(
            text(one(&one(&schema, 22), 1)),
            wanted["type"].as_str().unwrap_or_default(),
            "{name}"
        );
        for property in all(&one(&schema, 25), 1) {
            let (field, property) = (text(one(&property, 1)), one(&property, 2));
            let wanted = &wanted["properties"][&field];
            assert!(wanted.is_object(), "{name} has no {field}");
            assert_eq!(
                text(one(&property, 1)),
                wanted["$ref"].as_str().unwrap_or_default(),
                "{name}.{field}"
            );
        }
        for extension in all(&schema, 31) {
            let value: Value = serde_json::from_slice(&one(&one(&extension, 2), 2)).unwrap();
            assert_eq!(value, wanted[text(one(&extension, 1))], "{name}");
        }
    }

    let paths = all(&one(&bytes, 8), 2);
    assert_eq!(paths.len(), json["paths"].as_object().unwrap().len());
    for path in paths {
        let patch = one(&one(&path, 2), 8);
        if patch.is_empty() {
            continue;
        }
        let names: Vec<String> = all(&patch, 8)
            .iter()
            .map(|item| one(item, 1))
            .map(|parameter| one(&one(&one(&parameter, 2), 3), 4))
            .map(text)
            .filter(|name| !name.is_empty())
            .collect();
        assert_eq!(
            names,
            ["dryRun", "fieldManager", "fieldValidation", "force"]
        );
        assert_eq!(all(&patch, 13).len(), 2, "action and group-version-kind");
    }
}

#[test]
fn a_parameter_of_a_path_is_required_in_the_protobuf_too() {
    // Fails when booleans are written under a wrong number or in a wrong way.
    let (_, bytes) = respond(
        kinds::all(),
        "/openapi/v2",
        "application/x.proto-openapi.spec.v2+protobuf",
    )
    .unwrap();
    let path = all(&one(&bytes, 8), 2)
        .into_iter()
        .find(|path| text(one(path, 1)) == "/api/v1/namespaces/{name}")
        .unwrap();
    let parameter = one(&one(&one(&path, 2), 9), 1);
    let in_path = one(&one(&parameter, 2), 4);
    assert_eq!(text(one(&in_path, 4)), "name");
    assert!(
        decode(&in_path)
            .iter()
            .any(|(number, field)| *number == 1 && matches!(field, Field::Number(1)))
    );
}
