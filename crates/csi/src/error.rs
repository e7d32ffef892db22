//! Why the driver cannot be served.

use std::io;
use std::path::PathBuf;

/// Why a socket cannot be served, or reached.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path leads to something else.
    #[error("{path} exists and is not a socket; remove it, or give another path", path = .path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// Another process serves the socket.
    #[error("another process answers at {path}; stop it, or give another path", path = .path.display())]
    Answered {
        /// The path.
        path: PathBuf,
    },
    /// The path has no directory or no name, or is relative.
    #[error("{path} cannot be the path of a socket; give an absolute path in a directory that exists", path = .path.display())]
    NoPath {
        /// The path.
        path: PathBuf,
    },
    /// The kernel refused to make the socket.
    #[error("the socket {path} cannot be made", path = .path.display())]
    Socket {
        /// The path.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// Serving has failed.
    #[error("{path} cannot be served any more", path = .path.display())]
    Served {
        /// The path.
        path: PathBuf,
        /// Why.
        source: tonic::transport::Error,
    },
    /// Nobody answers.
    #[error("nobody answers at {path}", path = .path.display())]
    Unanswered {
        /// The path.
        path: PathBuf,
        /// Why.
        source: tonic::transport::Error,
    },
}
