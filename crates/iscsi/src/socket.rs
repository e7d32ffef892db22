//! Writes to a socket, from memory and from files.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;

use rustix::fs::sendfile;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use crate::limits::WRITE_SLICES_MAX;
use crate::pdu::Outbox;

/// Write as much of the queue as one call takes, and return how much that was. The queue must not be empty.
///
/// # Errors
/// The socket cannot take anything. [`io::ErrorKind::UnexpectedEof`] says that it was the file that failed.
pub fn write(out: &Outbox, socket: impl AsFd) -> io::Result<usize> {
    if let Some(span) = out.first_span() {
        let len = usize::try_from(span.len).unwrap_or(usize::MAX);
        let mut at = span.offset;
        return match sendfile(socket, &*span.file, Some(&mut at), len) {
            Ok(0) | Err(rustix::io::Errno::IO) => Err(io::ErrorKind::UnexpectedEof.into()),
            sent => Ok(sent?),
        };
    }
    let mut slices = [IoSlice::new(&[]); WRITE_SLICES_MAX];
    let (count, span_follows) = out.slices(&mut slices);
    // A header must not travel alone while its data is about to follow.
    let more = if span_follows {
        SendFlags::MORE
    } else {
        SendFlags::empty()
    };
    let mut nothing = SendAncillaryBuffer::default();
    let flags = SendFlags::NOSIGNAL | more;
    Ok(sendmsg(socket, &slices[..count], &mut nothing, flags)?)
}
