//! What a StorageClass asks for, read strictly: a parameter that is not understood is an error, never a silent default.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::StorageClass;
use trellis_api::kinds::{
    FSTYPE_PARAMETER, FilesystemKind, IscsiAccess, PROVISIONER, PortalAt, SCRUB_INTERVAL_SECONDS,
    Via, WhenBelowQuorum, WhenFull,
};
use trellis_api::{Hold, HoldReason, MountOptions};

/// A class in our own terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    /// Pools to choose from; empty for any.
    pub pools: Vec<String>,
    /// How many copies.
    pub replicas: u32,
    /// How many of them must have a write before it is acknowledged.
    pub consistency_factor: u32,
    /// How a volume is brought to a node through a target; none if its only copy is used in place.
    pub via: Option<Via>,
    /// Whether every byte is allocated from the start.
    pub thick: bool,
    /// The filesystem to make.
    pub filesystem: FilesystemKind,
    /// Whether it may grow while it is mounted.
    pub online_growth: bool,
    /// What happens to requests when too few copies are there.
    pub when_below_quorum: WhenBelowQuorum,
    /// What happens to a write if too many pools have no space for it.
    pub when_full: WhenFull,
    /// How long requests wait then, in seconds, if set.
    pub patience_seconds: Option<u32>,
    /// Whether copies keep checksums of their blocks.
    pub checksums: bool,
    /// How often copies are compared with their checksums, in seconds; 0 for never.
    pub scrub_interval_seconds: u64,
    /// Whether two copies may be on one filesystem.
    pub allow_shared_disk: bool,
    /// How initiators may use its volumes.
    pub iscsi: IscsiAccess,
    /// The options that its filesystems are mounted with; all of them are honoured.
    pub mount_options: Vec<String>,
    /// Whether a claim waits until something uses it.
    pub waits_for_consumer: bool,
    /// What happens to the volume when its claim is gone: `Delete` or `Retain`.
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
        let nothing = BTreeMap::new();
        let parameters = class.parameters.as_ref().unwrap_or(&nothing);
        let options = class.mount_options.as_deref().unwrap_or_default();
        let mut read = Class::of(&format!("StorageClass {name:?}"), parameters, options)?;
        read.waits_for_consumer =
            class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer");
        if let Some(policy) = &class.reclaim_policy {
            read.reclaim_policy = policy.clone();
        }
        Ok(read)
    }

    /// Reads parameters and mount options by themselves. `whose` they are begins every message.
    pub fn of<'a>(
        whose: &str,
        parameters: impl IntoIterator<Item = (&'a String, &'a String)>,
        mount_options: &[String],
    ) -> Result<Class, Hold> {
        let invalid = |message| Hold::new(HoldReason::ClassInvalid, message);
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
            checksums: true,
            scrub_interval_seconds: SCRUB_INTERVAL_SECONDS,
            allow_shared_disk: false,
            iscsi: IscsiAccess::default(),
            mount_options: mount_options.to_vec(),
            waits_for_consumer: false,
            reclaim_policy: "Delete".to_owned(),
        };
        for (parameter, value) in parameters {
            read.take(parameter, value).map_err(|allowed| {
                invalid(format!(
                    "{whose} has the parameter {parameter}: {value:?}; allowed is {allowed}."
                ))
            })?;
        }
        if let Err(refused) = MountOptions::read(read.filesystem, &read.mount_options) {
            return Err(invalid(format!("{whose}: {refused}.")));
        }
        if read.replicas > 1 {
            read.via = read.via.or(Some(Via::Fuse));
        }
        if let Some(why) = read.iscsi_contradicts() {
            return Err(invalid(format!("{whose} {why}.")));
        }
        if read.consistency_factor == 0 {
            read.consistency_factor = read.replicas / 2 + 1;
        }
        if read.consistency_factor > read.replicas {
            return Err(invalid(format!(
                "{whose} has consistencyFactor {}, and {} copies.",
                read.consistency_factor, read.replicas
            )));
        }
        Ok(read)
    }

    /// Why initiators cannot have what the class promises them.
    fn iscsi_contradicts(&self) -> Option<&'static str> {
        if self.iscsi.is_usual() {
            return None;
        }
        match self.via {
            None => Some(
                "has parameters that begin with iscsi, and its volumes have no target that initiators could use; \
                 ask for several replicas, or for via: fuse",
            ),
            Some(Via::Iscsi) => Some(
                "has via: iscsi, so that the node itself is the initiator, and also parameters that begin with iscsi, \
                 which are for others; ask for via: fuse",
            ),
            Some(Via::Fuse | Via::Local) => None,
        }
    }

    /// Takes in one parameter, or returns what would have been allowed.
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
            "checksums" => {
                self.checksums = value.parse().map_err(|_| "\"true\" or \"false\"")?;
                Ok(())
            }
            "scrubInterval" => {
                self.scrub_interval_seconds = interval(value)
                    .ok_or("a number of hours or days, as \"12h\" or \"7d\", or \"0\"")?;
                Ok(())
            }
            "allowSharedDisk" => {
                self.allow_shared_disk = value.parse().map_err(|_| "\"true\" or \"false\"")?;
                Ok(())
            }
            "iscsiPortal" => {
                self.iscsi.portal = match value {
                    "loopback" => PortalAt::Loopback,
                    "node" => PortalAt::Node,
                    _ => return Err("\"loopback\" or \"node\""),
                };
                Ok(())
            }
            "iscsiInitiators" => {
                let names = value.split(',').map(|name| name.trim().to_owned());
                self.iscsi.initiators = names.collect();
                let are_names = self.iscsi.initiators.iter().all(|name| is_initiator(name));
                are_names.then_some(()).ok_or(
                    "names of initiators with commas between them, each in small letters and beginning with iqn., eui. or naa.",
                )
            }
            "iscsiMutualChap" => {
                self.iscsi.mutual_chap = value.parse().map_err(|_| "\"true\" or \"false\"")?;
                Ok(())
            }
            "iscsiReadOnly" => {
                self.iscsi.read_only = value.parse().map_err(|_| "\"true\" or \"false\"")?;
                Ok(())
            }
            FSTYPE_PARAMETER => {
                self.filesystem = value.parse().map_err(|_| "xfs, btrfs, ext4 or ext3")?;
                Ok(())
            }
            // Secrets and the like belong to the CSI sidecars, which read them themselves.
            other if other.starts_with("csi.storage.k8s.io/") => Ok(()),
            _ => Err(
                "one of engine, replicas, consistencyFactor, via, pools, thick, checksums, scrubInterval, onlineGrowth, whenBelowQuorum, whenFull, patience, allowSharedDisk, iscsiPortal, iscsiInitiators, iscsiMutualChap, iscsiReadOnly and csi.storage.k8s.io/fstype",
            ),
        }
    }
}

/// Whether that can be the name of an initiator.
fn is_initiator(name: &str) -> bool {
    const BYTES_MAX: usize = 223;
    let is_sound =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.:".contains(&byte);
    let begins = ["iqn.", "eui.", "naa."];
    begins.iter().any(|begin| name.starts_with(begin))
        && name.len() <= BYTES_MAX
        && name.bytes().all(is_sound)
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

/// A time in seconds: `12h`, `7d`, or `0`.
fn interval(value: &str) -> Option<u64> {
    const HOUR: u64 = 60 * 60;
    if value == "0" {
        return Some(0);
    }
    let (count, unit) = if let Some(hours) = value.strip_suffix('h') {
        (hours, HOUR)
    } else {
        (value.strip_suffix('d')?, 24 * HOUR)
    };
    let count: u64 = count.parse().ok().filter(|count| *count > 0)?;
    count.checked_mul(unit)
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
    fn sums_are_kept_unless_the_class_says_otherwise() {
        // Fails if a class cannot turn them off, or an interval means something else than it says.
        let read = |parameters: &[(&str, &str)]| {
            let read = Class::read(&class(parameters));
            read.map(|class| (class.checksums, class.scrub_interval_seconds))
                .ok()
        };
        assert_eq!(read(&[("replicas", "2")]), Some((true, 604_800)));
        assert_eq!(read(&[("checksums", "false")]), Some((false, 604_800)));
        assert_eq!(read(&[("scrubInterval", "0")]), Some((true, 0)));
        assert_eq!(read(&[("scrubInterval", "12h")]), Some((true, 43_200)));
        assert_eq!(read(&[("scrubInterval", "2d")]), Some((true, 172_800)));
        for bad in ["7", "d", "0h", "week", "-1d"] {
            assert_eq!(read(&[("scrubInterval", bad)]), None, "{bad}");
        }
    }

    #[test]
    fn parameters_are_read() {
        let read = Class::read(&class(&[
            ("pools", "a, b"),
            ("thick", "true"),
            ("onlineGrowth", "false"),
            ("allowSharedDisk", "true"),
            (FSTYPE_PARAMETER, "btrfs"),
        ]));
        let read = read.expect("a valid class");
        assert_eq!(read.pools, ["a", "b"]);
        assert!(read.thick);
        assert!(!read.online_growth);
        assert!(read.allow_shared_disk);
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

    // Fails if what initiators may do is not what the class says, or is promised where there is no target for it.
    #[test]
    fn initiators_get_what_the_class_says_and_only_behind_a_target() {
        let asked = [
            ("replicas", "3"),
            ("iscsiPortal", "node"),
            (
                "iscsiInitiators",
                "iqn.2026-11.dev.example:a, eui.02004567a425678d",
            ),
            ("iscsiMutualChap", "true"),
            ("iscsiReadOnly", "true"),
        ];
        let read = Class::read(&class(&asked)).expect("a valid class").iscsi;
        assert_eq!(read.portal, PortalAt::Node);
        assert_eq!(read.initiators.len(), 2);
        assert!(read.mutual_chap && read.read_only && !read.is_usual());
        // A class that is made again from a copy asks for the same.
        let again = read.parameters();
        let again = [("replicas", "3")]
            .into_iter()
            .chain(again.iter().map(|(name, value)| (*name, value.as_str())));
        let again = Class::read(&class(&again.collect::<Vec<_>>()));
        assert_eq!(again.expect("a valid class").iscsi, read);
        assert!(Class::read(&class(&asked[..1])).is_ok_and(|class| class.iscsi.is_usual()));
        for parameter in &asked[1..] {
            for (via, words) in [(None, "no target"), (Some(("via", "iscsi")), "via: iscsi")] {
                let parameters: Vec<_> = via.into_iter().chain([*parameter]).collect();
                let hold = Class::read(&class(&parameters)).expect_err("refused");
                assert_eq!(hold.reason, HoldReason::ClassInvalid);
                assert!(hold.message.contains(words), "{}", hold.message);
            }
        }
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
            ("allowSharedDisk", "perhaps"),
            ("pools", "a,,b"),
            (FSTYPE_PARAMETER, "ntfs"),
            ("engine", "zfs"),
            ("iscsiPortal", "everywhere"),
            ("iscsiInitiators", "iqn.2026-11.dev.example:a,,"),
            ("iscsiInitiators", "IQN.2026-11.dev.example:a"),
            ("iscsiMutualChap", "perhaps"),
            ("iscsiReadOnly", "perhaps"),
        ] {
            let hold = Class::read(&class(&[bad])).expect_err("refused");
            assert_eq!(hold.reason, HoldReason::ClassInvalid);
            assert!(hold.message.contains(bad.0), "{}", hold.message);
        }
    }
}
