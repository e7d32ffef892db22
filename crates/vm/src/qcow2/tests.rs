#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::prelude::*;

use super::*;

/// A directory with a raw disk of some data, holes, and data that does not compress.
struct Bench {
    directory: tempfile::TempDir,
    bytes: Vec<u8>,
}

const DISK_BYTES: usize = (37 << 16) + 512 * 7;

impl Bench {
    fn new() -> Bench {
        static BYTES: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        let directory = tempfile::tempdir().unwrap();
        let bytes = BYTES.get_or_init(disk).clone();
        std::fs::write(directory.path().join("raw"), &bytes).unwrap();
        Bench { directory, bytes }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn make(&self, name: &str, options: &[&str]) -> File {
        let image = self.path(name);
        let convert = ["convert", "-q", "-f", "raw", "-O", "qcow2"];
        qemu_img(
            &[
                &convert[..],
                options,
                &[text(&self.path("raw")), text(&image)],
            ]
            .concat(),
        );
        File::open(image).unwrap()
    }
}

fn disk() -> Vec<u8> {
    let mut bytes = vec![0; DISK_BYTES];
    let mut state = 88_172_645_463_325_252u64;
    for (index, byte) in bytes.iter_mut().enumerate() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = match index >> 16 {
            // Text, zeros, noise, and noise of two symbols.
            0 | 7 | 35 => b'a' + u8::try_from(index % 23).unwrap(),
            2 | 11 => state.to_le_bytes()[0],
            5 => state.to_le_bytes()[0] & 1,
            37 => 7,
            _ => 0,
        };
    }
    bytes
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn qemu_img(arguments: &[&str]) {
    let output = Command::new("qemu-img").args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
}

fn read_all(image: &dyn BytesAt) -> Result<Vec<u8>, Qcow2Error> {
    let mut image = Qcow2Image::open(image)?;
    let size = image.virtual_size().get();
    let mut bytes = Vec::new();
    while u64::try_from(bytes.len()).unwrap() < size {
        match image.run_at(u64::try_from(bytes.len()).unwrap())? {
            Run::Data(data) => bytes.extend_from_slice(data),
            Run::Zeros(count) => bytes.resize(bytes.len() + usize::try_from(count).unwrap(), 0),
        }
    }
    Ok(bytes)
}

#[test]
fn every_kind_of_cluster_reads_as_qemu_wrote_it() {
    // Fails if a cluster of any kind, size or compression differs from the disk that qemu-img was given.
    let bench = Bench::new();
    let kinds: &[&[&str]] = &[
        &[],
        &["-o", "compat=0.10"],
        &["-o", "cluster_size=512"],
        &["-o", "cluster_size=2M"],
        &["-o", "preallocation=metadata"],
        &["-o", "lazy_refcounts=on"],
        &["-o", "extended_l2=on"],
        &["-o", "extended_l2=on,cluster_size=16k"],
        &["-c"],
        &["-c", "-o", "compat=0.10"],
        &["-c", "-o", "cluster_size=512"],
        &["-c", "-o", "cluster_size=2M"],
        &["-c", "-o", "compression_type=zstd"],
        &["-c", "-o", "compression_type=zstd,cluster_size=2M"],
        &["-c", "-o", "extended_l2=on"],
    ];
    for options in kinds {
        let image = bench.make("image", options);
        assert!(read_all(&image).unwrap() == bench.bytes, "{options:?}");
    }
}

#[test]
fn parts_of_clusters_and_written_zeros_read_as_qemu_wrote_them() {
    // Fails if a subcluster that was never written shows the bytes of its neighbours, or discarded bytes come back.
    let bench = Bench::new();
    let image = bench.path("parts");
    let options = "extended_l2=on,cluster_size=64k";
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        options,
        text(&image),
        "4M",
    ]);
    let commands = [
        "write -P 17 6k 2k",
        "write -P 18 130k 3k",
        "write -z 131k 1k",
        "write -P 19 1M 64k",
        "discard 1M 64k",
    ];
    for command in commands {
        let output = Command::new("qemu-io")
            .args(["-f", "qcow2", "-c", command, text(&image)])
            .output()
            .unwrap();
        assert!(output.status.success(), "{command}: {output:?}");
    }
    let raw = bench.path("parts.raw");
    qemu_img(&[
        "convert",
        "-f",
        "qcow2",
        "-O",
        "raw",
        text(&image),
        text(&raw),
    ]);
    let found = read_all(&File::open(&image).unwrap()).unwrap();
    assert!(found == std::fs::read(raw).unwrap());
    let at = |kib: usize| found[kib << 10];
    assert_eq!(
        [at(6), at(130), at(131), at(132), at(133)],
        [17, 18, 0, 18, 0]
    );
}

#[test]
fn an_image_that_refers_to_anything_outside_itself_is_refused() {
    // Fails if a stranger's image can make this machine open a file of its own.
    let bench = Bench::new();
    let _base = bench.make("base", &[]);
    let base = bench.path("base");
    let create = |name: &str, options: &[&str]| {
        let image = bench.path(name);
        qemu_img(
            &[
                &["create", "-q", "-f", "qcow2"],
                options,
                &[text(&image), "1M"],
            ]
            .concat(),
        );
        Qcow2Header::read(&File::open(image).unwrap())
    };
    let backing = create("backing", &["-b", text(&base), "-F", "qcow2"]);
    assert!(
        matches!(backing, Err(Qcow2Error::BackingFile)),
        "{backing:?}"
    );
    let data = format!("data_file={}", text(&bench.path("data")));
    let data = create("external", &["-o", &data]);
    assert!(matches!(data, Err(Qcow2Error::DataFile)), "{data:?}");
    let secret = [
        "--object",
        "secret,id=key,data=hush",
        "-o",
        "encrypt.format=luks,encrypt.key-secret=key",
    ];
    let encrypted = create("encrypted", &secret);
    assert!(
        matches!(encrypted, Err(Qcow2Error::Encrypted)),
        "{encrypted:?}"
    );
}

/// A small image of our own making, to be damaged.
fn small() -> Vec<u8> {
    let bench = Bench::new();
    let image = bench.path("small");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=4k",
        text(&image),
        "256k",
    ]);
    let commands = ["-c", "write -P 5 0 8k", "-c", "write -P 6 100k 4k"];
    let output = Command::new("qemu-io")
        .args(["-f", "qcow2"])
        .args(commands)
        .arg(&image)
        .output()
        .unwrap();
    assert!(output.status.success());
    std::fs::read(image).unwrap()
}

fn put(image: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut changed = image.to_vec();
    changed[at..at + bytes.len()].copy_from_slice(bytes);
    changed
}

#[test]
fn a_header_that_lies_is_refused_by_name() {
    // Fails if a table outside the file, an absurd size or an unknown feature is believed.
    let image = small();
    assert!(Qcow2Header::read(&image).is_ok());
    let refused = |at: usize, bytes: &[u8]| Qcow2Header::read(&put(&image, at, bytes)).unwrap_err();
    let lies = |at: usize, bytes: &[u8]| matches!(refused(at, bytes), Qcow2Error::Lies { .. });
    assert!(lies(20, &8u32.to_be_bytes()), "clusters of 256 bytes");
    assert!(lies(20, &40u32.to_be_bytes()), "clusters of a tebibyte");
    assert!(lies(36, &u32::MAX.to_be_bytes()), "a first table of 32 GiB");
    assert!(lies(36, &0u32.to_be_bytes()), "no first table");
    assert!(
        lies(40, &(1u64 << 60).to_be_bytes()),
        "a first table far away"
    );
    assert!(
        lies(40, &u64::MAX.to_be_bytes()),
        "an offset that overflows"
    );
    assert!(lies(40, &0u64.to_be_bytes()), "a first table on the header");
    assert!(lies(48, &(1u64 << 60).to_be_bytes()), "counts far away");
    assert!(lies(56, &u32::MAX.to_be_bytes()), "counts without end");
    assert!(lies(100, &u32::MAX.to_be_bytes()), "a header without end");
    assert!(
        lies(100, &8u32.to_be_bytes()),
        "a header shorter than itself"
    );
    assert!(matches!(
        refused(24, &u64::MAX.to_be_bytes()),
        Qcow2Error::Size { .. }
    ));
    assert!(matches!(
        refused(24, &0u64.to_be_bytes()),
        Qcow2Error::Size { .. }
    ));
    assert!(matches!(
        refused(4, &4u32.to_be_bytes()),
        Qcow2Error::Version { version: 4 }
    ));
    assert!(matches!(
        refused(72, &(1u64 << 63).to_be_bytes()),
        Qcow2Error::UnknownFeatures { .. }
    ));
    assert!(matches!(
        refused(72, &2u64.to_be_bytes()),
        Qcow2Error::Corrupt
    ));
    assert!(matches!(
        refused(72, &4u64.to_be_bytes()),
        Qcow2Error::DataFile
    ));
    assert!(matches!(
        refused(32, &1u32.to_be_bytes()),
        Qcow2Error::Encrypted
    ));
    assert!(matches!(
        refused(8, &1u64.to_be_bytes()),
        Qcow2Error::BackingFile
    ));
    assert!(matches!(refused(0, b"QED\0"), Qcow2Error::NotQcow2));
    let named = refused(112, &extension::DATA_FILE_NAME.to_be_bytes());
    assert!(matches!(named, Qcow2Error::DataFile), "{named:?}");
    for cut in [0, 3, 50, 71, 103] {
        assert!(Qcow2Header::read(&image[..cut].to_vec()).is_err(), "{cut}");
    }
}

#[test]
fn the_dirty_bit_does_not_keep_an_image_from_being_read() {
    // Fails if an image whose counts may be stale, and which reads well, is refused.
    let image = small();
    let dirty = put(&image, 72, &1u64.to_be_bytes());
    assert_eq!(read_all(&dirty).unwrap(), read_all(&image).unwrap());
}

#[test]
fn a_table_that_points_nowhere_is_an_error_and_not_zeros() {
    // Fails if damage is copied onto a root disk as if it were data.
    let image = small();
    let header = Qcow2Header::read(&image).unwrap();
    let l1 = usize::try_from(header.l1_offset).unwrap();
    let far = put(&image, l1, &(1u64 << 40).to_be_bytes());
    assert!(matches!(read_all(&far), Err(Qcow2Error::Damaged { .. })));
    let mut entry = [0; 8];
    image.read(&mut entry, header.l1_offset).unwrap();
    let l2 = usize::try_from(u64::from_be_bytes(entry) & 0x00ff_ffff_ffff_fe00).unwrap();
    for word in [1u64 << 40, 0x200, 1 << 62, (1 << 62) | (1 << 30), !1] {
        let found = read_all(&put(&image, l2, &word.to_be_bytes()));
        assert!(
            matches!(found, Err(Qcow2Error::Damaged { .. })),
            "{word:#x}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    // Fails if any change of an image makes the reader panic, hang, or answer with another length than the header says.
    #[test]
    fn damaged_images_are_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        in_header in any::<bool>(),
        cut in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        static IMAGE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        let mut image = IMAGE.get_or_init(small).clone();
        let within = if in_header { 128 } else { image.len() };
        for (index, byte) in changes {
            let at = index.index(within);
            image[at] = byte;
        }
        if is_cut {
            image.truncate(cut.index(image.len()));
        }
        if let Ok(mut open) = Qcow2Image::open(&image) {
            let size = open.virtual_size().get();
            let mut at = 0;
            // A disk may say that it is huge; a few hundred runs show that every answer goes on.
            for _ in 0..300 {
                if at == size {
                    break;
                }
                match open.run_at(at) {
                    Ok(Run::Data(bytes)) => at += u64::try_from(bytes.len()).unwrap(),
                    Ok(Run::Zeros(count)) => at += count,
                    Err(_) => break,
                }
                prop_assert!(at <= size);
            }
        }
    }

    // Fails if bytes that were never an image make the reader panic.
    #[test]
    fn any_bytes_after_the_magic_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..600), version in 2u8..4) {
        let mut image = MAGIC.to_vec();
        image.extend([0, 0, 0, version]);
        image.extend(bytes);
        let _ = read_all(&image);
    }
}

#[test]
fn memory_does_not_follow_what_an_image_says() {
    // Fails if the largest image that a header can describe makes the reader allocate by that size.
    let bench = Bench::new();
    let image = bench.path("huge");
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=2M",
        text(&image),
        "1024T",
    ]);
    let file = File::options().read(true).write(true).open(&image).unwrap();
    file.write_all_at(&[0xff; 3], 0x30_0000).unwrap();
    let mut open = Qcow2Image::open(&file).unwrap();
    assert_eq!(open.virtual_size(), Bytes::VOLUME_MAX);
    assert!(matches!(open.run_at(0), Ok(Run::Zeros(_))));
    let held = open.held_bytes();
    assert!(u64::try_from(held).unwrap() <= MEMORY_BYTES_MAX);
}
