//! Reading and writing numbers one after the other.

use bytes::BytesMut;
use uuid::Uuid;

use crate::proto::{Epoch, Key, Region, Stale};

/// Bytes that are being read. Every read answers nothing when they are used up.
pub(super) struct Cursor<'a>(pub(super) &'a [u8]);

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    pub(super) fn flag(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    pub(super) fn uuid(&mut self) -> Option<Uuid> {
        self.take().map(Uuid::from_bytes)
    }

    pub(super) fn epoch(&mut self) -> Option<Epoch> {
        self.u64().map(Epoch::from_raw)
    }

    pub(super) fn key(&mut self) -> Option<Key> {
        Some(Key {
            epoch: self.epoch()?,
            seq: self.u64()?,
        })
    }

    /// Whether a region waits for repair, and since when.
    pub(super) fn stale(&mut self) -> Option<Option<Stale>> {
        Some(match self.u8()? {
            0 => None,
            mark @ (1 | 2) => Some(Stale {
                key: self.key()?,
                mixed: mark == 2,
            }),
            _ => return None,
        })
    }

    pub(super) fn region(&mut self) -> Option<Region> {
        self.u32().map(Region)
    }

    /// A list: how many, then each. At most `max`, each of which takes a byte at least.
    pub(super) fn list<T>(
        &mut self,
        max: usize,
        mut read: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        let count = usize::try_from(self.u32()?).ok()?;
        if count > max || count > self.0.len() {
            return None;
        }
        let mut list = Vec::with_capacity(count);
        for _ in 0..count {
            list.push(read(self)?);
        }
        Some(list)
    }
}

/// Bytes that are being written.
pub(super) struct Writer<'a>(pub(super) &'a mut BytesMut);

impl Writer<'_> {
    pub(super) fn u8(&mut self, value: u8) {
        self.0.extend_from_slice(&[value]);
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub(super) fn flag(&mut self, value: bool) {
        self.u8(u8::from(value));
    }

    pub(super) fn uuid(&mut self, value: Uuid) {
        self.0.extend_from_slice(value.as_bytes());
    }

    pub(super) fn key(&mut self, value: Key) {
        self.u64(value.epoch.get());
        self.u64(value.seq);
    }

    pub(super) fn stale(&mut self, stale: Option<Stale>) {
        match stale {
            None => self.u8(0),
            Some(stale) => {
                self.u8(if stale.mixed { 2 } else { 1 });
                self.key(stale.key);
            }
        }
    }

    pub(super) fn list<T>(&mut self, list: &[T], mut write: impl FnMut(&mut Self, &T)) {
        // A list too long for its count is too long for a frame, which is refused as a whole.
        self.u32(u32::try_from(list.len()).unwrap_or(u32::MAX));
        for item in list {
            write(self, item);
        }
    }
}
