#![allow(clippy::unwrap_used)]

use std::cell::{Cell, RefCell};

use proptest::prelude::*;

use super::*;

const DISK: usize = 1 << 20;
const VOLUME: usize = 3 << 20;

/// A volume in memory that loses power: from an operation on everything fails, and of what was not synced any sectors
/// may be missing.
struct Volume {
    durable: RefCell<Vec<u8>>,
    pending: RefCell<Vec<(u64, Vec<u8>)>>,
    left: Cell<usize>,
    writes: Cell<usize>,
    bytes_written: Cell<usize>,
}

impl Volume {
    fn new(bytes: Vec<u8>) -> Volume {
        Volume {
            durable: RefCell::new(bytes),
            pending: RefCell::default(),
            left: Cell::new(usize::MAX),
            writes: Cell::new(0),
            bytes_written: Cell::new(0),
        }
    }

    fn empty() -> Volume {
        Volume::new(vec![0; VOLUME])
    }

    fn take_one(&self) -> io::Result<()> {
        let left = self
            .left
            .get()
            .checked_sub(1)
            .ok_or(io::ErrorKind::BrokenPipe)?;
        self.left.set(left);
        Ok(())
    }

    /// What the disk holds when the power comes back. Bits of `luck` say which sectors had made it.
    fn after_power_loss(&self, mut luck: u64) -> Volume {
        let mut bytes = self.durable.borrow().clone();
        for (offset, data) in self.pending.borrow().iter() {
            let start = usize::try_from(*offset).unwrap();
            for (index, sector) in data.chunks(512).enumerate() {
                luck = luck
                    .rotate_left(7)
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .wrapping_add(1);
                if luck & 4 != 0 {
                    let at = start + index * 512;
                    bytes[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        Volume::new(bytes)
    }

    fn disk(&self) -> Vec<u8> {
        self.bytes()[1 << 20..][..DISK].to_vec()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.durable.borrow().len()];
        self.read_whole(&mut bytes, 0).unwrap();
        bytes
    }

    fn prepare(&self, image: &Image, rules: RootRules) -> Result<PreparedRoot, RootError> {
        prepare(self, &image.as_root(), rules, &mut |_| {})
    }
}

impl BytesAt for Volume {
    fn size(&self) -> io::Result<u64> {
        self.durable.borrow().size()
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let count = self.durable.borrow().read(buffer, offset)?;
        for (start, data) in self.pending.borrow().iter() {
            let (from, to) = (*start, *start + u64::try_from(data.len()).unwrap());
            let end = offset + u64::try_from(count).unwrap();
            let (low, high) = (from.max(offset), to.min(end));
            if low < high {
                let at = |place: u64, base: u64| usize::try_from(place - base).unwrap();
                let bytes = &data[at(low, from)..at(high, from)];
                buffer[at(low, offset)..at(high, offset)].copy_from_slice(bytes);
            }
        }
        Ok(count)
    }
}

impl Medium for Volume {
    fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.take_one()?;
        assert!(offset + u64::try_from(bytes.len()).unwrap() <= self.size()?);
        self.writes.set(self.writes.get() + 1);
        self.bytes_written
            .set(self.bytes_written.get() + bytes.len());
        self.pending.borrow_mut().push((offset, bytes.to_vec()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.take_one()?;
        let mut durable = self.durable.borrow_mut();
        for (offset, data) in self.pending.borrow_mut().drain(..) {
            let start = usize::try_from(offset).unwrap();
            durable[start..start + data.len()].copy_from_slice(&data);
        }
        Ok(())
    }
}

struct Image {
    digest: ImageDigest,
    bytes: Vec<u8>,
}

impl Image {
    /// A disk with some data, zeros in the middle, and data at its end.
    fn new(fill: u8) -> Image {
        let mut bytes = vec![0; DISK];
        for (index, byte) in bytes.iter_mut().enumerate() {
            let at = index >> 16;
            if at < 2 || at == 5 || at == 15 {
                *byte = fill.wrapping_add(u8::try_from(index % 7).unwrap());
            }
        }
        let digest = ImageDigest::new([fill; 32]);
        Image { digest, bytes }
    }

    fn as_root(&self) -> RootImage<'_> {
        RootImage {
            digest: self.digest,
            file: &self.bytes,
            format: ImageFormat::Raw,
        }
    }
}

fn rules(changed_image: ChangedImage, overwrite_foreign: bool) -> RootRules {
    RootRules {
        changed_image,
        overwrite_foreign,
    }
}

const STRICT: RootRules = RootRules {
    changed_image: ChangedImage::Refuse,
    overwrite_foreign: false,
};

/// Virtlet's header for an image, as blockdev.go writes it.
fn virtlet(version: u16, digest: &ImageDigest) -> Vec<u8> {
    let mut bytes = vec![0x26, 0x3d, 0xbe, 0x52, 0xba, 0x57, 0x67, 0x02];
    bytes.extend(version.to_be_bytes());
    bytes.extend(digest.bytes());
    bytes.resize(VOLUME, 0);
    bytes
}

#[test]
fn an_image_is_copied_once_and_then_the_guests_own() {
    // Fails if the copy differs, if progress does not reach the end, or if a second start undoes what the guest wrote.
    let (volume, image) = (Volume::empty(), Image::new(1));
    let mut last = None;
    let root = prepare(&volume, &image.as_root(), STRICT, &mut |progress| {
        last = Some(progress)
    })
    .unwrap();
    assert_eq!(
        (root.outcome, root.data_offset),
        (RootOutcome::Written, DATA_OFFSET)
    );
    assert_eq!(last.unwrap().done, Bytes::new(u64::try_from(DISK).unwrap()));
    assert!(volume.disk() == image.bytes);
    volume
        .write(b"the guest was here", DATA_OFFSET.get())
        .unwrap();
    let again = volume.prepare(&image, STRICT).unwrap();
    assert_eq!(again.outcome, RootOutcome::Unchanged);
    assert_eq!((again.uuid, again.digest), (root.uuid, image.digest));
    assert_eq!(&volume.disk()[..18], b"the guest was here");
}

#[test]
fn a_version_that_is_not_known_is_refused_before_everything_else() {
    // Fails (Virtlet's defect) if a newer root is overwritten because its image differs too, whatever is allowed.
    let image = Image::new(1);
    for version in [0, 3, 9, u16::MAX] {
        for digest in [image.digest, ImageDigest::new([9; 32])] {
            let before = virtlet(version, &digest);
            let volume = Volume::new(before.clone());
            let refused = volume
                .prepare(&image, rules(ChangedImage::Replace, true))
                .unwrap_err();
            assert!(
                matches!(refused, RootError::FutureVersion { version: found } if found == version)
            );
            assert!(volume.bytes() == before && volume.writes.get() == 0);
        }
    }
}

#[test]
fn a_newer_second_slot_is_refused_as_well() {
    // Fails if a newer program's state in the slot that it used last is overlooked.
    let (volume, image) = (Volume::empty(), Image::new(1));
    volume.prepare(&image, STRICT).unwrap();
    volume
        .write(&virtlet(3, &image.digest)[..512], SLOTS[1])
        .unwrap();
    let refused = volume
        .prepare(&image, rules(ChangedImage::Replace, true))
        .unwrap_err();
    assert!(matches!(refused, RootError::FutureVersion { version: 3 }));
}

#[test]
fn virtlets_roots_are_used_where_they_are() {
    // Fails if an existing Virtlet root is copied over, or its disk is looked for anywhere but at 512.
    let image = Image::new(1);
    let volume = Volume::new(virtlet(1, &image.digest));
    let root = volume.prepare(&image, STRICT).unwrap();
    assert_eq!(
        (root.outcome, root.data_offset, root.uuid),
        (RootOutcome::Unchanged, Bytes::new(512), None)
    );
    assert_eq!(volume.writes.get(), 0);
    let other = Image::new(2);
    let kept = volume
        .prepare(&other, rules(ChangedImage::Keep, false))
        .unwrap();
    assert_eq!(
        (kept.outcome, kept.digest, kept.data_offset),
        (RootOutcome::Kept, image.digest, Bytes::new(512))
    );
    let replaced = volume
        .prepare(&other, rules(ChangedImage::Replace, false))
        .unwrap();
    assert_eq!(
        (replaced.outcome, replaced.data_offset),
        (RootOutcome::Replaced, DATA_OFFSET)
    );
    assert!(volume.disk() == other.bytes);
}

#[test]
fn another_image_is_refused_kept_or_put_in_its_place() {
    // Fails if a tag that has moved takes a disk with it, or if the refusal does not say how to go on.
    let (volume, one, two) = (Volume::empty(), Image::new(1), Image::new(2));
    volume.prepare(&one, STRICT).unwrap();
    let before = volume.bytes();
    let refused = volume.prepare(&two, RootRules::default()).unwrap_err();
    assert!(
        refused.to_string().contains(CHANGED_IMAGE_ANNOTATION),
        "{refused}"
    );
    let kept = volume
        .prepare(&two, rules(ChangedImage::Keep, false))
        .unwrap();
    assert_eq!((kept.outcome, kept.digest), (RootOutcome::Kept, one.digest));
    assert!(volume.bytes() == before);
    let replaced = volume
        .prepare(&two, rules(ChangedImage::Replace, false))
        .unwrap();
    assert_eq!(
        (replaced.outcome, replaced.digest),
        (RootOutcome::Replaced, two.digest)
    );
    assert!(volume.disk() == two.bytes);
}

#[test]
fn a_volume_that_is_too_small_is_left_as_it_was() {
    // Fails (Virtlet's defect) if the header names an image that was never copied, so that going back wipes the disk.
    let one = Image::new(1);
    let mut two = Image::new(2);
    two.bytes.resize(VOLUME, 7);
    let volume = Volume::empty();
    volume.prepare(&one, STRICT).unwrap();
    let before = volume.bytes();
    let refused = volume
        .prepare(&two, rules(ChangedImage::Replace, true))
        .unwrap_err();
    let need = Bytes::new(u64::try_from(VOLUME + (1 << 20)).unwrap());
    assert!(matches!(refused, RootError::TooSmall { need: found, .. } if found == need));
    assert!(volume.bytes() == before);
    assert_eq!(
        volume.prepare(&one, STRICT).unwrap().outcome,
        RootOutcome::Unchanged
    );
    let tiny = Volume::new(vec![0; 100]);
    assert!(matches!(
        tiny.prepare(&one, STRICT),
        Err(RootError::TooSmall { .. })
    ));
    assert_eq!(tiny.writes.get(), 0);
}

#[test]
fn foreign_data_is_named_and_left_alone_unless_allowed() {
    // Fails (Virtlet's defect) if a filesystem, a partition table or any bytes at either end are overwritten unasked.
    let image = Image::new(1);
    let places: &[(usize, &[u8], &str)] = &[
        (0, b"XFSB", "an xfs filesystem"),
        (1080, b"\x53\xef", "an ext filesystem"),
        (0x1_0040, b"_BHRfS_M", "a btrfs filesystem"),
        (512, b"EFI PART", "a GPT partition table"),
        (512, b"LABELONE", "an LVM physical volume"),
        (0, b"LUKS\xba\xbe", "a LUKS encrypted volume"),
        (510, b"\x55\xaa", "a partition table"),
        (4096, b"\x01", "data that is not known here, at byte 4096"),
        (
            (2 << 20) - 1,
            b"\x01",
            "data that is not known here, at byte 2097151",
        ),
        (
            VOLUME - 1,
            b"\x01",
            "data that is not known here, at byte 3145727",
        ),
    ];
    for (at, bytes, what) in places {
        let mut before = vec![0; VOLUME];
        before[*at..at + bytes.len()].copy_from_slice(bytes);
        let volume = Volume::new(before.clone());
        let refused = volume
            .prepare(&image, rules(ChangedImage::Replace, false))
            .unwrap_err();
        assert!(
            matches!(&refused, RootError::Foreign { what: found } if found.to_string() == *what),
            "{refused}"
        );
        assert!(refused.to_string().contains(OVERWRITE_ANNOTATION));
        assert!(volume.bytes() == before);
        let written = volume
            .prepare(&image, rules(ChangedImage::Refuse, true))
            .unwrap();
        assert_eq!(written.outcome, RootOutcome::Written);
        assert!(volume.disk() == image.bytes, "{what}");
    }
}

#[test]
fn a_damaged_header_over_data_is_not_taken_for_an_empty_volume() {
    // Fails if a few flipped bits make a guest's disk disappear.
    let (volume, image) = (Volume::empty(), Image::new(1));
    volume.prepare(&image, STRICT).unwrap();
    for slot in SLOTS {
        volume.write(&[0xff], slot + 100).unwrap();
    }
    let refused = volume
        .prepare(&image, rules(ChangedImage::Replace, false))
        .unwrap_err();
    assert!(matches!(refused, RootError::DamagedHeader), "{refused}");
    assert!(volume.disk() == image.bytes);
    let written = volume
        .prepare(&image, rules(ChangedImage::Refuse, true))
        .unwrap();
    assert_eq!(written.outcome, RootOutcome::Written);
}

#[test]
fn an_old_slot_behind_something_else_does_not_count() {
    // Fails if a volume that was formatted after it had been a root is booted from.
    let (volume, image) = (Volume::empty(), Image::new(1));
    volume.prepare(&image, STRICT).unwrap();
    volume.write(&[0; 512], 0).unwrap();
    volume.write(b"\x53\xef", 1080).unwrap();
    let refused = volume.prepare(&image, STRICT).unwrap_err();
    assert!(matches!(refused, RootError::Foreign { .. }), "{refused}");
    // Its generation is remembered all the same, so that it does not win over what is written now.
    let other = Image::new(2);
    volume
        .prepare(&other, rules(ChangedImage::Refuse, true))
        .unwrap();
    assert_eq!(
        volume.prepare(&other, STRICT).unwrap().outcome,
        RootOutcome::Unchanged
    );
}

#[test]
fn zeros_are_not_written_to_a_fresh_volume_but_replace_what_was_there() {
    // Fails if a thin volume is filled with zeros, or if bytes of an older disk shine through the holes of an image.
    let (fresh, used, image) = (
        Volume::empty(),
        Volume::new(vec![0xaa; VOLUME]),
        Image::new(1),
    );
    fresh.prepare(&image, STRICT).unwrap();
    assert!(fresh.disk() == image.bytes);
    assert!(
        fresh.bytes_written.get() < DISK / 3,
        "{}",
        fresh.bytes_written.get()
    );
    used.prepare(&image, rules(ChangedImage::Refuse, true))
        .unwrap();
    assert!(used.disk() == image.bytes);
}

/// Loses power after every number of operations in turn, and checks what the next start makes of it.
fn lose_power(
    before: &[u8],
    image: &Image,
    old: Option<&Image>,
    allowed: RootRules,
    luck: u64,
) -> usize {
    for operations in 0.. {
        let volume = Volume::new(before.to_vec());
        volume.left.set(operations);
        let done = volume.prepare(image, allowed).is_ok();
        let after = volume.after_power_loss(luck.wrapping_add(u64::try_from(operations).unwrap()));
        // Whoever asks for either image gets all of it, or a copy that is made now; never a part.
        for asked in [Some(image), old].into_iter().flatten() {
            let again = Volume::new(after.bytes());
            let found = again.prepare(asked, allowed).unwrap();
            assert_eq!(found.digest, asked.digest);
            assert!(
                again.disk() == asked.bytes,
                "after {operations} operations: {:?}",
                found.outcome
            );
        }
        if done {
            assert_eq!(
                after.prepare(image, STRICT).unwrap().outcome,
                RootOutcome::Unchanged
            );
            return operations;
        }
    }
    unreachable!("a copy ends")
}

#[test]
fn a_power_loss_after_any_operation_never_leaves_a_half_image_for_a_whole_one() {
    // Fails (Virtlet's defect) if a header says ready before the image is durable, or if the next start cannot go on.
    let (one, two) = (Image::new(1), Image::new(2));
    let ready = Volume::empty();
    ready.prepare(&one, STRICT).unwrap();
    for luck in 0..3 {
        let fresh = lose_power(&vec![0; VOLUME], &one, None, STRICT, luck);
        let replace = rules(ChangedImage::Replace, false);
        let replaced = lose_power(&ready.bytes(), &two, Some(&one), replace, luck);
        let foreign = vec![0xaa; VOLUME];
        let over = lose_power(
            &foreign,
            &one,
            None,
            rules(ChangedImage::Refuse, true),
            luck,
        );
        assert!(
            fresh >= 8 && replaced >= 8 && over >= 8,
            "{fresh} {replaced} {over}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    // Fails if a header does not read back, or a flipped bit goes unnoticed.
    #[test]
    fn a_header_reads_back_and_every_flipped_bit_shows(digest in any::<[u8; 32]>(), generation in any::<u64>(), ready in any::<bool>(), bit in 0usize..4096) {
        let header = RootHeader {
            digest: ImageDigest::new(digest),
            state: if ready { RootState::Ready } else { RootState::Writing },
            generation,
            data_offset: DATA_OFFSET,
            image_size: Bytes::GIB,
            uuid: Uuid::from_u128(u128::from(generation) << 7),
        };
        let mut sector = header.to_sector();
        prop_assert_eq!(Sector::read(&sector), Sector::Ours(header));
        sector[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(!matches!(Sector::read(&sector), Sector::Ours(_)));
    }

    // Fails if any first sector makes the look panic, or leads to a write that was not allowed.
    #[test]
    fn any_beginning_of_a_volume_has_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..600), with_magic in any::<bool>()) {
        let mut before = if with_magic { virtlet(2, &ImageDigest::new([3; 32])) } else { vec![0; VOLUME] };
        let from = if with_magic { 10 } else { 0 };
        before[from..from + bytes.len()].copy_from_slice(&bytes);
        let volume = Volume::new(before.clone());
        if volume.prepare(&Image::new(1), STRICT).is_err() {
            prop_assert!(volume.bytes() == before);
        }
    }
}
