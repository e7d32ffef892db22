//! From OpenAPI version 3 to version 2 (Swagger), which knows no alternatives and keeps bodies among the parameters.

use serde_json::{Map, Value, json};

use super::schemas::REF_PREFIX;

/// One path with its operations.
pub(super) fn path_item(item: Value) -> Value {
    let Value::Object(item) = item else {
        return item;
    };
    let converted: Map<String, Value> = item
        .into_iter()
        .map(|(name, value)| match (name.as_str(), value) {
            ("parameters", Value::Array(list)) => (name, list.into_iter().map(parameter).collect()),
            (_, value) => (name, operation(value)),
        })
        .collect();
    Value::Object(converted)
}

fn operation(operation: Value) -> Value {
    let Value::Object(mut operation) = operation else {
        return operation;
    };
    let mut parameters = Vec::new();
    if let Some(Value::Object(body)) = operation.remove("requestBody") {
        let content = body.get("content").and_then(Value::as_object);
        let media_types: Vec<&String> = content.into_iter().flat_map(Map::keys).collect();
        let first = content.and_then(|content| content.values().next());
        operation.insert("consumes".to_owned(), json!(media_types));
        parameters.push(json!({
            "name": "body",
            "in": "body",
            "required": body.get("required"),
            "schema": schema(first.map(|first| first["schema"].clone()).unwrap_or_default()),
        }));
    }
    if let Some(Value::Array(list)) = operation.remove("parameters") {
        parameters.extend(list.into_iter().map(parameter));
    }
    operation.insert("parameters".to_owned(), json!(parameters));
    if let Some(Value::Object(responses)) = operation.get_mut("responses") {
        for response in responses.values_mut().filter_map(Value::as_object_mut) {
            if let Some(content) = response.remove("content") {
                response.insert(
                    "schema".to_owned(),
                    schema(content["application/json"]["schema"].clone()),
                );
            }
        }
    }
    operation.insert("produces".to_owned(), json!(["application/json"]));
    operation.insert("schemes".to_owned(), json!(["https"]));
    Value::Object(operation)
}

/// The type of a parameter stands beside its name.
fn parameter(parameter: Value) -> Value {
    let Value::Object(mut parameter) = parameter else {
        return parameter;
    };
    if let Some(Value::Object(schema)) = parameter.remove("schema") {
        parameter.extend(schema);
    }
    Value::Object(parameter)
}

/// One schema and all below it.
pub(super) fn schema(value: Value) -> Value {
    let Value::Object(mut found) = value else {
        return value;
    };
    found.remove("nullable");
    found.remove("default");
    found.remove("anyOf");
    found.remove("not");
    if found.remove("oneOf").is_some() {
        // Quantities and int-or-strings: a string, which to kubectl's validation may also be a number.
        found.insert("type".to_owned(), json!("string"));
    }
    if let Some(reference) = found
        .get("allOf")
        .and_then(|all| all.pointer("/0/$ref"))
        .cloned()
    {
        found.remove("allOf");
        found.insert("$ref".to_owned(), reference);
    }
    if let Some(Value::String(reference)) = found.get_mut("$ref")
        && let Some(name) = reference.strip_prefix(REF_PREFIX)
    {
        *reference = format!("#/definitions/{name}");
    }
    if let Some(Value::Object(properties)) = found.get_mut("properties") {
        for property in properties.values_mut() {
            *property = schema(property.take());
        }
    }
    for keyword in ["items", "additionalProperties"] {
        if let Some(below) = found.get_mut(keyword) {
            *below = schema(below.take());
        }
    }
    Value::Object(found)
}
