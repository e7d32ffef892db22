//! Tables: what `kubectl get` asks for. The server decides how a kind looks in a terminal.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::kind::{Column, Kind};

/// The group version in which tables and bare metadata are sent.
const META_API_VERSION: &str = "meta.k8s.io/v1";

/// What of an object goes with its row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IncludeObject {
    /// Its metadata: what kubectl needs to sort, to select, and to print namespaces and labels.
    #[default]
    Metadata,
    /// All of it.
    Object,
    /// Nothing.
    None,
}

impl IncludeObject {
    /// Reads the query parameter `includeObject`; `None` where its value is not one that Kubernetes knows.
    pub fn parse(value: &str) -> Option<Self> {
        match value {
            "" | "Metadata" => Some(Self::Metadata),
            "Object" => Some(Self::Object),
            "None" => Some(Self::None),
            _ => None,
        }
    }
}

/// Whether a client that sends this `Accept` header wants a table.
///
/// The first media type that we can serve decides, as kubectl lists them in the order of its preference.
pub fn wanted(accept: &str) -> bool {
    for range in accept.split(',') {
        let mut parts = range.split(';').map(str::trim);
        let media_type = parts.next().unwrap_or_default();
        if !matches!(media_type, "application/json" | "application/*" | "*/*") {
            continue;
        }
        let mut transform = None;
        let mut group_version = (None, None);
        for parameter in parts {
            match parameter.split_once('=') {
                Some(("as", kind)) => transform = Some(kind),
                Some(("g", group)) => group_version.0 = Some(group),
                Some(("v", version)) => group_version.1 = Some(version),
                _ => {}
            }
        }
        match transform {
            None => return false,
            Some("Table") if group_version == (Some("meta.k8s.io"), Some("v1")) => return true,
            Some(_) => {}
        }
    }
    false
}

/// The table of these objects; `list_meta` is the metadata of their list (or of the single object).
pub fn render(
    kind: &Kind,
    objects: &[Value],
    list_meta: Value,
    include_object: IncludeObject,
    now: Timestamp,
) -> Value {
    let rows: Vec<Value> = objects
        .iter()
        .map(|object| row(kind, object, include_object, now))
        .collect();
    json!({
        "kind": "Table",
        "apiVersion": META_API_VERSION,
        "metadata": list_meta,
        "columnDefinitions": kind.columns.iter().map(definition).collect::<Vec<_>>(),
        "rows": rows,
    })
}

fn definition(column: &Column) -> Value {
    // kubectl finds the column with the name by its format, whatever it is called.
    let format = if column.name == "Name" { "name" } else { "" };
    json!({
        "name": column.name,
        "type": column.r#type,
        "format": format,
        "description": column.description,
        "priority": column.priority,
    })
}

fn row(kind: &Kind, object: &Value, include_object: IncludeObject, now: Timestamp) -> Value {
    let cells: Vec<Value> = kind
        .columns
        .iter()
        .map(|column| (column.cell)(object, now))
        .collect();
    let mut row = json!({ "cells": cells });
    match include_object {
        IncludeObject::None => row["object"] = Value::Null,
        IncludeObject::Object => row["object"] = object.clone(),
        IncludeObject::Metadata => {
            row["object"] = json!({
                "kind": "PartialObjectMetadata",
                "apiVersion": META_API_VERSION,
                "metadata": object["metadata"],
            });
        }
    }
    row
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
