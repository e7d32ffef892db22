//! The commands that the volume carries out.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::cdb::{Blocks, Check, Command};
use super::{Data, Outcome, Request, Sense, Started, gather, status};
use crate::limits::{
    COMPARE_AND_WRITE_BLOCKS_MAX, LBA_STATUS_EXTENTS_MAX, OR_WRITE_TRIES, TRANSFER_BYTES_MAX,
    UNMAP_DESCRIPTORS_MAX, VERIFY_BYTES_MAX, VERIFY_STEP_BYTES, WRITE_SAME_BLOCKS_MAX,
};
use crate::lun::{Answer, Chunks, Compared, Extent, Lun, chunks_len};
use crate::unit::Unit;

/// Begin a command that names blocks; `None` for other commands.
pub fn start(unit: &Arc<Unit>, size: u64, command: &Command, request: &Request) -> Option<Started> {
    let data = &request.data;
    // Where a command names one length and the transport another, only a plain write has a sound meaning.
    let exact = matches!(
        command,
        Command::WriteSame { .. } | Command::CompareAndWrite { .. }
    );
    if exact && command.data_out_bytes(unit.block_size()) != u64::from(request.announced) {
        return Some(Outcome::check(Sense::INVALID_FIELD_IN_CDB).into());
    }
    let medium = Medium {
        lun: unit.lun(),
        block_size: unit.block_size(),
        size,
    };
    let started = match *command {
        Command::Read { range } => medium.read(range, request.spans),
        Command::Write { range, fua } => medium.write(range, data, fua),
        Command::WriteVerify { range, compare } => medium.write_verify(range, data, compare),
        Command::Verify { range, check } => medium.verify(range, check, data),
        Command::WriteSame {
            range,
            unmap,
            no_data,
        } => medium.write_same(range, unmap, no_data, data),
        Command::Unmap { .. } => medium.unmap(&gather(data)),
        Command::CompareAndWrite { range, fua } => medium.compare_and_write(range, data, fua),
        Command::OrWrite { range, fua } => medium.or_write(range, data, fua),
        Command::SynchronizeCache { range } => medium.flush(range),
        Command::Prefetch { range } => medium.in_range(range).map(|_| Outcome::good().into()),
        Command::LbaStatus { lba, alloc } => medium.lba_status(lba, alloc),
        _ => return None,
    };
    Some(started.unwrap_or_else(|sense| Outcome::check(sense).into()))
}

/// A range in bytes, inside of the volume.
#[derive(Clone, Copy)]
struct Bytewise {
    offset: u64,
    len: u64,
}

/// The blocks of a logical unit, with the size that they have while a command runs.
struct Medium<'a> {
    lun: &'a Arc<dyn Lun>,
    block_size: u32,
    size: u64,
}

type Begun = Result<Started, Sense>;

/// Go on at once if the answer is there, else when it comes.
fn then<T: Send + 'static>(
    answer: Answer<T>,
    finish: impl FnOnce(crate::lun::LunResult<T>) -> Outcome + Send + 'static,
) -> Started {
    match answer {
        Answer::Now(result) => Started::Done(finish(result)),
        Answer::Later(future) => Started::Running(Box::pin(async move { finish(future.await) })),
    }
}

fn written(result: crate::lun::LunResult<()>) -> Outcome {
    match result {
        Ok(()) => Outcome::good(),
        Err(error) => Outcome::failed(error, true),
    }
}

impl Medium<'_> {
    fn block(&self) -> u64 {
        u64::from(self.block_size)
    }

    fn blocks(&self) -> u64 {
        self.size / self.block()
    }

    fn in_range(&self, range: Blocks) -> Result<Bytewise, Sense> {
        let end = range
            .lba
            .checked_add(range.count)
            .ok_or(Sense::LBA_OUT_OF_RANGE)?;
        if end > self.blocks() {
            return Err(Sense::LBA_OUT_OF_RANGE);
        }
        Ok(Bytewise {
            offset: range.lba * self.block(),
            len: range.count * self.block(),
        })
    }

    /// A range whose data goes over the wire.
    fn transfer(&self, range: Blocks) -> Result<Bytewise, Sense> {
        let bytes = self.in_range(range)?;
        if bytes.len > u64::from(TRANSFER_BYTES_MAX) {
            return Err(Sense::INVALID_FIELD_IN_CDB);
        }
        Ok(bytes)
    }

    fn read(&self, range: Blocks, spans: bool) -> Begun {
        let bytes = self.transfer(range)?;
        if bytes.len == 0 {
            return Ok(Outcome::good().into());
        }
        let len = u32::try_from(bytes.len).map_err(|_| Sense::INVALID_FIELD_IN_CDB)?;
        if spans && let Some(span) = self.lun.span(bytes.offset, len) {
            let data = Data::File(span);
            return Ok(Outcome {
                data,
                ..Outcome::good()
            }
            .into());
        }
        Ok(then(
            self.lun.read(bytes.offset, len),
            |result| match result {
                Ok(data) => Outcome::data(data),
                Err(error) => Outcome::failed(error, false),
            },
        ))
    }

    /// What the initiator sent for a range. It may have announced less than the command names; then only whole blocks
    /// of it count.
    fn sent(&self, bytes: Bytewise, data: &Chunks) -> Result<u64, Sense> {
        let len = u64::try_from(chunks_len(data)).map_err(|_| Sense::INVALID_FIELD_IN_CDB)?;
        if len > bytes.len || len % self.block() != 0 {
            return Err(Sense::INVALID_FIELD_IN_UNIT);
        }
        Ok(len)
    }

    fn write(&self, range: Blocks, data: &Chunks, fua: bool) -> Begun {
        let bytes = self.transfer(range)?;
        if self.sent(bytes, data)? == 0 {
            return Ok(Outcome::good().into());
        }
        Ok(then(
            self.lun.write(bytes.offset, data.clone(), fua),
            written,
        ))
    }

    fn write_verify(&self, range: Blocks, data: &Chunks, compare: bool) -> Begun {
        let bytes = self.transfer(range)?;
        let len = self.sent(bytes, data)?;
        if len == 0 {
            return Ok(Outcome::good().into());
        }
        let lun = Arc::clone(self.lun);
        let data = data.clone();
        Ok(Started::Running(Box::pin(async move {
            if let Err(error) = lun.write(bytes.offset, data.clone(), true).await {
                return Outcome::failed(error, true);
            }
            let expect = if compare {
                Expect::Data(data)
            } else {
                Expect::Anything
            };
            verify(
                &*lun,
                Bytewise {
                    offset: bytes.offset,
                    len,
                },
                &expect,
            )
            .await
        })))
    }

    fn verify(&self, range: Blocks, check: Check, data: &Chunks) -> Begun {
        let bytes = match check {
            Check::Data => self.transfer(range)?,
            Check::Medium | Check::OneBlock => self.in_range(range)?,
        };
        if bytes.len > VERIFY_BYTES_MAX {
            return Err(Sense::INVALID_FIELD_IN_CDB);
        }
        let expect = match check {
            Check::Medium => Expect::Anything,
            Check::Data => Expect::Data(data.clone()),
            Check::OneBlock => Expect::Pattern(self.one_block(data)?),
        };
        let len = if check == Check::Data {
            self.sent(bytes, data)?
        } else {
            bytes.len
        };
        if len == 0 {
            return Ok(Outcome::good().into());
        }
        let lun = Arc::clone(self.lun);
        let bytes = Bytewise {
            offset: bytes.offset,
            len,
        };
        Ok(Started::Running(Box::pin(async move {
            verify(&*lun, bytes, &expect).await
        })))
    }

    fn one_block(&self, data: &Chunks) -> Result<Bytes, Sense> {
        let block = gather(data);
        if u64::try_from(block.len()).ok() != Some(self.block()) {
            return Err(Sense::INVALID_FIELD_IN_UNIT);
        }
        Ok(block)
    }

    fn write_same(&self, mut range: Blocks, unmap: bool, no_data: bool, data: &Chunks) -> Begun {
        if range.count == 0 {
            range.count = self
                .blocks()
                .checked_sub(range.lba)
                .ok_or(Sense::LBA_OUT_OF_RANGE)?;
        }
        let bytes = self.in_range(range)?;
        if range.count > u64::from(WRITE_SAME_BLOCKS_MAX) {
            return Err(Sense::INVALID_FIELD_IN_CDB);
        }
        let block = if no_data {
            Bytes::new()
        } else {
            self.one_block(data)?
        };
        // With UNMAP the space is given back whatever the block holds, as Linux's own target does.
        if unmap || block.iter().all(|byte| *byte == 0) {
            return Ok(then(self.lun.zero(bytes.offset, bytes.len, unmap), written));
        }
        let lun = Arc::clone(self.lun);
        Ok(Started::Running(Box::pin(async move {
            repeat(&*lun, bytes, &block).await
        })))
    }

    fn unmap(&self, list: &[u8]) -> Begun {
        if list.is_empty() {
            return Ok(Outcome::good().into());
        }
        let head = list.first_chunk::<8>().ok_or(Sense::PARAMETER_LENGTH)?;
        let len = usize::from(u16::from_be_bytes([head[2], head[3]]));
        let descriptors = list
            .get(8..8 + len)
            .ok_or(Sense::PARAMETER_LENGTH)?
            .chunks_exact(16);
        if descriptors.len() > usize::try_from(UNMAP_DESCRIPTORS_MAX).unwrap_or(0) {
            return Err(Sense::INVALID_PARAMETER);
        }
        let mut ranges = Vec::with_capacity(descriptors.len());
        for descriptor in descriptors {
            let word = |at: usize, len: usize| {
                descriptor[at..at + len]
                    .iter()
                    .fold(0, |word: u64, byte| word << 8 | u64::from(*byte))
            };
            let bytes = self.in_range(Blocks {
                lba: word(0, 8),
                count: word(8, 4),
            })?;
            if bytes.len > 0 {
                ranges.push(bytes);
            }
        }
        let lun = Arc::clone(self.lun);
        Ok(Started::Running(Box::pin(async move {
            for bytes in ranges {
                if let Err(error) = lun.zero(bytes.offset, bytes.len, true).await {
                    return Outcome::failed(error, true);
                }
            }
            Outcome::good()
        })))
    }

    fn compare_and_write(&self, range: Blocks, data: &Chunks, fua: bool) -> Begun {
        if range.count > u64::from(COMPARE_AND_WRITE_BLOCKS_MAX) {
            return Err(Sense::INVALID_FIELD_IN_CDB);
        }
        let bytes = self.in_range(range)?;
        let all = u64::try_from(chunks_len(data)).map_err(|_| Sense::INVALID_FIELD_IN_CDB)?;
        if all != bytes.len * 2 {
            return Err(Sense::INVALID_FIELD_IN_UNIT);
        }
        if bytes.len == 0 {
            return Ok(Outcome::good().into());
        }
        let (compare, write) = split(
            data,
            usize::try_from(bytes.len).map_err(|_| Sense::INVALID_FIELD_IN_CDB)?,
        );
        Ok(then(
            self.lun
                .compare_and_write(bytes.offset, compare, write, fua),
            |result| match result {
                Ok(Compared::Written) => Outcome::good(),
                Ok(Compared::Differs { at }) => {
                    Outcome::check(Sense::MISCOMPARE.with_information(at))
                }
                Err(error) => Outcome::failed(error, true),
            },
        ))
    }

    fn or_write(&self, range: Blocks, data: &Chunks, fua: bool) -> Begun {
        let bytes = self.transfer(range)?;
        let len = self.sent(bytes, data)?;
        if len == 0 {
            return Ok(Outcome::good().into());
        }
        let lun = Arc::clone(self.lun);
        let ones = gather(data);
        Ok(Started::Running(Box::pin(async move {
            or_write(&*lun, bytes.offset, &ones, fua).await
        })))
    }

    fn flush(&self, range: Blocks) -> Begun {
        self.in_range(range)?;
        Ok(then(self.lun.flush(), written))
    }

    fn lba_status(&self, lba: u64, alloc: u32) -> Begun {
        if lba >= self.blocks() {
            return Err(Sense::LBA_OUT_OF_RANGE);
        }
        // One descriptor covers at most 2^32 - 1 blocks.
        let count = (self.blocks() - lba).min(u64::from(u32::MAX));
        let room = usize::try_from(alloc.saturating_sub(8) / 16)
            .unwrap_or(0)
            .clamp(1, LBA_STATUS_EXTENTS_MAX);
        let block = self.block();
        let answer = self.lun.extents(lba * block, count * block, room);
        Ok(then(answer, move |result| match result {
            Ok(extents) => Outcome::allocated(status_list(lba, block, &extents), alloc),
            Err(error) => Outcome::failed(error, false),
        }))
    }
}

/// The descriptors of GET LBA STATUS. A block that has space in part has space.
fn status_list(lba: u64, block: u64, extents: &[Extent]) -> Vec<u8> {
    let mut data = vec![0; 8];
    let mut next = lba;
    let mut offset = lba * block;
    for extent in extents {
        let end = offset + extent.len;
        // Round so that the mapped side gets the shared block.
        let end_block = if extent.mapped {
            end.div_ceil(block)
        } else {
            end / block
        };
        let count = u32::try_from(end_block.saturating_sub(next)).unwrap_or(u32::MAX);
        if count > 0 {
            data.extend_from_slice(&next.to_be_bytes());
            data.extend_from_slice(&count.to_be_bytes());
            data.extend_from_slice(&[u8::from(!extent.mapped), 0, 0, 0]);
        }
        next = next.max(end_block);
        offset = end;
    }
    let len = u32::try_from(data.len() - 4).unwrap_or(0);
    data[..4].copy_from_slice(&len.to_be_bytes());
    data
}

/// What a range has to hold.
enum Expect {
    Anything,
    Data(Chunks),
    Pattern(Bytes),
}

async fn verify(lun: &dyn Lun, bytes: Bytewise, expect: &Expect) -> Outcome {
    let expected = match expect {
        Expect::Data(data) => gather(data),
        Expect::Anything | Expect::Pattern(_) => Bytes::new(),
    };
    let mut done: u64 = 0;
    while done < bytes.len {
        let step = (bytes.len - done).min(VERIFY_STEP_BYTES);
        let len = u32::try_from(step).unwrap_or(u32::MAX);
        let found = match lun.read(bytes.offset + done, len).await {
            Ok(found) => gather(&found),
            Err(error) => return Outcome::failed(error, false),
        };
        let start = usize::try_from(done).unwrap_or(usize::MAX);
        let differs = match expect {
            Expect::Anything => None,
            Expect::Data(_) => expected
                .get(start..)
                .and_then(|rest| first_difference(&found, rest)),
            Expect::Pattern(block) => {
                found
                    .chunks(block.len())
                    .enumerate()
                    .find_map(|(at, each)| {
                        first_difference(each, block).map(|inner| at * block.len() + inner)
                    })
            }
        };
        if let Some(at) = differs {
            let at = done + u64::try_from(at).unwrap_or(0);
            return Outcome::check(Sense::MISCOMPARE.with_information(at));
        }
        done += step;
    }
    Outcome::good()
}

/// Eight bytes at a time; both are whole blocks.
fn set_bits(bytes: &mut [u8], ones: &[u8]) {
    for (word, ones) in bytes
        .as_chunks_mut::<8>()
        .0
        .iter_mut()
        .zip(ones.as_chunks::<8>().0)
    {
        *word = (u64::from_ne_bytes(*word) | u64::from_ne_bytes(*ones)).to_ne_bytes();
    }
}

/// Set bits atomically: the result is written only if nobody wrote in between.
async fn or_write(lun: &dyn Lun, offset: u64, ones: &Bytes, fua: bool) -> Outcome {
    let len = u32::try_from(ones.len()).unwrap_or(u32::MAX);
    for _ in 0..OR_WRITE_TRIES {
        let before = match lun.read(offset, len).await {
            Ok(before) => gather(&before),
            Err(error) => return Outcome::failed(error, false),
        };
        let mut after = BytesMut::from(&before[..]);
        set_bits(&mut after, ones);
        match lun
            .compare_and_write(offset, vec![before], vec![after.freeze()], fua)
            .await
        {
            Ok(Compared::Written) => return Outcome::good(),
            Ok(Compared::Differs { .. }) => {}
            Err(error) => return Outcome::failed(error, true),
        }
    }
    Outcome::status(status::BUSY)
}

fn first_difference(found: &[u8], expected: &[u8]) -> Option<usize> {
    if expected.starts_with(found) {
        return None;
    }
    Some(
        found
            .iter()
            .zip(expected)
            .position(|(a, b)| a != b)
            .unwrap_or(found.len().min(expected.len())),
    )
}

async fn repeat(lun: &dyn Lun, bytes: Bytewise, block: &Bytes) -> Outcome {
    let step = bytes.len.min(VERIFY_STEP_BYTES);
    let mut pattern = BytesMut::with_capacity(usize::try_from(step).unwrap_or(0));
    while u64::try_from(pattern.len()).unwrap_or(u64::MAX) < step {
        pattern.extend_from_slice(block);
    }
    let pattern = pattern.freeze();
    let mut done: u64 = 0;
    while done < bytes.len {
        let len = (bytes.len - done).min(step);
        let piece = pattern.slice(..usize::try_from(len).unwrap_or(0));
        if let Err(error) = lun.write(bytes.offset + done, vec![piece], false).await {
            return Outcome::failed(error, true);
        }
        done += len;
    }
    Outcome::good()
}

/// Cut a list in two, without copying.
fn split(data: &Chunks, mut at: usize) -> (Chunks, Chunks) {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    for piece in data {
        let cut = piece.len().min(at);
        at -= cut;
        if cut > 0 {
            first.push(piece.slice(..cut));
        }
        if cut < piece.len() {
            second.push(piece.slice(cut..));
        }
    }
    (first, second)
}
