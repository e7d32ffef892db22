//! What guests of the tests are made of.
//!
//! [`kernel`] fetches a kernel, [`modules`] knows which of its modules need which, [`package`] unpacks what the machine
//! itself must not have installed, [`tree`] gathers files, programs and their libraries, and [`cpio`] packs them as the
//! guest's first filesystem. Nothing here knows what a guest is for.

pub mod cpio;
pub mod error;
pub mod kernel;
pub mod modules;
pub mod package;
pub mod tree;

use std::path::PathBuf;

pub use error::{Error, Result};

/// The root of the workspace.
pub fn workspace() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Where cargo puts what it makes, and we what we keep between runs.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => dir.into(),
        None => workspace().join("target"),
    }
}
