//! Files of ConfigMaps, Secrets, projected volumes and the downward API, as cloud-init's `write_files`.
//!
//! The kubelet keeps such a volume in a directory of its own making: the files are below `..2026_x`, `..data` is a link to
//! that, and each key is a link through `..data`. Only the keys count; Virtlet followed all three and wrote each file three
//! times.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::SeedError;
use super::annotations::{Encoding, FILES_SOURCE};

/// The most files of a VM, and the most bytes in them.
pub const FILES_MAX: usize = 4096;
/// See [`FILES_MAX`].
pub const FILE_BYTES_MAX: usize = 16 << 20;

const DEPTH_MAX: usize = 16;
const KEY_BYTES_MAX: usize = 1024;
const NAME_BYTES_MAX: usize = 255;
const MODE_BITS: u32 = 0o777;
const MODE_DEFAULT: u32 = 0o644;

/// What the data of an object is: its keys and their values.
pub type ObjectData = BTreeMap<String, Vec<u8>>;

/// A volume of small files, and where it is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileVolume {
    /// Where the guest finds the files.
    pub mount_path: String,
    /// The files.
    pub files: Vec<VolumeFile>,
}

/// One file of a volume. It may be a secret, so logs show its length alone.
#[derive(Clone, PartialEq, Eq)]
pub struct VolumeFile {
    /// Its path below the mount.
    pub key: String,
    /// Its permissions.
    pub mode: u32,
    /// What it holds.
    pub bytes: Vec<u8>,
}

impl fmt::Debug for VolumeFile {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("VolumeFile")
            .field("key", &self.key)
            .field("mode", &self.mode)
            .field("length", &self.bytes.len())
            .finish_non_exhaustive()
    }
}

/// A file as the guest shall have it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct GuestFile {
    pub path: String,
    pub mode: u32,
    pub bytes: Vec<u8>,
}

impl GuestFile {
    pub(super) fn to_value(&self) -> Value {
        json!({
            "path": self.path,
            "permissions": format!("{:04o}", self.mode & MODE_BITS),
            "encoding": "b64",
            "content": STANDARD.encode(&self.bytes),
        })
    }
}

impl FileVolume {
    /// Reads a volume where the kubelet has put it. A path that is a file itself is one, as with `subPath`.
    pub fn read(source: &Path, mount_path: &str) -> Result<FileVolume, SeedError> {
        let unreadable = |error: std::io::Error| SeedError::UnreadableVolume {
            directory: source.display().to_string(),
            why: error.to_string(),
        };
        let root = fs::canonicalize(source).map_err(unreadable)?;
        let mut walk = Walk {
            root: root.clone(),
            files: Vec::new(),
            bytes: 0,
        };
        if root.is_file() {
            let file = walk.file(&root, String::new()).map_err(unreadable)?;
            walk.files.extend(file);
        } else {
            walk.directory(&root, "", 0)?;
        }
        Ok(FileVolume {
            mount_path: mount_path.to_owned(),
            files: walk.files,
        })
    }
}

struct Walk {
    root: PathBuf,
    files: Vec<VolumeFile>,
    bytes: usize,
}

impl Walk {
    fn directory(&mut self, directory: &Path, below: &str, depth: usize) -> Result<(), SeedError> {
        let unreadable = |error: std::io::Error| SeedError::UnreadableVolume {
            directory: directory.display().to_string(),
            why: error.to_string(),
        };
        let entries = fs::read_dir(directory)
            .map_err(unreadable)?
            .take(FILES_MAX + 1);
        let mut names: Vec<_> = entries.collect::<Result<_, _>>().map_err(unreadable)?;
        if names.len() > FILES_MAX || depth > DEPTH_MAX {
            return Err(SeedError::TooManyFiles);
        }
        names.sort_by_key(fs::DirEntry::file_name);
        for entry in names {
            let path = entry.path();
            let name = entry.file_name();
            // The kubelet's own names begin so, and no key does.
            if depth == 0 && name.to_string_lossy().starts_with("..") {
                continue;
            }
            let name = name.into_string().map_err(|name| SeedError::BadKey {
                key: name.to_string_lossy().into_owned(),
                mount_path: below.to_owned(),
            })?;
            let key = if below.is_empty() {
                name
            } else {
                format!("{below}/{name}")
            };
            let real = fs::canonicalize(&path).map_err(unreadable)?;
            if !real.starts_with(&self.root) {
                let path = path.display().to_string();
                return Err(SeedError::LeadsOut { path });
            }
            if real.is_dir() {
                self.directory(&real, &key, depth + 1)?;
            } else if let Some(file) = self.file(&real, key).map_err(unreadable)? {
                self.files.push(file);
            }
            if self.files.len() > FILES_MAX || self.bytes > FILE_BYTES_MAX {
                return Err(SeedError::TooManyFiles);
            }
        }
        Ok(())
    }

    /// Sockets, pipes and devices are nobody's keys.
    fn file(&mut self, path: &Path, key: String) -> std::io::Result<Option<VolumeFile>> {
        let metadata = fs::metadata(path)?;
        if !metadata.is_file() {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        let limit = u64::try_from(FILE_BYTES_MAX + 1 - self.bytes).unwrap_or_default();
        fs::File::open(path)?.take(limit).read_to_end(&mut bytes)?;
        self.bytes += bytes.len();
        let mode = metadata.permissions().mode() & MODE_BITS;
        Ok(Some(VolumeFile { key, mode, bytes }))
    }
}

/// The files of all volumes, each path once.
pub(super) fn guest_files(volumes: &[FileVolume]) -> Result<Vec<GuestFile>, SeedError> {
    let mut files = Vec::new();
    let mut bytes = 0usize;
    for volume in volumes {
        let base = volume.mount_path.trim_end_matches('/');
        if !is_absolute(&volume.mount_path) {
            return Err(SeedError::BadPath {
                place: "a mountPath",
                path: volume.mount_path.clone(),
            });
        }
        for file in &volume.files {
            // A mount that is a file has no key.
            let is_mount_itself = file.key.is_empty() && volume.files.len() == 1;
            if !is_mount_itself && !is_key(&file.key) {
                return Err(SeedError::BadKey {
                    key: file.key.clone(),
                    mount_path: volume.mount_path.clone(),
                });
            }
            let path = if is_mount_itself {
                base.to_owned()
            } else {
                format!("{base}/{}", file.key)
            };
            bytes = bytes.saturating_add(file.bytes.len());
            files.push(GuestFile {
                path,
                mode: file.mode,
                bytes: file.bytes.clone(),
            });
        }
    }
    if files.len() > FILES_MAX || bytes > FILE_BYTES_MAX {
        return Err(SeedError::TooManyFiles);
    }
    Ok(files)
}

/// Files that an object describes: `k` is a content, `k_path` says where it belongs and `k_encoding` how it is written.
pub(super) fn injected(data: &ObjectData, object: &str) -> Result<Vec<GuestFile>, SeedError> {
    const PATH: &str = "_path";
    const ENCODING: &str = "_encoding";
    let text = |key: &str| -> Result<Option<&str>, SeedError> {
        let place = || format!("the key {key:?} of {object}");
        let value = data.get(key).map(|bytes| std::str::from_utf8(bytes));
        value
            .transpose()
            .map_err(|_| SeedError::NotText { place: place() })
    };
    let describes = |key: &str, suffix: &str| {
        key.strip_suffix(suffix)
            .is_some_and(|of| data.contains_key(of))
    };
    let mut files = Vec::new();
    for (key, bytes) in data {
        if describes(key, PATH) || describes(key, ENCODING) {
            continue;
        }
        let path = text(&format!("{key}{PATH}"))?.ok_or_else(|| SeedError::NoKey {
            object: object.to_owned(),
            key: format!("{key}{PATH}"),
            name: FILES_SOURCE,
        })?;
        if !is_absolute(path) {
            let path = path.to_owned();
            return Err(SeedError::BadPath {
                place: "the path of a file",
                path,
            });
        }
        let encoding =
            text(&format!("{key}{ENCODING}"))?.map_or(Some(Encoding::Base64), Encoding::from_name);
        let bytes = match encoding {
            Some(Encoding::Plain) => bytes.clone(),
            Some(Encoding::Base64) => decode(bytes, &format!("the key {key:?} of {object}"))?,
            None => {
                return Err(SeedError::BadValue {
                    name: format!("{key}{ENCODING}"),
                    value: String::new(),
                    allowed: "plain or base64",
                });
            }
        };
        let path = path.to_owned();
        files.push(GuestFile {
            path,
            mode: MODE_DEFAULT,
            bytes,
        });
    }
    Ok(files)
}

/// Base64 as people write it: with line breaks.
pub(super) fn decode(bytes: &[u8], place: &str) -> Result<Vec<u8>, SeedError> {
    let digits: Vec<u8> = bytes
        .iter()
        .copied()
        .filter(|byte| !byte.is_ascii_whitespace())
        .collect();
    STANDARD.decode(digits).map_err(|_| SeedError::NotBase64 {
        place: place.to_owned(),
    })
}

/// Refuses two files with one path.
pub(super) fn check_paths(files: &[GuestFile]) -> Result<(), SeedError> {
    let mut paths = BTreeSet::new();
    for file in files {
        if !paths.insert(file.path.as_str()) {
            let path = file.path.clone();
            return Err(SeedError::SamePath { path });
        }
    }
    Ok(())
}

fn is_key(key: &str) -> bool {
    key.len() <= KEY_BYTES_MAX && !key.starts_with("..") && key.split('/').all(is_component)
}

/// Whether a path is absolute, and has nothing that leads elsewhere.
pub(super) fn is_absolute(path: &str) -> bool {
    let below = path.trim_end_matches('/').strip_prefix('/');
    path.len() <= KEY_BYTES_MAX && below.is_some_and(|below| below.split('/').all(is_component))
}

fn is_component(name: &str) -> bool {
    let plain = !name.chars().any(char::is_control);
    plain && !matches!(name, "" | "." | "..") && name.len() <= NAME_BYTES_MAX
}
