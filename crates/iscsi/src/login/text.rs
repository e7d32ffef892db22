//! The `key=value` text of login and text PDUs.

use bytes::Bytes;

use crate::limits::{TEXT_BYTES_MAX, TEXT_KEY_BYTES_MAX, TEXT_KEYS_MAX};

/// Text that is not what the protocol allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadText;

/// Collects text over PDUs that say that they are continued.
#[derive(Debug, Default)]
pub struct TextBuffer {
    bytes: Vec<u8>,
}

impl TextBuffer {
    /// Add a part.
    ///
    /// # Errors
    /// The whole would be longer than an exchange may be.
    pub fn push(&mut self, part: &Bytes) -> Result<(), BadText> {
        if self.bytes.len() + part.len() > TEXT_BYTES_MAX {
            return Err(BadText);
        }
        self.bytes.extend_from_slice(part);
        Ok(())
    }

    /// The pairs of the whole text; the buffer is empty afterwards.
    ///
    /// # Errors
    /// It is not a list of pairs.
    pub fn take(&mut self) -> Result<Vec<(String, String)>, BadText> {
        let bytes = std::mem::take(&mut self.bytes);
        parse(&bytes)
    }
}

/// The pairs of a text.
///
/// # Errors
/// It is not UTF-8, a part has no `=`, a key is empty, too long or has other characters than the
/// protocol allows, or there are too many.
pub fn parse(bytes: &[u8]) -> Result<Vec<(String, String)>, BadText> {
    let text = std::str::from_utf8(bytes).map_err(|_| BadText)?;
    let mut pairs = Vec::new();
    for part in text.split('\0').filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').ok_or(BadText)?;
        let sane = |c: char| c.is_ascii_alphanumeric() || "-._+@".contains(c);
        if key.is_empty() || key.len() > TEXT_KEY_BYTES_MAX || !key.chars().all(sane) {
            return Err(BadText);
        }
        if pairs.len() == TEXT_KEYS_MAX {
            return Err(BadText);
        }
        pairs.push((key.to_owned(), value.to_owned()));
    }
    Ok(pairs)
}

/// Text to send.
#[derive(Debug, Default)]
pub struct TextWriter {
    bytes: Vec<u8>,
}

impl TextWriter {
    /// Add a pair.
    pub fn pair(&mut self, key: &str, value: &str) {
        self.bytes.extend_from_slice(key.as_bytes());
        self.bytes.push(b'=');
        self.bytes.extend_from_slice(value.as_bytes());
        self.bytes.push(0);
    }

    /// The text.
    pub fn finish(self) -> Bytes {
        Bytes::from(self.bytes)
    }
}

/// A binary value in hexadecimal.
pub fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(2 + bytes.len() * 2);
    text.push_str("0x");
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

/// A binary value: `0x` and hexadecimal, or `0b` and base64, at most `bytes_max` long.
pub fn from_binary(text: &str, bytes_max: usize) -> Option<Vec<u8>> {
    let (prefix, digits) = text.split_at_checked(2)?;
    let bytes = match prefix {
        "0x" | "0X" if digits.len() <= bytes_max * 2 => from_hex(digits)?,
        "0b" | "0B" if digits.len() <= bytes_max * 2 => from_base64(digits)?,
        _ => return None,
    };
    (!bytes.is_empty() && bytes.len() <= bytes_max).then_some(bytes)
}

fn from_hex(digits: &str) -> Option<Vec<u8>> {
    let nibble = |c: u8| {
        char::from(c)
            .to_digit(16)
            .and_then(|d| u8::try_from(d).ok())
    };
    let (odd, pairs) = digits.as_bytes().split_at(digits.len() % 2);
    let mut bytes = Vec::with_capacity(digits.len() / 2 + 1);
    for digit in odd {
        bytes.push(nibble(*digit)?);
    }
    for pair in pairs.chunks_exact(2) {
        bytes.push(nibble(pair[0])? << 4 | nibble(pair[1])?);
    }
    Some(bytes)
}

fn from_base64(digits: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    let mut bits: u32 = 0;
    let mut count = 0;
    for digit in digits.trim_end_matches('=').bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count & 0xff).ok()?);
            bits &= (1 << count) - 1;
        }
    }
    Some(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn binary_values_are_read_in_both_notations() {
        // Fails if a digit is lost, or if padding is taken for data.
        assert_eq!(from_binary("0x00ff10", 3), Some(vec![0, 255, 16]));
        assert_eq!(from_binary("0xF10", 3), Some(vec![15, 16]));
        assert_eq!(from_binary("0bTWFu", 3), Some(b"Man".to_vec()));
        assert_eq!(from_binary("0bTWE=", 3), Some(b"Ma".to_vec()));
        assert_eq!(from_binary("0x0000", 1), None);
        assert_eq!(from_binary("0xzz", 8), None);
        assert_eq!(from_binary("é", 8), None);
        assert_eq!(to_hex(&[0, 255, 16]), "0x00ff10");
    }

    #[test]
    fn text_without_a_pair_is_refused() {
        // Fails if a part without `=`, or with a key that no one could have meant, is let through.
        assert_eq!(
            parse(b"A=1\0B=\0").unwrap(),
            [("A".into(), "1".into()), ("B".into(), String::new())]
        );
        assert_eq!(parse(b"A\0"), Err(BadText));
        assert_eq!(parse(b"=1\0"), Err(BadText));
        assert_eq!(parse(b"A B=1\0"), Err(BadText));
        assert_eq!(parse(&[b'A', b'=', 0xff, 0]), Err(BadText));
        assert_eq!(
            parse("k=v\0".repeat(TEXT_KEYS_MAX + 1).as_bytes()),
            Err(BadText)
        );
    }
}
