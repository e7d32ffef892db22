//! The rules that every history is held to, each with a name and a sentence.

use std::fmt;

/// A rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Law {
    OneAcknowledges,
    TermsRise,
    AcknowledgedStays,
    CopiesStay,
    MeasuredFirst,
    NothingShrinks,
    RemovedWasDeleted,
    UsersKeepTheirs,
    UsesEnd,
    RoomOnce,
    PlansArePure,
    GrowthEndsOnce,
    StuckSaysWhy,
    Arrives,
    Reclaimed,
    ComesToRest,
}

impl Law {
    const fn sentence(self) -> &'static str {
        match self {
            Law::OneAcknowledges => "At most one target of a volume can acknowledge a write.",
            Law::TermsRise => {
                "After a target of a later term, none of an earlier one acknowledges."
            }
            Law::AcknowledgedStays => "A target that takes over finds every acknowledged write.",
            Law::CopiesStay => {
                "No change leaves fewer full copies than are asked for, or than there were before."
            }
            Law::MeasuredFirst => {
                "A claim is finished when every branch, on whichever node, was measured at its size."
            }
            Law::NothingShrinks => "No size ever goes down.",
            Law::RemovedWasDeleted => {
                "Bytes go only for an object of the same identity that was deleted."
            }
            Law::UsersKeepTheirs => "Nothing is taken away from under its users.",
            Law::UsesEnd => "A use that another node has taken over does not go on.",
            Law::RoomOnce => "The room of a pool is promised once.",
            Law::PlansArePure => "The same view gives the same plan.",
            Law::GrowthEndsOnce => "A growth ends once.",
            Law::StuckSaysWhy => "Whatever is not where it should be says why.",
            Law::Arrives => "What nothing holds up is as it should be, and complains of nothing.",
            Law::Reclaimed => "What was deleted is gone, and what was kept is whole.",
            Law::ComesToRest => "When nothing disturbs it any more, everything comes to rest.",
        }
    }
}

/// A rule that was broken, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breach {
    pub law: Law,
    pub what: String,
}

impl Breach {
    pub fn of(law: Law, what: impl Into<String>) -> Self {
        let what = what.into();
        Breach { law, what }
    }

    /// The same, with where it happened.
    pub fn at(self, place: impl fmt::Display) -> Self {
        let what = format!("{place}: {}", self.what);
        Breach { what, ..self }
    }
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {} {}", self.law, self.law.sentence(), self.what)
    }
}

/// The rule holds, or is broken in this way.
pub fn rule(law: Law, holds: bool, broken: impl FnOnce() -> String) -> Result<(), Breach> {
    if holds {
        Ok(())
    } else {
        Err(Breach::of(law, broken()))
    }
}
