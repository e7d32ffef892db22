//! The kernel's side of `/dev/fuse`: numbers and structures, as `linux/fuse.h` of 7.40 has them.
//!
//! The structures are in the machine's own byte order. They are copied out of a request and into an answer unchanged;
//! [`super::request`] and [`super::tree`] decide what they mean.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The one major version that there is.
pub const MAJOR: u32 = 7;
/// The version that these structures are of.
pub const MINOR: u32 = 40;
/// The oldest version that can be served: it brought `max_pages`, without which requests end at 128 KiB.
pub const MINOR_MIN: u32 = 28;

/// The number of the root directory, by definition.
pub const ROOT: u64 = 1;
/// The number of the one file.
pub const VOLUME: u64 = 2;

pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const ACCESS: u32 = 34;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
}

/// What a server tells the kernel unasked; the number stands where an answer has its error.
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const STORE: i32 = 4;
}

/// What kernel and server agree on at the first request.
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const MAX_PAGES: u64 = 1 << 22;
    /// There is a second word of these bits.
    pub const EXT: u64 = 1 << 30;
}

/// How an open file behaves.
pub mod open {
    /// Past the page cache, whatever the opener asked for.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// Closing needs no word to the server: a dead one would keep the closer.
    pub const NOFLUSH: u32 = 1 << 5;
    /// Writes do not wait for each other.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Which attributes a SETATTR is about.
pub mod setattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
}

/// Modes of FALLOCATE.
pub mod fallocate {
    pub const KEEP_SIZE: u32 = 0x01;
    pub const PUNCH_HOLE: u32 = 0x02;
    pub const ZERO_RANGE: u32 = 0x10;
}

/// Entry types of a directory.
pub mod dirent {
    pub const DIRECTORY: u32 = 4;
    pub const REGULAR: u32 = 8;
}

macro_rules! structures {
    ($($(#[$about:meta])* $name:ident $bytes:literal { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$about])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $(pub $field: $type),* }
        const _: () = assert!(size_of::<$name>() == $bytes);
    )*};
}

structures! {
    /// What every request begins with.
    InHeader 40 {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32,
        extension_len: u16, padding: u16,
    }
    /// What every answer begins with.
    OutHeader 16 { len: u32, error: i32, unique: u64 }

    /// The part of INIT that every kernel sends. `flags2` follows where [`init::EXT`] is set.
    InitIn 16 { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    InitOut 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16,
        congestion_threshold: u16, max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16,
        flags2: u32, unused: [u32; 7],
    }

    Attr 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atime_ns: u32,
        mtime_ns: u32, ctime_ns: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32,
        block_size: u32, flags: u32,
    }
    AttrOut 104 { valid: u64, valid_ns: u32, padding: u32, attr: Attr }
    EntryOut 128 {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_ns: u32,
        attr_valid_ns: u32, attr: Attr,
    }
    SetAttrIn 88 {
        valid: u32, padding: u32, handle: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64,
        ctime: u64, atime_ns: u32, mtime_ns: u32, ctime_ns: u32, mode: u32, unused4: u32, uid: u32,
        gid: u32, unused5: u32,
    }
    OpenIn 8 { flags: u32, open_flags: u32 }
    OpenOut 16 { handle: u64, open_flags: u32, padding: u32 }
    ReadIn 40 {
        handle: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    WriteIn 40 {
        handle: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    WriteOut 8 { size: u32, padding: u32 }
    FallocateIn 32 { handle: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    StatfsOut 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, name_len: u32,
        fragment_size: u32, padding: u32, spare: [u32; 6],
    }
    Dirent 24 { ino: u64, offset: u64, name_len: u32, kind: u32 }

    InvalInodeOut 24 { ino: u64, offset: i64, len: i64 }
    StoreOut 24 { nodeid: u64, offset: u64, size: u32, padding: u32 }
}
