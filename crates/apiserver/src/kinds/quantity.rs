//! Quantities in the form that Kubernetes gives them: `1.5Gi` becomes `1536Mi`.

use serde::de::Error as _;
use serde_json::Value;
use trellis_api::quantity::parse_nanos;

/// Kubernetes' words for a text that is not a quantity.
const PATTERN: &str =
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";
const NANOS: i128 = 1_000_000_000;
const BINARY: [(&str, i128); 7] = [
    ("Ei", 1 << 60),
    ("Pi", 1 << 50),
    ("Ti", 1 << 40),
    ("Gi", 1 << 30),
    ("Mi", 1 << 20),
    ("Ki", 1 << 10),
    ("", 1),
];
/// Each with the number of billionths that it stands for.
const DECIMAL: [(&str, i128); 10] = [
    ("E", NANOS * 1_000_000_000_000_000_000),
    ("P", NANOS * 1_000_000_000_000_000),
    ("T", NANOS * 1_000_000_000_000),
    ("G", NANOS * 1_000_000_000),
    ("M", NANOS * 1_000_000),
    ("k", NANOS * 1_000),
    ("", NANOS),
    ("m", 1_000_000),
    ("u", 1_000),
    ("n", 1),
];

/// Puts every quantity of the maps at these pointers into its canonical form.
pub(super) fn canonicalise(object: &mut Value, maps: &[&str]) -> Result<(), serde_json::Error> {
    for pointer in maps {
        let Some(Value::Object(map)) = object.pointer_mut(pointer) else {
            continue;
        };
        for value in map.values_mut() {
            if let Value::String(text) = value {
                let canonical =
                    canonical(text).ok_or_else(|| serde_json::Error::custom(PATTERN))?;
                *value = Value::from(canonical);
            }
        }
    }
    Ok(())
}

/// A quantity's number of billionths; `None` where there is no quantity.
pub(super) fn nanos(object: &Value, pointer: &str) -> Option<i128> {
    parse_nanos(object.pointer(pointer)?.as_str()?).ok()
}

fn canonical(text: &str) -> Option<String> {
    let nanos = parse_nanos(text).ok()?;
    if nanos == 0 {
        return Some("0".to_owned());
    }
    let whole = nanos % NANOS == 0;
    if text.ends_with('i') && whole && (nanos / NANOS).abs() >= 1024 {
        let units = nanos / NANOS;
        let (suffix, unit) = BINARY.iter().find(|(_, unit)| units % unit == 0)?;
        return Some(format!("{}{suffix}", units / unit));
    }
    if text.contains(['e', 'E']) && !text.ends_with('E') {
        return exponent(nanos);
    }
    let (suffix, unit) = DECIMAL.iter().find(|(_, unit)| nanos % unit == 0)?;
    Some(format!("{}{suffix}", nanos / unit))
}

/// The form with an exponent, which is a multiple of three.
fn exponent(nanos: i128) -> Option<String> {
    const EXPONENTS: [&str; 10] = [
        "e18", "e15", "e12", "e9", "e6", "e3", "", "e-3", "e-6", "e-9",
    ];
    let index = DECIMAL.iter().position(|(_, unit)| nanos % unit == 0)?;
    Some(format!("{}{}", nanos / DECIMAL[index].1, EXPONENTS[index]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn quantities_take_kubernetes_canonical_form() {
        // Fails if a client that compares with what a cluster answers would see a difference.
        for (text, expected) in [
            ("1.5Gi", "1536Mi"),
            ("1024Mi", "1Gi"),
            ("1Gi", "1Gi"),
            ("1000M", "1G"),
            ("1.0", "1"),
            ("0.5", "500m"),
            ("1e3", "1e3"),
            ("12e6", "12e6"),
            ("0", "0"),
            ("0Gi", "0"),
            ("5", "5"),
            ("1025", "1025"),
            ("-1", "-1"),
            ("1000", "1k"),
            ("512Ki", "512Ki"),
        ] {
            assert_eq!(canonical(text).as_deref(), Some(expected), "{text}");
        }
        assert_eq!(canonical("abc"), None);
    }
}
