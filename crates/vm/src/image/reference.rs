//! Where an image comes from, as a pod names it.
//!
//! ```text
//!   download.example.org/disk.img               the image of a Virtlet pod: a URL without its scheme
//!   virtlet.cloud/download.example.org/disk.img  the same, with the prefix that led to Virtlet
//!   https://host/disk.img@sha256:0123…           a URL, and the image that must be there
//!   /var/lib/images/disk.img, file:///…          a file of the node, below a directory that the node lends out
//! ```

use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use http::Uri;

use super::ImageError;
use crate::ImageDigest;

const VIRTLET: &str = "virtlet.cloud/";
const SCHEMELESS: &str = "https://";
const TEXT_BYTES_MAX: usize = 2048;
const TAG_BYTES_MAX: usize = 128;

/// What a pod calls its image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageReference {
    /// Where it is.
    pub place: ImagePlace,
    /// Which image must be there.
    pub digest: Option<ImageDigest>,
    text: String,
}

/// Where an image is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImagePlace {
    /// On a web server.
    Web(Uri),
    /// In a file of the node.
    File(PathBuf),
}

impl ImageReference {
    /// As the pod has it.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for ImageReference {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        let bad = || ImageError::BadReference {
            text: text.chars().take(TEXT_BYTES_MAX).collect(),
        };
        if text.is_empty()
            || text.len() > TEXT_BYTES_MAX
            || text
                .chars()
                .any(|letter| letter.is_control() || letter == ' ')
        {
            return Err(bad());
        }
        let (place, digest) = match text.rsplit_once('@') {
            Some((place, digest)) if digest.contains(':') && !digest.contains('/') => {
                (place, Some(digest.parse().map_err(ImageError::Digest)?))
            }
            _ => (text, None),
        };
        let place = place.strip_prefix(VIRTLET).unwrap_or(place);
        let place = if let Some(path) = place.strip_prefix("file://") {
            ImagePlace::File(file(path).ok_or_else(bad)?)
        } else if place.starts_with('/') {
            ImagePlace::File(file(place).ok_or_else(bad)?)
        } else if place.contains("://") {
            ImagePlace::Web(web(place).ok_or_else(bad)?)
        } else {
            let address = format!("{SCHEMELESS}{}", without_tag(place));
            ImagePlace::Web(web(&address).ok_or_else(bad)?)
        };
        let text = text.to_owned();
        Ok(ImageReference {
            place,
            digest,
            text,
        })
    }
}

/// An absolute path without detours.
fn file(path: &str) -> Option<PathBuf> {
    let path = Path::new(path);
    let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    (path.is_absolute() && path.components().all(plain) && path.file_name().is_some())
        .then(|| path.to_owned())
}

/// A URL with a host and nothing secret.
pub(super) fn web(address: &str) -> Option<Uri> {
    let uri: Uri = address.parse().ok()?;
    let scheme = uri.scheme_str()?;
    let authority = uri.authority()?.as_str();
    // A password in a reference would be shown wherever the pod is.
    let fine =
        matches!(scheme, "http" | "https") && !authority.contains('@') && !uri.host()?.is_empty();
    fine.then_some(uri)
}

/// Kubernetes adds `:latest` to what it takes for the name of a container image.
fn without_tag(place: &str) -> &str {
    let last = place.rfind('/').map_or(0, |slash| slash + 1);
    let tag = place[last..].rfind(':').map(|colon| last + colon);
    let is_tag = |tag: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
        !tag.is_empty() && tag.len() <= TAG_BYTES_MAX && tag.bytes().all(plain)
    };
    match tag {
        Some(colon) if last > 0 && is_tag(&place[colon + 1..]) => &place[..colon],
        _ => place,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn place(text: &str) -> String {
        match text.parse::<ImageReference>().unwrap().place {
            ImagePlace::Web(uri) => uri.to_string(),
            ImagePlace::File(path) => path.display().to_string(),
        }
    }

    #[test]
    fn a_reference_says_where_an_image_is_and_which() {
        // Fails if the image of Virtlet's example is not found, or if a tag or digest becomes a part of the path.
        let cirros = "https://download.cirros-cloud.net/0.3.5/cirros-0.3.5-x86_64-disk.img";
        let bare = "download.cirros-cloud.net/0.3.5/cirros-0.3.5-x86_64-disk.img";
        for text in [
            bare.to_owned(),
            format!("{bare}:latest"),
            format!("virtlet.cloud/{bare}"),
            cirros.to_owned(),
        ] {
            assert_eq!(place(&text), cirros, "{text}");
        }
        assert_eq!(
            place("host:8080/a/disk.img"),
            "https://host:8080/a/disk.img"
        );
        assert_eq!(place("file:///images/a.img"), "/images/a.img");
        let digest = format!("sha256:{}", "ab".repeat(32));
        let pinned: ImageReference = format!("https://host/a.img@{digest}").parse().unwrap();
        assert_eq!(pinned.digest.unwrap().to_string(), digest);
        assert!(matches!(pinned.place, ImagePlace::Web(uri) if uri == "https://host/a.img"));
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        // Fails if a detour, a password, a strange scheme or another digest gets through.
        let texts = [
            "",
            "ftp://host/a",
            "https://user:pw@host/a",
            "/a/../b",
            "file://a",
            "/",
            "https:///a",
            "a b",
            "host/a\n",
        ];
        for text in texts {
            assert!(text.parse::<ImageReference>().is_err(), "{text:?}");
        }
        assert!(matches!(
            "host/a@md5:00".parse::<ImageReference>(),
            Err(ImageError::Digest(_))
        ));
    }
}
