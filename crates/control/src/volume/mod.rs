//! The volume room: how large a volume may become, which copies it has, where they are, which of them count, and what
//! they lack. It reads and writes only our own kinds, and runs the same way in both homes.

pub mod copies;
pub mod goals;
pub mod history;
pub mod members;
pub mod nodes;
pub mod parts;
pub mod plan;
pub mod reconcile;
pub mod recovery;
pub mod redundancy;
pub mod removal;
pub mod rooms;
pub mod serving;
pub mod space;
pub mod status;
pub mod surroundings;
