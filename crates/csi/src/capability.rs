//! How a volume is to be used: as a filesystem or as a device, by whom, and with which mount options.

use tonic::Status;
use trellis_api::kinds::{FilesystemKind, Volume};
use trellis_api::{Hold, HoldReason};

use crate::codes;
use crate::proto::csi::VolumeCapability;
use crate::proto::csi::volume_capability::AccessType;
use crate::proto::csi::volume_capability::access_mode::Mode;

/// A use that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// As what.
    pub form: Form,
    /// By whom.
    pub writers: Writers,
}

/// As what a volume appears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// A block device.
    Block,
    /// A mounted filesystem.
    Mount {
        /// Its kind; none leaves it to the volume.
        filesystem: Option<FilesystemKind>,
        /// The mount options.
        options: Vec<String>,
    },
}

/// Who may write. A volume is used on one node at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// Nobody.
    None,
    /// One path of the node.
    One,
    /// Any path of the node.
    Any,
}

impl Usage {
    /// Reads what is asked for.
    pub fn read(asked: Option<&VolumeCapability>) -> Result<Usage, Status> {
        let asked = asked.ok_or_else(|| codes::invalid("The request has no volume capability."))?;
        let writers = writers(asked)?;
        let form = match &asked.access_type {
            None => {
                return Err(codes::invalid(
                    "The volume capability says neither block nor mount.",
                ));
            }
            Some(AccessType::Block(_)) => Form::Block,
            Some(AccessType::Mount(mount)) if !mount.volume_mount_group.is_empty() => {
                return Err(codes::invalid(
                    "The volume capability has a mount group, which this driver does not offer.",
                ));
            }
            Some(AccessType::Mount(mount)) => Form::Mount {
                filesystem: filesystem(&mount.fs_type)?,
                options: mount.mount_flags.clone(),
            },
        };
        Ok(Usage { form, writers })
    }

    /// Reads several, of which there has to be at least one.
    pub fn read_all(asked: &[VolumeCapability]) -> Result<Vec<Usage>, Status> {
        if asked.is_empty() {
            return Err(codes::invalid("The request has no volume capability."));
        }
        asked.iter().map(|each| Usage::read(Some(each))).collect()
    }

    /// The access mode in Kubernetes' word.
    pub fn access_mode(&self) -> &'static str {
        match self.writers {
            Writers::None => "ReadOnlyMany",
            Writers::One => "ReadWriteOncePod",
            Writers::Any => "ReadWriteOnce",
        }
    }

    /// Why the volume cannot be used like this.
    pub fn refusal(&self, volume: &Volume) -> Option<Hold> {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        let (asked, has) = match (&self.form, volume.spec.filesystem) {
            (Form::Block, Some(kind)) => ("a device".to_owned(), kind.name()),
            (Form::Mount { .. }, None) => ("a mount".to_owned(), "no filesystem"),
            (
                Form::Mount {
                    filesystem: Some(asked),
                    ..
                },
                Some(kind),
            ) if *asked != kind => (asked.name().to_owned(), kind.name()),
            _ => return self.writes_to_read_only(volume, name),
        };
        let message = format!("{asked} is asked for, and volume {name} has {has}.");
        Some(Hold::new(HoldReason::ConsumerUnfit, message))
    }

    fn writes_to_read_only(&self, volume: &Volume, name: &str) -> Option<Hold> {
        let modes = &volume.spec.access_modes;
        let only_reads = !modes.is_empty() && modes.iter().all(|mode| mode == "ReadOnlyMany");
        (only_reads && self.writers != Writers::None).then(|| {
            let message = format!("Volume {name} was made for reading alone (ReadOnlyMany).");
            Hold::new(HoldReason::AccessModeUnsupported, message)
        })
    }
}

fn writers(asked: &VolumeCapability) -> Result<Writers, Status> {
    let mode = asked.access_mode.as_ref();
    let mode = mode.ok_or_else(|| codes::invalid("The volume capability has no access mode."))?;
    match Mode::try_from(mode.mode) {
        Ok(Mode::SingleNodeWriter | Mode::SingleNodeMultiWriter) => Ok(Writers::Any),
        Ok(Mode::SingleNodeSingleWriter) => Ok(Writers::One),
        Ok(Mode::SingleNodeReaderOnly) => Ok(Writers::None),
        Ok(
            Mode::MultiNodeReaderOnly | Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter,
        ) => {
            let message = "A volume is used on one node at a time, and several are asked for.";
            let hold = Hold::new(HoldReason::AccessModeUnsupported, message);
            Err(codes::refused(&hold))
        }
        Ok(Mode::Unknown) | Err(_) => Err(codes::invalid(
            "The volume capability has an access mode that this driver does not know.",
        )),
    }
}

fn filesystem(name: &str) -> Result<Option<FilesystemKind>, Status> {
    if name.is_empty() {
        return Ok(None);
    }
    let kind = name.parse::<FilesystemKind>().map_err(|error| {
        let message = format!("{error}.");
        codes::refused(&Hold::new(HoldReason::FilesystemUnsupported, message))
    })?;
    Ok(Some(kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::csi::volume_capability::{AccessMode, MountVolume};
    use tonic::Code;

    fn asked(mode: Mode, filesystem: &str) -> VolumeCapability {
        VolumeCapability {
            access_mode: Some(AccessMode { mode: mode.into() }),
            access_type: Some(AccessType::Mount(MountVolume {
                fs_type: filesystem.to_owned(),
                ..MountVolume::default()
            })),
        }
    }

    // Fails if something is promised that a volume cannot do, or refused that it can.
    #[test]
    fn a_volume_is_offered_to_one_node_at_a_time() {
        let read = |mode| Usage::read(Some(&asked(mode, ""))).map(|usage| usage.access_mode());
        assert_eq!(read(Mode::SingleNodeWriter).ok(), Some("ReadWriteOnce"));
        assert_eq!(
            read(Mode::SingleNodeMultiWriter).ok(),
            Some("ReadWriteOnce")
        );
        assert_eq!(
            read(Mode::SingleNodeSingleWriter).ok(),
            Some("ReadWriteOncePod")
        );
        assert_eq!(read(Mode::SingleNodeReaderOnly).ok(), Some("ReadOnlyMany"));
        for mode in [
            Mode::Unknown,
            Mode::MultiNodeReaderOnly,
            Mode::MultiNodeSingleWriter,
            Mode::MultiNodeMultiWriter,
        ] {
            let refused = read(mode).expect_err("refused");
            assert_eq!(refused.code(), Code::InvalidArgument, "{mode:?}");
        }
    }

    // Fails if a capability that lacks something is filled up by guessing.
    #[test]
    fn what_a_capability_leaves_out_is_not_guessed() {
        let whole = asked(Mode::SingleNodeWriter, "ext4");
        assert!(Usage::read(Some(&whole)).is_ok());
        let no_mode = VolumeCapability {
            access_mode: None,
            ..whole.clone()
        };
        let no_type = VolumeCapability {
            access_type: None,
            ..whole
        };
        for lacking in [no_mode, no_type, asked(Mode::SingleNodeWriter, "ntfs")] {
            let refused = Usage::read(Some(&lacking)).expect_err("refused");
            assert_eq!(refused.code(), Code::InvalidArgument);
        }
        assert!(Usage::read(None).is_err());
        assert!(Usage::read_all(&[]).is_err());
    }
}
