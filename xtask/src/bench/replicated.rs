//! Claims of several copies at a service under measurement.

use std::path::Path;
use std::process::Command;

use anyhow::Context;
use serde_json::json;

use super::service::Service;

const POOLS: [&str; 3] = ["a", "b", "c"];

/// Gives the service a pool for each of three copies, all on the filesystem that is measured.
pub fn add_pools(service: &Service, binary: &Path) -> anyhow::Result<()> {
    for pool in POOLS {
        let path = service.path(pool);
        std::fs::create_dir_all(&path)?;
        let path = path.display().to_string();
        let arguments = ["pool", "add", pool, &path, "--overcommit", "10000"];
        service.verb(binary, &arguments)?;
    }
    Ok(())
}

/// Asks for a block claim with so many copies, with or without sums of their blocks, under a class of the same name.
pub fn claim_block(
    service: &Service,
    name: &str,
    copies: u32,
    checksums: bool,
    size: &str,
) -> anyhow::Result<()> {
    let manifest = json!({ "apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": { "name": name }, "provisioner": "trellis.dev", "allowVolumeExpansion": true,
            "parameters": {
                "replicas": copies.to_string(), "pools": POOLS.join(","), "checksums": checksums.to_string(),
                "scrubInterval": "0", "allowSharedDisk": "true",
            },
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": { "name": name, "namespace": "default" },
            "spec": {
                "storageClassName": name, "accessModes": ["ReadWriteOnce"], "volumeMode": "Block",
                "resources": { "requests": { "storage": size } },
            },
        },
    ]});
    let file = service.path(&format!("{name}.json"));
    std::fs::write(&file, manifest.to_string())?;
    let applied = Command::new("kubectl")
        .args(["apply", "-f"])
        .arg(&file)
        .env("KUBECONFIG", service.path("data/kubeconfig"))
        .output()
        .context("kubectl cannot be run")?;
    anyhow::ensure!(
        applied.status.success(),
        "{}",
        String::from_utf8_lossy(&applied.stderr)
    );
    Ok(())
}
