//! What the agent has no command for: growing a filesystem, and making a disk ready for its removal.
//!
//! Both are shell scripts that need little more than busybox. They find the disk by its serial number, print what they
//! found and did in words that are read here, and name what keeps them from going on.

use std::fmt;
use std::time::Duration;

use trellis_api::Bytes;
use trellis_node::filesystem::Outcome;

use super::GuestAgent;
use crate::error::{Error, Result};

const DISK: &str = include_str!("disk.sh");
const GROW: &str = include_str!("grow.sh");
const RELEASE: &str = include_str!("release.sh");
const SHELL: &str = "/bin/sh";
/// How long a growth in the guest may take. Large filesystems on slow disks take minutes.
const GROW_TIME_MAX: Duration = Duration::from_secs(600);
/// How long writing back and unmounting may take.
const RELEASE_TIME_MAX: Duration = Duration::from_secs(120);
/// How much of a script's complaint is kept.
const SAID_CHARS_MAX: usize = 400;

/// How far a growth in the guest came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestGrowth {
    /// The guest's name of the disk, and the size that its kernel sees.
    pub disk: Option<(String, Bytes)>,
    /// The last partition, if there are any, and what became of it.
    pub partition: Option<(String, Outcome)>,
    /// The filesystem, and what became of it.
    pub filesystem: Option<GrownFilesystem>,
    /// Why it went no further. None if all that could grow has.
    pub held: Option<GuestHold>,
}

/// A filesystem of the guest after its growth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrownFilesystem {
    /// Its kind, as the guest calls it.
    pub kind: String,
    /// Where it is mounted, as the guest's mountinfo writes it.
    pub mountpoint: String,
    /// What became of it.
    pub outcome: Outcome,
}

/// Why a growth in the guest went no further.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestHold {
    /// No disk has that serial number.
    NoDisk,
    /// The guest's kernel has not seen the new size yet.
    DiskSmaller(Bytes),
    /// The partition could not be made larger; something follows it.
    PartitionStays(String),
    /// Nothing on it is mounted.
    NotMounted(String),
    /// Something else is on it, such as LVM or RAID.
    Stacked(String),
    /// The guest lacks a program.
    NoTool(String),
    /// A program of the guest failed: which, and what it said.
    ToolFailed(String, String),
    /// It is a filesystem that this does not grow.
    UnknownFilesystem(String),
}

impl fmt::Display for GuestHold {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GuestHold::NoDisk => out.write_str("the guest has no disk with this serial number"),
            GuestHold::DiskSmaller(size) => write!(out, "the guest still sees {size}"),
            GuestHold::PartitionStays(name) => {
                write!(out, "the guest's partition {name} cannot become larger")
            }
            GuestHold::NotMounted(name) => {
                write!(out, "the guest has {name} not mounted; mount it there")
            }
            GuestHold::Stacked(name) => {
                write!(out, "the guest has {name} on it; grow that in the guest")
            }
            GuestHold::NoTool(name) => write!(out, "the guest has no {name}; install it there"),
            GuestHold::ToolFailed(name, said) => write!(out, "{name} failed in the guest: {said}"),
            GuestHold::UnknownFilesystem(kind) => {
                write!(out, "the guest's filesystem is {kind}, which does not grow")
            }
        }
    }
}

/// What uses a disk in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestUse {
    /// It is mounted there.
    Mount(String),
    /// It is below that device.
    Holder(String),
    /// It is used as swap.
    Swap(String),
}

impl fmt::Display for GuestUse {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GuestUse::Mount(at) => write!(out, "mounted at {at}"),
            GuestUse::Holder(name) => write!(out, "used by {name}"),
            GuestUse::Swap(name) => write!(out, "used as swap as {name}"),
        }
    }
}

/// What to do with a disk that is mounted in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfMounted {
    /// Leave it, and say so.
    Refuse,
    /// Unmount it.
    Unmount,
}

impl GuestAgent {
    /// Grows the partition and the filesystem on the disk with this serial number to the disk's size, which must be
    /// `want` at least.
    pub async fn grow_filesystem(&mut self, serial: &str, want: Bytes) -> Result<GuestGrowth> {
        let want = want.get().to_string();
        let said = self
            .script("growth", GROW, &[serial, &want], GROW_TIME_MAX)
            .await?;
        read_growth(&said)
    }

    /// Makes a disk ready for its removal: writes it back, and answers what still uses it. An empty answer means that
    /// nobody does.
    pub async fn release_disk(
        &mut self,
        serial: &str,
        if_mounted: IfMounted,
    ) -> Result<Vec<GuestUse>> {
        let mode = match if_mounted {
            IfMounted::Refuse => "refuse",
            IfMounted::Unmount => "unmount",
        };
        let said = self
            .script("removal", RELEASE, &[serial, mode], RELEASE_TIME_MAX)
            .await?;
        Ok(read_uses(&said))
    }

    async fn script(
        &mut self,
        purpose: &'static str,
        text: &str,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<String> {
        let text = format!("PATH=$PATH:/usr/sbin:/sbin:/usr/bin:/bin\n{DISK}{text}");
        let mut all = vec!["-c", text.as_str(), "trellis"];
        all.extend(arguments);
        let output = self.run(SHELL, &all, limit).await?;
        if output.status != 0 {
            let end = output.stderr.chars().rev().take(SAID_CHARS_MAX);
            return Err(Error::GuestScript {
                purpose,
                status: output.status,
                said: end.collect::<Vec<_>>().into_iter().rev().collect(),
            });
        }
        Ok(output.stdout)
    }
}

/// What the growth's words mean.
fn read_growth(said: &str) -> Result<GuestGrowth> {
    let mut growth = GuestGrowth::default();
    for line in said.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["disk", name, size] => growth.disk = Some(((*name).to_owned(), bytes(size)?)),
            ["partition", name, from, to] => {
                growth.partition = Some(((*name).to_owned(), outcome(from, to)?));
            }
            ["filesystem", kind, from, to, at] => {
                growth.filesystem = Some(GrownFilesystem {
                    kind: (*kind).to_owned(),
                    mountpoint: (*at).to_owned(),
                    outcome: outcome(from, to)?,
                });
            }
            ["held", reason @ ..] => growth.held = Some(hold(reason)?),
            _ => return Err(unread(line)),
        }
    }
    if growth.filesystem.is_none() && growth.held.is_none() {
        return Err(unread(said));
    }
    Ok(growth)
}

fn hold(words: &[&str]) -> Result<GuestHold> {
    Ok(match words {
        ["no-disk"] => GuestHold::NoDisk,
        ["disk-smaller", size] => GuestHold::DiskSmaller(bytes(size)?),
        ["partition-stays", name] => GuestHold::PartitionStays((*name).to_owned()),
        ["not-mounted", name] => GuestHold::NotMounted((*name).to_owned()),
        ["stacked", name] => GuestHold::Stacked((*name).to_owned()),
        ["no-tool", name] => GuestHold::NoTool((*name).to_owned()),
        ["tool-failed", name, said @ ..] => {
            let said: String = said.join(" ").chars().take(SAID_CHARS_MAX).collect();
            GuestHold::ToolFailed((*name).to_owned(), said)
        }
        ["unknown-filesystem", kind] => GuestHold::UnknownFilesystem((*kind).to_owned()),
        _ => return Err(unread(&words.join(" "))),
    })
}

fn read_uses(said: &str) -> Vec<GuestUse> {
    said.lines()
        .filter_map(|line| {
            let (kind, what) = line.strip_prefix("used ")?.split_once(' ')?;
            let what = what.to_owned();
            match kind {
                "mount" => Some(GuestUse::Mount(what)),
                "swap" => Some(GuestUse::Swap(what)),
                _ => Some(GuestUse::Holder(what)),
            }
        })
        .collect()
}

fn outcome(from: &str, to: &str) -> Result<Outcome> {
    let (from, to) = (bytes(from)?, bytes(to)?);
    Ok(if from == to {
        Outcome::Unchanged { size: to }
    } else {
        Outcome::Raised { from, to }
    })
}

fn bytes(text: &str) -> Result<Bytes> {
    let number = text.parse().map_err(|_| unread(text))?;
    Ok(Bytes::new(number))
}

fn unread(line: &str) -> Error {
    Error::GuestScript {
        purpose: "growth",
        status: 0,
        said: line.chars().take(SAID_CHARS_MAX).collect(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_word_of_the_growth_has_a_meaning() {
        // Fails if a hold of the script is not understood, or if a cut off answer passes for a success.
        let reasons = [
            "no-disk",
            "disk-smaller 4096",
            "partition-stays sda1",
            "not-mounted sda",
            "stacked dm-0",
            "no-tool resize2fs",
            "tool-failed xfs_growfs it is full",
            "unknown-filesystem vfat",
        ];
        for reason in reasons {
            let growth = read_growth(&format!("disk sda 8192\nheld {reason}\n")).unwrap();
            assert!(!growth.held.unwrap().to_string().is_empty());
        }
        // The script has no other words.
        for line in GROW.lines() {
            if let Some((_, after)) = line.split_once("held ")
                && let Some(word) = after.split(' ').next()
                && !line.trim_start().starts_with("echo")
                && !line.starts_with('#')
            {
                let known = reasons.iter().any(|reason| reason.starts_with(word));
                assert!(known, "{word} has no meaning");
            }
        }
        assert!(read_growth("disk sda 8192\n").is_err());
        assert!(read_growth("").is_err());
    }

    #[test]
    fn what_uses_a_disk_is_read_with_its_name() {
        // Fails if a use is lost: the disk would be taken from a guest that writes to it.
        let uses = read_uses("used mount /mnt\\040x\nused swap /dev/sda2\nused holder dm-0\n");
        assert_eq!(
            uses,
            [
                GuestUse::Mount("/mnt\\040x".to_owned()),
                GuestUse::Swap("/dev/sda2".to_owned()),
                GuestUse::Holder("dm-0".to_owned())
            ]
        );
        assert!(read_uses("absent\n").is_empty());
    }
}
