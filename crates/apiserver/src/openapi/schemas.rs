//! Component schemas of the kinds of one group version, as Kubernetes publishes them.
//!
//! schemars describes the Rust types. This file turns that into what kubectl expects: names that include the group,
//! the group, version and kind on each kind, merge keys on keyed lists, and quantities as quantities.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ListMeta, ObjectMeta, Status};
use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::kind::{Kind, Origin};

pub(super) const REF_PREFIX: &str = "#/components/schemas/";
const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";
const LIST_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta";
pub(super) const STATUS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.Status";
pub(super) const DELETE_OPTIONS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions";
pub(super) const PATCH: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.Patch";
pub(super) const QUANTITY: &str = "io.k8s.apimachinery.pkg.api.resource.Quantity";
const GROUP_VERSION_KIND: &str = "x-kubernetes-group-version-kind";
const INT_OR_STRING: &str = "x-kubernetes-int-or-string";

/// How deep references and lists are followed on the way to a keyed list.
const RESOLVE_DEPTH_MAX: usize = 8;

/// The components of these kinds, which are all of one group version.
pub(super) fn of(kinds: &[&Kind]) -> Map<String, Value> {
    let mut generator = SchemaSettings::openapi3().into_generator();
    generator.subschema_for::<ObjectMeta>();
    generator.subschema_for::<ListMeta>();
    generator.subschema_for::<Status>();
    generator.subschema_for::<DeleteOptions>();
    generator.subschema_for::<Quantity>();
    let roots: Vec<(&Kind, Value)> = kinds
        .iter()
        .map(|kind| (*kind, root(kind, &mut generator)))
        .collect();
    let prefix = kinds
        .first()
        .map(|kind| component_prefix(kind))
        .unwrap_or_default();

    let mut schemas: Map<String, Value> = generator
        .take_definitions(true)
        .into_iter()
        .map(|(name, schema)| (qualified(&name, &prefix), clean(schema, &prefix)))
        .collect();
    if let Some(quantity) = schemas.get_mut(QUANTITY) {
        quantity["oneOf"] = json!([{"type": "string"}, {"type": "number"}]);
    }
    schemas.insert(
        PATCH.to_owned(),
        json!({"description": "A patch, in one of its dialects.", "type": "object"}),
    );
    for (kind, root) in roots {
        let name = component_name(kind);
        let mut schema = match root["$ref"].as_str() {
            Some(_) => schemas
                .remove(&name)
                .unwrap_or_else(|| json!({"type": "object"})),
            None => clean(root, &prefix),
        };
        finish_root(&mut schema, kind);
        schemas.insert(list_name(kind), list(kind));
        schemas.insert(name, schema);
    }
    mark_keyed_list(&mut schemas, OBJECT_META, "ownerReferences", &["uid"]);
    if let Some(finalizers) = property(&mut schemas, OBJECT_META, "finalizers") {
        finalizers["x-kubernetes-list-type"] = json!("set");
        finalizers["x-kubernetes-patch-strategy"] = json!("merge");
    }
    for kind in kinds {
        for (path, keys) in kind.keyed_lists {
            mark_keyed_list(&mut schemas, &component_name(kind), path, keys);
        }
        for path in kind.atomic_maps {
            if let Some(map) = property(&mut schemas, &component_name(kind), path) {
                map["x-kubernetes-map-type"] = json!("atomic");
            }
        }
    }
    schemas
}

/// `io.k8s.api.core.v1.Pod`, `io.k8s.api.storage.v1.StorageClass`, `dev.trellis.v1alpha1.Pool`.
pub(super) fn component_name(kind: &Kind) -> String {
    format!("{}{}", component_prefix(kind), kind.kind)
}

pub(super) fn list_name(kind: &Kind) -> String {
    format!("{}List", component_name(kind))
}

pub(super) fn reference(component: &str) -> Value {
    json!({"$ref": format!("{REF_PREFIX}{component}")})
}

pub(super) fn group_version_kind(kind: &Kind) -> Value {
    json!({"group": kind.group, "version": kind.version, "kind": kind.kind})
}

fn component_prefix(kind: &Kind) -> String {
    if kind.origin != Origin::Custom {
        let group = kind
            .group
            .split('.')
            .next()
            .filter(|group| !group.is_empty())
            .unwrap_or("core");
        return format!("io.k8s.api.{group}.{}.", kind.version);
    }
    let reversed: Vec<&str> = kind.group.rsplit('.').collect();
    format!("{}.{}.", reversed.join("."), kind.version)
}

/// A kind's own schema, transformed as the generator transforms the definitions.
fn root(kind: &Kind, generator: &mut SchemaGenerator) -> Value {
    let mut schema: Schema = (kind.schema)(generator);
    for transform in generator.transforms_mut() {
        transform.transform(&mut schema);
    }
    schema.to_value()
}

fn finish_root(schema: &mut Value, kind: &Kind) {
    schema[GROUP_VERSION_KIND] = json!([group_version_kind(kind)]);
    for (field, meaning) in [
        ("apiVersion", "Group and version of the kind."),
        ("kind", "The kind of this object."),
    ] {
        let property = &mut schema["properties"][field];
        if property.is_null() {
            *property = json!({"type": "string", "description": meaning});
        }
    }
    let metadata = &mut schema["properties"]["metadata"];
    if metadata.get("allOf").is_none() && metadata.get("$ref").is_none() {
        *metadata = json!({"allOf": [reference(OBJECT_META)]});
    }
    // Metadata may be generated by the server, so Kubernetes requires it of no manifest.
    if let Some(required) = schema["required"].as_array_mut() {
        required.retain(|field| field != "metadata");
    }
    if schema["required"].as_array().is_none_or(Vec::is_empty)
        && let Some(schema) = schema.as_object_mut()
    {
        schema.remove("required");
    }
}

fn list(kind: &Kind) -> Value {
    let gvk =
        json!({"group": kind.group, "version": kind.version, "kind": format!("{}List", kind.kind)});
    json!({
        "description": format!("A list of {}.", kind.plural),
        "type": "object",
        "required": ["items"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"allOf": [reference(LIST_META)]},
            "items": {"type": "array", "items": {"allOf": [reference(&component_name(kind))]}},
        },
        GROUP_VERSION_KIND: [gvk],
    })
}

/// Rust types carry no group in their names; Kubernetes' own (`io.k8s...`) do.
fn qualified(name: &str, prefix: &str) -> String {
    if name.starts_with("io.k8s.") {
        name.to_owned()
    } else {
        format!("{prefix}{name}")
    }
}

/// One schema and all below it, in Kubernetes' habits.
fn clean(schema: Value, prefix: &str) -> Value {
    let Value::Object(mut schema) = schema else {
        return schema;
    };
    schema.remove("$schema");
    schema.remove("title");
    if let Some(Value::String(reference)) = schema.get_mut("$ref")
        && let Some(name) = reference.strip_prefix(REF_PREFIX)
    {
        *reference = format!("{REF_PREFIX}{}", qualified(name, prefix));
    }
    for keyword in ["properties", "patternProperties"] {
        if let Some(Value::Object(properties)) = schema.get_mut(keyword) {
            for property in properties.values_mut() {
                *property = clean(property.take(), prefix);
            }
        }
    }
    for keyword in ["items", "additionalProperties", "not"] {
        if let Some(below) = schema.get_mut(keyword) {
            *below = clean(below.take(), prefix);
        }
    }
    for keyword in ["allOf", "anyOf", "oneOf"] {
        if let Some(Value::Array(alternatives)) = schema.get_mut(keyword) {
            for alternative in alternatives {
                *alternative = clean(alternative.take(), prefix);
            }
        }
    }
    join_null_alternative(&mut schema);
    join_enum_alternatives(&mut schema);
    if schema.remove(INT_OR_STRING).is_some() {
        mark_int_or_string(&mut schema);
    }
    Value::Object(schema)
}

/// The only int-or-string without a name of its own is our size, which is a quantity.
fn mark_int_or_string(schema: &mut Map<String, Value>) {
    let description = schema
        .get("description")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if description.starts_with("IntOrString is") {
        schema.insert("format".to_owned(), json!("int-or-string"));
        schema.insert(
            "oneOf".to_owned(),
            json!([{"type": "integer"}, {"type": "string"}]),
        );
    } else if !description.starts_with("Quantity is") {
        schema.insert("allOf".to_owned(), json!([reference(QUANTITY)]));
    }
}

/// `anyOf: [X, null]`, which an optional field becomes, is a nullable X.
fn join_null_alternative(schema: &mut Map<String, Value>) {
    let is_null =
        |alternative: &Value| alternative["enum"] == json!([null]) || alternative["type"] == "null";
    let Some(alternatives) = schema.get("anyOf").and_then(Value::as_array) else {
        return;
    };
    let [first, second] = alternatives.as_slice() else {
        return;
    };
    let other = match (is_null(first), is_null(second)) {
        (false, true) => first.clone(),
        (true, false) => second.clone(),
        _ => return,
    };
    schema.remove("anyOf");
    schema.insert("nullable".to_owned(), json!(true));
    if other.get("$ref").is_some() {
        schema.insert("allOf".to_owned(), json!([other]));
    } else if let Value::Object(other) = other {
        for (keyword, value) in other {
            schema.entry(keyword).or_insert(value);
        }
    }
}

/// A Rust enum with comments on its variants is one string with a list of values.
fn join_enum_alternatives(schema: &mut Map<String, Value>) {
    let Some(alternatives) = schema.get("oneOf").and_then(Value::as_array) else {
        return;
    };
    let mut values = Vec::new();
    for alternative in alternatives {
        match (alternative["type"].as_str(), alternative["enum"].as_array()) {
            (Some("string"), Some(more)) => values.extend(more.iter().cloned()),
            _ => return,
        }
    }
    schema.remove("oneOf");
    schema.insert("type".to_owned(), json!("string"));
    schema.insert("enum".to_owned(), json!(values));
}

/// Puts the merge keys on a list, so that kubectl merges by the keys by which the server merges.
fn mark_keyed_list(schemas: &mut Map<String, Value>, component: &str, path: &str, keys: &[&str]) {
    let list = property(schemas, component, path);
    if let Some(list) = list.filter(|list| list["type"] == "array") {
        list["x-kubernetes-list-type"] = json!("map");
        list["x-kubernetes-list-map-keys"] = json!(keys);
        list["x-kubernetes-patch-strategy"] = json!("merge");
        list["x-kubernetes-patch-merge-key"] = json!(keys.first());
    }
}

/// The schema of the field at a path with dots, wherever references and lists on the way lead.
pub(super) fn property<'a>(
    schemas: &'a mut Map<String, Value>,
    component: &str,
    path: &str,
) -> Option<&'a mut Value> {
    let mut component = component.to_owned();
    let mut pointer = String::new();
    for field in path.split('.') {
        (component, pointer) = resolve(schemas, &component, &pointer)?;
        pointer.push_str("/properties/");
        pointer.push_str(field);
    }
    schemas.get_mut(&component)?.pointer_mut(&pointer)
}

/// Where the properties of the schema at `pointer` are: behind a reference, or behind the items of a list.
fn resolve(
    schemas: &Map<String, Value>,
    component: &str,
    pointer: &str,
) -> Option<(String, String)> {
    let (mut component, mut pointer) = (component.to_owned(), pointer.to_owned());
    for _ in 0..RESOLVE_DEPTH_MAX {
        let schema = schemas.get(&component)?.pointer(&pointer)?;
        let reference = schema
            .get("$ref")
            .or_else(|| schema.pointer("/allOf/0/$ref"))
            .and_then(Value::as_str);
        if let Some(name) = reference.and_then(|reference| reference.strip_prefix(REF_PREFIX)) {
            (component, pointer) = (name.to_owned(), String::new());
        } else if schema.get("items").is_some() {
            pointer.push_str("/items");
        } else {
            return schema
                .get("properties")
                .map(|_| (component.clone(), pointer.clone()));
        }
    }
    None
}
