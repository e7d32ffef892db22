//! Capabilities of this process that the kernel's filesystem drivers ask for.

use std::fs;

/// A capability that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// `CAP_SYS_ADMIN`: mounts, loop devices, growth of xfs and btrfs.
    SysAdmin,
    /// `CAP_SYS_RESOURCE`: growth of a mounted ext4 or ext3.
    SysResource,
}

impl Capability {
    /// The name that capabilities(7) has.
    pub const fn name(self) -> &'static str {
        match self {
            Capability::SysAdmin => "CAP_SYS_ADMIN",
            Capability::SysResource => "CAP_SYS_RESOURCE",
        }
    }

    /// The number of its bit.
    pub const fn bit(self) -> u32 {
        match self {
            Capability::SysAdmin => 21,
            Capability::SysResource => 24,
        }
    }
}

/// The effective capabilities as /proc shows them, in hexadecimal.
pub fn effective_text() -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))?;
    Some(line.trim().to_owned())
}

/// Whether a bit of that text is set; `None` if the text is not in the documented form.
pub fn in_text(text: &str, wanted: Capability) -> Option<bool> {
    let set = u64::from_str_radix(text, 16).ok()?;
    Some(set >> wanted.bit() & 1 == 1)
}

/// Whether the filesystem drivers will find the capability: it has to be effective, and in the machine's
/// own user namespace, because they ask for no other.
pub fn is_effective(wanted: Capability) -> bool {
    let effective = effective_text().and_then(|text| in_text(&text, wanted));
    effective == Some(true) && in_first_user_namespace()
}

/// The machine's own user namespace maps every identity to itself.
fn in_first_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cleared_bit_is_seen_beside_set_ones() {
        // Fails if a wrong bit is looked at, or if text that is no number passes for a set bit.
        let text = "000001fffeffffff";
        assert_eq!(in_text(text, Capability::SysResource), Some(false));
        assert_eq!(in_text(text, Capability::SysAdmin), Some(true));
        assert_eq!(in_text("none", Capability::SysAdmin), None);
    }
}
