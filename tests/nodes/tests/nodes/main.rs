//! Several nodes on one machine: the harness itself, and what runs on it.
#![allow(clippy::unwrap_used, missing_docs)]

mod authorization;
mod disturbed;
mod harness;
mod moves;
