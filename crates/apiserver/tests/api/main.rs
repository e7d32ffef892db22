//! The embedded API, driven from outside: through HTTP requests and through `kube::Client`.
#![allow(clippy::unwrap_used)]

mod certificates;
mod client;
mod deletion;
mod durability;
mod earlier;
mod errors;
mod full_disk;
mod nodes;
mod own_kinds;
mod ownership;
mod support;
mod validation;
mod watching;
mod writing;
