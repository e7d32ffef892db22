//! Probing arbitrary bytes, and bytes that are almost right.

use proptest::prelude::*;

use super::*;

/// Offsets at which signatures are looked for, and a few beside them.
const PLACES: [usize; 14] = [
    0, 3, 54, 82, 510, 512, 1024, 1080, 4086, 4096, 4120, 32_769, 65_536, 65_600,
];

const MAGICS: [&[u8]; 8] = [
    b"XFSB",
    b"\x53\xef",
    b"_BHRfS_M",
    b"!BHRfS_M",
    b"EFI PART",
    b"LUKS\xba\xbe\x00\x02",
    b"SWAPSPACE2",
    b"\xfc\x4e\x2b\xa9",
];

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..70_000)) {
        // Fails if some length or content makes the probe panic.
        let _ = probe_bytes(&bytes);
    }

    #[test]
    fn a_magic_with_arbitrary_bytes_around_it_never_panics_and_is_never_empty(
        mut bytes in proptest::collection::vec(any::<u8>(), 70_000..72_000),
        place in proptest::sample::select(&PLACES[..]),
        magic in proptest::sample::select(&MAGICS[..]),
    ) {
        // Fails if a damaged superblock makes its reader panic, or is taken for an empty device.
        bytes[place..place + magic.len()].copy_from_slice(magic);
        prop_assert_ne!(probe_bytes(&bytes), Content::Empty);
    }

    #[test]
    fn one_byte_in_a_window_is_enough_not_to_be_empty(
        size in 1usize..(4 << 20),
        at in any::<proptest::sample::Index>(),
        from_end in any::<bool>(),
        value in 1u8..,
    ) {
        // Fails if any byte of the first or last MiB is overlooked.
        let mut bytes = vec![0; size];
        prop_assert_eq!(probe_bytes(&bytes), Content::Empty);
        let window = size.min(1 << 20);
        let index = at.index(window);
        let place = if from_end { size - 1 - index } else { index };
        bytes[place] = value;
        prop_assert_ne!(probe_bytes(&bytes), Content::Empty);
    }
}

#[test]
fn every_length_up_to_two_sectors_is_answered() {
    // Fails if a device smaller than a superblock makes the probe panic.
    for length in 0..1024 {
        assert_eq!(probe_bytes(&vec![0; length]), Content::Empty);
        assert_eq!(
            probe_bytes(&vec![0xff; length]) == Content::Empty,
            length == 0
        );
    }
}
