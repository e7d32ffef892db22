//! The identity of an image: the SHA-256 of its file.

use std::fmt::{self, Write};
use std::str::FromStr;

const ALGORITHM: &str = "sha256:";
const BYTES: usize = 32;

/// The SHA-256 of an image file, as it is written: `sha256:` and 64 digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageDigest([u8; BYTES]);

/// Why a text is no digest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    /// It names another algorithm, or none.
    #[error(
        "the digest {text:?} does not begin with sha256:, the only algorithm that images are known by"
    )]
    OtherAlgorithm {
        /// The whole text.
        text: String,
    },
    /// What follows is not 64 hexadecimal digits.
    #[error("the digest {text:?} is not sha256: and 64 hexadecimal digits")]
    NotHexadecimal {
        /// The whole text.
        text: String,
    },
}

impl ImageDigest {
    /// The digest with these bytes.
    pub const fn new(bytes: [u8; BYTES]) -> Self {
        ImageDigest(bytes)
    }

    /// Its bytes.
    pub const fn bytes(&self) -> &[u8; BYTES] {
        &self.0
    }

    /// The digits alone, as a file is named by them.
    pub fn hex(&self) -> String {
        self.0
            .iter()
            .fold(String::with_capacity(2 * BYTES), |mut text, byte| {
                // Writing to a string does not fail.
                let _ = write!(text, "{byte:02x}");
                text
            })
    }

    /// The digest whose digits these are. Capital letters count as well.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let digits = hex.as_bytes();
        let mut bytes = [0; BYTES];
        if digits.len() != 2 * BYTES {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |at: usize| char::from(pair[at]).to_digit(16);
            *byte = u8::try_from(digit(0)? * 16 + digit(1)?).ok()?;
        }
        Some(ImageDigest(bytes))
    }
}

impl fmt::Display for ImageDigest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{ALGORITHM}{}", self.hex())
    }
}

impl fmt::Debug for ImageDigest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

impl FromStr for ImageDigest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let hex = text
            .strip_prefix(ALGORITHM)
            .ok_or_else(|| DigestError::OtherAlgorithm {
                text: text.to_owned(),
            })?;
        Self::from_hex(hex).ok_or_else(|| DigestError::NotHexadecimal {
            text: text.to_owned(),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_reads_back_and_nothing_else_is_one() {
        // Fails if a digit is lost, or if a short, long or foreign text is taken for a digest.
        let digest = ImageDigest::new(std::array::from_fn(|index| {
            u8::try_from(index * 7).unwrap()
        }));
        assert_eq!(digest.to_string().parse(), Ok(digest));
        let hex = digest.hex();
        assert_eq!(ImageDigest::from_hex(&hex.to_uppercase()), Some(digest));
        for wrong in ["", "sha256:", "sha256:00", &hex, &format!("sha512:{hex}")] {
            assert!(wrong.parse::<ImageDigest>().is_err(), "{wrong}");
        }
        for wrong in [format!("sha256:{hex}0"), format!("sha256:+{}", &hex[1..])] {
            assert!(wrong.parse::<ImageDigest>().is_err(), "{wrong}");
        }
    }
}
