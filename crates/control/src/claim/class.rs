//! What a StorageClass asks for, read strictly: a parameter that is not understood is an error, never
//! a silent default.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::StorageClass;
use trellis_api::kinds::{
    FSTYPE_PARAMETER, FilesystemKind, PROVISIONER, Via, WhenBelowQuorum, WhenFull,
};
use trellis_api::{Hold, HoldReason};

/// A class in our own terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    /// Pools to choose from; empty for any.
    pub pools: Vec<String>,
    /// How many copies.
    pub replicas: u32,
    /// How many of them must have a write before it is acknowledged.
    pub consistency_factor: u32,
    /// How a volume is brought to a node through a target; none if its only copy is used where it lies.
    pub via: Option<Via>,
    /// Whether every byte is allocated from the start.
    pub thick: bool,
    /// The filesystem to make.
    pub filesystem: FilesystemKind,
    /// Whether it may grow while it is mounted.
    pub online_growth: bool,
    /// What becomes of requests when too few copies are there.
    pub when_below_quorum: WhenBelowQuorum,
    /// What becomes of a write for which too many pools have no space.
    pub when_full: WhenFull,
    /// How long they wait then, in seconds, if it is said.
    pub patience_seconds: Option<u32>,
    /// Whether a claim waits until something uses it.
    pub waits_for_consumer: bool,
    /// What becomes of the volume when its claim is gone: `Delete` or `Retain`.
    pub reclaim_policy: String,
}

/// The most copies of a volume.
const REPLICAS_MAX: u32 = 5;

impl Class {
    /// Whether the class is ours to serve.
    pub fn is_ours(class: &StorageClass) -> bool {
        class.provisioner == PROVISIONER
    }

    /// Reads a class.
    pub fn read(class: &StorageClass) -> Result<Class, Hold> {
        let name = class.metadata.name.as_deref().unwrap_or_default();
        let nothing = BTreeMap::new();
        let mut read = Class {
            pools: Vec::new(),
            replicas: 1,
            consistency_factor: 0,
            via: None,
            thick: false,
            filesystem: FilesystemKind::default(),
            online_growth: true,
            when_below_quorum: WhenBelowQuorum::Wait,
            when_full: WhenFull::Wait,
            patience_seconds: None,
            waits_for_consumer: class.volume_binding_mode.as_deref()
                == Some("WaitForFirstConsumer"),
            reclaim_policy: class
                .reclaim_policy
                .clone()
                .unwrap_or_else(|| "Delete".to_owned()),
        };
        if class
            .mount_options
            .as_ref()
            .is_some_and(|options| !options.is_empty())
        {
            let message =
                format!("StorageClass {name:?} has mountOptions, which are not supported.");
            return Err(Hold::new(HoldReason::ClassInvalid, message));
        }
        if class
            .allowed_topologies
            .as_ref()
            .is_some_and(|topologies| !topologies.is_empty())
        {
            let message = format!(
                "StorageClass {name:?} has allowedTopologies, which are not supported; its parameter pools says where \
                 volumes live."
            );
            return Err(Hold::new(HoldReason::ClassInvalid, message));
        }
        for (parameter, value) in class.parameters.as_ref().unwrap_or(&nothing) {
            read.take(parameter, value).map_err(|allowed| {
                let message = format!(
                    "StorageClass {name:?} has the parameter {parameter}: {value:?}; allowed is {allowed}."
                );
                Hold::new(HoldReason::ClassInvalid, message)
            })?;
        }
        if read.replicas > 1 {
            read.via = read.via.or(Some(Via::Fuse));
        }
        if read.consistency_factor == 0 {
            read.consistency_factor = read.replicas / 2 + 1;
        }
        if read.consistency_factor > read.replicas {
            let message = format!(
                "StorageClass {name:?} has consistencyFactor {}, and {} copies.",
                read.consistency_factor, read.replicas
            );
            return Err(Hold::new(HoldReason::ClassInvalid, message));
        }
        Ok(read)
    }

    /// Takes one parameter in, or answers what would have been allowed.
    fn take(&mut self, parameter: &str, value: &str) -> Result<(), &'static str> {
        match parameter {
            "engine" => (value == "replicated")
                .then_some(())
                .ok_or("engine: \"replicated\""),
            "replicas" => {
                self.replicas = copies(value).ok_or("a number of copies from 1 to 5")?;
                Ok(())
            }
            "consistencyFactor" => {
                let allowed = "a number from 1 to the number of copies";
                self.consistency_factor = copies(value).ok_or(allowed)?;
                Ok(())
            }
            "via" => {
                self.via = Some(match value {
                    "fuse" => Via::Fuse,
                    "iscsi" => Via::Iscsi,
                    _ => return Err("\"fuse\" or \"iscsi\""),
                });
                Ok(())
            }
            "pools" => {
                self.pools = value
                    .split(',')
                    .map(|pool| pool.trim().to_owned())
                    .collect();
                let named = self.pools.iter().all(|pool| !pool.is_empty());
                named
                    .then_some(())
                    .ok_or("names of pools with commas between them")
            }
            "thick" => {
                self.thick = value.parse().map_err(|_| "\"true\" or \"false\"")?;
                Ok(())
            }
            "onlineGrowth" => {
                self.online_growth = value.parse().map_err(|_| "\"true\" or \"false\"")?;
                Ok(())
            }
            "whenBelowQuorum" => {
                self.when_below_quorum = match value {
                    "wait" => WhenBelowQuorum::Wait,
                    "fail" => WhenBelowQuorum::Fail,
                    _ => return Err("\"wait\" or \"fail\""),
                };
                Ok(())
            }
            "whenFull" => {
                self.when_full = match value {
                    "wait" => WhenFull::Wait,
                    "fail" => WhenFull::Fail,
                    _ => return Err("\"wait\" or \"fail\""),
                };
                Ok(())
            }
            "patience" => {
                let allowed = "a time of at least a second, such as 30s, 5m or 1h";
                self.patience_seconds = Some(seconds(value).ok_or(allowed)?);
                Ok(())
            }
            FSTYPE_PARAMETER => {
                self.filesystem = value.parse().map_err(|_| "xfs, btrfs, ext4 or ext3")?;
                Ok(())
            }
            // Secrets and the like belong to the CSI sidecars, which read them themselves.
            other if other.starts_with("csi.storage.k8s.io/") => Ok(()),
            _ => Err(
                "one of engine, replicas, consistencyFactor, via, pools, thick, onlineGrowth, whenBelowQuorum, whenFull, patience and csi.storage.k8s.io/fstype",
            ),
        }
    }
}

/// A time in whole seconds.
fn seconds(value: &str) -> Option<u32> {
    let digits = value.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let number: u32 = digits.parse().ok()?;
    let unit = match value.get(digits.len()..)? {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return None,
    };
    number.checked_mul(unit).filter(|seconds| *seconds > 0)
}

fn copies(value: &str) -> Option<u32> {
    let count = value.parse().ok()?;
    (1..=REPLICAS_MAX).contains(&count).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(parameters: &[(&str, &str)]) -> StorageClass {
        let parameters = parameters
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()));
        let mut class = StorageClass {
            provisioner: PROVISIONER.to_owned(),
            parameters: Some(parameters.collect()),
            ..StorageClass::default()
        };
        class.metadata.name = Some("c".to_owned());
        class
    }

    // Fails if a parameter is read as another value than it says.
    #[test]
    fn parameters_are_read() {
        let read = Class::read(&class(&[
            ("pools", "a, b"),
            ("thick", "true"),
            ("onlineGrowth", "false"),
            (FSTYPE_PARAMETER, "btrfs"),
        ]));
        let read = read.expect("a valid class");
        assert_eq!(read.pools, ["a", "b"]);
        assert!(read.thick);
        assert!(!read.online_growth);
        assert_eq!(read.filesystem, FilesystemKind::Btrfs);
    }

    // Fails if the default is not a majority, or a factor that was asked for is not taken.
    #[test]
    fn a_majority_must_have_a_write_unless_the_class_says_otherwise() {
        for (replicas, majority) in [("1", 1), ("2", 2), ("3", 2), ("4", 3), ("5", 3)] {
            let read = Class::read(&class(&[("replicas", replicas)])).expect("a valid class");
            assert_eq!(read.consistency_factor, majority);
        }
        let all = [("consistencyFactor", "3"), ("replicas", "3")];
        let read = Class::read(&class(&all)).expect("a valid class");
        assert_eq!((read.replicas, read.consistency_factor), (3, 3));
    }

    // Fails if several copies are used without a target, or one that was asked for is not.
    #[test]
    fn a_target_stands_before_several_copies_and_where_it_is_asked_for() {
        let via = |parameters: &[(&str, &str)]| {
            let read = Class::read(&class(parameters)).expect("a valid class");
            read.via
        };
        assert_eq!(via(&[]), None);
        assert_eq!(via(&[("replicas", "3")]), Some(Via::Fuse));
        let asked = [("via", "iscsi"), ("replicas", "3")];
        assert_eq!(via(&asked), Some(Via::Iscsi));
        assert_eq!(via(&asked[..1]), Some(Via::Iscsi));
    }

    // Fails if a misspelt or impossible parameter is taken as if it were not there.
    #[test]
    fn parameters_that_are_not_understood_are_refused() {
        for bad in [
            ("fstype", "xfs"),
            ("thick", "maybe"),
            ("onlineGrowth", "sometimes"),
            ("replicas", "0"),
            ("replicas", "6"),
            ("consistencyFactor", "0"),
            ("whenBelowQuorum", "hope"),
            ("whenFull", "hope"),
            ("patience", "0s"),
            ("patience", "30"),
            ("patience", "5000000h"),
            ("consistencyFactor", "2"),
            ("via", "nvme"),
            ("pools", "a,,b"),
            (FSTYPE_PARAMETER, "ntfs"),
            ("engine", "zfs"),
        ] {
            let hold = Class::read(&class(&[bad])).expect_err("refused");
            assert_eq!(hold.reason, HoldReason::ClassInvalid);
            assert!(hold.message.contains(bad.0), "{}", hold.message);
        }
    }
}
