//! Stand-in until the grammar lands.
impl std::str::FromStr for crate::Bytes {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(crate::Bytes::new)
    }
}
