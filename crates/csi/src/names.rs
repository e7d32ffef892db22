//! Names: from what a CO calls a volume to the name of its Volume, and of its Attachments.

use sha2::{Digest, Sha256};

/// The longest name that is taken as it is. Sockets and directories of a volume carry it, and a socket's path is short.
const NAME_PLAIN_MAX: usize = 40;
/// How many digits of a hash stand for a name that cannot be taken as it is.
const NAME_DIGITS: usize = 32;
/// How many digits stand for a node.
const NODE_DIGITS: usize = 8;
/// The longest name of an object.
const OBJECT_NAME_MAX: usize = 253;

/// The name of the Volume for a CO's name: the same one if an object can have it, as those of a provisioner can, and a
/// hash of it if not.
pub fn volume_name(name: &str) -> String {
    if is_label(name) && name.len() <= NAME_PLAIN_MAX {
        return name.to_owned();
    }
    format!("csi-{}", digits(name, NAME_DIGITS))
}

/// The name of the Attachment by which CSI uses a volume on a node: a node stages a volume once.
pub fn attachment_name(volume: &str, node: &str) -> String {
    format!("csi-{volume}-{}", digits(node, NODE_DIGITS))
}

/// Whether an object can have that name. What cannot is the name of nothing, and is never put into a path of the API.
pub fn can_be_object(name: &str) -> bool {
    name.len() <= OBJECT_NAME_MAX && name.split('.').all(is_label)
}

fn is_label(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let ends = !name.starts_with('-') && !name.ends_with('-');
    !name.is_empty() && ends && name.bytes().all(inner)
}

fn digits(text: &str, count: usize) -> String {
    let hash = Sha256::digest(text.as_bytes());
    let mut digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    digits.truncate(count);
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a provisioner's name is not kept, if two names become one, or if a name becomes one that no object can
    // have.
    #[test]
    fn a_name_is_kept_if_an_object_can_have_it() {
        let plain = "pvc-0f0ef9a1-a11b-4a70-8f7c-6f7a5c2e9d11";
        assert_eq!(volume_name(plain), plain);
        let long = "a".repeat(128);
        let odd = ["Sanity Name", "a/b", "../a", "", "-a", long.as_str(), "ä"];
        let mut seen = std::collections::BTreeSet::new();
        for name in odd {
            let made = volume_name(name);
            assert!(can_be_object(&made), "{made}");
            assert_eq!(made.len(), 36);
            assert!(seen.insert(made), "{name}");
        }
    }

    // Fails if an id could lead to another object of the API than a volume.
    #[test]
    fn what_is_no_name_is_no_object() {
        assert!(can_be_object("pvc-1") && can_be_object("a.b"));
        for bad in ["", "a/b", "../pods", "a..b", "A", "a?x=y", "a%2fb", " "] {
            assert!(!can_be_object(bad), "{bad:?}");
        }
        assert!(!can_be_object(&"a".repeat(254)));
    }

    // Fails if an upgrade would stage a volume a second time.
    #[test]
    fn the_name_of_an_attachment_never_changes() {
        assert_eq!(attachment_name("pvc-1", "node-a"), "csi-pvc-1-66570ff0");
        assert_ne!(attachment_name("v", "a"), attachment_name("v", "b"));
    }
}
