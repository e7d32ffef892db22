//! A set of regions: one bit per region, so a set of a million takes 128 KiB.

use crate::proto::Region;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RegionSet {
    words: Vec<u64>,
    count: usize,
}

const BITS: u32 = u64::BITS;

fn place(region: Region) -> (usize, u64) {
    let word = usize::try_from(region.0 / BITS).unwrap_or(usize::MAX);
    (word, 1 << (region.0 % BITS))
}

impl RegionSet {
    pub(super) fn insert(&mut self, region: Region) {
        let (word, bit) = place(region);
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        if self.words[word] & bit == 0 {
            self.words[word] |= bit;
            self.count += 1;
        }
    }

    pub(super) fn remove(&mut self, region: Region) {
        let (word, bit) = place(region);
        if let Some(slot) = self.words.get_mut(word)
            && *slot & bit != 0
        {
            *slot &= !bit;
            self.count -= 1;
        }
    }

    pub(super) fn contains(&self, region: Region) -> bool {
        let (word, bit) = place(region);
        self.words.get(word).is_some_and(|slot| slot & bit != 0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Region> + '_ {
        self.from(Region(0))
    }

    /// The regions of the set from that one on.
    pub(super) fn from(&self, first: Region) -> impl Iterator<Item = Region> + '_ {
        let (word, _) = place(first);
        let words = self.words.iter().enumerate().skip(word);
        words
            .flat_map(|(word, bits)| {
                let base = u32::try_from(word).unwrap_or(u32::MAX).saturating_mul(BITS);
                let mut bits = *bits;
                std::iter::from_fn(move || {
                    (bits != 0).then(|| {
                        let low = bits.trailing_zeros();
                        bits &= bits - 1;
                        Region(base + low)
                    })
                })
            })
            .skip_while(move |region| *region < first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_put_in_and_not_taken_out() {
        // Fails if a bit lands in another word, or the count drifts.
        let mut set = RegionSet::default();
        for region in [0, 1, 63, 64, 65, 127, 128, 1000] {
            set.insert(Region(region));
            set.insert(Region(region));
        }
        set.remove(Region(64));
        set.remove(Region(64));
        set.remove(Region(5000));
        let all: Vec<u32> = set.iter().map(|region| region.0).collect();
        assert_eq!(all, [0, 1, 63, 65, 127, 128, 1000]);
        assert_eq!(set.len(), all.len());
        let tail: Vec<u32> = set.from(Region(65)).map(|region| region.0).collect();
        assert_eq!(tail, [65, 127, 128, 1000]);
        assert!(set.contains(Region(1000)) && !set.contains(Region(64)));
    }
}
