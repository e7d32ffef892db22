//! What a copy says about itself in its own directory, so a pool can be read without the store.
//!
//! The superblock remains the truth for identity and size. This file has what the superblock has no room for: names,
//! and how the volume was made.

use serde::{Deserialize, Serialize};

use crate::{Bytes, IscsiAccess};

/// The content of a copy's `about.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct About {
    /// The volume's name.
    pub volume: String,
    /// The volume's identity, as in the superblock.
    pub volume_id: String,
    /// The copy's identity, as in the superblock.
    pub replica_id: String,
    /// The namespace of the claim.
    pub namespace: String,
    /// The claim.
    pub claim: String,
    /// The claim's access modes.
    pub access_modes: Vec<String>,
    /// The claim's class.
    pub class: String,
    /// The pools that its copies may be on; any, if it names none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<String>,
    /// The size that was asked for when this was written. A growth alone does not write it again: the superblock has
    /// the size that the copy has.
    pub size: Bytes,
    /// The volume's filesystem; none for a block volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<String>,
    /// The filesystem was made. If the volume is found empty from then on, that is a loss.
    pub formatted: bool,
    /// Whether it is one of several copies behind a target.
    pub replicated: bool,
    /// How many copies there shall be.
    pub replicas: u32,
    /// How many of them must have a write before it is acknowledged.
    pub consistency_factor: u32,
    /// How the volume is brought to a node, if the class says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub via: Option<String>,
    /// Whether every byte is allocated.
    pub thick: bool,
    /// Whether the filesystem may grow while it is mounted.
    pub online_growth: bool,
    /// Whether two copies may be on one filesystem.
    pub allow_shared_disk: bool,
    /// What becomes of requests when too few copies are there. This and the next four are absent from copies that an
    /// earlier release made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub when_below_quorum: Option<String>,
    /// What becomes of a write for which too many pools have no space.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub when_full: Option<String>,
    /// How long a request waits for a quorum, in seconds, if that is not left to the release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience_seconds: Option<u32>,
    /// Whether copies keep sums of their blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checksums: Option<bool>,
    /// How often all copies are compared with their sums, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scrub_interval_seconds: Option<u64>,
    /// How initiators may use the volume.
    #[serde(skip_serializing_if = "IscsiAccess::is_usual")]
    pub iscsi: IscsiAccess,
    /// The options that the filesystem is mounted with.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mount_options: Vec<String>,
}

impl About {
    /// How the volume is brought to a node; none if its only copy is used where it lies. An earlier release said it in
    /// two fields, of which the second could be absent.
    pub fn way(&self) -> Option<&str> {
        let way = self.via.as_deref().unwrap_or("fuse");
        self.replicated.then_some(way)
    }

    /// What shall stand in the place of `self`. A filesystem that was made once was made, and nothing shrinks, whatever
    /// an older store says.
    pub fn renewed(&self, new: &About) -> About {
        let same_bytes = self.volume_id == new.volume_id;
        About {
            formatted: new.formatted || (self.formatted && same_bytes),
            size: if same_bytes {
                new.size.max(self.size)
            } else {
                new.size
            },
            ..new.clone()
        }
    }
}

impl About {
    /// Whether they say the same, apart from the size.
    pub fn is_but_for_size(&self, other: &About) -> bool {
        let size = self.size;
        *self
            == About {
                size,
                ..other.clone()
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(formatted: bool, mib: u64) -> About {
        About {
            volume_id: "v".to_owned(),
            formatted,
            size: Bytes::mib(mib),
            ..About::default()
        }
    }

    // Fails if an older store makes a copy forget that it was formatted, or how large it was.
    #[test]
    fn what_was_once_made_is_not_forgotten() {
        let renewed = about(true, 8).renewed(&about(false, 4));
        assert_eq!(renewed, about(true, 8));
        assert_eq!(about(false, 4).renewed(&about(true, 8)), about(true, 8));
        let other = About {
            volume_id: "w".to_owned(),
            ..about(true, 8)
        };
        assert_eq!(other.renewed(&about(false, 4)), about(false, 4));
    }
}
