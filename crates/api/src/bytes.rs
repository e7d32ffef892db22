//! `Bytes`: the one type for a size.
//!
//! A size is an exact count of bytes. It never goes negative and never wraps: arithmetic that could
//! is checked and answers `None`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An exact number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(u64);

impl Bytes {
    /// No bytes at all.
    pub const ZERO: Bytes = Bytes(0);
    /// One kibibyte.
    pub const KIB: Bytes = Bytes(1 << 10);
    /// One mebibyte.
    pub const MIB: Bytes = Bytes(1 << 20);
    /// One gibibyte.
    pub const GIB: Bytes = Bytes(1 << 30);
    /// One tebibyte.
    pub const TIB: Bytes = Bytes(1 << 40);
    /// The largest size that the kernel can address in a file (2^63 - 1).
    pub const MAX: Bytes = Bytes(i64::MAX.unsigned_abs());

    /// A size of so many bytes.
    pub const fn new(bytes: u64) -> Self {
        Bytes(bytes)
    }

    /// So many mebibytes, or the largest size if that is too much.
    pub const fn mib(count: u64) -> Self {
        Bytes(count.saturating_mul(1 << 20))
    }

    /// So many gibibytes, or the largest size if that is too much.
    pub const fn gib(count: u64) -> Self {
        Bytes(count.saturating_mul(1 << 30))
    }

    /// The plain number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The sum, unless it is too large for a size.
    pub fn checked_add(self, other: Bytes) -> Option<Bytes> {
        self.0.checked_add(other.0).map(Bytes).filter(|sum| *sum <= Bytes::MAX)
    }

    /// The difference, or zero when `other` is larger.
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// The next multiple of `unit` at or above this size, unless it is too large. `unit` is not zero.
    pub fn checked_next_multiple_of(self, unit: Bytes) -> Option<Bytes> {
        self.0.checked_next_multiple_of(unit.0).map(Bytes).filter(|size| *size <= Bytes::MAX)
    }
}

/// A person reads `2Gi` where the number is a whole multiple of a binary unit, and the plain number
/// of bytes where it is not: nothing is rounded away.
impl fmt::Display for Bytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 6] =
            [(60, "Ei"), (50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
        for (shift, suffix) in UNITS {
            let unit = 1u64 << shift;
            if self.0 >= unit && self.0.is_multiple_of(unit) {
                return out.pad(&format!("{}{suffix}", self.0 / unit));
            }
        }
        out.pad(&self.0.to_string())
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(sizes: I) -> Bytes {
        sizes.fold(Bytes::ZERO, |sum, size| Bytes(sum.0.saturating_add(size.0)))
    }
}
