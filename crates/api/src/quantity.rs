//! Sizes as people write them: the Kubernetes quantity grammar, and the ways to ask for growth.
//!
//! ```text
//! quantity = [ "+" | "-" ] number suffix
//! number   = digits | digits "." [ digits ] | "." digits
//! suffix   = "" | "n" | "u" | "m" | "k" | "M" | "G" | "T" | "P" | "E"
//!          | "Ki" | "Mi" | "Gi" | "Ti" | "Pi" | "Ei"
//!          | ( "e" | "E" ) [ "+" | "-" ] digits
//! ```
//!
//! `E` alone is exa and `E3` is an exponent. There is no white space anywhere.
//!
//! The number is exact down to a billionth. Finer fractions are rounded away from zero, and a size is rounded up to a
//! whole byte, so nobody gets less than they asked for. `k8s.io/apimachinery/pkg/api/resource` gives the same results,
//! with these deliberate exceptions, each of them an error here:
//!
//! - Kubernetes silently caps `8Ei` at 2^63 - 1, and its `Value` of `10E` is a number that has wrapped around. A
//!   volume of the wrong size is worse than none.
//! - Kubernetes reads a missing number (`Gi`, `.`, `+`) as zero, against its own grammar.
//! - A text longer than [`TEXT_BYTES_MAX`] is refused unread.
//!
//! Kubernetes also truncates an exponent to 32 bits, so that its `1e4294967299` is `1e3`; here an
//! exponent means what it says.
//!
//! There are no floating-point numbers here. The digits of the text stay digits until the point is in place, so no
//! fraction, however long, loses its last digit.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::Bytes;

/// The longest text that is read as a quantity. Every exact size fits several times over, and a
/// hostile text costs no more than this.
pub const TEXT_BYTES_MAX: usize = 128;

/// How much of a text that is too long is quoted back.
const TEXT_CHARS_QUOTED: usize = 32;

/// The billionths in one, and their exponent of ten.
const NANOS_PER_ONE: u128 = 1_000_000_000;
const NANO_EXPONENT: i64 = 9;

/// The binary suffixes, and the power of two that each stands for.
const BINARY_SUFFIXES: [(&str, u32); 6] = [
    ("Ki", 10),
    ("Mi", 20),
    ("Gi", 30),
    ("Ti", 40),
    ("Pi", 50),
    ("Ei", 60),
];

/// The decimal suffixes, and the power of ten that each stands for.
const DECIMAL_SUFFIXES: [(&str, i64); 10] = [
    ("", 0),
    ("n", -9),
    ("u", -6),
    ("m", -3),
    ("k", 3),
    ("M", 6),
    ("G", 9),
    ("T", 12),
    ("P", 15),
    ("E", 18),
];

/// Why a text is not the size or the growth that it was meant to be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum QuantityError {
    /// The text is empty.
    #[error("the quantity is empty: write a number and a unit, such as 20Gi")]
    Empty,
    /// The text is longer than any quantity needs to be.
    #[error(
        "the quantity that begins with {start:?} is {length} bytes long and at most \
         {TEXT_BYTES_MAX} are read: write a number and a unit, such as 20Gi"
    )]
    TooLong {
        /// The beginning of the text.
        start: String,
        /// The length of the whole text.
        length: usize,
    },
    /// There is no number where the number belongs.
    #[error(
        "{text:?} does not begin with a number: write digits, at most one decimal point, and a \
         unit without a space, such as 20Gi or 1.5Ti"
    )]
    NoNumber {
        /// The whole text.
        text: String,
    },
    /// What follows the number is not a unit.
    #[error(
        "{text:?} ends in {suffix:?}, which is not a unit: use Ki, Mi, Gi, Ti, Pi or Ei for powers \
         of 1024, k, M, G, T, P or E for powers of 1000, n, u or m for fractions, an exponent \
         such as e3, or nothing"
    )]
    UnknownSuffix {
        /// The whole text.
        text: String,
        /// What follows the number.
        suffix: String,
    },
    /// The quantity is too large to be counted in billionths.
    #[error("{text:?} is too large: its count of billionths does not fit 128 bits")]
    BeyondNanos {
        /// The whole text.
        text: String,
    },
    /// A size is below zero.
    #[error("{text:?} is negative: a size is zero or more bytes, such as 20Gi")]
    Negative {
        /// The whole text.
        text: String,
    },
    /// A size is larger than a file or a block device can be.
    #[error("{text:?} is too large: a size is at most {} bytes, just under 8Ei", Bytes::MAX.get())]
    TooLarge {
        /// The whole text.
        text: String,
    },
    /// A growth by nothing.
    #[error("{text:?} grows by nothing: say by how much, such as +10Gi or +25%")]
    NoGrowth {
        /// The whole text.
        text: String,
    },
    /// A growth that asks for less.
    #[error(
        "{text:?} asks for less and volumes never shrink: write the new size, such as 20Gi, or \
         how much to add, such as +10Gi or +25%"
    )]
    Shrink {
        /// The whole text.
        text: String,
    },
    /// A percentage that is not a whole number with a plus in front.
    #[error(
        "{text:?} is not a growth in percent: write a plus and a whole number from 1 to {}, such \
         as +25%",
        u32::MAX
    )]
    BadPercent {
        /// The whole text.
        text: String,
    },
    /// The new size is below the size that the volume has.
    #[error(
        "the volume has {current} and {target} is less: volumes never shrink, so ask for {current} \
         or more"
    )]
    BelowCurrent {
        /// The size that the volume has.
        current: Bytes,
        /// The size that was asked for.
        target: Bytes,
    },
    /// The volume would grow past the largest size.
    #[error(
        "growing a volume of {current} as {growth} asks is too much: a size is at most {} bytes, \
         just under 8Ei",
        Bytes::MAX.get()
    )]
    GrowsTooLarge {
        /// The size that the volume has.
        current: Bytes,
        /// The growth that was asked for.
        growth: Growth,
    },
}

/// A size as Kubernetes reads it: rounded up to a whole byte.
impl FromStr for Bytes {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let number = Number::read(text)?;
        if number.negative && !number.is_zero() {
            return Err(QuantityError::Negative {
                text: text.to_owned(),
            });
        }
        number
            .nanos()
            .and_then(|nanos| u64::try_from(nanos.div_ceil(NANOS_PER_ONE)).ok())
            .map(Bytes::new)
            .filter(|size| *size <= Bytes::MAX)
            .ok_or_else(|| QuantityError::TooLarge {
                text: text.to_owned(),
            })
    }
}

impl Bytes {
    /// The size as Kubernetes prints a binary quantity: a whole number with the largest of Ki to Ei
    /// that divides it, else the plain number. It reads back as the same size, up to [`Bytes::MAX`].
    ///
    /// Kubernetes counts in thousands below 1024, so that its text for 1000 is `1k`. The text is
    /// compared with what the API server stored, so ours is the same.
    pub fn to_quantity(self) -> String {
        if self.get() == 1000 {
            "1k".to_owned()
        } else {
            self.to_string()
        }
    }
}

/// The exact count of billionths in a quantity of either sign. What is finer than a billionth is
/// rounded away from zero.
pub fn parse_nanos(text: &str) -> Result<i128, QuantityError> {
    let number = Number::read(text)?;
    number
        .nanos()
        .and_then(|nanos| i128::try_from(nanos).ok())
        .map(|nanos| if number.negative { -nanos } else { nanos })
        .ok_or_else(|| QuantityError::BeyondNanos {
            text: text.to_owned(),
        })
}

/// How a person asks for a volume to grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// To this size: `20Gi`.
    To(Bytes),
    /// By this much: `+10Gi`.
    By(Bytes),
    /// By so many hundredths of the size that it has: `+25%`.
    ByPercent(u32),
}

impl Growth {
    /// The size that a volume of size `current` is to have. A percentage is rounded up to a whole
    /// mebibyte, because nobody means the odd bytes. The answer is never below `current`.
    pub fn apply(self, current: Bytes) -> Result<Bytes, QuantityError> {
        let target = match self {
            Growth::To(target) if target < current => {
                return Err(QuantityError::BelowCurrent { current, target });
            }
            Growth::To(target) => Some(target),
            Growth::By(more) => current.checked_add(more),
            Growth::ByPercent(percent) => {
                // 64 bits times 32 bits cannot overflow 128.
                let more = (u128::from(current.get()) * u128::from(percent)).div_ceil(100);
                u64::try_from(more)
                    .ok()
                    .and_then(|more| current.checked_add(Bytes::new(more)))
                    .and_then(|sum| sum.checked_next_multiple_of(Bytes::MIB))
            }
        };
        target
            .filter(|target| *target <= Bytes::MAX)
            .ok_or(QuantityError::GrowsTooLarge {
                current,
                growth: self,
            })
    }
}

impl FromStr for Growth {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        check_length(text)?;
        if let Some(number) = text.strip_suffix('%') {
            return read_percent(text, number);
        }
        // A text that is no quantity at all is told so, whatever its sign.
        let size = match text.parse::<Bytes>() {
            Err(QuantityError::Negative { text }) => return Err(QuantityError::Shrink { text }),
            other => other?,
        };
        match text.as_bytes().first() {
            Some(b'-') => Err(QuantityError::Shrink {
                text: text.to_owned(),
            }),
            Some(b'+') if size == Bytes::ZERO => Err(QuantityError::NoGrowth {
                text: text.to_owned(),
            }),
            Some(b'+') => Ok(Growth::By(size)),
            _ => Ok(Growth::To(size)),
        }
    }
}

/// The text that reads back as the same growth.
impl fmt::Display for Growth {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Growth::To(size) => write!(out, "{size}"),
            Growth::By(size) => write!(out, "+{size}"),
            Growth::ByPercent(percent) => write!(out, "+{percent}%"),
        }
    }
}

fn read_percent(text: &str, number: &str) -> Result<Growth, QuantityError> {
    let text = || text.to_owned();
    let bad = || QuantityError::BadPercent { text: text() };
    let digits = number.strip_prefix(['+', '-']).ok_or_else(bad)?;
    // The standard library would take a second sign.
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(bad());
    }
    let percent: u32 = digits.parse().map_err(|_| bad())?;
    if number.starts_with('-') {
        return Err(QuantityError::Shrink { text: text() });
    }
    if percent == 0 {
        return Err(QuantityError::NoGrowth { text: text() });
    }
    Ok(Growth::ByPercent(percent))
}

fn check_length(text: &str) -> Result<(), QuantityError> {
    if text.is_empty() {
        return Err(QuantityError::Empty);
    }
    if text.len() > TEXT_BYTES_MAX {
        let start = text.chars().take(TEXT_CHARS_QUOTED).collect();
        return Err(QuantityError::TooLong {
            start,
            length: text.len(),
        });
    }
    Ok(())
}

/// A quantity taken apart: plus or minus `digits` times ten to the `exponent`.
struct Number {
    negative: bool,
    /// The digits as values from 0 to 9, the most significant first, without zeros in front.
    digits: Vec<u8>,
    exponent: i64,
}

impl Number {
    fn read(text: &str) -> Result<Self, QuantityError> {
        check_length(text)?;
        let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
        let (whole, rest) = split_digits(unsigned);
        let (fraction, suffix) = rest.strip_prefix('.').map_or(("", rest), split_digits);
        if whole.is_empty() && fraction.is_empty() {
            return Err(QuantityError::NoNumber {
                text: text.to_owned(),
            });
        }
        let (shift, exponent) =
            read_suffix(suffix).ok_or_else(|| QuantityError::UnknownSuffix {
                text: text.to_owned(),
                suffix: suffix.to_owned(),
            })?;
        let digits = whole
            .bytes()
            .chain(fraction.bytes())
            .map(|byte| byte - b'0')
            .skip_while(|digit| *digit == 0)
            .collect::<Vec<u8>>();
        // The length of the text bounds the length of the fraction far below 64 bits.
        let places = i64::try_from(fraction.len()).unwrap_or(i64::MAX);
        Ok(Number {
            negative: text.starts_with('-'),
            digits: multiplied_by_power_of_two(&digits, shift),
            exponent: exponent.saturating_sub(places),
        })
    }

    fn is_zero(&self) -> bool {
        self.digits.is_empty()
    }

    /// The count of billionths without the sign, rounded up, unless it does not fit.
    fn nanos(&self) -> Option<u128> {
        if self.is_zero() {
            return Some(0);
        }
        let exponent = self.exponent.saturating_add(NANO_EXPONENT);
        if let Ok(zeros) = u32::try_from(exponent) {
            return value_of(&self.digits)?.checked_mul(10u128.checked_pow(zeros)?);
        }
        // The last digits are finer than a billionth. When there are fewer digits than that, all
        // of them are. A zero exponent was answered above and a large one does not fit.
        if exponent > 0 {
            return None;
        }
        let finer = usize::try_from(exponent.unsigned_abs()).unwrap_or(usize::MAX);
        let kept = self.digits.len().saturating_sub(finer);
        let (kept, dropped) = self.digits.split_at(kept);
        let round_up = dropped.iter().any(|digit| *digit != 0);
        value_of(kept)?.checked_add(u128::from(round_up))
    }
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text.bytes().take_while(u8::is_ascii_digit).count();
    text.split_at(end)
}

/// The power of two and the power of ten that a suffix stands for.
fn read_suffix(suffix: &str) -> Option<(u32, i64)> {
    if let Some((_, exponent)) = DECIMAL_SUFFIXES.iter().find(|(name, _)| *name == suffix) {
        return Some((0, *exponent));
    }
    if let Some((_, shift)) = BINARY_SUFFIXES.iter().find(|(name, _)| *name == suffix) {
        return Some((*shift, 0));
    }
    let signed = suffix.strip_prefix(['e', 'E'])?;
    let digits = signed.strip_prefix(['+', '-']).unwrap_or(signed);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // An exponent past 64 bits is as good as the largest: no number of so few digits can tell.
    let exponent = digits.parse::<i64>().unwrap_or(i64::MAX);
    Some((
        0,
        if signed.starts_with('-') {
            -exponent
        } else {
            exponent
        },
    ))
}

/// Multiplies digit by digit, as on paper, from the last to the first.
fn multiplied_by_power_of_two(digits: &[u8], shift: u32) -> Vec<u8> {
    let mut carry = 0u128;
    let mut product = Vec::with_capacity(digits.len());
    for digit in digits.iter().rev() {
        carry += u128::from(*digit) << shift;
        product.push(last_digit(carry));
        carry /= 10;
    }
    while carry > 0 {
        product.push(last_digit(carry));
        carry /= 10;
    }
    product.reverse();
    product
}

fn last_digit(number: u128) -> u8 {
    u8::try_from(number % 10).unwrap_or_else(|_| unreachable!("a remainder of ten is below ten"))
}

fn value_of(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0u128, |value, digit| {
        value.checked_mul(10)?.checked_add(u128::from(*digit))
    })
}
