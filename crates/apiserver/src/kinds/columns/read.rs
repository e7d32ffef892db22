//! Reading cells out of objects, and the ages that tables show.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::UNKNOWN;

/// What is at a path (a JSON pointer); null counts as absent.
pub(super) fn item<'a>(object: &'a Value, path: &str) -> Option<&'a Value> {
    object.pointer(path).filter(|value| !value.is_null())
}

/// The scalar at a path, or an empty cell.
pub(super) fn text(object: &Value, path: &str) -> Value {
    or(object, path, "")
}

/// The scalar at a path, or `otherwise` where it is absent or empty.
pub(super) fn or(object: &Value, path: &str, otherwise: &str) -> Value {
    match item(object, path) {
        Some(Value::String(found)) if found.is_empty() => json!(otherwise),
        Some(found) => found.clone(),
        None => json!(otherwise),
    }
}

/// How many entries a map or a list has.
pub(super) fn count(object: &Value, path: &str) -> usize {
    match item(object, path) {
        Some(Value::Object(map)) => map.len(),
        Some(Value::Array(list)) => list.len(),
        _ => 0,
    }
}

/// The `status` of one of the object's conditions.
pub(super) fn condition<'a>(object: &'a Value, r#type: &str) -> Option<&'a str> {
    let conditions = item(object, "/status/conditions")?.as_array()?;
    conditions
        .iter()
        .find(|condition| condition["type"] == r#type)?
        .get("status")?
        .as_str()
}

/// Time since the object was created.
pub(super) fn age(object: &Value, now: Timestamp) -> Value {
    json!(since(item(object, "/metadata/creationTimestamp"), now))
}

/// Time since a timestamp, as kubectl's users know it; an absent one is unknown.
pub(super) fn since(time: Option<&Value>, now: Timestamp) -> String {
    match time
        .and_then(Value::as_str)
        .and_then(|time| time.parse::<Timestamp>().ok())
    {
        Some(time) => human_duration(now.duration_since(time).as_secs()),
        None => UNKNOWN.to_owned(),
    }
}

/// Two or three significant figures: `90s`, `5m30s`, `3h20m`, `40h`, `5d4h`, `300d`, `3y40d`, `9y`.
///
/// A time just ahead of our clock is now; one further ahead is shown as `<invalid>`, not hidden.
pub(super) fn human_duration(seconds: i64) -> String {
    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    const YEAR: i64 = 365 * DAY;
    const AHEAD_SECONDS_MAX: i64 = 1;
    const UNITS: [(i64, &str); 5] = [
        (1, "s"),
        (MINUTE, "m"),
        (HOUR, "h"),
        (DAY, "d"),
        (YEAR, "y"),
    ];
    // Below each limit: the unit that counts, and whether the next smaller one is shown beside it.
    const LIMITS: [(i64, usize, bool); 9] = [
        (2 * MINUTE, 0, false),
        (10 * MINUTE, 1, true),
        (3 * HOUR, 1, false),
        (8 * HOUR, 2, true),
        (2 * DAY, 2, false),
        (8 * DAY, 3, true),
        (2 * YEAR, 3, false),
        (8 * YEAR, 4, true),
        (i64::MAX, 4, false),
    ];
    if seconds < -AHEAD_SECONDS_MAX {
        return "<invalid>".to_owned();
    }
    let seconds = seconds.max(0);
    let (_, at, with_smaller) = LIMITS
        .into_iter()
        .find(|(below, ..)| seconds < *below)
        .unwrap_or(LIMITS[8]);
    let (unit, suffix) = UNITS[at];
    let shown = format!("{}{suffix}", seconds / unit);
    if with_smaller {
        let (smaller, suffix) = UNITS[at - 1];
        let rest = seconds % unit / smaller;
        if rest != 0 {
            return format!("{shown}{rest}{suffix}");
        }
    }
    shown
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_shortened_as_kubectl_shortens_them() {
        // Fails when a limit of the ladder is moved, or when a zero remainder is printed.
        let (m, h, d, y) = (60, 3600, 86400, 365 * 86400);
        for (seconds, shown) in [
            (-2, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (2 * m, "2m"),
            (5 * m + 30, "5m30s"),
            (10 * m + 59, "10m"),
            (179 * m, "179m"),
            (3 * h, "3h"),
            (3 * h + 20 * m, "3h20m"),
            (8 * h + 59 * m, "8h"),
            (47 * h, "47h"),
            (2 * d, "2d"),
            (5 * d + 4 * h, "5d4h"),
            (8 * d + 23 * h, "8d"),
            (729 * d, "729d"),
            (2 * y, "2y"),
            (3 * y + 40 * d, "3y40d"),
            (9 * y + 40 * d, "9y"),
        ] {
            assert_eq!(human_duration(seconds), shown, "{seconds} seconds");
        }
    }

    #[test]
    fn a_timestamp_that_is_absent_or_broken_is_unknown() {
        // Fails when a missing creationTimestamp prints as an age, or panics.
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        assert_eq!(since(None, now), "<unknown>");
        assert_eq!(since(Some(&json!("yesterday")), now), "<unknown>");
        assert_eq!(since(Some(&json!("2026-01-01T23:59:00.5Z")), now), "59s");
    }
}
