//! Every annotation of a VM pod, read once and typed.
//!
//! A value that cannot be meant is an error with what it can be. An annotation of Virtlet that means nothing here is
//! listed, so that whoever starts the VM can say so.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};
use trellis_api::Bytes;
use uuid::Uuid;

use super::{SeedError, SeedKind, yaml};
use crate::names::DiskBus;
use crate::root::{CHANGED_IMAGE_ANNOTATION, ChangedImage, OVERWRITE_ANNOTATION, RootRules};

/// The annotation and the value that make a pod a VM.
pub const RUNTIME_ANNOTATION: (&str, &str) = ("kubernetes.io/target-runtime", "virtlet.cloud");

/// The annotation that names the object with user data.
pub const USER_DATA_SOURCE: &str = "VirtletCloudInitUserDataSource";
/// The annotation that names the key of that object which is the user data.
pub const USER_DATA_SOURCE_KEY: &str = "VirtletCloudInitUserDataSourceKey";
/// The annotation that names the object with SSH keys.
pub const SSH_KEY_SOURCE: &str = "VirtletSSHKeySource";
/// The annotation that names the object with files.
pub const FILES_SOURCE: &str = "VirtletFilesFromDataSource";

const OURS: &str = "Virtlet";
const SSH_KEYS_DEFAULT: &str = "authorized_keys";
const VCPUS_DEFAULT: u8 = 1;
const QUOTED_CHARS_MAX: usize = 80;
const BOOL: &str = "\"true\" or \"false\"";

/// Which kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// A ConfigMap.
    ConfigMap,
    /// A Secret.
    Secret,
}

/// An object in the pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectName {
    /// Its kind.
    pub kind: ObjectKind,
    /// Its name.
    pub name: String,
}

impl fmt::Display for ObjectName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ObjectKind::ConfigMap => "ConfigMap",
            ObjectKind::Secret => "Secret",
        };
        write!(out, "{kind} {}", self.name)
    }
}

/// How a value is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// As it is.
    Plain,
    /// As base64.
    Base64,
}

impl Encoding {
    pub(super) fn from_name(name: &str) -> Option<Encoding> {
        match name {
            "plain" => Some(Encoding::Plain),
            "base64" => Some(Encoding::Base64),
            _ => None,
        }
    }
}

/// What the annotations of a VM pod say.
#[derive(Clone, Debug, PartialEq)]
pub struct Annotations {
    /// Whether the pod says that it is a VM.
    pub is_vm: bool,
    /// How its disks are connected.
    pub disk_bus: DiskBus,
    /// The size of its ephemeral root disk.
    pub root_volume_size: Option<Bytes>,
    /// What may be done to its persistent root.
    pub root_rules: RootRules,
    /// Whether directories that are shared with the guest are to belong to whom the guest's I/O is done as.
    pub chown_shares: bool,
    /// How cloud-init is told.
    pub seed_kind: SeedKind,
    /// What goes over the generated meta-data.
    pub meta_data: Map<String, Value>,
    /// User data.
    pub user_data: Map<String, Value>,
    /// Whether `user_data` takes the place of what the source has, and `ssh_keys` likewise.
    pub overwrite: bool,
    /// A script in the place of user data.
    pub user_data_script: Option<String>,
    /// Where further user data is.
    pub user_data_source: Option<ObjectName>,
    /// The key of the source that is the whole of the user data.
    pub user_data_source_key: Option<String>,
    /// How that key is encoded.
    pub user_data_encoding: Encoding,
    /// SSH keys.
    pub ssh_keys: Vec<String>,
    /// Where further SSH keys are: an object and its key.
    pub ssh_key_source: Option<(ObjectName, String)>,
    /// Where files for the guest are.
    pub files_source: Option<ObjectName>,
    /// The identity of the machine.
    pub system_uuid: Option<Uuid>,
    /// Whether the guest asks for its addresses by DHCP although they are known.
    pub force_dhcp: bool,
    /// How many CPUs it has.
    pub vcpus: u8,
    /// Whether it has the CPU of the machine that it runs on.
    pub host_cpu: bool,
    /// Annotations of Virtlet that mean nothing here.
    pub ignored: Vec<String>,
}

/// The size of an ephemeral root disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootSize {
    /// That of the image; nothing else was asked for.
    OfImage(Bytes),
    /// As asked for.
    Asked(Bytes),
    /// That of the image, because less was asked for, which whoever starts the VM says.
    LessAsked {
        /// The size.
        size: Bytes,
        /// What was asked for.
        asked: Bytes,
    },
}

impl Annotations {
    /// Reads the annotations of a pod.
    pub fn parse(annotations: &BTreeMap<String, String>) -> Result<Annotations, SeedError> {
        let mut reader = Reader::new(annotations);
        let (name, value) = RUNTIME_ANNOTATION;
        let parsed = Annotations {
            is_vm: annotations.get(name).is_some_and(|found| found == value),
            disk_bus: reader.disk_bus()?,
            root_volume_size: reader.root_volume_size()?,
            root_rules: reader.root_rules()?,
            chown_shares: reader.bool("VirtletChown9pfsMounts")?,
            seed_kind: reader.seed_kind()?,
            meta_data: reader.mapping("VirtletCloudInitMetaData")?,
            user_data: reader.mapping("VirtletCloudInitUserData")?,
            overwrite: reader.bool("VirtletCloudInitUserDataOverwrite")?,
            user_data_script: reader.script()?,
            user_data_source: reader.object(USER_DATA_SOURCE)?,
            user_data_source_key: reader.get(USER_DATA_SOURCE_KEY).map(str::to_owned),
            user_data_encoding: reader.encoding()?,
            ssh_keys: lines(reader.get("VirtletSSHKeys").unwrap_or_default()),
            ssh_key_source: reader.ssh_key_source()?,
            files_source: reader.object(FILES_SOURCE)?,
            system_uuid: reader.uuid()?,
            force_dhcp: reader.bool("VirtletForceDHCPNetworkConfig")?,
            vcpus: reader.vcpus()?,
            host_cpu: reader.host_cpu()?,
            ignored: Vec::new(),
        };
        let ignored = reader.left();
        Ok(Annotations { ignored, ..parsed })
    }

    /// The size of an ephemeral root disk that is made from an image of this size.
    pub fn root_size(&self, image: Bytes) -> RootSize {
        match self.root_volume_size {
            None => RootSize::OfImage(image),
            Some(asked) if asked >= image => RootSize::Asked(asked),
            Some(asked) => RootSize::LessAsked { size: image, asked },
        }
    }
}

/// The lines that say something.
pub(super) fn lines(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.map(str::to_owned).collect()
}

struct Reader<'a> {
    annotations: &'a BTreeMap<String, String>,
    known: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    fn new(annotations: &'a BTreeMap<String, String>) -> Self {
        let known = Vec::new();
        Reader { annotations, known }
    }

    fn get(&mut self, name: &'static str) -> Option<&'a str> {
        self.known.push(name);
        self.annotations.get(name).map(String::as_str)
    }

    fn left(&self) -> Vec<String> {
        let ours = self
            .annotations
            .keys()
            .filter(|name| name.starts_with(OURS));
        ours.filter(|name| !self.known.contains(&name.as_str()))
            .cloned()
            .collect()
    }

    /// A value that must be one of a few.
    fn one_of<T>(
        &mut self,
        name: &'static str,
        allowed: &'static str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, SeedError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        read(value).map(Some).ok_or_else(|| SeedError::BadValue {
            name: name.to_owned(),
            value: value.chars().take(QUOTED_CHARS_MAX).collect(),
            allowed,
        })
    }

    fn bool(&mut self, name: &'static str) -> Result<bool, SeedError> {
        let value = self.one_of(name, BOOL, |text| text.parse().ok())?;
        Ok(value.unwrap_or_default())
    }

    fn mapping(&mut self, name: &'static str) -> Result<Map<String, Value>, SeedError> {
        let text = self.get(name).unwrap_or_default();
        yaml::read_mapping(text, &format!("the annotation {name}"))
    }

    fn object(&mut self, name: &'static str) -> Result<Option<ObjectName>, SeedError> {
        self.one_of(name, "configmap/NAME or secret/NAME", |text| {
            let (kind, name) = text.split_once('/')?;
            object(kind, name)
        })
    }

    fn disk_bus(&mut self) -> Result<DiskBus, SeedError> {
        let bus = self.one_of("VirtletDiskDriver", "scsi or virtio", |text| match text {
            "scsi" => Some(DiskBus::Scsi),
            "virtio" => Some(DiskBus::Virtio),
            _ => None,
        })?;
        Ok(bus.unwrap_or_default())
    }

    fn root_volume_size(&mut self) -> Result<Option<Bytes>, SeedError> {
        const NAME: &str = "VirtletRootVolumeSize";
        let Some(text) = self.get(NAME) else {
            return Ok(None);
        };
        let size: Bytes = text.parse().map_err(|source| SeedError::BadSize {
            name: NAME.to_owned(),
            source,
        })?;
        self.one_of(NAME, "a size above zero such as 4Gi", |_| {
            (Bytes::new(1)..=Bytes::VOLUME_MAX)
                .contains(&size)
                .then_some(size)
        })
    }

    fn root_rules(&mut self) -> Result<RootRules, SeedError> {
        let changed = self.one_of(
            CHANGED_IMAGE_ANNOTATION,
            "refuse, keep or replace",
            ChangedImage::from_name,
        )?;
        Ok(RootRules {
            changed_image: changed.unwrap_or_default(),
            overwrite_foreign: self.bool(OVERWRITE_ANNOTATION)?,
        })
    }

    fn seed_kind(&mut self) -> Result<SeedKind, SeedError> {
        let kind = self.one_of(
            "VirtletCloudInitImageType",
            "nocloud or configdrive",
            |text| match text.to_ascii_lowercase().as_str() {
                "nocloud" => Some(SeedKind::NoCloud),
                "configdrive" => Some(SeedKind::ConfigDrive),
                _ => None,
            },
        )?;
        Ok(kind.unwrap_or_default())
    }

    fn script(&mut self) -> Result<Option<String>, SeedError> {
        const NAME: &str = "VirtletCloudInitUserDataScript";
        let script = self.get(NAME).filter(|script| !script.is_empty());
        match script {
            Some(script) if script.len() > yaml::TEXT_BYTES_MAX => Err(SeedError::TooLong {
                place: format!("the annotation {NAME}"),
                bytes: script.len(),
            }),
            script => Ok(script.map(str::to_owned)),
        }
    }

    fn encoding(&mut self) -> Result<Encoding, SeedError> {
        let name = "VirtletCloudInitUserDataSourceEncoding";
        let encoding = self.one_of(name, "plain or base64", Encoding::from_name)?;
        Ok(encoding.unwrap_or(Encoding::Plain))
    }

    fn ssh_key_source(&mut self) -> Result<Option<(ObjectName, String)>, SeedError> {
        let allowed = "configmap/NAME, secret/NAME, or one of them with /KEY";
        self.one_of(SSH_KEY_SOURCE, allowed, |text| {
            let (kind, rest) = text.split_once('/')?;
            let (name, key) = rest.split_once('/').unwrap_or((rest, SSH_KEYS_DEFAULT));
            let key = Some(key).filter(|key| !key.is_empty() && !key.contains('/'))?;
            Some((object(kind, name)?, key.to_owned()))
        })
    }

    fn uuid(&mut self) -> Result<Option<Uuid>, SeedError> {
        self.one_of("VirtletSystemUUID", "a UUID", |text| {
            Uuid::parse_str(text).ok()
        })
    }

    fn vcpus(&mut self) -> Result<u8, SeedError> {
        let count = self.one_of("VirtletVCPUCount", "a number from 1 to 255", |text| {
            text.parse().ok().filter(|count| *count > 0)
        })?;
        Ok(count.unwrap_or(VCPUS_DEFAULT))
    }

    fn host_cpu(&mut self) -> Result<bool, SeedError> {
        let model = self.one_of("VirtletCPUModel", "host-model", |text| match text {
            "" => Some(false),
            "host-model" => Some(true),
            _ => None,
        })?;
        Ok(model.unwrap_or_default())
    }
}

fn object(kind: &str, name: &str) -> Option<ObjectName> {
    let kind = match kind {
        "configmap" => ObjectKind::ConfigMap,
        "secret" => ObjectKind::Secret,
        _ => return None,
    };
    // As Kubernetes names objects.
    let is_name = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.')
    };
    let valid = !name.is_empty() && name.len() <= 253 && name.bytes().all(is_name);
    valid.then(|| ObjectName {
        kind,
        name: name.to_owned(),
    })
}
