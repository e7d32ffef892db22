//! Meta data and their changes as bytes, for the disk.

use bytes::BytesMut;

use super::cursor::{Cursor, Writer};
use super::fields::{promise, put_view, view};
use super::reserved;
use crate::proto::{Meta, MetaChange, Region, Stale};

/// The most regions of a volume: 1 PiB in regions of 1 MiB.
const REGIONS_MAX: usize = 1 << 30;

pub(crate) fn put_meta(meta: &Meta) -> BytesMut {
    let mut bytes = BytesMut::new();
    let mut to = Writer(&mut bytes);
    to.u64(meta.promise.generation);
    to.u64(meta.promise.owner);
    to.key(meta.durable);
    to.u64(meta.size);
    to.u64(meta.size_version);
    put_view(&mut to, &meta.view);
    reserved::put(&mut to);
    to.list(&meta.stamps, |to, stamp| to.u64(stamp.get()));
    let stale: Vec<_> = meta.stale.iter().collect();
    to.list(&stale, |to, (region, stale)| {
        put_stale(to, **region, Some(**stale));
    });
    bytes
}

pub(crate) fn meta(bytes: &[u8]) -> Option<Meta> {
    let mut from = Cursor(bytes);
    let meta = Meta {
        promise: promise(&mut from)?,
        durable: from.key()?,
        size: from.u64()?,
        size_version: from.u64()?,
        view: view(&mut from)?,
        stamps: {
            reserved::skip(&mut from)?;
            from.list(REGIONS_MAX, Cursor::epoch)?
        },
        stale: from
            .list(REGIONS_MAX, stale)?
            .into_iter()
            .filter_map(|(region, stale)| Some((region, stale?)))
            .collect(),
    };
    from.0.is_empty().then_some(meta)
}

pub(crate) fn put_change(change: &MetaChange) -> BytesMut {
    let mut bytes = BytesMut::new();
    let mut to = Writer(&mut bytes);
    to.flag(change.promise.is_some());
    if let Some(promise) = change.promise {
        to.u64(promise.generation);
        to.u64(promise.owner);
    }
    to.flag(change.durable.is_some());
    if let Some(key) = change.durable {
        to.key(key);
    }
    to.flag(change.size.is_some());
    if let Some((size, version)) = change.size {
        to.u64(size);
        to.u64(version);
    }
    to.flag(change.view.is_some());
    if let Some(view) = &change.view {
        put_view(&mut to, view);
    }
    reserved::put(&mut to);
    to.list(&change.stamps, |to, (region, stamp)| {
        to.u32(region.0);
        to.u64(stamp.get());
    });
    to.list(&change.stale, |to, (region, stale)| {
        put_stale(to, *region, *stale);
    });
    // Said only where it is so, as most changes do not.
    if change.forget {
        to.flag(true);
    }
    bytes
}

pub(crate) fn change(bytes: &[u8]) -> Option<MetaChange> {
    let mut from = Cursor(bytes);
    let change = MetaChange {
        promise: optional(&mut from, promise)?,
        durable: optional(&mut from, Cursor::key)?,
        size: optional(&mut from, |from| Some((from.u64()?, from.u64()?)))?,
        view: optional(&mut from, view)?,
        stamps: {
            reserved::skip(&mut from)?;
            from.list(REGIONS_MAX, |from| Some((from.region()?, from.epoch()?)))?
        },
        stale: from.list(REGIONS_MAX, stale)?,
        forget: !from.0.is_empty() && from.flag()?,
    };
    from.0.is_empty().then_some(change)
}

fn optional<'a, T>(
    from: &mut Cursor<'a>,
    read: impl FnOnce(&mut Cursor<'a>) -> Option<T>,
) -> Option<Option<T>> {
    if from.flag()? {
        read(from).map(Some)
    } else {
        Some(None)
    }
}

fn put_stale(to: &mut Writer<'_>, region: Region, stale: Option<Stale>) {
    to.u32(region.0);
    to.stale(stale);
}

fn stale(from: &mut Cursor<'_>) -> Option<(Region, Option<Stale>)> {
    Some((from.region()?, from.stale()?))
}
