//! Conditions as Kubernetes means them: the words are always the present ones, the time of transition
//! changes only when the status does.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime, Time};

/// What a condition says now.
#[derive(Clone, Copy, Debug)]
pub struct Says<'a> {
    /// Its type, such as `Ready`.
    pub kind: &'a str,
    /// Whether it is so.
    pub is_true: bool,
    /// Why, in one word.
    pub reason: &'a str,
    /// Why, in one sentence.
    pub message: &'a str,
}

/// The conditions that follow from `old` when `says` is what is true now. Conditions of other types are
/// dropped: a controller writes all the conditions of its own status.
pub fn renew(old: &[Condition], says: &[Says<'_>], now: &MicroTime) -> Vec<Condition> {
    says.iter().map(|each| renewed(old, each, now)).collect()
}

fn renewed(old: &[Condition], says: &Says<'_>, now: &MicroTime) -> Condition {
    let status = if says.is_true { "True" } else { "False" };
    let before = old
        .iter()
        .find(|each| each.type_ == says.kind && each.status == status);
    Condition {
        type_: says.kind.to_owned(),
        status: status.to_owned(),
        reason: says.reason.to_owned(),
        message: says.message.to_owned(),
        last_transition_time: before.map_or(Time(now.0), |each| each.last_transition_time.clone()),
        observed_generation: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::Timestamp;

    // Fails if the time moves although the status did not, or stays although it did.
    #[test]
    fn the_time_of_transition_follows_the_status_alone() {
        let at = |second| MicroTime(Timestamp::from_second(second).expect("a valid time"));
        let says = |is_true, reason| {
            [Says {
                kind: "Ready",
                is_true,
                reason,
                message: "",
            }]
        };
        let first = renew(&[], &says(true, "A"), &at(1));
        let same = renew(&first, &says(true, "B"), &at(2));
        assert_eq!(same[0].last_transition_time, first[0].last_transition_time);
        assert_eq!(same[0].reason, "B");
        let flipped = renew(&same, &says(false, "C"), &at(3));
        assert_eq!(flipped[0].last_transition_time, Time(at(3).0));
    }
}
