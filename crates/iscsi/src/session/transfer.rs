//! Write data on its way in: immediate, unsolicited, then by R2T, always in order.
//!
//! ```text
//!   command ─ immediate data ─► unsolicited Data-Out … F ─► R2T 0 ─ Data-Out … F ─► R2T 1 … ─► whole
//!   any gap, repetition, wrong DataSN or overlong burst ─► broken: the command fails, nothing is written
//! ```

use std::collections::VecDeque;

use bytes::Bytes;

use crate::login::Params;
use crate::lun::Chunks;
use crate::pdu::TAG_NONE;

/// A burst that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Burst {
    /// Its tag.
    pub ttt: u32,
    /// R2TSN.
    pub number: u32,
    /// Where it begins.
    pub offset: u32,
    /// How long it is.
    pub len: u32,
}

/// The data of one write.
#[derive(Debug)]
pub struct Transfer {
    data: Chunks,
    /// How much of the data we want.
    wanted: u32,
    /// How much has come, wanted or not.
    received: u32,
    /// The most that may come without being asked for.
    unsolicited_max: u32,
    unsolicited_open: bool,
    next_data_sn: u32,
    asked: u32,
    bursts: VecDeque<Burst>,
    bursts_made: u32,
}

/// The initiator did not keep to the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

/// One Data-Out, or the data in the command itself.
#[derive(Debug)]
pub struct Segment<'a> {
    /// The tag: of a burst, or none.
    pub ttt: u32,
    /// DataSN.
    pub data_sn: u32,
    /// Buffer offset.
    pub offset: u32,
    /// The last of its sequence.
    pub last: bool,
    /// The data.
    pub data: &'a Bytes,
}

impl Transfer {
    /// A write that announces `expected` bytes, of which we want `wanted`. `more` says that unsolicited
    /// data follows the command.
    pub fn new(expected: u32, wanted: u32, more: bool, params: &Params) -> Self {
        Transfer {
            data: Vec::new(),
            wanted: wanted.min(expected),
            received: 0,
            unsolicited_max: expected.min(params.first_burst_bytes),
            unsolicited_open: more && !params.initial_r2t,
            next_data_sn: 0,
            asked: 0,
            bursts: VecDeque::new(),
            bursts_made: 0,
        }
    }

    /// Data in the command's own PDU.
    ///
    /// # Errors
    /// It is more than may come unasked.
    pub fn immediate(&mut self, data: &Bytes) -> Result<(), Broken> {
        self.take(data, self.unsolicited_max)?;
        self.asked = self.received;
        Ok(())
    }

    /// A Data-Out.
    ///
    /// # Errors
    /// It is not the one that has to come next.
    pub fn segment(&mut self, segment: &Segment<'_>) -> Result<(), Broken> {
        if segment.data_sn != self.next_data_sn || segment.offset != self.received {
            return Err(Broken);
        }
        if segment.ttt == TAG_NONE {
            if !self.unsolicited_open {
                return Err(Broken);
            }
            self.take(segment.data, self.unsolicited_max)?;
            self.asked = self.received;
            self.unsolicited_open = !segment.last;
        } else {
            let burst = *self.bursts.front().ok_or(Broken)?;
            if burst.ttt != segment.ttt {
                return Err(Broken);
            }
            let end = burst.offset + burst.len;
            self.take(segment.data, end)?;
            if segment.last != (self.received == end) {
                return Err(Broken);
            }
            if segment.last {
                self.bursts.pop_front();
            }
        }
        self.next_data_sn = if segment.last {
            0
        } else {
            self.next_data_sn + 1
        };
        Ok(())
    }

    fn take(&mut self, data: &Bytes, end: u32) -> Result<(), Broken> {
        let len = u32::try_from(data.len()).map_err(|_| Broken)?;
        let after = self
            .received
            .checked_add(len)
            .filter(|after| *after <= end)
            .ok_or(Broken)?;
        let keep = self.wanted.saturating_sub(self.received).min(len);
        if keep > 0 {
            self.data
                .push(data.slice(..usize::try_from(keep).map_err(|_| Broken)?));
        }
        self.received = after;
        Ok(())
    }

    /// Whether all that we want has come, and nothing unasked is still to come.
    pub fn is_whole(&self) -> bool {
        !self.unsolicited_open && self.received >= self.wanted
    }

    /// What remains to be asked for, once nothing comes unasked any more.
    pub fn unasked(&self) -> u32 {
        if self.unsolicited_open {
            0
        } else {
            self.wanted.saturating_sub(self.asked)
        }
    }

    /// Ask for the next burst, if one is due and not too many are out. `tag` makes it a tag.
    pub fn ask(&mut self, params: &Params, tag: impl FnOnce() -> u32) -> Option<Burst> {
        let left = self.unasked();
        let out = u32::try_from(self.bursts.len()).unwrap_or(u32::MAX);
        if left == 0 || out >= params.outstanding_r2t_max {
            return None;
        }
        let len = left.min(params.max_burst_bytes);
        let burst = Burst {
            ttt: tag(),
            number: self.bursts_made,
            offset: self.asked,
            len,
        };
        self.bursts_made += 1;
        self.asked += len;
        self.bursts.push_back(burst);
        Some(burst)
    }

    /// R2Ts sent so far.
    pub fn bursts_made(&self) -> u32 {
        self.bursts_made
    }

    /// The data, when it is whole.
    pub fn into_data(self) -> Chunks {
        self.data
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::lun::chunks_len;

    fn params() -> Params {
        Params {
            initial_r2t: false,
            first_burst_bytes: 1024,
            max_burst_bytes: 2048,
            outstanding_r2t_max: 2,
            ..Params::default()
        }
    }

    fn data(len: usize) -> Bytes {
        Bytes::from(vec![7; len])
    }

    fn segment(ttt: u32, data_sn: u32, offset: u32, last: bool, data: &Bytes) -> Segment<'_> {
        Segment {
            ttt,
            data_sn,
            offset,
            last,
            data,
        }
    }

    #[test]
    fn data_comes_in_order_and_is_asked_for_in_bursts() {
        // Fails if a burst is longer than agreed, too many are out, or the whole is not recognised.
        let mut transfer = Transfer::new(6144, 6144, true, &params());
        transfer.immediate(&data(512)).unwrap();
        assert_eq!(transfer.unasked(), 0, "unsolicited data is still to come");
        transfer
            .segment(&segment(TAG_NONE, 0, 512, true, &data(512)))
            .unwrap();
        let mut tags = 10..;
        let mut tag = || tags.next().unwrap();
        assert_eq!(
            transfer.ask(&params(), &mut tag),
            Some(Burst {
                ttt: 10,
                number: 0,
                offset: 1024,
                len: 2048
            })
        );
        assert_eq!(
            transfer.ask(&params(), &mut tag),
            Some(Burst {
                ttt: 11,
                number: 1,
                offset: 3072,
                len: 2048
            })
        );
        assert_eq!(transfer.ask(&params(), &mut tag), None, "two are out");
        transfer
            .segment(&segment(10, 0, 1024, false, &data(1024)))
            .unwrap();
        transfer
            .segment(&segment(10, 1, 2048, true, &data(1024)))
            .unwrap();
        assert_eq!(
            transfer.ask(&params(), &mut tag),
            Some(Burst {
                ttt: 12,
                number: 2,
                offset: 5120,
                len: 1024
            })
        );
        transfer
            .segment(&segment(11, 0, 3072, true, &data(2048)))
            .unwrap();
        assert!(!transfer.is_whole());
        transfer
            .segment(&segment(12, 0, 5120, true, &data(1024)))
            .unwrap();
        assert!(transfer.is_whole());
        assert_eq!(chunks_len(&transfer.into_data()), 6144);
    }

    #[test]
    fn a_sequence_that_is_not_kept_breaks_the_transfer() {
        // Fails if a wrong number, offset or tag, a short or a long burst is taken.
        let begin = || {
            let mut transfer = Transfer::new(4096, 4096, false, &params());
            transfer.ask(&params(), || 5).unwrap();
            transfer
        };
        for bad in [
            segment(5, 1, 0, false, &data(512)),
            segment(5, 0, 512, false, &data(512)),
            segment(6, 0, 0, false, &data(512)),
            segment(TAG_NONE, 0, 0, false, &data(512)),
            segment(5, 0, 0, true, &data(512)),
            segment(5, 0, 0, true, &data(4096)),
            segment(5, 0, 0, false, &data(2048)),
        ] {
            assert_eq!(begin().segment(&bad), Err(Broken), "{bad:?}");
        }
        let mut unasked = Transfer::new(4096, 4096, true, &params());
        assert_eq!(unasked.immediate(&data(1025)), Err(Broken));
    }

    #[test]
    fn data_that_the_command_does_not_want_is_dropped() {
        // Fails if more than the command names is kept, or is asked for.
        let mut transfer = Transfer::new(1024, 512, true, &params());
        transfer.immediate(&data(256)).unwrap();
        transfer
            .segment(&segment(TAG_NONE, 0, 256, true, &data(768)))
            .unwrap();
        assert!(transfer.is_whole());
        assert_eq!(transfer.unasked(), 0);
        assert_eq!(chunks_len(&transfer.into_data()), 512);
    }
}
