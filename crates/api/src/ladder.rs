//! The ladder: the layers between a claim's request and what its consumer sees, and the one rule for their growth.
//!
//! Each layer is a rung with one measured size. A rung may be raised to the wanted size only when the rung below it
//! has been *observed* there. Rungs never go down, so there is nothing to roll back: after a crash anywhere, observe
//! again and ask [`next_step`] what is missing.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Bytes, HoldReason};

/// A layer whose size can be measured, lowest first.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub enum Rung {
    /// A copy on a pool, as its superblock says.
    Replica,
    /// What the target serves.
    Volume,
    /// The block device on the node.
    Device,
    /// The filesystem on the device.
    Filesystem,
    /// The disk image inside a filesystem claim of a virtual machine.
    Image,
    /// The disk that the virtual machine is shown.
    Disk,
    /// What the guest itself sees.
    Guest,
}

impl Rung {
    /// Every rung, lowest first.
    pub const ALL: [Rung; 7] = [
        Rung::Replica,
        Rung::Volume,
        Rung::Device,
        Rung::Filesystem,
        Rung::Image,
        Rung::Disk,
        Rung::Guest,
    ];

    /// The name that users, objects and metrics use.
    pub const fn name(self) -> &'static str {
        match self {
            Rung::Replica => "replica",
            Rung::Volume => "volume",
            Rung::Device => "device",
            Rung::Filesystem => "filesystem",
            Rung::Image => "image",
            Rung::Disk => "disk",
            Rung::Guest => "guest",
        }
    }
}

impl std::fmt::Display for Rung {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.pad(self.name())
    }
}

/// What was measured of one rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Which rung.
    pub rung: Rung,
    /// Its size, measured.
    pub size: Bytes,
    /// It already covers all that it can cover of the rung below. A filesystem grows in whole units
    /// and may leave the last few blocks of its device unused for ever; that is full, not behind.
    pub full: bool,
    /// Why it cannot be raised now, if something is in the way.
    pub hold: Option<HoldReason>,
}

/// What is to be done next with a ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Every rung has the wanted size.
    Reached,
    /// This rung is the lowest that is behind, and nothing is in its way.
    Raise {
        /// The rung to raise.
        rung: Rung,
        /// The size to raise it to, at least. A rung that has units of its own may end above it, but never
        /// above the rung below.
        to: Bytes,
    },
    /// This rung is the lowest that is behind, and it cannot rise.
    Held {
        /// The rung that cannot rise.
        rung: Rung,
        /// Why.
        reason: HoldReason,
    },
}

/// The planner: which rung is to be raised next so that all of them reach `want`.
///
/// `rungs` stand lowest first. A rung that is larger than `want` stays as it is.
pub fn next_step(rungs: &[Observed], want: Bytes) -> Next {
    debug_assert!(
        rungs.windows(2).all(|pair| pair[0].rung <= pair[1].rung),
        "lowest rung first"
    );
    for (index, observed) in rungs.iter().enumerate() {
        let lowest = index == 0;
        if observed.size >= want || (observed.full && !lowest) {
            continue;
        }
        return match observed.hold {
            Some(reason) => Next::Held {
                rung: observed.rung,
                reason,
            },
            None => Next::Raise {
                rung: observed.rung,
                to: want,
            },
        };
    }
    Next::Reached
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A ladder of a model machine: raising a rung makes it at least as large as it was told, in whole
    /// units of its own, as far as the rung below allows.
    #[derive(Clone, Debug)]
    struct Model {
        sizes: Vec<u64>,
        unit: Vec<u64>,
        held: Vec<bool>,
    }

    impl Model {
        fn observe(&self) -> Vec<Observed> {
            let mut seen: Vec<Observed> = Vec::new();
            for (index, size) in self.sizes.iter().enumerate() {
                let full = index > 0 && *size >= self.fit(index, self.sizes[index - 1]);
                seen.push(Observed {
                    rung: Rung::ALL[index],
                    size: Bytes::new(*size),
                    full,
                    hold: self.held[index].then_some(HoldReason::NoSpaceInPool),
                });
            }
            seen
        }

        fn fit(&self, index: usize, below: u64) -> u64 {
            below - below % self.unit[index]
        }

        fn raise(&mut self, rung: Rung, to: Bytes) {
            let index = Rung::ALL
                .iter()
                .position(|each| *each == rung)
                .expect("a rung of ours");
            let whole_units = to.get().next_multiple_of(self.unit[index]);
            let target = match index.checked_sub(1) {
                Some(below) => whole_units.min(self.fit(index, self.sizes[below])),
                None => whole_units,
            };
            self.sizes[index] = self.sizes[index].max(target);
        }
    }

    fn models() -> impl Strategy<Value = Model> {
        (1usize..=7).prop_flat_map(|count| {
            (
                prop::collection::vec(0u64..1_000, count),
                prop::collection::vec(1u64..5, count),
                prop::collection::vec(prop::bool::weighted(0.1), count),
            )
                .prop_map(|(mut sizes, mut unit, held)| {
                    sizes.sort_unstable_by(|a, b| b.cmp(a));
                    unit[0] = 1;
                    Model { sizes, unit, held }
                })
        })
    }

    proptest! {
        // Fails if the planner would raise a rung while one below it has not been seen at that size.
        #[test]
        fn a_rung_is_never_raised_above_the_rung_below(model in models(), want in 0u64..1_500) {
            let seen = model.observe();
            if let Next::Raise { rung, to } = next_step(&seen, Bytes::new(want)) {
                for below in seen.iter().take_while(|each| each.rung < rung) {
                    prop_assert!(below.size >= to || below.full);
                }
            }
        }

        // Fails if the planner ever asks for a size that a rung already has or has passed.
        #[test]
        fn a_rung_never_goes_down(model in models(), want in 0u64..1_500) {
            let seen = model.observe();
            if let Next::Raise { rung, to } = next_step(&seen, Bytes::new(want)) {
                let now = seen.iter().find(|each| each.rung == rung).expect("it was observed").size;
                prop_assert!(to > now);
            }
        }

        // Fails if following the planner loops, or stops short without a hold to name.
        #[test]
        fn following_the_planner_converges(model in models(), want in 0u64..1_500) {
            let mut model = model;
            let mut raises = 0;
            loop {
                match next_step(&model.observe(), Bytes::new(want)) {
                    Next::Reached => break,
                    Next::Held { rung, .. } => {
                        let index = Rung::ALL.iter().position(|each| *each == rung).expect("ours");
                        prop_assert!(model.held[index]);
                        break;
                    }
                    Next::Raise { rung, to } => {
                        model.raise(rung, to);
                        raises += 1;
                        prop_assert!(raises <= model.sizes.len(), "one raise a rung is enough");
                    }
                }
            }
        }

        // Fails if doing the same step twice would do anything the second time.
        #[test]
        fn a_raise_is_idempotent(model in models(), want in 0u64..1_500) {
            let mut once = model;
            if let Next::Raise { rung, to } = next_step(&once.observe(), Bytes::new(want)) {
                once.raise(rung, to);
                let mut twice = once.clone();
                twice.raise(rung, to);
                prop_assert_eq!(&once.sizes, &twice.sizes);
                let repeated = matches!(next_step(&once.observe(), Bytes::new(want)),
                    Next::Raise { rung: again, .. } if again == rung);
                prop_assert!(!repeated);
            }
        }
    }

    // Fails if a hold high on the ladder keeps a lower rung from rising, or the other way round.
    #[test]
    fn the_lowest_rung_that_is_behind_decides() {
        let rung = |rung, size, hold| Observed {
            rung,
            size: Bytes::gib(size),
            full: false,
            hold,
        };
        let seen = [
            rung(Rung::Replica, 1, None),
            rung(Rung::Volume, 1, Some(HoldReason::NoSpaceInPool)),
        ];
        let want = Bytes::gib(2);
        assert_eq!(
            next_step(&seen, want),
            Next::Raise {
                rung: Rung::Replica,
                to: want
            }
        );
        let seen = [
            rung(Rung::Replica, 2, None),
            rung(Rung::Volume, 1, Some(HoldReason::NoSpaceInPool)),
        ];
        let held = Next::Held {
            rung: Rung::Volume,
            reason: HoldReason::NoSpaceInPool,
        };
        assert_eq!(next_step(&seen, want), held);
    }
}
