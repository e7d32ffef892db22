//! The volume room: which copies a volume has, where they are, which of them count, and what they lack.
//!
//! It writes only our own kinds. Two places still look at the claim: `recovery` tells it of a recovery, and the goals of
//! target and copies are raised by the claim room (`claim::grow`).

pub mod copies;
pub mod members;
pub mod parts;
pub mod recovery;
pub mod redundancy;
pub mod rooms;
pub mod space;
