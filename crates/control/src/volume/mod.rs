//! The volume room: which copies a volume has, where they are, which of them count, and what they lack. It knows only
//! our own kinds, so that it can run wherever these are stored.

pub mod copies;
pub mod members;
pub mod parts;
pub mod recovery;
pub mod redundancy;
pub mod rooms;
pub mod space;
