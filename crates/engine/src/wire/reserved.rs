//! The place of a list that is always empty.
//!
//! Earlier releases have a list of records there, which nothing ever filled. The place stays, so that these releases
//! and this one read what the other has written.

use super::cursor::{Cursor, Writer};

/// The most records that an earlier release reads or writes.
const RECORDS_MAX: usize = 64;

/// The length of such a record.
const RECORD_BYTES: usize = 40;

/// Writes the empty list.
pub(super) fn put(to: &mut Writer<'_>) {
    to.u32(0);
}

/// Reads past the list, if it is one that an earlier release could have written.
pub(super) fn skip(from: &mut Cursor<'_>) -> Option<()> {
    let count = usize::try_from(from.u32()?).ok()?;
    if count > RECORDS_MAX {
        return None;
    }
    from.0 = from.0.get(count * RECORD_BYTES..)?;
    Some(())
}
