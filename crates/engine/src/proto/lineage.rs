//! Which history of a volume a replica belongs to.
//!
//! A volume has one history as long as quorums of its replicas are there. When too many are lost for good, an operator
//! may begin another history from the survivors (`Takeover::Survivors`). If the others come back, they hold a history
//! that has been given up, and they could be a quorum of a view that was once in force. The lineage tells the two
//! apart.
//!
//! A recovery also raises generations and view versions by a stride that no history can use up. So whatever the lost
//! replicas have promised or learned is earlier than everything that comes after.

use std::fmt;
use std::str::FromStr;

use super::Epoch;

/// Which history of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Lineage {
    /// The history that began with the volume.
    #[default]
    Original,
    /// A history that was begun from the replicas that were left.
    Recovered {
        /// Counts the recoveries of the volume, from 1 to [`Lineage::NUMBER_MAX`].
        number: u32,
        /// Drawn at random: two recoveries that got the same number are not the same.
        id: u64,
    },
    /// The replica cannot prove which history it holds: it has lost its memory.
    Unknown,
}

impl Lineage {
    /// Bits of a generation, and of a view's version, below the number of the recovery.
    pub(super) const STRIDE_BITS: u32 = 32;
    /// The most recoveries of a volume.
    pub const NUMBER_MAX: u32 = (1 << (64 - Epoch::COUNT_BITS - Lineage::STRIDE_BITS)) - 1;

    /// A lineage that follows all of these. None if there have been too many.
    pub fn after(known: impl IntoIterator<Item = Lineage>) -> Option<Lineage> {
        let latest = known.into_iter().filter_map(Lineage::number).max();
        let number = latest.unwrap_or(0) + 1;
        (number <= Lineage::NUMBER_MAX).then(|| Lineage::Recovered {
            number,
            id: uuid::Uuid::new_v4().as_u64_pair().1,
        })
    }

    /// How many recoveries there were; none if it is not known.
    pub const fn number(self) -> Option<u32> {
        match self {
            Lineage::Original => Some(0),
            Lineage::Recovered { number, .. } => Some(number),
            Lineage::Unknown => None,
        }
    }

    /// The number of the lineage to which a coordinator of that generation belongs.
    pub fn number_of_generation(generation: u64) -> u32 {
        u32::try_from(generation >> Lineage::STRIDE_BITS).unwrap_or(u32::MAX)
    }

    /// The lowest generation of its coordinators.
    pub fn generation_min(self) -> u64 {
        self.floor().max(1)
    }

    /// What the versions of its views are above.
    pub(super) fn floor(self) -> u64 {
        u64::from(self.number().unwrap_or(0)) << Lineage::STRIDE_BITS
    }

    /// Whether it can be one of a volume.
    pub(crate) fn is_sound(self) -> bool {
        match self {
            Lineage::Recovered { number, .. } => (1..=Lineage::NUMBER_MAX).contains(&number),
            Lineage::Original | Lineage::Unknown => true,
        }
    }
}

/// Text that is not a lineage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a lineage is `original`, or the number of a recovery and its id, such as 1-00c0ffee00c0ffee"
)]
pub struct LineageError;

impl fmt::Display for Lineage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lineage::Original => write!(out, "original"),
            Lineage::Recovered { number, id } => write!(out, "{number}-{id:016x}"),
            Lineage::Unknown => write!(out, "unknown"),
        }
    }
}

impl FromStr for Lineage {
    type Err = LineageError;

    fn from_str(text: &str) -> Result<Lineage, LineageError> {
        match text {
            "original" => return Ok(Lineage::Original),
            "unknown" => return Ok(Lineage::Unknown),
            _ => {}
        }
        let (number, id) = text.split_once('-').ok_or(LineageError)?;
        let lineage = Lineage::Recovered {
            number: number.parse().map_err(|_| LineageError)?,
            id: u64::from_str_radix(id, 16).map_err(|_| LineageError)?,
        };
        lineage.is_sound().then_some(lineage).ok_or(LineageError)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_recovery_is_above_whatever_the_lost_replicas_know() {
        // Fails if a replica that was given up could outbid the coordinator that gave it up.
        let first = Lineage::after([Lineage::Original, Lineage::Unknown]).unwrap();
        let second = Lineage::after([Lineage::Original, first]).unwrap();
        assert_eq!((first.number(), second.number()), (Some(1), Some(2)));
        assert!(first.generation_min() > u64::from(u32::MAX));
        assert!(second.generation_min() > first.generation_min() + u64::from(u32::MAX) - 1);
        assert_ne!(Lineage::after([first]), Lineage::after([first]));
        let last = Lineage::Recovered {
            number: Lineage::NUMBER_MAX,
            id: 1,
        };
        assert_eq!(Lineage::after([last]), None);
        assert!(last.generation_min() <= Epoch::GENERATION_MAX);
        assert_eq!(
            Lineage::number_of_generation(last.generation_min()),
            Lineage::NUMBER_MAX
        );
    }

    #[test]
    fn a_lineage_is_the_same_after_it_was_written_down() {
        // Fails if an object that keeps a lineage as text would name another one.
        let recovered = Lineage::Recovered { number: 3, id: 255 };
        for lineage in [Lineage::Original, recovered, Lineage::Unknown] {
            assert_eq!(lineage.to_string().parse(), Ok(lineage));
        }
        assert_eq!(recovered.to_string(), "3-00000000000000ff");
        for bad in ["", "1", "0-0", "9999999-1", "x-1", "1-x"] {
            assert_eq!(bad.parse::<Lineage>(), Err(LineageError), "{bad}");
        }
    }
}
