//! What was just measured on the machine of whoever looks, as plain values. They take the place of what a node reported
//! earlier.

use trellis_api::Bytes;
use trellis_api::kinds::{PoolCapacity, Usage};

/// What was measured of a claim.
#[derive(Clone, Debug, Default)]
pub struct ClaimNow {
    /// How full its filesystem is; none if it is not mounted here, or did not answer in time.
    pub usage: Option<Usage>,
    /// The space that its copies here take on their disks.
    pub allocated: Option<Bytes>,
}

/// What was found at a pool's directory.
#[derive(Clone, Debug)]
pub enum PoolNow {
    /// It was measured.
    Measured(PoolCapacity),
    /// The directory is not there, or is not the pool that it was.
    Gone,
    /// It cannot be looked at from here, or does not answer.
    Unknown,
}
