//! Several nodes on one machine. Each is a network namespace with an address, a directory on a filesystem of its own,
//! and whatever programs a test starts there.
//!
//! ```text
//!  namespace PREFIX.a          namespace PREFIX.switch         namespace PREFIX.b
//!  eth0 10.88.X.1/24 ──veth── port0 ── bridge ── port1 ──veth── eth0 10.88.X.2/24
//! ```
//!
//! A [`network::Network`] has no way out: its namespaces see each other and nothing else, so networks of parallel tests
//! cannot meet, whatever their addresses are. A [`machine::Machine`] is one of its nodes: programs are started in it,
//! stopped, killed; its link is cut and healed; delay and loss are put on it ([`link::Weather`]).
//!
//! **Mounts.** A program enters the network namespace alone (`nsenter --net`), not by `ip netns exec`, which would also
//! give it a mount namespace of its own. So everything that a node mounts is seen by all nodes and by the test, as if
//! they shared one disk shelf: a test reads a volume at the path where the node mounted it, and whatever is left behind
//! can be found and removed. Loop devices belong to the kernel and are shared in any case. The directories of nodes are
//! apart, each on a tmpfs, so that pools of two nodes are never on one filesystem.
//!
//! **Cleaning up.** A network that is dropped, by a panic too, kills what runs in its namespaces and removes mounts, loop
//! devices, namespaces and files. What an aborted process left behind is removed by the next one that makes a network
//! ([`leftovers`]): names carry the process that made them and when it began.

pub mod cluster;
pub mod error;
mod ip;
pub mod leftovers;
pub mod link;
pub mod machine;
pub mod network;
pub mod program;
pub mod service;
mod wire;
pub mod writer;

pub use error::{Error, Result};
