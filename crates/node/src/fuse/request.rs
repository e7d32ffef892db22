//! Parses the kernel's requests. Nothing that it sends can panic here.

use std::ops::Range;

use rustix::io::Errno;
use zerocopy::FromBytes;

use super::abi::{self, InHeader, opcode};

/// A request of which at least the header could be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// What the answer is to carry.
    pub(super) unique: u64,
    /// What is asked, or the error that answers it.
    pub(super) ask: Result<Ask, Errno>,
}

/// One of the two things that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Node {
    Root,
    Volume,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Init {
        major: u32,
        minor: u32,
        flags: u64,
    },
    /// A name in the root; `None` if there is no such entry.
    Lookup {
        found: Option<Node>,
    },
    GetAttr(Node),
    SetAttr {
        node: Node,
        /// The size that is wanted, if it is about that.
        size: Option<u64>,
        /// Whether it is about the mode or the owner.
        identity: bool,
    },
    Open {
        for_writing: bool,
    },
    Read {
        offset: u64,
        len: u32,
    },
    Write {
        offset: u64,
        /// Where in the request the data is.
        data: Range<usize>,
        /// Whether the answer promises that it is durable.
        durable: bool,
    },
    Zero {
        offset: u64,
        len: u64,
        deallocate: bool,
        /// Whether a range behind the end is to be passed over in silence.
        keep_size: bool,
    },
    Sync,
    StatFs,
    OpenDir,
    ReadDir {
        offset: u64,
        len: u32,
    },
    /// Answered with success, and that is all.
    Nothing,
    /// Not answered at all.
    Unanswered,
}

/// Parses a request; `None` if it has not even a header and so cannot be answered.
pub(super) fn parse(bytes: &[u8]) -> Option<Request> {
    let (header, body) = InHeader::read_from_prefix(bytes).ok()?;
    Some(Request {
        unique: header.unique,
        ask: ask(&header, body),
    })
}

fn ask(header: &InHeader, body: &[u8]) -> Result<Ask, Errno> {
    Ok(match header.opcode {
        opcode::INIT => init(body)?,
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::NOTIFY_REPLY => {
            Ask::Unanswered
        }
        opcode::FLUSH
        | opcode::RELEASE
        | opcode::RELEASEDIR
        | opcode::FSYNCDIR
        | opcode::ACCESS
        | opcode::DESTROY => Ask::Nothing,
        opcode::STATFS => Ask::StatFs,
        opcode::LOOKUP => {
            in_root(header)?;
            let name = body.split(|byte| *byte == 0).next().unwrap_or_default();
            Ask::Lookup {
                found: (name == super::VOLUME_NAME.as_bytes()).then_some(Node::Volume),
            }
        }
        opcode::GETATTR => Ask::GetAttr(node(header)?),
        opcode::SETATTR => set_attr(node(header)?, take(body)?),
        opcode::OPENDIR => {
            in_root(header)?;
            Ask::OpenDir
        }
        opcode::READDIR => {
            in_root(header)?;
            let asked: abi::ReadIn = take(body)?;
            Ask::ReadDir {
                offset: asked.offset,
                len: asked.size,
            }
        }
        opcode::OPEN => {
            in_volume(header)?;
            let asked: abi::OpenIn = take(body)?;
            Ask::Open {
                for_writing: asked.flags & ACCESS_MODE != 0,
            }
        }
        opcode::READ => {
            in_volume(header)?;
            let asked: abi::ReadIn = take(body)?;
            Ask::Read {
                offset: asked.offset,
                len: asked.size,
            }
        }
        opcode::WRITE => {
            in_volume(header)?;
            write(body)?
        }
        opcode::FSYNC => {
            in_volume(header)?;
            Ask::Sync
        }
        opcode::FALLOCATE => {
            in_volume(header)?;
            fallocate(take(body)?)?
        }
        _ => return Err(Errno::NOSYS),
    })
}

/// The bits of the open flags that say how a file may be used; zero is for reading only.
const ACCESS_MODE: u32 = 0o3;
/// What a write with `O_DSYNC`, or `O_SYNC` which has it within, carries.
const O_DSYNC: u32 = rustix::fs::OFlags::DSYNC.bits();

fn init(body: &[u8]) -> Result<Ask, Errno> {
    let (first, rest) = abi::InitIn::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
    let mut flags = u64::from(first.flags);
    if flags & abi::init::EXT != 0
        && let Ok((second, _)) = u32::read_from_prefix(rest)
    {
        flags |= u64::from(second) << 32;
    }
    Ok(Ask::Init {
        major: first.major,
        minor: first.minor,
        flags,
    })
}

fn set_attr(node: Node, asked: abi::SetAttrIn) -> Ask {
    use abi::setattr::{GID, MODE, SIZE, UID};
    Ask::SetAttr {
        node,
        size: (asked.valid & SIZE != 0).then_some(asked.size),
        identity: asked.valid & (MODE | UID | GID) != 0,
    }
}

fn write(body: &[u8]) -> Result<Ask, Errno> {
    let asked: abi::WriteIn = take(body)?;
    let start = size_of::<InHeader>() + size_of::<abi::WriteIn>();
    let len = usize::try_from(asked.size).map_err(|_| Errno::INVAL)?;
    // The kernel sends the data whole, or there is something that nobody knows about.
    if body.len() - size_of::<abi::WriteIn>() != len {
        return Err(Errno::INVAL);
    }
    Ok(Ask::Write {
        offset: asked.offset,
        data: start..start + len,
        durable: asked.flags & O_DSYNC != 0,
    })
}

fn fallocate(asked: abi::FallocateIn) -> Result<Ask, Errno> {
    use abi::fallocate::{KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE};
    let deallocate = match asked.mode & !KEEP_SIZE {
        PUNCH_HOLE => true,
        ZERO_RANGE => false,
        // Not ENOSYS, after which the kernel would never ask again for anything of this kind.
        _ => return Err(Errno::OPNOTSUPP),
    };
    if asked.length == 0 {
        return Err(Errno::INVAL);
    }
    Ok(Ask::Zero {
        offset: asked.offset,
        len: asked.length,
        deallocate,
        keep_size: asked.mode & KEEP_SIZE != 0,
    })
}

fn take<T: FromBytes>(body: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(body)
        .map(|(value, _)| value)
        .map_err(|_| Errno::INVAL)
}

fn node(header: &InHeader) -> Result<Node, Errno> {
    match header.nodeid {
        abi::ROOT => Ok(Node::Root),
        abi::VOLUME => Ok(Node::Volume),
        _ => Err(Errno::STALE),
    }
}

fn in_root(header: &InHeader) -> Result<(), Errno> {
    match node(header)? {
        Node::Root => Ok(()),
        Node::Volume => Err(Errno::NOTDIR),
    }
}

fn in_volume(header: &InHeader) -> Result<(), Errno> {
    match node(header)? {
        Node::Volume => Ok(()),
        Node::Root => Err(Errno::ISDIR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    fn message(opcode: u32, nodeid: u64, body: &[u8]) -> Vec<u8> {
        let header = InHeader {
            len: u32::try_from(size_of::<InHeader>() + body.len()).unwrap_or(u32::MAX),
            opcode,
            unique: 7,
            nodeid,
            ..InHeader::default()
        };
        [header.as_bytes(), body].concat()
    }

    fn ask_of(message: &[u8]) -> Result<Ask, Errno> {
        parse(message).map_or(Err(Errno::IO), |request| request.ask)
    }

    #[test]
    fn a_write_names_exactly_its_data() {
        // Fails if the data begins or ends elsewhere than the kernel put it, or if a write that is shorter
        // than it says is taken.
        let head = abi::WriteIn {
            offset: 8192,
            size: 3,
            flags: O_DSYNC,
            ..abi::WriteIn::default()
        };
        let body = [head.as_bytes(), b"abc"].concat();
        let message = message(opcode::WRITE, abi::VOLUME, &body);
        let Ok(Ask::Write {
            offset,
            data,
            durable,
        }) = ask_of(&message)
        else {
            panic!("not taken as a write");
        };
        assert_eq!((offset, &message[data], durable), (8192, &b"abc"[..], true));
        assert_eq!(ask_of(&message[..message.len() - 1]), Err(Errno::INVAL));
    }

    #[test]
    fn what_does_not_fit_the_node_is_refused_by_its_own_error() {
        // Fails if a directory can be read as the volume, an unknown node is taken for one of ours, or an
        // unknown request is anything but ENOSYS.
        let read = abi::ReadIn::default();
        let ask = |code, node| ask_of(&message(code, node, read.as_bytes()));
        assert_eq!(ask(opcode::READ, abi::ROOT), Err(Errno::ISDIR));
        assert_eq!(ask(opcode::READDIR, abi::VOLUME), Err(Errno::NOTDIR));
        assert_eq!(ask(opcode::GETATTR, 99), Err(Errno::STALE));
        assert_eq!(ask(52, abi::VOLUME), Err(Errno::NOSYS));
        let prealloc = abi::FallocateIn {
            length: 1,
            ..abi::FallocateIn::default()
        };
        let fallocate = message(opcode::FALLOCATE, abi::VOLUME, prealloc.as_bytes());
        assert_eq!(ask_of(&fallocate), Err(Errno::OPNOTSUPP));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(opcode in 0u32..60, nodeid in 0u64..4, body in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..240) {
            // Fails by a panic, or if data lies outside of the request.
            let whole = message(opcode, nodeid, &body);
            let cut = &whole[..cut.min(whole.len())];
            for bytes in [&whole[..], cut] {
                if let Some(Request { ask: Ok(Ask::Write { data, .. }), .. }) = parse(bytes) {
                    prop_assert!(data.end <= bytes.len());
                }
            }
        }
    }
}
