//! What the copies of a claim lack, with ages: a state without news is shown with its age, in the same words everywhere.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use trellis_api::Hold;
use trellis_api::kinds::ReplicaState;

use crate::stored::StoredClaim;
use crate::volume::redundancy::{CopySeen, lacking};

/// What a replicated volume lacks.
pub fn degraded(look: &StoredClaim, now: Timestamp) -> Option<Hold> {
    let volume = look.stored.volume.as_deref()?;
    lacking(&look.stored, volume, &|copy| with_age(copy, now))
}

/// The state of a copy, as a word of a table: what was seen last, and when if that is not now.
pub fn state_word(copy: &CopySeen, now: Timestamp) -> String {
    let word = copy.state.map_or("Unknown", ReplicaState::name);
    match &copy.silent_since {
        Some(since) => format!("{word} {}", age(since, now)),
        None => word.to_owned(),
    }
}

/// The state of a copy, in a sentence.
pub fn with_age(copy: &CopySeen, now: Timestamp) -> String {
    let word = state_word(copy, now);
    match copy.state {
        Some(ReplicaState::Repairing) => format!("{word} ({} left)", copy.repair_left),
        _ => word,
    }
}

/// How long ago something was, in kubectl's short form.
pub fn age(then: &MicroTime, now: Timestamp) -> String {
    let seconds = now.as_second().saturating_sub(then.0.as_second()).max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if an age is shown in a unit that says too little or too much.
    #[test]
    fn ages_are_short() {
        let now = Timestamp::from_second(1_000_000).expect("a time");
        let ago =
            |seconds: i64| MicroTime(Timestamp::from_second(1_000_000 - seconds).expect("a time"));
        assert_eq!(age(&ago(-5), now), "0s");
        assert_eq!(age(&ago(119), now), "119s");
        assert_eq!(age(&ago(7_199), now), "119m");
        assert_eq!(age(&ago(7_200), now), "2h");
        assert_eq!(age(&ago(864_000), now), "10d");
    }
}
