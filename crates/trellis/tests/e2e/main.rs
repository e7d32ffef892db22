//! The binary, run as users run it: a real service, real kubectl, real loop devices and filesystems.
//!
//! Needs root. Every test has its own data directory and leaves nothing behind, also when it fails.
#![allow(clippy::unwrap_used)]

mod bad_input;
mod copies;
mod crash;
mod csi;
mod down;
mod full;
mod growth;
mod harness;
mod kubectl;
mod lifecycle;
mod links;
mod logs;
mod lost_store;
mod manager;
mod measured;
mod metrics;
mod nodes;
mod pools;
mod power_loss;
mod replicated;
mod room;
mod shown;
mod terminal;
mod wishes;
