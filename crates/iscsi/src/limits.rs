//! Every bound of the target, in one place.
//!
//! Whatever a peer sends, one connection can make the target hold at most the sum of these. `docs/iscsi.md` has the
//! arithmetic.

use std::time::Duration;

/// The largest data segment that we accept in the full-feature phase; declared at login.
pub const RECV_SEGMENT_BYTES_MAX: u32 = 256 * 1024;
/// The largest data segment that we send, whatever the peer would take.
pub const SEND_SEGMENT_BYTES_MAX: u32 = 256 * 1024;
/// The largest data segment before the peer has logged in: the protocol's default.
pub const LOGIN_SEGMENT_BYTES_MAX: u32 = 8192;
/// Unsolicited data of one write, at most.
pub const FIRST_BURST_BYTES_MAX: u32 = 256 * 1024;
/// Data of one solicited burst, at most.
pub const MAX_BURST_BYTES_MAX: u32 = 1024 * 1024;
/// Bursts of one write that may be solicited at the same time.
pub const OUTSTANDING_R2T_MAX: u32 = 4;

/// Commands that a session may have open: the width of the command window.
pub const COMMAND_WINDOW: u32 = 128;
/// Immediate commands that may be open in addition to the window.
pub const IMMEDIATE_MAX: usize = 16;
/// The largest transfer of one command; larger ones are refused, and the limit is in VPD page B0h.
pub const TRANSFER_BYTES_MAX: u32 = 8 * 1024 * 1024;
/// Write data that one connection may make us hold before R2Ts wait.
pub const DATA_OUT_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// Read data that one connection may make us hold, in flight or unsent, before reads wait.
pub const DATA_IN_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Memory of unused buffers that are kept for the next large transfer.
pub const POOL_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Text of one login or text exchange, over all its PDUs.
pub const TEXT_BYTES_MAX: usize = 16 * 1024;
/// A key's name.
pub const TEXT_KEY_BYTES_MAX: usize = 63;
/// Keys in one exchange.
pub const TEXT_KEYS_MAX: usize = 64;
/// PDUs of one login.
pub const LOGIN_PDUS_MAX: u32 = 32;
/// An iSCSI name.
pub const NAME_BYTES_MAX: usize = 223;
/// The longest challenge that an initiator may give us.
pub const CHALLENGE_BYTES_MAX: usize = 1024;

/// Logical units of one target.
pub const UNITS_MAX: usize = 256;
/// Registrations of persistent reservations on one logical unit.
pub const REGISTRATIONS_MAX: usize = 256;
/// Unit attentions that one nexus can have pending on one logical unit; there are fewer codes.
pub const ATTENTIONS_MAX: usize = 16;
/// Ranges in one UNMAP.
pub const UNMAP_DESCRIPTORS_MAX: u32 = 256;
/// Blocks of one WRITE SAME: as many as its shorter form can name.
pub const WRITE_SAME_BLOCKS_MAX: u32 = 65_535;
/// Blocks of one COMPARE AND WRITE. The field is one byte.
pub const COMPARE_AND_WRITE_BLOCKS_MAX: u8 = 128;
/// Times that ORWRITE is tried while others write to the same place.
pub const OR_WRITE_TRIES: u32 = 16;
/// Extents in the answer to one GET LBA STATUS.
pub const LBA_STATUS_EXTENTS_MAX: usize = 1024;
/// Bytes that VERIFY reads at a time.
pub const VERIFY_STEP_BYTES: u64 = 1024 * 1024;
/// Bytes that VERIFY reads in one command, since it transfers nothing and could name a whole disk.
pub const VERIFY_BYTES_MAX: u64 = 1024 * 1024 * 1024;

/// Messages that a connection may have waiting from other sessions.
pub const CONTROL_QUEUE: usize = 256;
/// Bytes asked of the socket at a time.
pub const READ_CHUNK_BYTES: usize = 256 * 1024;
/// From this size on, incoming data gets a buffer of its own. Below it one more system call costs more than the
/// copying.
pub const LONG_BYTES_MIN: usize = 96 * 1024;
/// The same if the volume says where it wants the data: otherwise the data would be copied once more.
pub const LONG_BYTES_MIN_WANTED: usize = 32 * 1024;
/// From this size on, data that lies in a file in memory is sent from there.
pub const SPAN_BYTES_MIN: u32 = 32 * 1024;
/// Slices in one vectored write.
pub const WRITE_SLICES_MAX: usize = 128;
/// Rounds of reading and writing before a connection lets others have the thread.
pub const ROUNDS_BEFORE_YIELD: u32 = 32;
/// How long an orderly stop waits for initiators to log out.
pub const LOGOUT_GRACE: Duration = Duration::from_secs(5);
/// Connections that the system may hold before we have taken them.
pub const LISTEN_BACKLOG: u32 = 4096;
/// How long the last words to a peer may take to be written.
pub const LAST_WORDS: Duration = Duration::from_secs(1);
/// Pause after the system had no resources for another connection.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
