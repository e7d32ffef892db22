//! What a guest is told when it starts: a small disk that cloud-init reads.
//!
//! ```text
//!   user data source ─┐
//!                     ├─ merged ─┐
//!   annotation ───────┘          ├─ appended ──▶ user-data ─┐
//!   volumes, scripts, mounts ────┘                          ├──▶ ISO 9660 (cidata or config-2)
//!   pod, SSH keys ─────────────────────────────▶ meta-data ─┤
//!   addresses ────────────────────────────▶ network-config ─┘
//! ```
//!
//! A script in the place of user data stays as it is, byte for byte, because simple guests read nothing else. Virtlet then
//! delivered no Secret and no ConfigMap, and said nothing. Here they are delivered as vendor data, which cloud-init reads
//! besides.
//!
//! cloud-init applies most of it once for each `instance-id`, which is `POD.NAMESPACE`, as Virtlet's was. A guest that
//! keeps its root keeps its identity, and what was written to it, when its pod is made again. That is also why it gets no
//! network configuration: its address may have changed. It asks by DHCP.

mod annotations;
mod error;
mod files;
mod guest;
mod iso;
mod network;
mod yaml;

#[cfg(test)]
mod tests;

use serde_json::{Map, Value, json};

pub use annotations::{
    Annotations, Encoding, FILES_SOURCE, ObjectKind, ObjectName, RUNTIME_ANNOTATION, RootSize,
    SSH_KEY_SOURCE, USER_DATA_SOURCE, USER_DATA_SOURCE_KEY,
};
pub use error::SeedError;
pub use files::{FILE_BYTES_MAX, FILES_MAX, FileVolume, ObjectData, VolumeFile};
pub use guest::{BlockDevice, DiskMount};
pub use network::{GuestInterface, GuestNetwork};

use crate::names::DiskBus;
use files::GuestFile;
use guest::Scripts;
use iso::IsoFile;

const HEADER: &str = "#cloud-config\n";
const MOUNT_SCRIPT_MARK: &str = "@virtlet-mount-script@";
const ENVIRONMENT: &str = "/etc/cloud/environment";
const ENVIRONMENT_MODE: u32 = 0o644;

/// How cloud-init is told: the annotation `VirtletCloudInitImageType`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SeedKind {
    /// `user-data` and `meta-data` on a disk called `cidata`.
    #[default]
    NoCloud,
    /// OpenStack's files on a disk called `config-2`.
    ConfigDrive,
}

impl SeedKind {
    /// The label of the disk.
    pub const fn label(self) -> &'static str {
        match self {
            SeedKind::NoCloud => "cidata",
            SeedKind::ConfigDrive => "config-2",
        }
    }
}

/// Everything that a seed is made from. Secrets are among it, so it is not shown in logs.
#[derive(Clone)]
pub struct SeedInput<'a> {
    /// The name of the pod.
    pub pod: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// Its annotations.
    pub annotations: &'a Annotations,
    /// The object that `annotations.user_data_source` names.
    pub user_data_source: Option<&'a ObjectData>,
    /// The object that `annotations.ssh_key_source` names.
    pub ssh_key_source: Option<&'a ObjectData>,
    /// The object that `annotations.files_source` names.
    pub files_source: Option<&'a ObjectData>,
    /// ConfigMaps, Secrets and their like, where they are mounted.
    pub volumes: &'a [FileVolume],
    /// Variables of the container.
    pub environment: &'a [(String, String)],
    /// Block volumes that have a path in the guest.
    pub devices: &'a [BlockDevice],
    /// Flexvolumes that are mounted.
    pub mounts: &'a [DiskMount],
    /// The guest's addresses, if they are known.
    pub network: Option<&'a GuestNetwork>,
    /// Whether the guest keeps its root when its pod goes.
    pub persistent_root: bool,
}

/// A seed. Secrets are in it, so it is not shown in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Seed {
    /// How cloud-init is told.
    pub kind: SeedKind,
    /// The bytes of the disk. The same input has the same bytes.
    pub image: Vec<u8>,
    /// Whether a script has taken the place of user data that the pod has as well.
    pub user_data_replaced: bool,
}

impl Seed {
    /// Makes a seed.
    pub fn build(input: &SeedInput<'_>) -> Result<Seed, SeedError> {
        let kind = input.annotations.seed_kind;
        let told = Told::new(input)?;
        let files = match kind {
            SeedKind::NoCloud => told.nocloud(),
            SeedKind::ConfigDrive => told.configdrive(),
        };
        Ok(Seed {
            kind,
            image: iso::write(kind.label(), &files)?,
            user_data_replaced: told.user_data_replaced,
        })
    }
}

/// What the guest is told, whatever the form.
struct Told {
    meta_data: Map<String, Value>,
    user_data: String,
    /// Present beside a script alone.
    vendor_data: Option<String>,
    network: Option<GuestNetwork>,
    user_data_replaced: bool,
}

impl Told {
    fn new(input: &SeedInput<'_>) -> Result<Told, SeedError> {
        let annotations = input.annotations;
        let scripts = Scripts::new(annotations.disk_bus, input.devices, input.mounts)?;
        let generated = generated(input, &scripts)?;
        let script =
            script(input)?.map(|script| script.replace(MOUNT_SCRIPT_MARK, &scripts.inline));
        // The whole of the user data may well be user data.
        let whole = script
            .as_deref()
            .and_then(|script| script.strip_prefix("#cloud-config"));
        let whole = whole.filter(|rest| rest.starts_with(['\n', '\r']));
        let (user_data, vendor_data) = match (whole, &script) {
            (Some(whole), _) => (Some(yaml::read_mapping(whole, "the user data")?), None),
            (None, Some(_)) => (
                None,
                (!generated.is_empty()).then(|| cloud_config(&generated)),
            ),
            (None, None) => (Some(user_data(input)?), None),
        };
        let text = match (user_data, &script) {
            (Some(user_data), _) => {
                let mut user_data = user_data;
                use_stable_paths(&mut user_data, annotations.disk_bus, input.devices);
                cloud_config(&merge_mappings(user_data, generated))
            }
            (None, script) => script.clone().unwrap_or_default(),
        };
        let network = input
            .network
            .filter(|_| !input.persistent_root && !annotations.force_dhcp);
        Ok(Told {
            meta_data: meta_data(input)?,
            user_data: text,
            vendor_data,
            network: network.cloned(),
            user_data_replaced: script.is_some() && !annotations.user_data.is_empty(),
        })
    }

    fn nocloud(&self) -> Vec<IsoFile> {
        let file = |path: &str, text: String| IsoFile {
            path: path.to_owned(),
            bytes: text.into_bytes(),
        };
        let mut files = vec![
            // JSON, because simple guests read nothing else here.
            file(
                "meta-data",
                json_text(&Value::Object(self.meta_data.clone())),
            ),
            file("user-data", self.user_data.clone()),
        ];
        let network = self.network.as_ref();
        files.extend(
            network.map(|network| file("network-config", yaml::write(&network.to_nocloud()))),
        );
        files.extend(
            self.vendor_data
                .clone()
                .map(|text| file("vendor-data", text)),
        );
        files
    }

    fn configdrive(&self) -> Vec<IsoFile> {
        let file = |name: &str, text: String| IsoFile {
            path: format!("openstack/latest/{name}"),
            bytes: text.into_bytes(),
        };
        let mut meta_data = self.meta_data.clone();
        for (name, of) in [("uuid", "instance-id"), ("hostname", "local-hostname")] {
            if let Some(value) = self.meta_data.get(of).cloned() {
                meta_data.entry(name).or_insert(value);
            }
        }
        if let Some(Value::Array(keys)) = self.meta_data.get("public-keys") {
            let named = (0..)
                .zip(keys)
                .map(|(index, key)| (format!("key-{index}"), key.clone()));
            let named: Map<String, Value> = named.collect();
            meta_data
                .entry("public_keys")
                .or_insert(Value::Object(named));
        }
        let mut files = vec![
            file("meta_data.json", json_text(&Value::Object(meta_data))),
            file("user_data", self.user_data.clone()),
        ];
        let network = self.network.as_ref();
        files.extend(
            network.map(|network| file("network_data.json", json_text(&network.to_configdrive()))),
        );
        let vendor = self
            .vendor_data
            .as_ref()
            .map(|text| json!({ "cloud-init": text }));
        files.extend(vendor.map(|value| file("vendor_data.json", json_text(&value))));
        files
    }
}

fn json_text(value: &Value) -> String {
    format!("{value}\n")
}

fn cloud_config(mapping: &Map<String, Value>) -> String {
    format!("{HEADER}{}", yaml::write(&Value::Object(mapping.clone())))
}

/// What volumes and variables add, as cloud-config.
fn generated(input: &SeedInput<'_>, scripts: &Scripts) -> Result<Map<String, Value>, SeedError> {
    let mut files = files::guest_files(input.volumes)?;
    if let Some(object) = &input.annotations.files_source {
        let data = given(input.files_source, object, FILES_SOURCE)?;
        files.extend(files::injected(data, &object.to_string())?);
    }
    files.extend(scripts.files.iter().cloned());
    files.extend(environment(input.environment)?);
    files::check_paths(&files)?;
    let mut mapping = Map::new();
    let mut put = |name: &str, items: Vec<Value>| {
        if !items.is_empty() {
            mapping.insert(name.to_owned(), Value::Array(items));
        }
    };
    put(
        "write_files",
        files.iter().map(GuestFile::to_value).collect(),
    );
    let bus = input.annotations.disk_bus;
    let mounts = input
        .mounts
        .iter()
        .map(|mount| json!([mount.stable_path(bus), mount.path]));
    put("mounts", mounts.collect());
    let link = (!input.devices.is_empty()).then(|| json!(["/bin/sh", guest::LINK_SCRIPT]));
    put("runcmd", link.into_iter().collect());
    Ok(mapping)
}

fn environment(variables: &[(String, String)]) -> Result<Option<GuestFile>, SeedError> {
    let mut text = String::new();
    for (name, value) in variables {
        let breaks = |text: &str| text.contains(['\n', '\r', '\0']);
        if name.is_empty() || name.contains('=') || breaks(name) || breaks(value) {
            let variable = name.clone();
            return Err(SeedError::BadVariable { variable });
        }
        text.push_str(&format!("{name}={value}\n"));
    }
    Ok((!text.is_empty()).then(|| GuestFile {
        path: ENVIRONMENT.to_owned(),
        mode: ENVIRONMENT_MODE,
        bytes: text.into_bytes(),
    }))
}

/// The source first, then the annotation over it.
fn user_data(input: &SeedInput<'_>) -> Result<Map<String, Value>, SeedError> {
    let annotations = input.annotations;
    let own = annotations.user_data.clone();
    let Some(object) = &annotations.user_data_source else {
        return Ok(own);
    };
    let mut from_source = Map::new();
    for (key, bytes) in given(input.user_data_source, object, USER_DATA_SOURCE)? {
        let place = format!("the key {key:?} of {object}");
        let text = std::str::from_utf8(bytes).map_err(|_| SeedError::NotText {
            place: place.clone(),
        })?;
        from_source.insert(key.clone(), yaml::read(text, &place)?);
    }
    if annotations.overwrite && !own.is_empty() {
        return Ok(own);
    }
    Ok(merge_mappings(from_source, own))
}

/// The script of the annotation, or the key of the source that is the whole of the user data.
fn script(input: &SeedInput<'_>) -> Result<Option<String>, SeedError> {
    let annotations = input.annotations;
    let Some(key) = &annotations.user_data_source_key else {
        return Ok(annotations.user_data_script.clone());
    };
    let Some(object) = &annotations.user_data_source else {
        return Err(SeedError::NoObject {
            object: format!("the key {key:?} of no object"),
            name: USER_DATA_SOURCE_KEY,
        });
    };
    let bytes = value_of(
        input.user_data_source,
        object,
        key,
        (USER_DATA_SOURCE, USER_DATA_SOURCE_KEY),
    )?;
    let place = format!("the key {key:?} of {object}");
    let bytes = match annotations.user_data_encoding {
        Encoding::Plain => bytes.clone(),
        Encoding::Base64 => files::decode(bytes, &place)?,
    };
    let text = String::from_utf8(bytes).map_err(|_| SeedError::NotText { place })?;
    Ok(Some(text))
}

fn meta_data(input: &SeedInput<'_>) -> Result<Map<String, Value>, SeedError> {
    let annotations = input.annotations;
    let mut keys = Vec::new();
    if let Some((object, key)) = &annotations.ssh_key_source {
        let bytes = value_of(
            input.ssh_key_source,
            object,
            key,
            (SSH_KEY_SOURCE, SSH_KEY_SOURCE),
        )?;
        let place = format!("the key {key:?} of {object}");
        let text = std::str::from_utf8(bytes).map_err(|_| SeedError::NotText { place })?;
        keys = annotations::lines(text);
    }
    if annotations.overwrite && !annotations.ssh_keys.is_empty() {
        keys.clear();
    }
    keys.extend(annotations.ssh_keys.iter().cloned());
    let mut meta_data = Map::new();
    let instance = format!("{}.{}", input.pod, input.namespace);
    meta_data.insert("instance-id".to_owned(), instance.into());
    meta_data.insert("local-hostname".to_owned(), input.pod.into());
    if !keys.is_empty() {
        meta_data.insert("public-keys".to_owned(), keys.into());
    }
    // What the pod says counts.
    meta_data.extend(annotations.meta_data.clone());
    Ok(meta_data)
}

fn given<'a>(
    data: Option<&'a ObjectData>,
    object: &ObjectName,
    name: &'static str,
) -> Result<&'a ObjectData, SeedError> {
    data.ok_or_else(|| SeedError::NoObject {
        object: object.to_string(),
        name,
    })
}

fn value_of<'a>(
    data: Option<&'a ObjectData>,
    object: &ObjectName,
    key: &str,
    (source, names_key): (&'static str, &'static str),
) -> Result<&'a Vec<u8>, SeedError> {
    let value = given(data, object, source)?.get(key);
    value.ok_or_else(|| SeedError::NoKey {
        object: object.to_string(),
        key: key.to_owned(),
        name: names_key,
    })
}

/// Mappings are merged, lists are appended, and of everything else the second counts.
fn merge(base: Value, over: Value) -> Value {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => Value::Object(merge_mappings(base, over)),
        (Value::Array(mut base), Value::Array(over)) => {
            base.extend(over);
            Value::Array(base)
        }
        (_, over) => over,
    }
}

fn merge_mappings(mut base: Map<String, Value>, over: Map<String, Value>) -> Map<String, Value> {
    for (name, value) in over {
        let merged = match base.remove(&name) {
            Some(before) => merge(before, value),
            None => value,
        };
        base.insert(name, merged);
    }
    base
}

/// `mounts` are carried out before the links to block volumes are made, so an entry that names one gets a path that is
/// there by then.
fn use_stable_paths(user_data: &mut Map<String, Value>, bus: DiskBus, devices: &[BlockDevice]) {
    let Some(Value::Array(entries)) = user_data.get_mut("mounts") else {
        return;
    };
    for entry in entries {
        let Some(Value::String(what)) = entry.get_mut(0) else {
            continue;
        };
        let found = devices.iter().find(|device| {
            let path = device.device_path.as_str();
            // cloud-init looks for names without a slash below /dev.
            path == what || path.strip_prefix("/dev/") == Some(what)
        });
        if let Some(device) = found {
            *what = bus.stable_path(&device.serial);
        }
    }
}
