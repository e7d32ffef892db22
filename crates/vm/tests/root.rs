//! Persistent roots on real files and a real block device, with processes that die.
#![allow(clippy::unwrap_used, missing_docs)]

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Signal, getpid, kill_process};
use trellis_api::step::{self, Step};

use trellis_vm::image::ImageFormat;
use trellis_vm::root::{
    ChangedImage, DATA_OFFSET, PreparedRoot, RootError, RootImage, RootOutcome, RootRules, prepare,
};
use trellis_vm::{ImageDigest, medium::BytesAt};

const DISK_BYTES: u64 = 24 << 20;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A directory with a compressed qcow2 image and the disk that is in it.
struct Bench {
    directory: tempfile::TempDir,
    disk: Vec<u8>,
}

impl Bench {
    fn new() -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let mut disk = vec![0; usize::try_from(DISK_BYTES).unwrap()];
        for index in (0..5000).chain(3 << 20..4 << 20) {
            disk[index] = u8::try_from(index % 251).unwrap();
        }
        let bench = Bench { directory, disk };
        std::fs::write(bench.path("disk"), &bench.disk).unwrap();
        let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2"];
        let output = Command::new("qemu-img")
            .args(convert)
            .arg(bench.path("disk"))
            .arg(bench.path("image"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn volume(&self, bytes: u64) -> PathBuf {
        let path = self.path("volume");
        File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }
}

fn boot(volume: &Path, image: &Path, rules: RootRules) -> Result<PreparedRoot, RootError> {
    let volume = File::options().read(true).write(true).open(volume).unwrap();
    let image = File::open(image).unwrap();
    let root = RootImage {
        digest: ImageDigest::new([5; 32]),
        file: &image,
        format: ImageFormat::Qcow2,
    };
    prepare(&volume, &root, rules, &mut |_| {})
}

fn disk_on(volume: &Path) -> Vec<u8> {
    let file = File::open(volume).unwrap();
    let mut bytes = vec![0; usize::try_from(DISK_BYTES).unwrap()];
    file.read_whole(&mut bytes, DATA_OFFSET.get()).unwrap();
    bytes
}

#[test]
fn a_compressed_image_lands_on_a_sparse_file_as_sparse_as_it_was() {
    // Fails if the copy differs from what was in the image, or takes more space than its data.
    let bench = Bench::new();
    let volume = bench.volume(DISK_BYTES + (2 << 20));
    let root = boot(&volume, &bench.path("image"), RootRules::default()).unwrap();
    assert_eq!(root.outcome, RootOutcome::Written);
    assert!(disk_on(&volume) == bench.disk);
    let taken = std::fs::metadata(&volume).unwrap().blocks() * 512;
    println!("{taken} bytes taken for 1 MiB and 5000 bytes of data on a disk of {DISK_BYTES}");
    assert!(taken < 4 << 20, "{taken}");
}

/// A loop device that goes with the test.
struct Loop(PathBuf);

impl Loop {
    fn on(file: &Path) -> Loop {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        Loop(String::from_utf8(output.stdout).unwrap().trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
    }
}

#[test]
fn a_block_device_has_its_size_and_its_filesystem_is_not_overwritten() {
    // Fails if the size of a device is read as zero, if mkfs's work is not seen, or if a copy does not reach the device.
    let bench = Bench::new();
    let file = bench.volume(DISK_BYTES + (2 << 20));
    let device = Loop::on(&file);
    let made = Command::new("mkfs.ext4")
        .args(["-q", text(&device.0)])
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(made.success());
    let refused = boot(&device.0, &bench.path("image"), RootRules::default()).unwrap_err();
    assert!(
        refused.to_string().contains("an ext filesystem"),
        "{refused}"
    );
    let allowed = RootRules {
        changed_image: ChangedImage::Refuse,
        overwrite_foreign: true,
    };
    boot(&device.0, &bench.path("image"), allowed).unwrap();
    assert!(disk_on(&device.0) == bench.disk);
    let again = boot(&device.0, &bench.path("image"), RootRules::default()).unwrap();
    assert_eq!(again.outcome, RootOutcome::Unchanged);
}

const STEP: &str = "TRELLIS_TEST_STEP";
const DIRECTORY: &str = "TRELLIS_TEST_DIRECTORY";

fn is_of_roots(step: &Step) -> bool {
    matches!(step, Step::RootMarked | Step::RootCopied | Step::RootReady)
}

/// What the process that is to die does.
fn die(step: &str) {
    assert!(Step::from_name(step).is_some());
    step::install_hook(|reached| {
        if std::env::var(STEP).is_ok_and(|wanted| wanted == reached.name()) {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
    });
    let directory = PathBuf::from(std::env::var(DIRECTORY).unwrap());
    let _ = boot(
        &directory.join("volume"),
        &directory.join("image"),
        RootRules::default(),
    );
}

#[test]
fn a_death_at_any_step_of_a_copy_ends_in_a_whole_root() {
    // Fails if a killed copy is taken for a whole one, cannot be repeated, or if nothing reaches a step.
    if let Ok(step) = std::env::var(STEP) {
        return die(&step);
    }
    let name = "a_death_at_any_step_of_a_copy_ends_in_a_whole_root";
    for step in Step::ALL.iter().filter(|step| is_of_roots(step)) {
        let bench = Bench::new();
        let volume = bench.volume(DISK_BYTES + (2 << 20));
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(STEP, step.name())
            .env(DIRECTORY, bench.directory.path())
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(9), "nothing reaches {step:?}");
        let outcome = boot(&volume, &bench.path("image"), RootRules::default())
            .unwrap()
            .outcome;
        let expected = match step {
            Step::RootReady => RootOutcome::Unchanged,
            _ => RootOutcome::Finished,
        };
        assert_eq!(outcome, expected, "{step:?}");
        assert!(disk_on(&volume) == bench.disk, "{step:?}");
    }
}
