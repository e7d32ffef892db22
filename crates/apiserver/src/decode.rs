//! Decodes what a client sent into an object of its kind, with a list of the fields that the kind does not have.

use std::sync::OnceLock;

use serde_json::{Map, Value};

use crate::kind::Kind;
use crate::status::Status;

/// Unknown fields that are named at most.
const UNKNOWN_MAX: usize = 100;

/// What to do about fields that the kind does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldValidation {
    Ignore,
    Warn,
    Strict,
}

impl FieldValidation {
    pub(crate) fn parse(text: &str) -> Result<FieldValidation, Status> {
        match text {
            "" | "Warn" => Ok(FieldValidation::Warn),
            "Ignore" => Ok(FieldValidation::Ignore),
            "Strict" => Ok(FieldValidation::Strict),
            other => Err(Status::bad_request(format!(
                "fieldValidation: Unsupported value: {other:?}: supported values: \"\", \"Ignore\", \"Strict\", \"Warn\""
            ))),
        }
    }
}

/// An object of its kind, and what fell out of it.
#[derive(Debug)]
pub(crate) struct Decoded {
    pub(crate) object: Value,
    pub(crate) unknown: Vec<String>,
}

/// Decodes a whole object, as POST and PUT bring it.
pub(crate) fn object(
    kind: &Kind,
    mut value: Value,
    validation: FieldValidation,
) -> Result<(Value, Vec<String>), Status> {
    identify(kind, &mut value)?;
    let decoded = normalise(kind, value).map_err(|error| malformed(kind, &error))?;
    if validation == FieldValidation::Strict && !decoded.unknown.is_empty() {
        let why = format!("strict decoding error: {}", decoded.unknown.join(", "));
        return Err(Status::bad_request(unfit(kind, &why)));
    }
    let warnings = if validation == FieldValidation::Warn {
        decoded.unknown
    } else {
        Vec::new()
    };
    Ok((decoded.object, warnings))
}

/// Decodes a value of the kind; fields that the kind does not have fall out and are named.
pub(crate) fn normalise(kind: &Kind, value: Value) -> Result<Decoded, serde_json::Error> {
    let object = (kind.normalise)(value.clone())?;
    let mut unknown = Vec::new();
    missing(kind, &mut Vec::new(), &value, &object, &mut unknown);
    let unknown = unknown
        .into_iter()
        .map(|path| format!("unknown field {path:?}"))
        .collect();
    Ok(Decoded { object, unknown })
}

/// Decodes a value of the kind for somebody who does not ask what fell out.
pub(crate) fn normalise_silently(kind: &Kind, value: Value) -> Result<Decoded, serde_json::Error> {
    Ok(Decoded {
        object: (kind.normalise)(value)?,
        unknown: Vec::new(),
    })
}

/// The answer to a whole object that cannot be one of its kind.
pub(crate) fn malformed(kind: &Kind, error: &serde_json::Error) -> Status {
    Status::bad_request(unfit(kind, &error.to_string()))
}

fn unfit(kind: &Kind, why: &str) -> String {
    let Kind {
        kind: name,
        version,
        ..
    } = kind;
    format!("{name} in version {version:?} cannot be handled as a {name}: {why}")
}

/// Checks `apiVersion` and `kind`, and fills them in where they are missing.
pub(crate) fn identify(kind: &Kind, value: &mut Value) -> Result<(), Status> {
    let Value::Object(map) = value else {
        return Err(Status::bad_request(unfit(
            kind,
            "the body is not an object",
        )));
    };
    let text = |map: &Map<String, Value>, field: &str| {
        map.get(field)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let (version, name) = (text(map, "apiVersion"), text(map, "kind"));
    let expected = kind.api_version();
    if (!version.is_empty() && version != expected) || (!name.is_empty() && name != kind.kind) {
        return Err(Status::bad_request(format!(
            "{name} in version {version:?} cannot be handled as a {}: it is not {expected} {}",
            kind.kind, kind.kind
        )));
    }
    map.insert("apiVersion".to_owned(), Value::from(expected));
    map.insert("kind".to_owned(), Value::from(kind.kind));
    Ok(())
}

/// Collects the paths that are in `sent` but not in `kept`, unless the kind's schema knows them.
fn missing(
    kind: &Kind,
    path: &mut Vec<Step>,
    sent: &Value,
    kept: &Value,
    unknown: &mut Vec<String>,
) {
    match (sent, kept) {
        (Value::Object(sent), Value::Object(kept)) => {
            for (field, value) in sent.iter().filter(|(_, value)| !value.is_null()) {
                path.push(Step::Field(field.clone()));
                match kept.get(field) {
                    Some(kept) => missing(kind, path, value, kept, unknown),
                    None if unknown.len() < UNKNOWN_MAX && !is_known(kind, path) => {
                        unknown.push(printed(path));
                    }
                    None => {}
                }
                path.pop();
            }
        }
        (Value::Array(sent), Value::Array(kept)) => {
            for (index, (sent, kept)) in sent.iter().zip(kept).enumerate() {
                path.push(Step::Index(index));
                missing(kind, path, sent, kept, unknown);
                path.pop();
            }
        }
        _ => {}
    }
}

#[derive(Debug)]
enum Step {
    Field(String),
    Index(usize),
}

fn printed(path: &[Step]) -> String {
    let mut text = String::new();
    for step in path {
        match step {
            Step::Field(field) if text.is_empty() => text.push_str(field),
            Step::Field(field) => {
                text.push('.');
                text.push_str(field);
            }
            Step::Index(index) => text.push_str(&format!("[{index}]")),
        }
    }
    text
}

/// Whether the kind's schema has the path: a type may leave out a value that is empty.
fn is_known(kind: &Kind, path: &[Step]) -> bool {
    let root = schema(kind);
    let mut at = root;
    for step in path {
        at = resolved(root, at);
        let next = match step {
            Step::Field(field) => at
                .get("properties")
                .and_then(|properties| properties.get(field))
                .or_else(|| {
                    at.get("additionalProperties")
                        .filter(|value| value.is_object())
                }),
            Step::Index(_) => at.get("items"),
        };
        match next {
            Some(next) => at = next,
            None => return false,
        }
    }
    true
}

/// Follows references and picks the one alternative that is not null.
fn resolved<'a>(root: &'a Value, mut at: &'a Value) -> &'a Value {
    /// References in a row; a schema that goes round in circles ends here.
    const HOPS_MAX: usize = 8;
    for _ in 0..HOPS_MAX {
        if let Some(reference) = at.get("$ref").and_then(Value::as_str) {
            match root.pointer(reference.trim_start_matches('#')) {
                Some(target) => at = target,
                None => return at,
            }
        } else if let Some(alternatives) = at
            .get("anyOf")
            .or_else(|| at.get("allOf"))
            .and_then(Value::as_array)
        {
            let real = |schema: &&Value| schema.get("type").is_none_or(|kind| kind != "null");
            match alternatives.iter().find(real) {
                Some(target) if at.get("properties").is_none() => at = target,
                _ => return at,
            }
        } else {
            return at;
        }
    }
    at
}

fn schema(kind: &Kind) -> &'static Value {
    static SCHEMAS: OnceLock<Vec<(String, Value)>> = OnceLock::new();
    static NOTHING: Value = Value::Null;
    let schemas = SCHEMAS.get_or_init(|| {
        let made = crate::kinds::all().iter().map(|kind| {
            let mut generator = schemars::generate::SchemaSettings::draft2020_12().into_generator();
            let mut schema = (kind.schema)(&mut generator).to_value();
            let definitions = generator.take_definitions(true);
            if let Value::Object(map) = &mut schema {
                map.insert("$defs".to_owned(), Value::Object(definitions));
            }
            (format!("{}/{}", kind.group, kind.kind), schema)
        });
        made.collect()
    });
    let wanted = format!("{}/{}", kind.group, kind.kind);
    schemas
        .iter()
        .find(|(name, _)| *name == wanted)
        .map_or(&NOTHING, |(_, schema)| schema)
}

/// The parts of `normal` that `sent` names: a type may fill in what the client left out.
pub(crate) fn restricted(normal: &Value, sent: &Value) -> Value {
    match (normal, sent) {
        (Value::Object(normal), Value::Object(sent)) => {
            let named = normal.iter().filter_map(|(field, value)| {
                Some((field.clone(), restricted(value, sent.get(field)?)))
            });
            Value::Object(named.collect())
        }
        (Value::Array(normal), Value::Array(sent)) if normal.len() == sent.len() => Value::Array(
            normal
                .iter()
                .zip(sent)
                .map(|(normal, sent)| restricted(normal, sent))
                .collect(),
        ),
        _ => normal.clone(),
    }
}
