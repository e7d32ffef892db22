//! A connection without I/O: login, numbers, data, task management, growth.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../common/mod.rs"]
mod common;
mod data;
mod held;
mod life;
mod login;
mod tasks;
mod unit;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::{
    CAPACITY_CHANGED, INITIATOR, Initiator, Local, MIB, Reply, TARGET, Wire, cdb10, keys, portal,
    ram,
};
use held::Held;
use tokio::sync::oneshot;
use trellis_iscsi::limits::{COMMAND_WINDOW, DATA_OUT_BYTES_MAX};
use trellis_iscsi::lun::{Answer, Chunks, Compared, Extent, Identity, LunError};
use trellis_iscsi::pdu::header::{Reject, TaskManagementResponse, TextResponse};
use trellis_iscsi::pdu::{TAG_NONE, opcode};
use trellis_iscsi::session::Times;
use trellis_iscsi::{Access, Breach, Disconnect, Lun, Portal, Target};
use trellis_test_luns::{FileLun, RamLun};

fn open_portal() -> Arc<Portal> {
    portal(ram(64 * MIB), Access::default()).0
}
