//! How long a call may take. The caller says when it stops listening; the answer comes before.

use std::time::Duration;

use tokio::time::Instant;
use tonic::Request;

/// How long a call takes at most if the caller does not say.
const TIME_MAX: Duration = Duration::from_secs(60);
/// The answer leaves this long before the caller stops listening.
const MARGIN: Duration = Duration::from_millis(500);
/// How long a growth is waited for, so that it is done in one call. The resizer listens for ten seconds.
pub const GROWTH_TIME_MAX: Duration = Duration::from_secs(8);
/// The header in which a caller says how long it listens.
const TIMEOUT_HEADER: &str = "grpc-timeout";

/// When the call has to be answered.
pub fn until<T>(request: &Request<T>) -> Instant {
    let told = request.metadata().get(TIMEOUT_HEADER);
    let told = told.and_then(|text| listens_for(text.to_str().ok()?));
    let time = told.map_or(TIME_MAX, |told| told.saturating_sub(MARGIN).min(TIME_MAX));
    Instant::now() + time
}

/// The same for a growth.
pub fn until_grown<T>(request: &Request<T>) -> Instant {
    until(request).min(Instant::now() + GROWTH_TIME_MAX)
}

/// A time in gRPC's words: at most eight digits and a unit.
fn listens_for(text: &str) -> Option<Duration> {
    let unit = text.chars().next_back()?;
    let count: u64 = text.get(..text.len() - unit.len_utf8())?.parse().ok()?;
    match unit {
        'H' => Some(Duration::from_secs(count.checked_mul(3600)?)),
        'M' => Some(Duration::from_secs(count.checked_mul(60)?)),
        'S' => Some(Duration::from_secs(count)),
        'm' => Some(Duration::from_millis(count)),
        'u' => Some(Duration::from_micros(count)),
        'n' => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a caller's time is read as another one, or something that is no time is taken for one.
    #[test]
    fn the_time_of_a_caller_is_read_in_grpcs_units() {
        assert_eq!(listens_for("10S"), Some(Duration::from_secs(10)));
        assert_eq!(listens_for("9999m"), Some(Duration::from_millis(9999)));
        assert_eq!(listens_for("2M"), Some(Duration::from_secs(120)));
        assert_eq!(listens_for("5000000u"), Some(Duration::from_secs(5)));
        for bad in ["", "S", "10", "-1S", "10s", "1.5S", "ä"] {
            assert_eq!(listens_for(bad), None, "{bad:?}");
        }
    }
}
