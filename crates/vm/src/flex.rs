//! The options of Virtlet's flexvolumes: `type: qcow2 | raw | ceph`.
//!
//! A size with a unit that two readers understand differently is refused, with both readings. Virtlet took `MB` where no
//! unit was given, libvirt took `M` as 1024 × 1024 bytes, and Kubernetes takes it as 1000 × 1000.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use trellis_api::Bytes;

/// The driver that a pod names.
pub const DRIVER: &str = "virtlet/flexvolume_driver";

/// The size of a qcow2 volume that says none: Virtlet's 1024 MB.
pub const CAPACITY_DEFAULT: Bytes = Bytes::new(1_024_000_000);

/// The size of a disk is a multiple of this.
const SECTOR: Bytes = Bytes::new(512);

/// The longest value of an option, and the most of them.
const VALUE_BYTES_MAX: usize = 4096;
const OPTIONS_MAX: usize = 64;

const PARTITION_MAX: u8 = 128;
const MONITORS_MAX: usize = 16;

/// A flexvolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlexVolume {
    /// Where its bytes are.
    pub backing: FlexBacking,
    /// What of it is mounted.
    pub partition: FlexPartition,
    /// Options that mean nothing here.
    pub ignored: Vec<String>,
}

/// Where the bytes of a flexvolume are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FlexBacking {
    /// A file that comes and goes with the pod.
    Qcow2 {
        /// Its size, a whole number of sectors.
        capacity: Bytes,
    },
    /// A block device of the node.
    Raw {
        /// Its path, below `/dev/`.
        path: String,
    },
    /// An image of a Ceph cluster.
    Ceph(CephImage),
}

/// An image of a Ceph cluster.
#[derive(Clone, PartialEq, Eq)]
pub struct CephImage {
    /// The monitors.
    pub monitors: Vec<SocketAddr>,
    /// The pool.
    pub pool: String,
    /// The image.
    pub image: String,
    /// Who asks.
    pub user: String,
    /// The user's key.
    pub secret: Vec<u8>,
}

/// The key stays out of logs.
impl fmt::Debug for CephImage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("CephImage")
            .field("monitors", &self.monitors)
            .field("pool", &self.pool)
            .field("image", &self.image)
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

/// What of a flexvolume is mounted: the option `part`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlexPartition {
    /// The whole disk: `0`.
    Whole,
    /// This partition. The first, if the option is absent.
    Number(u8),
}

impl FlexPartition {
    /// What follows the stable path of the disk.
    pub fn suffix(self) -> String {
        match self {
            FlexPartition::Whole => String::new(),
            FlexPartition::Number(number) => format!("-part{number}"),
        }
    }
}

/// Why options are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlexError {
    /// There is no `type`.
    #[error("the flexvolume has no option `type`: write qcow2, raw or ceph")]
    NoType,
    /// The type is not known.
    #[error("the flexvolume has the type {found:?}: write qcow2, raw or ceph")]
    UnknownType {
        /// What it says.
        found: String,
    },
    /// There are too many options, or one is too long.
    #[error(
        "the flexvolume has more than {OPTIONS_MAX} options or {MONITORS_MAX} monitors, or an option that is longer than {VALUE_BYTES_MAX} bytes"
    )]
    TooMuch,
    /// An option is missing.
    #[error("the flexvolume of type {kind} has no option `{option}`")]
    Missing {
        /// The type.
        kind: &'static str,
        /// The option.
        option: &'static str,
    },
    /// The size cannot be read.
    #[error("the capacity {text:?} is not a number and a unit, such as 1024MB or 1GiB")]
    NotACapacity {
        /// The text.
        text: String,
    },
    /// The size has no unit.
    #[error(
        "the capacity {text:?} has no unit: Virtlet read it as {text}MB, Kubernetes reads it as bytes; write {text}MB or {text}MiB"
    )]
    NoUnit {
        /// The text.
        text: String,
    },
    /// The unit has two meanings.
    #[error(
        "the capacity {text:?} has the unit {unit}, which is {unit}iB to libvirt and {unit}B to Kubernetes; write {unit}iB or {unit}B"
    )]
    Ambiguous {
        /// The text.
        text: String,
        /// The unit.
        unit: String,
    },
    /// The size is zero or larger than a volume can be.
    #[error(
        "the capacity {text:?} is not between one byte and {}",
        Bytes::VOLUME_MAX
    )]
    OutOfRange {
        /// The text.
        text: String,
    },
    /// The path of a raw device is not one.
    #[error("the path {path:?} is not that of a device: write a path below /dev/ without . and ..")]
    NotADevicePath {
        /// The path.
        path: String,
    },
    /// A monitor is not an address and a port.
    #[error(
        "the monitor {text:?} is not an address and a port, such as 10.0.0.1:6789 or [fd00::1]:6789"
    )]
    NotAMonitor {
        /// The text.
        text: String,
    },
    /// The secret is not base64, or empty.
    #[error("the option `secret` is not the user's key in base64")]
    NotASecret,
    /// The name of a pool, image or user cannot be one.
    #[error("the option `{option}` is {text:?}; Ceph's names here have letters, digits and . _ -")]
    NotAName {
        /// The option.
        option: &'static str,
        /// The text.
        text: String,
    },
    /// The partition is not a number.
    #[error(
        "the option `part` is {text:?}: write 0 for the whole disk, or a number from 1 to {PARTITION_MAX}"
    )]
    NotAPartition {
        /// The text.
        text: String,
    },
}

impl FlexVolume {
    /// Reads the options of a flexvolume whose driver is [`DRIVER`].
    pub fn parse(options: &BTreeMap<String, String>) -> Result<FlexVolume, FlexError> {
        if options.len() > OPTIONS_MAX
            || options.values().any(|value| value.len() > VALUE_BYTES_MAX)
        {
            return Err(FlexError::TooMuch);
        }
        let kind = options.get("type").ok_or(FlexError::NoType)?;
        let (backing, known): (_, &[&str]) = match kind.as_str() {
            "qcow2" => (qcow2(options)?, &["capacity"]),
            "raw" => (raw(options)?, &["path"]),
            "ceph" => (
                ceph(options)?,
                &["monitor", "pool", "volume", "user", "secret"],
            ),
            _ => {
                let found = kind.clone();
                return Err(FlexError::UnknownType { found });
            }
        };
        // The kubelet adds options of its own, and the driver wrote the volume's identity.
        let is_known = |name: &str| {
            matches!(name, "type" | "part" | "uuid")
                || known.contains(&name)
                || name.starts_with("kubernetes.io/")
        };
        let ignored = options.keys().filter(|name| !is_known(name));
        Ok(FlexVolume {
            backing,
            partition: partition(options.get("part"))?,
            ignored: ignored.cloned().collect(),
        })
    }
}

fn qcow2(options: &BTreeMap<String, String>) -> Result<FlexBacking, FlexError> {
    let text = options.get("capacity");
    let capacity = text.map_or(Ok(CAPACITY_DEFAULT), |text| capacity(text))?;
    Ok(FlexBacking::Qcow2 { capacity })
}

/// A number and a unit, as libvirt reads them where that is also how a person reads them. The answer is rounded up to a
/// whole sector.
fn capacity(text: &str) -> Result<Bytes, FlexError> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let owned = || text.to_owned();
    if number.is_empty() {
        return Err(FlexError::NotACapacity { text: owned() });
    }
    let scale: u64 = match unit.trim_start() {
        "" => return Err(FlexError::NoUnit { text: owned() }),
        "B" | "bytes" => 1,
        "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" | "Ki" => 1 << 10,
        "MiB" | "Mi" => 1 << 20,
        "GiB" | "Gi" => 1 << 30,
        "TiB" | "Ti" => 1 << 40,
        unit @ ("k" | "K" | "M" | "G" | "T") => {
            let unit = unit.to_uppercase();
            return Err(FlexError::Ambiguous {
                text: owned(),
                unit,
            });
        }
        _ => return Err(FlexError::NotACapacity { text: owned() }),
    };
    let number: Option<u64> = number.parse().ok();
    number
        .and_then(|number| number.checked_mul(scale))
        .and_then(|bytes| Bytes::new(bytes).checked_next_multiple_of(SECTOR))
        .filter(|size| (SECTOR..=Bytes::VOLUME_MAX).contains(size))
        .ok_or_else(|| FlexError::OutOfRange { text: owned() })
}

fn raw(options: &BTreeMap<String, String>) -> Result<FlexBacking, FlexError> {
    let path = needed(options, "raw", "path")?;
    let parts = path.strip_prefix("/dev/").map(|rest| rest.split('/'));
    let is_plain = |part: &str| !matches!(part, "" | "." | "..") && !part.contains('\0');
    if !parts.is_some_and(|mut parts| parts.all(is_plain)) {
        let path = path.to_owned();
        return Err(FlexError::NotADevicePath { path });
    }
    let path = path.to_owned();
    Ok(FlexBacking::Raw { path })
}

fn ceph(options: &BTreeMap<String, String>) -> Result<FlexBacking, FlexError> {
    let option = |name| needed(options, "ceph", name);
    let monitor = |text: &str| -> Result<SocketAddr, FlexError> {
        let text = text.trim();
        text.parse().map_err(|_| FlexError::NotAMonitor {
            text: text.to_owned(),
        })
    };
    let monitors = option("monitor")?.split(',');
    if monitors.clone().count() > MONITORS_MAX {
        return Err(FlexError::TooMuch);
    }
    let name = |name: &'static str| -> Result<String, FlexError> {
        let text = option(name)?;
        // QEMU reads `:` and `@` in such names as the beginning of something else.
        let is_plain =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if text.is_empty() || !text.bytes().all(is_plain) {
            let text = text.to_owned();
            return Err(FlexError::NotAName { option: name, text });
        }
        Ok(text.to_owned())
    };
    let secret = STANDARD.decode(option("secret")?.trim());
    Ok(FlexBacking::Ceph(CephImage {
        monitors: monitors.map(monitor).collect::<Result<_, _>>()?,
        pool: name("pool")?,
        image: name("volume")?,
        user: name("user")?,
        secret: secret
            .ok()
            .filter(|secret| !secret.is_empty())
            .ok_or(FlexError::NotASecret)?,
    }))
}

fn needed<'a>(
    options: &'a BTreeMap<String, String>,
    kind: &'static str,
    option: &'static str,
) -> Result<&'a str, FlexError> {
    let value = options.get(option).map(String::as_str);
    value.ok_or(FlexError::Missing { kind, option })
}

fn partition(part: Option<&String>) -> Result<FlexPartition, FlexError> {
    let Some(text) = part else {
        return Ok(FlexPartition::Number(1));
    };
    // The standard library would take a sign.
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = is_number.then(|| text.parse::<u8>().ok()).flatten();
    match number {
        Some(0) => Ok(FlexPartition::Whole),
        Some(number) if number <= PARTITION_MAX => Ok(FlexPartition::Number(number)),
        _ => Err(FlexError::NotAPartition { text: text.clone() }),
    }
}

/// Whether a node lends out the device at `path`: its patterns are relative to `/dev/`, `*` stands for any characters
/// but a slash, and `?` for one. Virtlet's default was `loop*`.
pub fn is_lent(path: &str, patterns: &[String]) -> bool {
    let below = path.strip_prefix("/dev/");
    below.is_some_and(|name| {
        let matches = |pattern: &String| glob(pattern.as_bytes(), name.as_bytes());
        patterns.iter().any(matches)
    })
}

/// Goes back to the last star only, so the time is bounded by the product of the lengths.
fn glob(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while from < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(b'?') if name[from] != b'/' => {
                at += 1;
                from += 1;
            }
            Some(byte) if *byte == name[from] => {
                at += 1;
                from += 1;
            }
            _ => match star {
                Some((back, taken)) if name[taken] != b'/' => {
                    star = Some((back, taken + 1));
                    at = back + 1;
                    from = taken + 1;
                }
                _ => return false,
            },
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(options: &[(&str, &str)]) -> Result<FlexVolume, FlexError> {
        let owned = options.iter();
        let options = owned.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        FlexVolume::parse(&options.collect())
    }

    fn size(text: &str) -> Result<u64, FlexError> {
        let parsed = parse(&[("type", "qcow2"), ("capacity", text)])?;
        let FlexBacking::Qcow2 { capacity } = parsed.backing else {
            panic!("{parsed:?} is not qcow2");
        };
        Ok(capacity.get())
    }

    #[test]
    fn the_volumes_of_virtlets_examples_are_read() {
        // Fails if a capacity of 1024MB is not 1024 million bytes, or the default differs from it.
        assert_eq!(size("1024MB").unwrap(), 1_024_000_000);
        assert_eq!(size("2048MiB").unwrap(), 2 << 30);
        let default = parse(&[("type", "qcow2")]).unwrap();
        let capacity = CAPACITY_DEFAULT;
        assert_eq!(default.backing, FlexBacking::Qcow2 { capacity });
        assert_eq!(default.partition, FlexPartition::Number(1));
        let raw = parse(&[("type", "raw"), ("path", "/dev/mapper/somevg")]).unwrap();
        let path = "/dev/mapper/somevg".to_owned();
        assert_eq!(raw.backing, FlexBacking::Raw { path });
        let ceph = [
            ("type", "ceph"),
            ("monitor", "10.0.0.1:6789,[fd00::1]:6789"),
            ("user", "libvirt"),
            ("secret", "c2VjcmV0"),
            ("volume", "rbd-test-image"),
            ("pool", "libvirt-pool"),
            ("part", "0"),
            ("fancy", "yes"),
            ("kubernetes.io/readwrite", "rw"),
        ];
        let ceph = parse(&ceph).unwrap();
        assert_eq!(ceph.partition, FlexPartition::Whole);
        assert_eq!(ceph.ignored, ["fancy"]);
        assert!(!format!("{ceph:?}").contains("115, 101"), "{ceph:?}");
        let FlexBacking::Ceph(image) = ceph.backing else {
            panic!("not ceph");
        };
        assert_eq!(
            (image.monitors.len(), image.secret.as_slice()),
            (2, b"secret".as_slice())
        );
    }

    #[test]
    fn a_size_that_two_readers_understand_differently_is_refused() {
        // Fails if a surprising unit is taken in silence.
        assert!(matches!(size("1024"), Err(FlexError::NoUnit { .. })));
        for text in ["1k", "1K", "1M", "10 G", "1T"] {
            assert!(
                matches!(size(text), Err(FlexError::Ambiguous { .. })),
                "{text}"
            );
        }
        for text in ["", "MB", "-1MB", "1.5GiB", "1 MBs", "+1MB", "0x10MB"] {
            assert!(
                matches!(size(text), Err(FlexError::NotACapacity { .. })),
                "{text}"
            );
        }
        for text in [
            "0MB",
            "99999999999999999999MB",
            "18446744073709551615TiB",
            "2048TiB",
        ] {
            assert!(
                matches!(size(text), Err(FlexError::OutOfRange { .. })),
                "{text}"
            );
        }
        assert_eq!(size(" 1 B ").unwrap(), 512);
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        // Fails if a path leaves /dev, if a name could smuggle options into QEMU, or if a type is guessed.
        let error = |options: &[(&str, &str)]| parse(options).unwrap_err();
        assert_eq!(error(&[]), FlexError::NoType);
        assert!(matches!(
            error(&[("type", "nfs")]),
            FlexError::UnknownType { .. }
        ));
        for path in [
            "/dev/../etc/shadow",
            "/etc/shadow",
            "/dev/",
            "/dev//sda",
            "dev/sda",
            "/dev/./x",
        ] {
            let found = error(&[("type", "raw"), ("path", path)]);
            assert!(matches!(found, FlexError::NotADevicePath { .. }), "{path}");
        }
        for part in ["", "-1", "+1", "129", "x", "1 "] {
            let found = error(&[("type", "qcow2"), ("part", part)]);
            assert!(matches!(found, FlexError::NotAPartition { .. }), "{part}");
        }
        let ceph = |pool: &str, monitor: &str, secret: &str| {
            let options = [
                ("type", "ceph"),
                ("monitor", monitor),
                ("user", "u"),
                ("secret", secret),
                ("volume", "v"),
                ("pool", pool),
            ];
            error(&options)
        };
        let name = ceph("a:conf=/etc", "10.0.0.1:1", "c2VjcmV0");
        assert!(matches!(name, FlexError::NotAName { option: "pool", .. }));
        let monitor = ceph("a", "mon.example", "c2VjcmV0");
        assert!(matches!(monitor, FlexError::NotAMonitor { .. }));
        assert_eq!(ceph("a", "10.0.0.1:1", "%%"), FlexError::NotASecret);
    }

    #[test]
    fn a_node_lends_out_only_what_its_patterns_name() {
        // Fails if a star reaches below a directory, or an empty list lends out everything.
        let patterns = ["loop*".to_owned(), "mapper/vg-?".to_owned()];
        for lent in ["/dev/loop0", "/dev/loop", "/dev/mapper/vg-a"] {
            assert!(is_lent(lent, &patterns), "{lent}");
        }
        for kept in [
            "/dev/sda",
            "/dev/loop/0",
            "/dev/mapper/vg-ab",
            "/loop0",
            "/dev/mapper/vg-/",
        ] {
            assert!(!is_lent(kept, &patterns), "{kept}");
        }
        assert!(!is_lent("/dev/loop0", &[]));
    }

    proptest! {
        // Fails if any text makes the parser panic, or a size is read that is no whole number of sectors.
        #[test]
        fn any_capacity_is_read_or_refused(text in "[ 0-9]{0,22}[a-zA-Z. ]{0,4}") {
            if let Ok(size) = size(&text) {
                prop_assert!(size.is_multiple_of(512) && size > 0);
            }
        }
    }
}
