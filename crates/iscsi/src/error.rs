//! Errors that end a connection, and mistakes that a caller can make.

use thiserror::Error;

/// Why a connection is closed by us.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum Disconnect {
    /// The header's checksum does not match: nothing after it can be trusted.
    #[error("a header digest does not match")]
    HeaderDigest,
    /// A data segment's checksum does not match.
    #[error("a data digest does not match")]
    DataDigest,
    /// A length field goes beyond what was negotiated.
    #[error("a data segment of {len} bytes, where {max} were agreed")]
    SegmentTooLong {
        /// What the header says.
        len: u32,
        /// What was agreed.
        max: u32,
    },
    /// The peer did what the protocol does not allow.
    #[error("the peer broke the protocol: {0}")]
    Protocol(Breach),
    /// The login was refused.
    #[error("login refused with status {class:02x}{detail:02x}h")]
    LoginRefused {
        /// Status-Class.
        class: u8,
        /// Status-Detail.
        detail: u8,
    },
    /// The peer logged out.
    #[error("logged out")]
    LoggedOut,
    /// Another login took over this session.
    #[error("replaced by a new login of the same initiator")]
    Reinstated,
    /// A target cold reset ended all sessions.
    #[error("the target was reset")]
    ColdReset,
    /// The target goes away.
    #[error("the target stops")]
    Stopped,
    /// The peer did not answer a ping.
    #[error("the peer does not answer")]
    Silent,
    /// The peer did not finish its login in time, or had to make room for others.
    #[error("the login took too long")]
    LoginTimeout,
    /// Data that was promised to the peer could not be read where it lies.
    #[error("a volume's file cannot be read")]
    Unreadable,
    /// The peer closed the connection or the network failed.
    #[error("the connection was closed by the peer or the network")]
    PeerGone,
}

/// The rules of the protocol that a peer can break so that the connection has to end.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum Breach {
    /// Not a login where only a login may come.
    #[error("a PDU other than a login before the login")]
    NotALogin,
    /// A login that changes what cannot change, or goes on for ever.
    #[error("a login out of sequence")]
    LoginSequence,
    /// More text than an exchange may have.
    #[error("too much text")]
    TextTooLong,
    /// A login after the login.
    #[error("a login in the full-feature phase")]
    LoginTwice,
    /// An initiator task tag that is in use.
    #[error("a task tag used twice")]
    TagInUse,
    /// Too many immediate commands.
    #[error("too many immediate commands")]
    TooManyImmediate,
    /// A discovery session may only send text, NOPs and a logout.
    #[error("a command in a discovery session")]
    DiscoveryCommand,
}

/// What a caller of the crate got wrong.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// Not a name that the protocol allows (`iqn.`, `eui.` or `naa.`, at most 223 bytes, no capitals).
    #[error(
        "not an iSCSI name: use iqn.yyyy-mm.reversed.domain:name in lower case, at most 223 bytes"
    )]
    Name,
    /// A target of that name is there already.
    #[error("a target of this name is there already")]
    TargetExists,
    /// A logical unit of that number is there already.
    #[error("a logical unit of this number is there already")]
    UnitExists,
    /// Too many logical units.
    #[error("a target has at most {max} logical units", max = crate::limits::UNITS_MAX)]
    TooManyUnits,
    /// A block size that is neither 512 nor 4096.
    #[error("a block has 512 or 4096 bytes")]
    BlockSize,
    /// A CHAP secret outside 12 to 255 bytes, or the same in both directions.
    #[error("a CHAP secret has 12 to 255 bytes and differs between the two directions")]
    Secret,
}
