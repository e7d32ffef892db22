//! Tests with real filesystems on a real kernel, through the real `trellis` binary and through the calls that it grows
//! volumes with.
//!
//! One program serves both kernels: in the guest it does everything, on the machine itself what that kernel allows. It
//! reports what it found line by line, and fails like a test, with a panic.
#![allow(clippy::unwrap_used)]

mod bytes;
mod copies;
mod daemon;
mod initiator;
mod ladder;
mod load;
mod matrix;
mod rung;
mod service;
mod verifier;
mod volume;

use trellis_node::filesystem::FilesystemKind;

use crate::matrix::Extent;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((what, names)) = arguments.split_first() else {
        panic!(
            "usage: guest-scenario ladder|matrix|matrix-all|load|rung|copies FILESYSTEM... | initiator"
        )
    };
    let kinds: Vec<FilesystemKind> = names.iter().map(|name| name.parse().unwrap()).collect();
    match what.as_str() {
        "ladder" => ladder::run(&kinds),
        "matrix" => kinds
            .into_iter()
            .for_each(|kind| matrix::run(kind, Extent::Usual)),
        "matrix-all" => kinds
            .into_iter()
            .for_each(|kind| matrix::run(kind, Extent::Everything)),
        "load" => kinds.into_iter().for_each(load::run),
        "copies" => copies::run(&kinds),
        "initiator" => initiator::run(),
        "rung" => kinds.into_iter().for_each(rung::run),
        other => panic!("there is no {other}"),
    }
}
