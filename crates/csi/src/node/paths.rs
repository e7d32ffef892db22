//! The paths that a caller names. They come from outside, so each is judged before anything is done with it.

use std::path::{Component, Path, PathBuf};

use tonic::Status;
use trellis_api::{Hold, HoldReason};

use crate::codes;

/// The name of the device below the staging path of a block volume: the path itself is a directory.
const DEVICE: &str = "device";
/// The longest path that the kernel takes.
const PATH_MAX: usize = 4096;

/// A path that can be used: absolute, without `..`, and below the directory that everything has to be below, if there is
/// one.
pub fn read(path: &str, below: Option<&Path>) -> Result<PathBuf, Status> {
    let refused = |why: &str| {
        let message = format!("{path:?} {why}.");
        codes::refused(&Hold::new(HoldReason::PathInvalid, message))
    };
    if path.len() > PATH_MAX || path.contains('\0') {
        return Err(refused("is no path"));
    }
    let read = PathBuf::from(path);
    let goes_up = read.components().any(|part| part == Component::ParentDir);
    if !read.is_absolute() || goes_up || read.file_name().is_none() {
        return Err(refused("is not an absolute path without \"..\""));
    }
    match below {
        Some(directory) if !read.starts_with(directory) || read == directory => {
            Err(refused(&format!("is not below {}", directory.display())))
        }
        _ => Ok(read),
    }
}

/// Where the volume appears when it is staged at `staging`.
pub fn staged_at(staging: &Path, is_block: bool) -> PathBuf {
    match is_block {
        true => staging.join(DEVICE),
        false => staging.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a caller can have something appear where it should not, or a path that is fine is refused.
    #[test]
    fn only_absolute_paths_without_dots_below_the_kubelets_directory_are_taken() {
        let below = Some(Path::new("/var/lib/kubelet"));
        assert!(read("/var/lib/kubelet/pods/a/mount", below).is_ok());
        assert!(read("/anywhere/else", None).is_ok());
        for bad in [
            "",
            "/",
            "some/path",
            "./a",
            "/var/lib/kubelet",
            "/var/lib/kubelet/../../../etc",
            "/var/lib/kubelet-other/a",
            "/etc",
            "/var/lib/kubelet/a\0b",
        ] {
            let refused = read(bad, below).expect_err(bad);
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{bad}");
        }
        let long = format!("/var/lib/kubelet/{}", "a/".repeat(4096));
        assert!(read(&long, below).is_err());
    }
}
