//! Sizes: from a range of bytes to the size of a volume.

use tonic::Status;
use trellis_api::{Bytes, Hold, HoldReason};
use trellis_control::claim::provision::goal;

use crate::codes;
use crate::proto::csi::CapacityRange;

/// The size of a volume for which none is asked.
const SIZE_DEFAULT: Bytes = Bytes::GIB;
/// Sizes are whole mebibytes.
const UNIT: u64 = Bytes::MIB.get();

/// A range of sizes that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// At least so much.
    pub least: Option<Bytes>,
    /// At most so much.
    pub most: Option<Bytes>,
}

impl Range {
    /// Reads a range. Zero says nothing.
    pub fn read(range: Option<&CapacityRange>) -> Result<Range, Status> {
        let Some(range) = range else {
            return Ok(Range {
                least: None,
                most: None,
            });
        };
        let bound = |bytes: i64| match u64::try_from(bytes) {
            Ok(0) => Ok(None),
            Ok(bytes) => Ok(Some(Bytes::new(bytes))),
            Err(_) => {
                let message = format!("{bytes} bytes are asked for, which is no size.");
                Err(codes::refused(&Hold::new(HoldReason::SizeInvalid, message)))
            }
        };
        Ok(Range {
            least: bound(range.required_bytes)?,
            most: bound(range.limit_bytes)?,
        })
    }

    /// The smallest size of a volume in the range; the default one if the range leaves it open.
    pub fn size(&self) -> Result<Bytes, Status> {
        let size = match (self.least, self.most) {
            (Some(least), _) => goal(least).map_err(|hold| codes::refused(&hold))?,
            (None, Some(most)) => SIZE_DEFAULT.min(Bytes::new(most.get() / UNIT * UNIT)),
            (None, None) => SIZE_DEFAULT,
        };
        if size == Bytes::ZERO || !self.has(size) {
            let most = self.most.unwrap_or(Bytes::VOLUME_MAX);
            let message = format!(
                "A volume has a whole number of mebibytes; the smallest that is large enough has {}, and at most {most} is \
                 allowed.",
                size.max(Bytes::MIB)
            );
            return Err(codes::refused(&Hold::new(
                HoldReason::SizeTooLarge,
                message,
            )));
        }
        Ok(size)
    }

    /// Whether a size is in the range.
    pub fn has(&self, size: Bytes) -> bool {
        self.least.is_none_or(|least| size >= least) && self.most.is_none_or(|most| size <= most)
    }
}

/// A size in CSI's type.
pub fn wire(size: Bytes) -> i64 {
    i64::try_from(size.get()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    fn size(required_bytes: i64, limit_bytes: i64) -> Result<u64, Code> {
        let range = CapacityRange {
            required_bytes,
            limit_bytes,
        };
        let read = Range::read(Some(&range)).and_then(|range| range.size());
        read.map(Bytes::get).map_err(|status| status.code())
    }

    // Fails if a size is rounded down, past its limit, or refused although one fits.
    #[test]
    fn a_size_is_the_smallest_whole_mebibyte_within_the_limits() {
        const MIB: i64 = 1 << 20;
        const GIB: i64 = 1 << 30;
        assert_eq!(size(GIB, 0), Ok(1 << 30));
        assert_eq!(size(GIB, GIB), Ok(1 << 30));
        assert_eq!(size(GIB + 1, 0), Ok((1 << 30) + (1 << 20)));
        assert_eq!(size(GIB + 1, GIB + MIB), Ok((1 << 30) + (1 << 20)));
        assert_eq!(size(GIB + 1, GIB + 2), Err(Code::OutOfRange));
        assert_eq!(size(0, 0), Ok(1 << 30));
        assert_eq!(size(0, 5 * MIB + 7), Ok(5 << 20));
        assert_eq!(size(0, 7), Err(Code::OutOfRange));
        assert_eq!(size(2 * GIB, GIB), Err(Code::OutOfRange));
        assert_eq!(size(i64::MAX, 0), Err(Code::OutOfRange));
        assert_eq!(size(-1, 0), Err(Code::InvalidArgument));
        assert_eq!(size(GIB, -1), Err(Code::InvalidArgument));
    }
}
