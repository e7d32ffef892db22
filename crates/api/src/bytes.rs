//! `Bytes`: the one type for a size.
//!
//! A size is an exact count of bytes. It never goes negative and never wraps: arithmetic that could
//! is checked and answers `None`.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// An exact number of bytes.
///
/// In objects it is a Kubernetes quantity such as `2Gi`; a size that is no whole multiple of a unit is
/// written as the plain number, so that nothing is ever rounded away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

    /// The largest volume: one pebibyte. Sums over any number of volumes that a pool can hold stay far
    /// from the largest number.
    pub const VOLUME_MAX: Bytes = Bytes(1 << 50);

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
        self.0
            .checked_add(other.0)
            .map(Bytes)
            .filter(|sum| *sum <= Bytes::MAX)
    }

    /// The difference, or zero when `other` is larger.
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// The next multiple of `unit` at or above this size, unless it is too large. `unit` is not zero.
    pub fn checked_next_multiple_of(self, unit: Bytes) -> Option<Bytes> {
        self.0
            .checked_next_multiple_of(unit.0)
            .map(Bytes)
            .filter(|size| *size <= Bytes::MAX)
    }
}

/// A person reads `2Gi` where the number is a whole multiple of a binary unit, and the plain number
/// of bytes where it is not: nothing is rounded away.
impl fmt::Display for Bytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 6] = [
            (60, "Ei"),
            (50, "Pi"),
            (40, "Ti"),
            (30, "Gi"),
            (20, "Mi"),
            (10, "Ki"),
        ];
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

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        struct Quantity;

        impl de::Visitor<'_> for Quantity {
            type Value = Bytes;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a size such as \"2Gi\" or a number of bytes")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Bytes, E> {
                Some(Bytes(number))
                    .filter(|size| *size <= Bytes::MAX)
                    .ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(number), &self))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Bytes, E> {
                u64::try_from(number)
                    .map(Bytes)
                    .map_err(|_| E::invalid_value(de::Unexpected::Signed(number), &self))
            }
        }

        deserializer.deserialize_any(Quantity)
    }
}

impl JsonSchema for Bytes {
    fn schema_name() -> Cow<'static, str> {
        "Bytes".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "x-kubernetes-int-or-string": true })
    }
}
