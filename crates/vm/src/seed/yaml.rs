//! YAML in, YAML out.
//!
//! What comes in was written by a user of the cluster, so its size, its depth and what its aliases expand to are bounded.
//! What goes out is read by cloud-init with PyYAML, which follows YAML 1.1. So strings are quoted wherever the two versions
//! could differ, and characters that PyYAML refuses are escaped.

use std::fmt::Write;

use serde_json::{Map, Value};
use serde_saphyr::Options;

use super::SeedError;

/// The longest text that is read: an object of Kubernetes is not longer.
pub const TEXT_BYTES_MAX: usize = 2 << 20;
/// How deep values may lie within each other.
pub const DEPTH_MAX: usize = 32;
/// PyYAML looks for the colon behind a name within 1024 characters. A character takes up to ten when it is escaped.
const NAME_CHARS_MAX: usize = 100;

const NODES_MAX: usize = 50_000;
const ALIASES_MAX: usize = 1000;
/// How often what an anchor stands for may be repeated in all.
const REPLAYED_MAX: usize = 50_000;
const WHY_CHARS_MAX: usize = 200;

/// Reads one YAML document. `place` names it in errors.
pub fn read(text: &str, place: &str) -> Result<Value, SeedError> {
    let place = || place.to_owned();
    if text.len() > TEXT_BYTES_MAX {
        let bytes = text.len();
        return Err(SeedError::TooLong {
            place: place(),
            bytes,
        });
    }
    let value = serde_saphyr::from_str_with_options(text, options()).map_err(|error| {
        let line = error
            .to_string()
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned();
        let why = line.chars().take(WHY_CHARS_MAX).collect();
        SeedError::BadYaml {
            place: place(),
            why,
        }
    })?;
    check_names(&value, &place())?;
    Ok(value)
}

/// Reads a mapping. An empty text is an empty one.
pub fn read_mapping(text: &str, place: &str) -> Result<Map<String, Value>, SeedError> {
    match read(text, place)? {
        Value::Object(mapping) => Ok(mapping),
        Value::Null => Ok(Map::new()),
        _ => Err(SeedError::NotAMapping {
            place: place.to_owned(),
        }),
    }
}

fn options() -> Options {
    let budget = serde_saphyr::budget! {
        max_depth: DEPTH_MAX,
        flow_nesting_limit: DEPTH_MAX,
        max_nodes: NODES_MAX,
        max_events: 3 * NODES_MAX,
        max_aliases: ALIASES_MAX,
        max_anchors: ALIASES_MAX,
        max_total_scalar_bytes: TEXT_BYTES_MAX,
    };
    serde_saphyr::options! {
        budget: budget,
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: REPLAYED_MAX,
            max_replay_stack_depth: DEPTH_MAX,
        },
        // cloud-init reads 0644 as an octal number, and hands it to chmod.
        legacy_octal_numbers: true,
    }
}

fn check_names(value: &Value, place: &str) -> Result<(), SeedError> {
    match value {
        Value::Object(mapping) => mapping.iter().try_for_each(|(name, value)| {
            if name.chars().count() > NAME_CHARS_MAX {
                return Err(SeedError::LongName {
                    place: place.to_owned(),
                    bytes: name.len(),
                    max: NAME_CHARS_MAX,
                });
            }
            check_names(value, place)
        }),
        Value::Array(items) => items.iter().try_for_each(|item| check_names(item, place)),
        _ => Ok(()),
    }
}

/// The YAML text of a value, ending in a line break. Names come in alphabetical order, so that equal values have equal
/// texts.
pub fn write(value: &Value) -> String {
    let mut out = String::new();
    put(&mut out, value, 0);
    out
}

/// Puts a value behind what stands in the line already, which ends in a colon, in a hyphen or is empty.
fn put(out: &mut String, value: &Value, indent: usize) {
    match value {
        Value::Object(mapping) if !mapping.is_empty() => {
            for (index, (name, value)) in mapping.iter().enumerate() {
                begin_line(out, index, indent);
                out.push_str(&quoted(name));
                out.push(':');
                put_nested(out, value, indent);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                begin_line(out, index, indent);
                out.push('-');
                put_nested(out, item, indent);
            }
        }
        scalar => {
            out.push_str(&scalar_text(scalar));
            out.push('\n');
        }
    }
}

fn put_nested(out: &mut String, value: &Value, indent: usize) {
    let is_nested = match value {
        Value::Object(mapping) => !mapping.is_empty(),
        Value::Array(items) => !items.is_empty(),
        _ => false,
    };
    out.push(if is_nested { '\n' } else { ' ' });
    if is_nested {
        out.push_str(&" ".repeat(indent + 2));
    }
    put(out, value, indent + 2);
}

fn begin_line(out: &mut String, index: usize, indent: usize) {
    // The first line has its indentation already.
    if index > 0 {
        out.push_str(&" ".repeat(indent));
    }
}

fn scalar_text(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Number(number) if number.is_f64() => float(&number.to_string()),
        Value::Array(_) => "[]".to_owned(),
        Value::Object(_) => "{}".to_owned(),
        other => other.to_string(),
    }
}

/// YAML 1.1 takes a number with an exponent for a float only if it has a point and the exponent a sign.
fn float(text: &str) -> String {
    let Some((digits, exponent)) = text.split_once('e') else {
        return text.to_owned();
    };
    let point = if digits.contains('.') { "" } else { ".0" };
    let sign = if exponent.starts_with(['-', '+']) {
        ""
    } else {
        "+"
    };
    format!("{digits}{point}e{sign}{exponent}")
}

/// The text as it is where no reader could take it for something else; else in double quotes.
fn quoted(text: &str) -> String {
    if is_plain(text) {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            ' '..='~' => out.push(letter),
            // Beyond ASCII everything is escaped: readers differ in what they call printable. Writing to a string does
            // not fail.
            _ if u32::from(letter) > 0xffff => drop(write!(out, "\\U{:08x}", u32::from(letter))),
            _ => drop(write!(out, "\\u{:04x}", u32::from(letter))),
        }
    }
    out.push('"');
    out
}

fn is_plain(text: &str) -> bool {
    const WORDS: [&str; 11] = [
        "y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf",
    ];
    let letter =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'/' | b'.');
    let begins = text
        .bytes()
        .next()
        .is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'/');
    let is_word = WORDS.iter().any(|word| text.eq_ignore_ascii_case(word));
    begins && text.bytes().all(letter) && !is_word
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_person_wrote_means_the_same_to_cloud_init() {
        // Fails if yes, an unquoted octal mode or a date changes its meaning between the two versions of YAML.
        let read = |text: &str| read(text, "the test").unwrap();
        assert_eq!(
            read("{a: yes, b: 'yes', c: 0644, d: '0644', e: 12:30}"),
            json!({"a": true, "b": "yes", "c": 420, "d": "0644", "e": "12:30"})
        );
        let text = write(
            &json!({"a": "yes", "b": "0644", "c": 1e300, "d": [], "e": {"f": [1, [2]]}, "g": "12:30"}),
        );
        assert_eq!(
            text,
            "a: \"yes\"\nb: \"0644\"\nc: 1.0e+300\nd: []\ne:\n  f:\n    - 1\n    -\n      - 2\ng: \"12:30\"\n"
        );
    }

    #[test]
    fn hostile_yaml_is_refused() {
        // Fails if an alias bomb, a deep nest, a huge text or a second document gets through.
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..12 {
            let items = vec![format!("*a{}", level - 1); 9].join(", ");
            writeln!(bomb, "a{level}: &a{level} [{items}]").unwrap();
        }
        let deep = format!("a: {}{}", "[".repeat(5000), "]".repeat(5000));
        let block: String = (0..2000)
            .map(|level| format!("{}a:\n", " ".repeat(level)))
            .collect();
        let long = format!("a: {}", "x".repeat(TEXT_BYTES_MAX));
        let name = format!("{}: 1", "x".repeat(500));
        for text in [
            bomb.as_str(),
            &deep,
            &block,
            &long,
            &name,
            "a: 1\n---\nb: 2",
            "a: [",
            "a: 1\na: 2",
            "\0",
        ] {
            let found = read(text, "the test");
            assert!(found.is_err(), "{:.60}", text);
        }
        assert!(matches!(
            read_mapping("- 1", "the test"),
            Err(SeedError::NotAMapping { .. })
        ));
        assert_eq!(read_mapping("", "the test").unwrap(), Map::new());
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let text = prop_oneof![
            "[ -~]{0,12}",
            any::<String>(),
            Just("yes".to_owned()),
            Just("~".to_owned())
        ];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-1e300f64..1e300).prop_map(Value::from),
            text.prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            let name = prop_oneof!["[a-z_]{1,8}", "[ -~]{1,12}"];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(name, inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        // Fails if a value does not read back as itself.
        #[test]
        fn what_is_written_reads_back(value in any_value()) {
            let text = write(&value);
            prop_assert!(text.bytes().all(|byte| byte == b'\n' || (b' '..=b'~').contains(&byte)), "{text}");
            prop_assert_eq!(read(&text, "the test"), Ok(value), "{}", text);
        }

        // Fails if any text makes the reader panic.
        #[test]
        fn any_text_is_read_or_refused(text in "[a-c:\\[\\]{}&*!|>'\"#%@,? \n-]{0,60}") {
            let _ = read_mapping(&text, "the test");
        }
    }
}
