//! The mount options of a StorageClass or a PersistentVolume, read strictly: an option is honoured, or refused with a
//! reason. None is ignored.

use std::fmt;

use crate::FilesystemKind;

/// The longest list of options: mount(2) takes one page, and Trellis adds a few of its own.
const LENGTH_MAX: usize = 3 << 10;

/// What a mount may be told, whatever its filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountFlag {
    /// Files do not remember when they were read.
    NoAtime,
    /// Directories do not remember when they were read.
    NoDirAtime,
    /// They do remember it, every time.
    StrictAtime,
    /// Times are written when it suits.
    LazyTime,
    /// Programs do not get the rights of their owner.
    NoSuid,
    /// Programs cannot be run.
    NoExec,
    /// Every write is on the disk before it is answered.
    Sync,
    /// Every change of a directory is.
    DirSync,
}

/// Options that have been read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountOptions {
    /// Those of every mount.
    pub flags: Vec<MountFlag>,
    /// Those of the filesystem, in the words of its driver.
    pub of_filesystem: Vec<String>,
}

/// An option that is not honoured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedOption {
    /// The option, as it was given.
    pub option: String,
    /// Why, as the end of a sentence.
    pub why: String,
}

impl fmt::Display for RefusedOption {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "mount option {:?} is refused: {}",
            self.option, self.why
        )
    }
}

impl std::error::Error for RefusedOption {}

/// What every mount is without being told.
const NOTHING: [&str; 8] = [
    "async", "atime", "defaults", "diratime", "exec", "relatime", "rw", "suid",
];

const FLAGS: [(&str, MountFlag); 8] = [
    ("noatime", MountFlag::NoAtime),
    ("nodiratime", MountFlag::NoDirAtime),
    ("strictatime", MountFlag::StrictAtime),
    ("lazytime", MountFlag::LazyTime),
    ("nosuid", MountFlag::NoSuid),
    ("noexec", MountFlag::NoExec),
    ("sync", MountFlag::Sync),
    ("dirsync", MountFlag::DirSync),
];

/// Options that are understood and refused, on any filesystem. One that ends in `=` stands for every value.
const REFUSED: [(&[&str], &str); 9] = [
    (
        &["ro"],
        "whether a use may write is said by the use: `trellis mount --read-only`, or the access mode ReadOnlyMany",
    ),
    (
        &["nobarrier", "barrier=0"],
        "without barriers a power loss takes writes that were acknowledged",
    ),
    (
        &[
            "norecovery",
            "noload",
            "nologreplay",
            "rescue=",
            "usebackuproot",
            "recovery",
        ],
        "the journal is always replayed before a volume is used",
    ),
    (
        &["data=writeback"],
        "after a crash files would show bytes that were never theirs",
    ),
    (
        &["nouuid", "errors="],
        "Trellis sets it itself, in the one way that is safe for volumes",
    ),
    (
        &[
            "degraded",
            "device=",
            "journal_dev=",
            "journal_path=",
            "logdev=",
            "rtdev=",
        ],
        "a volume is one device and has nothing beside it",
    ),
    (
        &["subvol=", "subvolid="],
        "the whole filesystem is shown, measured and grown",
    ),
    (
        &[
            "bind",
            "dev",
            "loop",
            "loop=",
            "move",
            "offset=",
            "private",
            "rbind",
            "remount",
            "shared",
            "sizelimit=",
            "slave",
        ],
        "how a volume is brought to its path is Trellis' own matter",
    ),
    (
        &[
            "_netdev", "auto", "comment=", "group", "noauto", "nofail", "nouser", "owner", "user",
            "users",
        ],
        "it is a word of fstab(5), which nobody reads here",
    ),
];

/// The options of each filesystem that are honoured. One that ends in `=` has a value.
const fn known(kind: FilesystemKind) -> &'static [&'static str] {
    match kind {
        FilesystemKind::Xfs => &[
            "allocsize=",
            "discard",
            "filestreams",
            "gquota",
            "grpid",
            "grpquota",
            "inode32",
            "inode64",
            "largeio",
            "logbsize=",
            "logbufs=",
            "noalign",
            "nodiscard",
            "nogrpid",
            "nolargeio",
            "noquota",
            "pquota",
            "prjquota",
            "quota",
            "swalloc",
            "uquota",
            "usrquota",
            "wsync",
        ],
        FilesystemKind::Btrfs => &[
            "acl",
            "autodefrag",
            "commit=",
            "compress",
            "compress-force",
            "compress-force=",
            "compress=",
            "datacow",
            "datasum",
            "discard",
            "discard=",
            "flushoncommit",
            "max_inline=",
            "metadata_ratio=",
            "noacl",
            "noautodefrag",
            "nodatacow",
            "nodatasum",
            "nodiscard",
            "noflushoncommit",
            "nossd",
            "ssd",
            "ssd_spread",
            "thread_pool=",
        ],
        FilesystemKind::Ext4 | FilesystemKind::Ext3 => &[
            "acl",
            "auto_da_alloc",
            "barrier",
            "barrier=1",
            "commit=",
            "data=journal",
            "data=ordered",
            "delalloc",
            "discard",
            "grpid",
            "grpquota",
            "init_itable=",
            "journal_ioprio=",
            "max_batch_time=",
            "min_batch_time=",
            "noacl",
            "nodelalloc",
            "nodiscard",
            "nogrpid",
            "noinit_itable",
            "prjquota",
            "quota",
            "resgid=",
            "resuid=",
            "stripe=",
            "user_xattr",
            "usrquota",
        ],
    }
}

impl MountOptions {
    /// Reads the options for a filesystem. Each string may hold several, with commas between them.
    pub fn read(kind: FilesystemKind, options: &[String]) -> Result<MountOptions, RefusedOption> {
        let refused = |option: &str, why: String| RefusedOption {
            option: option.to_owned(),
            why,
        };
        let mut read = MountOptions::default();
        let each = options.iter().flat_map(|option| option.split(','));
        for option in each.map(str::trim).filter(|option| !option.is_empty()) {
            if let Some((_, flag)) = FLAGS.iter().find(|(name, _)| *name == option) {
                read.flags.push(*flag);
            } else if let Some(why) = why_refused(option) {
                return Err(refused(option, why.to_owned()));
            } else if is_among(known(kind), option) && is_plain(option) {
                read.of_filesystem.push(option.to_owned());
            } else if !NOTHING.contains(&option) && option != "nodev" {
                // Device nodes on volumes never have an effect.
                let why = format!("Trellis does not know it for {kind}");
                return Err(refused(option, why));
            }
        }
        let length: usize = read.of_filesystem.iter().map(|each| each.len() + 1).sum();
        if length > LENGTH_MAX {
            let why = format!("all together are longer than {LENGTH_MAX} bytes");
            return Err(refused("…", why));
        }
        Ok(read)
    }
}

fn why_refused(option: &str) -> Option<&'static str> {
    if option.starts_with("x-") || option.starts_with("X-") {
        return Some("it is a word for mount(8), which is not run here");
    }
    let row = REFUSED.iter().find(|(names, _)| is_among(names, option));
    row.map(|(_, why)| *why)
}

fn is_among(names: &[&str], option: &str) -> bool {
    names.iter().any(|name| match option.strip_prefix(name) {
        Some(value) if name.ends_with('=') => !value.is_empty(),
        rest => rest == Some(""),
    })
}

/// Whether it is a word that cannot be taken for anything else by whoever reads a list of options.
fn is_plain(option: &str) -> bool {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_-=:.".contains(letter);
    option.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(kind: FilesystemKind, options: &[&str]) -> Result<MountOptions, RefusedOption> {
        let options: Vec<String> = options.iter().map(|each| (*each).to_owned()).collect();
        MountOptions::read(kind, &options)
    }

    // Fails if an option is lost, or taken for one of another sort.
    #[test]
    fn options_are_honoured_or_are_what_a_mount_is_anyway() {
        let options = ["noatime,logbufs=8", "rw", "defaults", "discard", "nodev"];
        let found = read(FilesystemKind::Xfs, &options).expect("all are known");
        assert_eq!(found.flags, [MountFlag::NoAtime]);
        assert_eq!(found.of_filesystem, ["logbufs=8", "discard"]);
        let found = read(FilesystemKind::Btrfs, &["compress=zstd:3"]).expect("known");
        assert_eq!(found.of_filesystem, ["compress=zstd:3"]);
        for (name, _) in FLAGS {
            assert!(read(FilesystemKind::Ext4, &[name]).is_ok(), "{name}");
        }
    }

    // Fails if an option is honoured or refused that the documentation does not name.
    #[test]
    fn every_option_stands_in_the_documentation() {
        let page = include_str!("../../../docs/classes.md");
        let named = |name: &str| {
            let value = name.strip_suffix('=').map(|name| format!("`{name}[=]`"));
            let optional = format!("`{name}[=]`");
            page.contains(&format!("`{name}`"))
                || page.contains(&optional)
                || value.is_some_and(|value| page.contains(&value))
                || (name.starts_with("barrier") && page.contains("`barrier[=1]`"))
        };
        let flags = FLAGS.iter().map(|(name, _)| *name);
        let honoured = FilesystemKind::ALL.into_iter().flat_map(known).copied();
        let refused = REFUSED.iter().flat_map(|(names, _)| *names).copied();
        for name in flags.chain(honoured).chain(refused).chain(NOTHING) {
            assert!(named(name), "docs/classes.md lacks {name}");
        }
    }

    // Fails if an option is ignored, or would cost data.
    #[test]
    fn every_other_option_is_refused_with_its_reason() {
        for (names, why) in REFUSED {
            for name in names {
                let option = if name.ends_with('=') {
                    format!("{name}1")
                } else {
                    (*name).to_owned()
                };
                for kind in FilesystemKind::ALL {
                    let refused = read(kind, &[&option]).expect_err(&option);
                    assert_eq!(
                        (refused.option.as_str(), refused.why.as_str()),
                        (&*option, why)
                    );
                }
            }
        }
        for option in [
            "x-systemd.requires=a",
            "compress=zstd",
            "logbufs=",
            "nonsense",
        ] {
            let refused = read(FilesystemKind::Xfs, &["noatime", option]).expect_err(option);
            assert_eq!(refused.option, option);
        }
        // No name is on both sides.
        for kind in FilesystemKind::ALL {
            for name in known(kind) {
                assert_eq!(why_refused(name), None, "{name}");
            }
        }
        let long = format!("allocsize={}", "1".repeat(LENGTH_MAX));
        assert!(read(FilesystemKind::Xfs, &[&long]).is_err());
    }
}
