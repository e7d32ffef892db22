//! A caller of the driver of one service.

use std::future::Future;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use tokio::runtime::Runtime;
use trellis_csi::client::{self, Driver};
use trellis_csi::proto::csi::volume_capability::access_mode::Mode;
use trellis_csi::proto::csi::volume_capability::{
    AccessMode, AccessType, BlockVolume, MountVolume,
};
use trellis_csi::proto::csi::*;
use trellis_csi::{Code, Status};

use crate::harness::Service;

pub const GIB: i64 = 1 << 30;
pub const MIB: i64 = 1 << 20;
/// The node of every service of these tests.
pub const NODE: &str = "test-node";

pub struct Caller {
    pub service: Service,
    pub driver: Driver,
    runtime: Runtime,
    /// The directory of the socket.
    sockets: TempDir,
}

impl Caller {
    pub fn start(arguments: &[&str]) -> Caller {
        let sockets = tempfile::tempdir().unwrap();
        let endpoint = sockets.path().join("csi.sock");
        let told = ["--csi-endpoint", endpoint.to_str().unwrap()];
        let service = Service::start_told(&[&told, arguments].concat());
        let runtime = Runtime::new().unwrap();
        let driver = runtime.block_on(client::connect(&endpoint)).unwrap();
        Caller {
            service,
            driver,
            runtime,
            sockets,
        }
    }

    pub fn endpoint(&self) -> PathBuf {
        self.sockets.path().join("csi.sock")
    }

    pub fn wait<T>(&self, call: impl Future<Output = T>) -> T {
        self.runtime.block_on(call)
    }

    pub fn connect(&self, socket: &Path) -> Driver {
        self.wait(client::connect(socket)).unwrap()
    }

    pub fn reconnect(&mut self) {
        self.driver = self.connect(&self.endpoint());
    }

    pub fn create(&self, name: &str, bytes: i64, how: VolumeCapability) -> Result<String, Code> {
        let volume = self.create_with(request(name, bytes, how));
        volume
            .map(|volume| volume.volume_id)
            .map_err(|status| status.code())
    }

    pub fn create_with(&self, request: CreateVolumeRequest) -> Result<Volume, Status> {
        let mut controller = self.driver.controller.clone();
        let made = self.wait(controller.create_volume(request))?;
        Ok(made.into_inner().volume.unwrap())
    }

    pub fn delete(&self, id: &str) -> Result<(), Code> {
        let mut controller = self.driver.controller.clone();
        let request = DeleteVolumeRequest {
            volume_id: id.to_owned(),
        };
        let deleted = self.wait(controller.delete_volume(request));
        deleted.map(drop).map_err(|status| status.code())
    }

    pub fn expand(&self, id: &str, bytes: i64) -> Result<ControllerExpandVolumeResponse, Status> {
        let mut controller = self.driver.controller.clone();
        let request = ControllerExpandVolumeRequest {
            volume_id: id.to_owned(),
            capacity_range: range(bytes, 0),
            volume_capability: None,
        };
        let grown = self.wait(controller.controller_expand_volume(request));
        grown.map(|grown| grown.into_inner())
    }

    pub fn publish_to(
        &self,
        id: &str,
        node: &str,
        how: VolumeCapability,
    ) -> Result<ControllerPublishVolumeResponse, Status> {
        let mut controller = self.driver.controller.clone();
        let request = ControllerPublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: node.to_owned(),
            volume_capability: Some(how),
            readonly: false,
            volume_context: Default::default(),
        };
        let published = self.wait(controller.controller_publish_volume(request));
        published.map(|published| published.into_inner())
    }

    pub fn unpublish_from(&self, id: &str, node: &str) -> Result<(), Status> {
        let mut controller = self.driver.controller.clone();
        let request = ControllerUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: node.to_owned(),
        };
        self.wait(controller.controller_unpublish_volume(request))
            .map(drop)
    }

    pub fn stage(&self, id: &str, path: &str, how: VolumeCapability) -> Result<(), Status> {
        let mut node = self.driver.node.clone();
        let request = NodeStageVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: path.to_owned(),
            volume_capability: Some(how),
            ..NodeStageVolumeRequest::default()
        };
        self.wait(node.node_stage_volume(request)).map(drop)
    }

    pub fn unstage(&self, id: &str, path: &str) -> Result<(), Status> {
        let mut node = self.driver.node.clone();
        let request = NodeUnstageVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: path.to_owned(),
        };
        self.wait(node.node_unstage_volume(request)).map(drop)
    }

    pub fn show(
        &self,
        id: &str,
        staging: &str,
        target: &str,
        how: VolumeCapability,
        readonly: bool,
    ) -> Result<(), Status> {
        let mut node = self.driver.node.clone();
        let request = NodePublishVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: staging.to_owned(),
            target_path: target.to_owned(),
            volume_capability: Some(how),
            readonly,
            ..NodePublishVolumeRequest::default()
        };
        self.wait(node.node_publish_volume(request)).map(drop)
    }

    pub fn hide(&self, id: &str, target: &str) -> Result<(), Status> {
        let mut node = self.driver.node.clone();
        let request = NodeUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            target_path: target.to_owned(),
        };
        self.wait(node.node_unpublish_volume(request)).map(drop)
    }

    pub fn stats(&self, id: &str, path: &str) -> Result<NodeGetVolumeStatsResponse, Status> {
        let mut node = self.driver.node.clone();
        let request = NodeGetVolumeStatsRequest {
            volume_id: id.to_owned(),
            volume_path: path.to_owned(),
            staging_target_path: String::new(),
        };
        let measured = self.wait(node.node_get_volume_stats(request));
        measured.map(|measured| measured.into_inner())
    }

    pub fn grow_on_node(&self, id: &str, path: &str, bytes: i64) -> Result<i64, Status> {
        let mut node = self.driver.node.clone();
        let request = NodeExpandVolumeRequest {
            volume_id: id.to_owned(),
            volume_path: path.to_owned(),
            capacity_range: range(bytes, 0),
            ..NodeExpandVolumeRequest::default()
        };
        let grown = self.wait(node.node_expand_volume(request))?;
        Ok(grown.into_inner().capacity_bytes)
    }

    /// A new directory for a volume to be staged at, and a path for a pod.
    pub fn paths(&self, name: &str) -> (String, String) {
        let staging = self.service.path(&format!("staging-{name}"));
        std::fs::create_dir_all(&staging).unwrap();
        let target = self.service.path(&format!("pod-{name}"));
        (text(&staging), text(&target))
    }
}

pub fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

pub fn range(required_bytes: i64, limit_bytes: i64) -> Option<CapacityRange> {
    Some(CapacityRange {
        required_bytes,
        limit_bytes,
    })
}

pub fn request(name: &str, bytes: i64, how: VolumeCapability) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: range(bytes, 0),
        volume_capabilities: vec![how],
        ..CreateVolumeRequest::default()
    }
}

pub fn with(mut request: CreateVolumeRequest, parameters: &[(&str, &str)]) -> CreateVolumeRequest {
    let given = parameters.iter();
    let given = given.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    request.parameters.extend(given);
    request
}

pub fn capability(of: AccessType, mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(of),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

/// A filesystem on one node.
pub fn mount() -> VolumeCapability {
    capability(
        AccessType::Mount(MountVolume::default()),
        Mode::SingleNodeWriter,
    )
}

/// A device on one node.
pub fn block() -> VolumeCapability {
    capability(AccessType::Block(BlockVolume {}), Mode::SingleNodeWriter)
}
