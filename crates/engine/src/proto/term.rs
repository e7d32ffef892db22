//! Which coordinators of a volume may outbid each other.
//!
//! Whoever decides on which node a volume is served counts these decisions: that count is the term. The generations of
//! a later term are above all generations of an earlier one, and a coordinator stays in its term. So a coordinator that
//! was replaced while nobody could reach it cannot take the volume back when it wakes up: the replicas have promised a
//! later term, and it cannot outbid that. Without terms, the two would depose each other for as long as both are
//! started again.

use super::Lineage;

/// Bits of a generation below the term: they count the starts within one term.
const START_BITS: u32 = 14;

/// How often it was decided anew on which node a volume is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term(u32);

impl Term {
    /// The last term.
    pub const MAX: Term = Term((1 << (Lineage::STRIDE_BITS - START_BITS)) - 1);

    /// The term of that number, or the last one.
    pub fn new(number: u32) -> Term {
        Term(number).min(Term::MAX)
    }

    /// Its number.
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The term of a coordinator of that generation.
    pub fn of_generation(generation: u64) -> Term {
        let number = (generation >> START_BITS) & u64::from(Term::MAX.0);
        Term(u32::try_from(number).unwrap_or(Term::MAX.0))
    }

    /// Its lowest generation in a lineage.
    pub fn generation_min(self, lineage: Lineage) -> u64 {
        (lineage.floor() | self.bits()).max(1)
    }

    /// Its lowest generation above that one, in the same history. It is of a later term if this term has none left
    /// there.
    pub fn above(self, generation: u64) -> u64 {
        let history = generation >> Lineage::STRIDE_BITS << Lineage::STRIDE_BITS;
        (history | self.bits()).max(generation + 1)
    }

    fn bits(self) -> u64 {
        u64::from(self.0) << START_BITS
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_later_term_is_above_all_that_an_earlier_one_can_reach() {
        // Fails if a coordinator that was replaced could outbid its successor.
        let (early, late) = (Term::new(4), Term::new(5));
        let first = late.generation_min(Lineage::Original);
        assert_eq!(Term::of_generation(first), late);
        assert_eq!(Term::of_generation(first - 1), early);
        assert!(Term::of_generation(early.above(first)) > early);
        let started_often = early.above(early.generation_min(Lineage::Original));
        assert_eq!(Term::of_generation(started_often), early);
    }

    #[test]
    fn generations_of_volumes_without_terms_go_on() {
        // Fails if a volume that was served before there were terms would begin below what its replicas have promised.
        let none = Term::default();
        assert_eq!(none.generation_min(Lineage::Original), 1);
        assert_eq!(none.above(7), 8);
        let used_up = none.above((1 << START_BITS) - 1);
        assert!(Term::of_generation(used_up) > none);
    }

    #[test]
    fn a_recovery_keeps_the_term() {
        // Fails if a new history began in an earlier term than the one that it follows.
        let lineage = Lineage::after([Lineage::Original]).unwrap();
        let term = Term::new(9);
        let generation = term.generation_min(lineage);
        assert_eq!(Term::of_generation(generation), term);
        assert_eq!(
            Some(Lineage::number_of_generation(generation)),
            lineage.number()
        );
        // It learns of the recovery from a coordinator of an earlier term.
        let heard = Term::new(2).generation_min(lineage);
        assert_eq!(Term::of_generation(term.above(heard)), term);
        assert_eq!(Term::new(u32::MAX), Term::MAX);
    }
}
