//! Conditions as Kubernetes means them: the words are always the present ones, the time of transition
//! changes only when the status does.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime, Time};
use k8s_openapi::jiff::Timestamp;

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
    /// When that began which it is about, if it is about something that begins: another growth is another transition,
    /// also from one that is under way.
    pub began: Option<&'a MicroTime>,
}

impl Says<'_> {
    /// The time of transition, when `before` said the same.
    fn since(&self, before: Option<&Condition>, now: &MicroTime) -> Time {
        let seconds = |at: &MicroTime| {
            // Times of conditions have no fractions; one that had would differ from itself when it is read back.
            let at = Timestamp::from_second(at.0.as_second());
            at.map_or(Time(now.0), Time)
        };
        let before = before.map(|each| each.last_transition_time.clone());
        match (self.is_true, self.began) {
            (true, Some(began)) => seconds(began),
            (false, Some(began)) => {
                let still = before.filter(|at| at.0.as_second() >= began.0.as_second());
                still.unwrap_or_else(|| seconds(now))
            }
            (_, None) => before.unwrap_or_else(|| seconds(now)),
        }
    }
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
        last_transition_time: says.since(before, now),
        observed_generation: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
                began: None,
            }]
        };
        let first = renew(&[], &says(true, "A"), &at(1));
        let same = renew(&first, &says(true, "B"), &at(2));
        assert_eq!(same[0].last_transition_time, first[0].last_transition_time);
        assert_eq!(same[0].reason, "B");
        let flipped = renew(&same, &says(false, "C"), &at(3));
        assert_eq!(flipped[0].last_transition_time, Time(at(3).0));
    }

    // Fails if a growth that replaces another one looks as if it had begun with it, if a growth that was over before
    // anybody told of it leaves no trace, or if the time of one moves while it goes on.
    #[test]
    fn the_time_of_a_growth_is_when_it_began_and_then_when_it_was_over() {
        let at = |second| MicroTime(Timestamp::from_second(second).expect("a valid time"));
        let says = |old: &[Condition], is_true, began, now| {
            let says = Says {
                kind: "Resizing",
                is_true,
                reason: "",
                message: "",
                began: Some(&at(began)),
            };
            let renewed = renew(old, &[says], &at(now));
            let second = renewed[0].last_transition_time.0.as_second();
            (renewed, second)
        };
        let (first, since) = says(&[], true, 10, 12);
        assert_eq!(since, 10);
        let (first, since) = says(&first, true, 10, 15);
        assert_eq!(since, 10);
        let (moved, since) = says(&first, true, 20, 21);
        assert_eq!(since, 20);
        let (over, since) = says(&moved, false, 20, 25);
        assert_eq!(since, 25);
        let (over, since) = says(&over, false, 20, 30);
        assert_eq!(since, 25);
        let (_, since) = says(&over, false, 40, 41);
        assert_eq!(since, 41, "a growth that was over at once");
    }
}
