//! What a replica reads for a coordinator: bytes, the intact blocks of a region, and a digest to compare.

use super::{DiskOp, DiskResult, Effect, Member, Purpose, READS_MAX, ReadAtDisk, SessionId};
use crate::proto::{Answer, Content, ReadFault, Request};

impl Member {
    pub(super) fn start_read(
        &mut self,
        session: SessionId,
        tag: u64,
        range: (u64, u64),
        purpose: Purpose,
        out: &mut Vec<Effect>,
    ) -> Option<Request> {
        let (offset, length) = range;
        if self.reads.len() >= READS_MAX {
            return Some(match purpose {
                Purpose::Bytes => Request::Read {
                    tag,
                    offset,
                    length,
                },
                Purpose::Salvage => Request::Salvage {
                    tag,
                    offset,
                    length,
                },
                Purpose::Verify => Request::Verify {
                    tag,
                    offset,
                    length,
                },
            });
        }
        if !self
            .geometry
            .allows_in_region(offset, length, self.meta.size)
        {
            self.close(out);
            return None;
        }
        let region = self.geometry.region_of(offset);
        if self.meta.region(region).stale.is_some() {
            let result = Err(ReadFault::Stale);
            self.answer(session, Answer::Read { tag, result }, out);
            return None;
        }
        let token = self.ask_disk(DiskOp::Read { offset, length }, out);
        let read = ReadAtDisk {
            session,
            tag,
            range,
            purpose,
        };
        self.reads.insert(token, read);
        None
    }

    pub(super) fn read_done(
        &mut self,
        read: &ReadAtDisk,
        result: DiskResult,
        out: &mut Vec<Effect>,
    ) {
        let tag = read.tag;
        let fits = |content: &Content| content.length() == read.range.1;
        let (content, bad) = match result {
            DiskResult::Read(content) if fits(&content) => (Some(content), Vec::new()),
            DiskResult::Rotten { content, bad } if fits(&content) => (Some(content), bad),
            _ => (None, Vec::new()),
        };
        let answer = match (read.purpose, content) {
            (Purpose::Salvage, Some(content)) => Answer::Salvaged { tag, content, bad },
            (Purpose::Verify, Some(content)) => {
                let digest = digest(&content);
                Answer::Verified { tag, digest, bad }
            }
            // A disk that fails is no better than one whose bytes are all wrong.
            (Purpose::Verify, None) => {
                let blocks = read.range.1 / u64::from(self.geometry.block_bytes);
                let bad = (0..u32::try_from(blocks).unwrap_or(0)).collect();
                Answer::Verified {
                    tag,
                    digest: 0,
                    bad,
                }
            }
            (Purpose::Bytes, Some(content)) if bad.is_empty() => Answer::Read {
                tag,
                result: Ok(content),
            },
            // What is not right is never shown, nor what else was read with it.
            _ => Answer::Read {
                tag,
                result: Err(ReadFault::Medium),
            },
        };
        self.answer(read.session, answer, out);
    }
}

/// The same bytes have the same digest.
fn digest(content: &Content) -> u32 {
    match content {
        Content::Data(data) => crc32c::crc32c(data),
        Content::Zeros(_) => 0,
    }
}
