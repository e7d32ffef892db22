//! Errors of bytes on a disk, as sentences.

use std::io;
use std::path::PathBuf;

use trellis_api::Bytes;
use uuid::Uuid;

use crate::drive::{Address, CredentialFault, NodeName};
use crate::replica::{BLOCK, Fault, Identity, NAME_LENGTH_MAX, REPLICAS_MAX, SIZE_MAX};

/// The result of everything in this crate that touches a disk.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something on a pool could not be done. Nothing was changed by an operation that answers with
/// one of these, except where the variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The pool's path leads to nothing, or to something that is not a directory.
    #[error("pool path {} is not a directory; make it, or mount what belongs there", .path.display())]
    PoolNotDirectory {
        /// The path that was given.
        path: PathBuf,
    },

    /// The directory is not the pool that it should be.
    #[error(
        "{} is not pool {expected}: it holds {}; its disk is probably not mounted, so mount what \
         belongs there (nothing was changed)",
        .path.display(), pool_found(.found)
    )]
    PoolUnknown {
        /// The path that was given.
        path: PathBuf,
        /// The id that the pool should have.
        expected: Uuid,
        /// The id of the pool that is there, if one is.
        found: Option<Uuid>,
    },

    /// The file with the pool's id does not hold one.
    #[error(
        "{} does not hold the id of a pool; restore it, or remove it if the pool may get a new id \
         (nothing was changed)", .path.display()
    )]
    PoolIdBad {
        /// The file.
        path: PathBuf,
    },

    /// Another process, or another part of this one, owns the pool.
    #[error("pool {} is already in use by another process; stop that one first", .path.display())]
    PoolOwned {
        /// The pool's directory.
        path: PathBuf,
    },

    /// Another process, or another part of this one, serves the replica.
    #[error(
        "replica {} is served by another process; ask that one, or stop it first (nothing was changed)",
        .path.display()
    )]
    ReplicaServed {
        /// The replica's directory.
        path: PathBuf,
    },

    /// A path does not lead to a replica on a pool.
    #[error("{} is not POOL/replicas/NAME; give the directory of a replica", .path.display())]
    ReplicaPathBad {
        /// The path that was given.
        path: PathBuf,
    },

    /// The pool holds as many replicas as a pool may.
    #[error(
        "pool {} has reached the limit of {REPLICAS_MAX} replicas; use another pool", .path.display()
    )]
    PoolCrowded {
        /// The pool's directory.
        path: PathBuf,
    },

    /// A replica's name is not a DNS label.
    #[error(
        "replica name {name:?} is not allowed; use 1 to {NAME_LENGTH_MAX} characters of a-z, 0-9 \
         and '-', with a letter or digit at both ends"
    )]
    NameNotAllowed {
        /// The name that was given.
        name: String,
    },

    /// There is no replica of that name.
    #[error("pool {} has no replica {replica}; create it first", .pool.display())]
    ReplicaAbsent {
        /// The replica's name.
        replica: String,
        /// The pool's directory.
        pool: PathBuf,
    },

    /// The replica was removed while this handle was still held.
    #[error("replica {replica} was removed; let go of it")]
    ReplicaRemoved {
        /// The replica's name.
        replica: String,
    },

    /// The name is taken by a copy of something else.
    #[error(
        "replica {replica} holds {found}, not {asked}; choose another name, or remove that replica \
         if it is no longer needed"
    )]
    ReplicaForeign {
        /// The replica's name.
        replica: String,
        /// Whose bytes are there.
        found: Identity,
        /// Whose bytes were to be put there.
        asked: Identity,
    },

    /// A replica that is to be removed and cannot show whose bytes it holds.
    #[error(
        "{} cannot prove whose bytes it holds, so it is kept; look at it with `trellis check`, and remove the \
         directory yourself if nobody needs it",
        path.display()
    )]
    ReplicaUnproven {
        /// The replica's directory.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<Error>,
    },

    /// A size that is zero or not a whole number of blocks.
    #[error("size {size} is not a positive multiple of {BLOCK}; round it up")]
    SizeNotBlocks {
        /// The size that was asked for.
        size: Bytes,
    },

    /// A size above what a replica may have.
    #[error("size {size} is above the largest replica, {SIZE_MAX}; ask for less")]
    SizeTooLarge {
        /// The size that was asked for.
        size: Bytes,
    },

    /// A size below the one that the replica has.
    #[error("replica {replica} has {from} and never shrinks; {to} was asked for")]
    SizeShrinks {
        /// The replica's name.
        replica: String,
        /// The size that it has and keeps.
        from: Bytes,
        /// The size that was asked for.
        to: Bytes,
    },

    /// The filesystem below the pool cannot hold a file of that length.
    #[error(
        "the filesystem below {} holds no file of {size}; use a pool on another filesystem, for \
         example xfs", .path.display()
    )]
    FileTooLong {
        /// The data file.
        path: PathBuf,
        /// The length that was asked for.
        size: Bytes,
    },

    /// A thick replica needs more space than the pool has.
    #[error(
        "replica {replica} needs {wanted} more, and its pool has {free} free; free some space, \
         extend the pool, or use thin provisioning"
    )]
    NoSpace {
        /// The replica's name.
        replica: String,
        /// How much was to be allocated.
        wanted: Bytes,
        /// How much the filesystem said it had, after the attempt was taken back.
        free: Bytes,
    },

    /// The filesystem below the pool cannot allocate ahead of writing.
    #[error(
        "the filesystem below {} cannot reserve space; use thin provisioning, or a pool on another \
         filesystem", .path.display()
    )]
    ThickUnsupported {
        /// The data file.
        path: PathBuf,
    },

    /// Neither copy of the superblock can be used.
    #[error(
        "replica {replica} has no usable superblock: {} {fault_a}, and {} {fault_b}; nothing was \
         changed, restore one of the two files or repair this replica from another one",
        .path_a.display(), .path_b.display()
    )]
    SuperblocksBad {
        /// The replica's name.
        replica: String,
        /// The first copy.
        path_a: PathBuf,
        /// What is wrong with the first copy.
        fault_a: Fault,
        /// The second copy.
        path_b: PathBuf,
        /// What is wrong with the second copy.
        fault_b: Fault,
    },

    /// Both copies of the superblock are whole, and they cannot both belong here.
    #[error(
        "the superblocks {} and {} are both whole and contradict each other; one was put there by \
         hand, so put the right one back (nothing was changed)",
        .path_a.display(), .path_b.display()
    )]
    SuperblocksContradict {
        /// The first copy.
        path_a: PathBuf,
        /// The second copy.
        path_b: PathBuf,
    },

    /// A superblock was written by a later Trellis.
    #[error(
        "superblock {} has format version {version}, which this Trellis does not know; use the \
         version that wrote it (nothing was changed)", .path.display()
    )]
    FormatUnknown {
        /// The superblock.
        path: PathBuf,
        /// Its format version.
        version: u32,
    },

    /// A superblock says that a reader must know of something that this Trellis does not know.
    #[error(
        "superblock {} needs features that this Trellis does not know ({unknown:#x}); use the \
         version that wrote it (nothing was changed)", .path.display()
    )]
    FeaturesUnknown {
        /// The superblock.
        path: PathBuf,
        /// The unknown features, as bits.
        unknown: u64,
    },

    /// The data file is gone.
    #[error("data file {} is gone; restore it, or repair this replica from another one", .path.display())]
    DataAbsent {
        /// Where it should be.
        path: PathBuf,
    },

    /// The data file is shorter than this store has left it.
    #[error(
        "data file {} has {length}, but had {expected}; something cut it, so restore it or repair \
         this replica from another one (nothing was changed)", .path.display()
    )]
    DataCut {
        /// The data file.
        path: PathBuf,
        /// How long it is.
        length: Bytes,
        /// How long it must at least be.
        expected: Bytes,
    },

    /// Something that should be a plain file is not one.
    #[error("{} is not a plain file; move it away and restore the file", .path.display())]
    NotAFile {
        /// What was found.
        path: PathBuf,
    },

    /// A thread could not be started.
    #[error("could not start a thread; see to the limits of this machine, then try again")]
    Thread {
        /// What the operating system said.
        source: io::Error,
    },

    /// A place at which a replica is reached cannot be used.
    #[error("could not {doing} {address}; see to the cause, then try again")]
    Address {
        /// The verb.
        doing: &'static str,
        /// The place.
        address: Address,
        /// What the operating system said.
        source: io::Error,
    },

    /// A file of a node's credentials is there and cannot be used.
    #[error("{} {fault}; put the right file there", .path.display())]
    CredentialsBad {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        fault: CredentialFault,
    },

    /// An address on the network was given, and nothing to prove with who listens there.
    #[error(
        "{address} needs the credentials of this node; give the directory with its certificate"
    )]
    CredentialsAbsent {
        /// The address.
        address: Address,
    },

    /// An address names another node than the credentials.
    #[error(
        "{address} names another node than the credentials, which are those of {found}; give the right ones"
    )]
    CredentialsForeign {
        /// The address.
        address: Address,
        /// The node that the credentials are of.
        found: NodeName,
    },

    /// The operating system refused. What was begun can be begun again.
    #[error("could not {doing} {}; see to the cause, then try again", .path.display())]
    Io {
        /// The verb.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

/// What was found in the place of a pool, in words.
fn pool_found(found: &Option<Uuid>) -> String {
    match found {
        Some(id) => format!("pool {id}"),
        None => "no pool with an id".to_owned(),
    }
}
