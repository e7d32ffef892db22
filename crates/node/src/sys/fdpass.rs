//! Sends open descriptors to another process over a Unix socket, with a few bytes that say what they are.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// The most descriptors of one message. The kernel's own limit is 253.
pub const DESCRIPTORS_MAX: usize = 16;

/// Sends descriptors with a message, which must not be empty: descriptors travel only with bytes. The other
/// side gets duplicates, which live on when these are closed.
pub fn send(socket: impl AsFd, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    if message.is_empty() || descriptors.len() > DESCRIPTORS_MAX {
        return Err(Errno::INVAL);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::NOBUFS);
    }
    let parts = [IoSlice::new(message)];
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL)
    })?;
    if sent == message.len() {
        Ok(())
    } else {
        // On a stream socket the rest would come without its descriptors.
        Err(Errno::MSGSIZE)
    }
}

/// What came over the socket.
#[derive(Debug)]
pub struct Received {
    /// The message; empty when the other side has closed.
    pub message: Vec<u8>,
    /// The descriptors that came with it, closed in programs that are started from here.
    pub descriptors: Vec<OwnedFd>,
}

/// Receives one message of at most `message_bytes_max` with its descriptors.
pub fn receive(socket: impl AsFd, message_bytes_max: usize) -> Result<Received> {
    let mut message = vec![0; message_bytes_max];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        let mut parts = [IoSliceMut::new(&mut message)];
        rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = part {
            descriptors.extend(sent);
        }
    }
    // Cut off: something that was sent is lost, and nobody can say what.
    if received
        .flags
        .intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC)
    {
        return Err(Errno::MSGSIZE);
    }
    message.truncate(received.bytes);
    Ok(Received {
        message,
        descriptors,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, SeekFrom, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_descriptor_arrives_with_its_message_and_outlives_the_sender() {
        // Fails if the descriptor is lost, is another one, or ends when the sender closes its own.
        let (here, there) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"kept").unwrap();
        send(&here, b"a file", &[file.as_fd()]).unwrap();
        drop(file);
        let mut received = receive(&there, 64).unwrap();
        assert_eq!(received.message, b"a file");
        let mut kept = std::fs::File::from(received.descriptors.pop().unwrap());
        kept.seek(SeekFrom::Start(0)).unwrap();
        let mut text = String::new();
        kept.read_to_string(&mut text).unwrap();
        assert_eq!(text, "kept");
        drop(here);
        let end = receive(&there, 64).unwrap();
        assert!(end.message.is_empty() && end.descriptors.is_empty());
    }
}
