//! Field selectors: `metadata.name=a,status.phase!=Bound`.

use std::fmt;

use serde_json::Value;

use crate::kind::Kind;
use crate::status::{Status, quoted};
use crate::store::memory::{ObjectPlace, Stored};

/// All terms must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FieldSelector {
    terms: Vec<Term>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Term {
    field: String,
    value: String,
    equal: bool,
}

/// Why a selector cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FieldSelectorError {
    #[error("invalid selector: '{term}'; can't understand '{term}'")]
    NoOperator { term: String },
    #[error("invalid field selector: invalid escape sequence: {0:?}")]
    Escape(String),
}

impl FieldSelector {
    pub(crate) fn parse(text: &str) -> Result<FieldSelector, FieldSelectorError> {
        let mut terms = Vec::new();
        for part in split(text) {
            if part.is_empty() {
                continue;
            }
            let (field, value, equal) =
                operator(part).ok_or_else(|| FieldSelectorError::NoOperator {
                    term: part.to_owned(),
                })?;
            terms.push(Term {
                field: field.to_owned(),
                value: unescape(value)?,
                equal,
            });
        }
        Ok(FieldSelector { terms })
    }

    /// The name of the only object that can match, if the selector says so.
    pub(crate) fn name(&self) -> Option<&str> {
        let mut terms = self.terms.iter();
        let name = terms.find(|term| term.equal && term.field == "metadata.name");
        name.map(|term| term.value.as_str())
    }

    /// Refuses a field by which the kind cannot be selected.
    pub(crate) fn check(&self, kind: &Kind) -> Result<(), Status> {
        for Term { field, .. } in &self.terms {
            let known = matches!(field.as_str(), "metadata.name" | "metadata.namespace")
                || kind.selectable_fields.contains(&field.as_str());
            if !known {
                return Err(Status::bad_request(format!(
                    "{} is not a known field selector: only \"metadata.name\", \"metadata.namespace\"",
                    quoted(field)
                )));
            }
        }
        Ok(())
    }

    pub(crate) fn matches(&self, place: &ObjectPlace, stored: &Stored) -> bool {
        let mut parsed: Option<Value> = None;
        self.terms.iter().all(|term| {
            let equal = match term.field.as_str() {
                "metadata.name" => *place.name == *term.value,
                "metadata.namespace" => *place.namespace == *term.value,
                field => {
                    let object = parsed.get_or_insert_with(|| stored.value());
                    text_at(object, field) == term.value
                }
            };
            equal == term.equal
        })
    }
}

impl fmt::Display for FieldSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, term) in self.terms.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            let operator = if term.equal { "=" } else { "!=" };
            write!(f, "{}{operator}{}", term.field, escape(&term.value))?;
        }
        Ok(())
    }
}

/// The text of a field; a field that is not there counts as empty, as in Kubernetes.
fn text_at(object: &Value, field: &str) -> String {
    let found = field
        .split('.')
        .try_fold(object, |value, part| value.get(part));
    match found {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// Splits at commas that are not escaped.
fn split(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut start, mut escaped) = (0, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b',' => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn operator(term: &str) -> Option<(&str, &str, bool)> {
    let at = term.find(['=', '!'])?;
    let (field, rest) = term.split_at(at);
    if let Some(value) = rest.strip_prefix("!=") {
        return Some((field, value, false));
    }
    let value = rest.strip_prefix("==").or_else(|| rest.strip_prefix('='))?;
    Some((field, value, true))
}

fn escape(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len());
    for letter in value.chars() {
        if matches!(letter, '\\' | ',' | '=') {
            escaped.push('\\');
        }
        escaped.push(letter);
    }
    escaped
}

fn unescape(value: &str) -> Result<String, FieldSelectorError> {
    let mut plain = String::with_capacity(value.len());
    let mut letters = value.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => match letters.next() {
                Some(next @ ('\\' | ',' | '=')) => plain.push(next),
                _ => return Err(FieldSelectorError::Escape(value.to_owned())),
            },
            // An equals sign that is not escaped has no meaning within a value.
            '=' => return Err(FieldSelectorError::Escape(value.to_owned())),
            other => plain.push(other),
        }
    }
    Ok(plain)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_printed_is_parsed_to_the_same(
            terms in proptest::collection::vec(("[a-z.]{1,9}", "[a-z\\\\,=!]{0,9}", any::<bool>()), 0..4),
        ) {
            // Fails if a value with commas, equals signs or backslashes is not escaped.
            let terms = terms.into_iter().map(|(field, value, equal)| Term { field, value, equal }).collect();
            let selector = FieldSelector { terms };
            prop_assert_eq!(FieldSelector::parse(&selector.to_string()), Ok(selector));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC{0,40}|[a-z!=,\\\\]{0,40}") {
            // Fails if a user's text can bring the server down.
            let _ = FieldSelector::parse(&text);
        }
    }
}
