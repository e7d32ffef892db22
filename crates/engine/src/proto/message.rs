//! The messages between coordinator and replicas.

use bytes::Bytes;
use uuid::Uuid;

use super::{Epoch, Key, Lineage, Promise, Region, RegionState, ReplicaId, View};

/// A message with its sender's identity. Both ends refuse messages that are not meant for them, and close a session
/// whose messages have a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The volume.
    pub volume: Uuid,
    /// The replica that speaks or is spoken to.
    pub replica: ReplicaId,
    /// Under which promise the session stands.
    pub promise: Promise,
    /// The sender's version of the size.
    pub size_version: u64,
    /// The number of the message in its direction of the session, from zero.
    pub index: u64,
    /// The message.
    pub body: Body,
}

/// Either direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Coordinator to replica.
    Request(Request),
    /// Replica to coordinator.
    Answer(Answer),
}

/// What a coordinator asks of a replica. A replica works on them in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Promise to obey me, then tell what you have. Always the first message of a session.
    Hello,
    /// Tell what is there, and promise nothing. Only as the first message, from anybody.
    Survey,
    /// Tell what you know of your regions, from this one on.
    Regions {
        /// The first region of the page.
        from: Region,
    },
    /// These regions of yours are stale. Comes into force with the `Join` that follows.
    Stale {
        /// The regions.
        regions: Vec<Region>,
    },
    /// These regions of yours count, stale or not, and get the epoch of the `Join` that follows as
    /// their stamp.
    Restamp {
        /// The regions.
        regions: Vec<Region>,
    },
    /// Take part from here on.
    Join(JoinTerms),
    /// Go on after the entry that your welcome named.
    Resume,
    /// The next entry.
    Entry(Entry),
    /// Read a range inside one region.
    Read {
        /// Comes back with the answer.
        tag: u64,
        /// The first byte.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// Have space for a range inside one region, whatever is written there next.
    Allocate {
        /// Comes back with the answer.
        tag: u64,
        /// The first byte.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// From here on entries of this region are sent, and its older bytes will follow.
    RepairBegin {
        /// The region.
        region: Region,
    },
    /// The older bytes: to be written where no entry has written since the beginning.
    RepairData {
        /// The region.
        region: Region,
        /// The region's stamp.
        stamp: Epoch,
        /// Its bytes.
        content: Content,
    },
    /// The older bytes, except for blocks that nobody could read: the replica keeps its own there.
    RepairPart {
        /// The region.
        region: Region,
        /// The region's stamp.
        stamp: Epoch,
        /// Its bytes.
        content: Content,
        /// The blocks that are not among them, counted from the region's first.
        except: Vec<u32>,
    },
    /// Read a range inside one region, and also say which of its blocks are not what was written there.
    Salvage {
        /// Comes back with the answer.
        tag: u64,
        /// The first byte.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// Compare a range inside one region with its sums.
    Verify {
        /// Comes back with the answer.
        tag: u64,
        /// The first byte.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// The bytes will not come. The region stays as stale as it was.
    RepairDrop {
        /// The region.
        region: Region,
    },
    /// Say that you are there. It is answered at once, whatever else waits.
    Call,
}

/// Bytes, or so many zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Bytes as they are.
    Data(Bytes),
    /// Zeros that take no space.
    Zeros(u64),
}

impl Content {
    /// How many bytes there are.
    pub fn length(&self) -> u64 {
        match self {
            Content::Data(data) => u64::try_from(data.len()).unwrap_or(u64::MAX),
            Content::Zeros(length) => *length,
        }
    }
}

/// What a joining replica's own bytes and keys are worth to the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Past {
    /// They count, except in the regions that it is told are stale.
    Counts,
    /// They are of another or an unknown history. A replica that has lost its memory may have acknowledged writes of
    /// this history.
    Void,
    /// As `Void`, but this history begins now, so the replica cannot have acknowledged anything in it.
    VoidBeforeBeginning,
}

/// On which terms a replica takes part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinTerms {
    /// What the replica's own bytes are worth.
    pub past: Past,
    /// Where the replica is from now on, in all regions that are not stale.
    pub key: Key,
    /// The size that it must have first.
    pub size: u64,
    /// The version of that size.
    pub size_version: u64,
    /// Who the replicas are.
    pub view: View,
}

/// One numbered step of the volume's history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its place.
    pub key: Key,
    /// What happens.
    pub op: EntryOp,
}

/// What an entry does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryOp {
    /// Nothing on this replica: the region that it writes is stale here.
    Skip {
        /// The region.
        region: Region,
    },
    /// Writes bytes inside one region.
    Write {
        /// The first byte.
        offset: u64,
        /// The bytes.
        data: Bytes,
    },
    /// Zeros a range inside one region, without taking space.
    Zero {
        /// The first byte.
        offset: u64,
        /// How many bytes.
        length: u64,
    },
    /// Makes everything before it durable.
    Flush,
    /// Sets space aside for that size.
    Reserve {
        /// The size.
        size: u64,
    },
    /// Raises the size.
    Raise {
        /// The size.
        size: u64,
        /// Its version.
        version: u64,
    },
    /// Replaces the view.
    View(View),
}

/// What a replica answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The promise was made, and this is what is here.
    Welcome(Welcome),
    /// Another coordinator has a later promise.
    Refused {
        /// The promise.
        promise: Promise,
    },
    /// What is there, for whoever asked.
    Surveyed(Box<Surveyed>),
    /// A page of regions.
    Regions {
        /// The first region of the page.
        from: Region,
        /// What is known of them, in order.
        states: Vec<RegionState>,
    },
    /// The replica takes part, durably.
    Joined,
    /// The replica cannot reach the size that taking part needs.
    JoinNoSpace,
    /// There was no space for what an entry or a repair writes. The session ends with this.
    Full,
    /// There was no space for what an entry or a repair writes to this region: it is stale from now on, durably, and
    /// its entries are passed over until its repair begins.
    Behind {
        /// The region.
        region: Region,
    },
    /// Whether there is space for the range that was asked for.
    Allocated {
        /// The tag of the request.
        tag: u64,
        /// Whether what is written there next has its space.
        granted: bool,
    },
    /// Whether so little space is left that a write may find none. Then space must be requested
    /// ([`Request::Allocate`]) before the write gets its number.
    Space {
        /// Whether it is low.
        is_low: bool,
    },
    /// All entries up to this one are applied (in the cache at least).
    Done {
        /// The entry.
        seq: u64,
    },
    /// All entries up to this one are durable.
    Flushed {
        /// The entry.
        seq: u64,
    },
    /// Whether there is space for that size.
    Reserved {
        /// The size.
        size: u64,
        /// Whether it was set aside.
        granted: bool,
    },
    /// What was read, or why not.
    Read {
        /// The tag of the request.
        tag: u64,
        /// The bytes.
        result: Result<Content, ReadFault>,
    },
    /// What was read. The bytes of blocks that are not what was written mean nothing.
    Salvaged {
        /// The tag of the request.
        tag: u64,
        /// The bytes.
        content: Content,
        /// The blocks that are not right, counted from the first that was read.
        bad: Vec<u32>,
    },
    /// How a range compares with its sums.
    Verified {
        /// The tag of the request.
        tag: u64,
        /// A digest of its bytes: the same bytes have the same.
        digest: u32,
        /// The blocks that are not right, counted from the first.
        bad: Vec<u32>,
    },
    /// The region is whole, durably.
    RepairDone {
        /// The region.
        region: Region,
    },
    /// The replica is there, and has heard the call.
    Heard,
}

/// Why a replica could not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFault {
    /// The disk failed, or its checksum did.
    Medium,
    /// The region is stale here.
    Stale,
}

/// What a replica has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// How far it is.
    pub key: Key,
    /// Whether it holds exactly that and not a byte more: it has lived since it applied it.
    pub exact: bool,
    /// Its size.
    pub size: u64,
    /// The version of its size.
    pub size_version: u64,
    /// The latest view that it knows.
    pub view: View,
    /// Some of its regions are stale. The coordinator may not have heard of all of them.
    pub has_stale: bool,
}

/// What a replica has, for a person who decides what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surveyed {
    /// The fence.
    pub promise: Promise,
    /// How far it is, in the regions that are not stale.
    pub key: Key,
    /// Whether it holds exactly that and not a byte more.
    pub exact: bool,
    /// Its size.
    pub size: u64,
    /// The version of its size.
    pub size_version: u64,
    /// The latest view that it knows. Its lineage is [`Lineage::Unknown`] if the replica has lost its
    /// memory.
    pub view: View,
    /// How many regions it has.
    pub regions: u64,
    /// How many of them are behind, and wait for repair.
    pub stale: u64,
    /// How many of these are partly repaired.
    pub mixed: u64,
    /// When its bytes were last written, in seconds since 1970, if that is known.
    pub written_at: Option<u64>,
}

impl Surveyed {
    /// Whether it can prove what it holds.
    pub fn is_proven(&self) -> bool {
        self.view.lineage != Lineage::Unknown
    }
}
