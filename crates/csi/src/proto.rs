//! The wire, generated from `proto/`.
#![allow(missing_docs, clippy::all)]

/// `csi.v1`.
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// `pluginregistration`.
pub mod registration {
    tonic::include_proto!("pluginregistration");
}
