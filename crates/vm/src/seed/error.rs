//! Why a seed cannot be made.

use trellis_api::quantity::QuantityError;

use super::files::{FILE_BYTES_MAX, FILES_MAX};
use super::iso::ISO_BYTES_MAX;
use super::yaml::{DEPTH_MAX, TEXT_BYTES_MAX};

/// Why what a pod says cannot be passed on to its guest. Each sentence names the place in the pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SeedError {
    /// An annotation has a value that it cannot have.
    #[error("the annotation {name} is {value:?}; it can be {allowed}")]
    BadValue {
        /// Which annotation.
        name: String,
        /// The beginning of its value.
        value: String,
        /// What it can be.
        allowed: &'static str,
    },
    /// An annotation is no size.
    #[error("the annotation {name} is no size")]
    BadSize {
        /// Which annotation.
        name: String,
        /// Why.
        source: QuantityError,
    },
    /// Text is longer than anybody reads.
    #[error("{place} has {bytes} bytes; at most {TEXT_BYTES_MAX} are read")]
    TooLong {
        /// Where it is.
        place: String,
        /// How long it is.
        bytes: usize,
    },
    /// Text is no YAML, or too deep.
    #[error("{place} is not YAML of at most {DEPTH_MAX} levels: {why}")]
    BadYaml {
        /// Where it is.
        place: String,
        /// The reader's first line.
        why: String,
    },
    /// YAML is not what belongs there.
    #[error("{place} is YAML, but not a mapping of names to values")]
    NotAMapping {
        /// Where it is.
        place: String,
    },
    /// A name in YAML cannot be written so that every reader finds it.
    #[error("{place} has a name of {bytes} bytes; readers of YAML find names of up to {max}")]
    LongName {
        /// Where it is.
        place: String,
        /// How long it is.
        bytes: usize,
        /// How long it can be.
        max: usize,
    },
    /// An object has no such key.
    #[error("{object} has no key {key:?}, which the annotation {name} names")]
    NoKey {
        /// Which object.
        object: String,
        /// Which key.
        key: String,
        /// Which annotation.
        name: &'static str,
    },
    /// An object that an annotation names was not given.
    #[error("the annotation {name} names {object}, which cannot be read")]
    NoObject {
        /// Which object.
        object: String,
        /// Which annotation.
        name: &'static str,
    },
    /// A value is not text.
    #[error("{place} is not text in UTF-8")]
    NotText {
        /// Where it is.
        place: String,
    },
    /// A value is not base64.
    #[error("{place} is not base64")]
    NotBase64 {
        /// Where it is.
        place: String,
    },
    /// A key of a volume would be written to another place.
    #[error(
        "the key {key:?} of the volume at {mount_path} cannot be the name of a file: it must be relative, and without .. and control characters"
    )]
    BadKey {
        /// Which key.
        key: String,
        /// Where the volume is mounted.
        mount_path: String,
    },
    /// A path is not one that a guest can have.
    #[error("{place} is {path:?}; it must be absolute, without . and .. and control characters")]
    BadPath {
        /// Where it stands.
        place: &'static str,
        /// The path.
        path: String,
    },
    /// The path of a device has characters that mean something to a shell or to udev.
    #[error(
        "the devicePath {path:?} has characters other than letters, digits and / _ . + : @ = , -, or has . or .. in it"
    )]
    BadDevicePath {
        /// The path.
        path: String,
    },
    /// Two files of the guest have one path.
    #[error("two volumes or files of the pod would be written to {path:?} in the guest")]
    SamePath {
        /// Which path.
        path: String,
    },
    /// There is too much.
    #[error(
        "the pod's volumes hold more than {FILES_MAX} files or {FILE_BYTES_MAX} bytes; cloud-init is for small files, so use a volume instead"
    )]
    TooManyFiles,
    /// A directory of a volume cannot be read.
    #[error("the volume in {directory} cannot be read: {why}")]
    UnreadableVolume {
        /// Where it is on the node.
        directory: String,
        /// What the kernel said.
        why: String,
    },
    /// A link in a volume leads out of it.
    #[error("{path} in a volume leads out of the volume")]
    LeadsOut {
        /// Which path.
        path: String,
    },
    /// A variable cannot be a line.
    #[error(
        "the variable {variable:?} cannot be a line of /etc/cloud/environment: its name or value has a line break, or its name an equals sign"
    )]
    BadVariable {
        /// Which one.
        variable: String,
    },
    /// The image would be too large.
    #[error("the seed would have more than {ISO_BYTES_MAX} bytes")]
    TooLarge,
    /// Two files would have one name in the image.
    #[error("two files of the seed are called {name:?}")]
    SameName {
        /// Which name.
        name: String,
    },
}
