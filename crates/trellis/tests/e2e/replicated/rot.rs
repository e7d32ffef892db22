//! Bytes that change by themselves on a copy's disk, and the scrubs that find them.

use std::path::{Path, PathBuf};

use super::{end, mounted, service, target, wait_whole};
use crate::harness::{Service, checksum, write_file};

// Fails if bytes that change by themselves on one copy are served, or are not found and mended by a scrub.
#[test]
fn a_scrub_finds_and_mends_what_has_rotted_on_one_copy() {
    let service = service();
    let (_, sum, flipped) = mounted_with_rot(&service);
    let said = service.trellis(&["volume", "scrub", "data", "--wait"]);
    let numbers: Vec<u64> = said
        .split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|word| word.parse().ok())
        .collect();
    println!("{flipped} flipped: {said}");
    // The filesystem may have written some of them anew meanwhile.
    let found = said.split(" blocks did not match").next().unwrap();
    let found: u64 = found.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(found > flipped / 2 && found <= flipped, "{said}");
    assert!(
        numbers.iter().filter(|number| **number == found).count() >= 2,
        "{said}"
    );
    let shown = service.trellis(&["volume", "show", "data"]);
    assert!(
        shown.contains("last scrub") && shown.contains("ROT"),
        "{shown}"
    );
    service.wait("the claim hears of it", |service| {
        let events = service.kubectl(&["get", "events", "-o", "jsonpath={.items[*].reason}"]);
        events.contains("BlocksRotten").then_some(())
    });
    // A copy in use is left to the scrub, and the check says so.
    let pool = service.path("pool-a");
    let checked = service.trellis(&["check", "--read-data", pool.to_str().unwrap()]);
    assert!(checked.contains("in use"), "{checked}");
    service.trellis(&["umount", "data"]);
    let again = service.mount("data");
    assert_eq!(checksum(&again.join("file")), sum);
    end(&service, &again);
}

/// A mounted claim with a file, and a byte flipped in every MiB of one copy. Answers where it is mounted, the file's
/// checksum, and how many bytes were flipped.
fn mounted_with_rot(service: &Service) -> (PathBuf, u32, u64) {
    let path = mounted(service);
    let sum = write_file(&path.join("file"), 24 << 20, 7);
    wait_whole(service);
    let copies = service.objects("replicas.trellis.dev");
    let data = PathBuf::from(copies[1]["status"]["path"].as_str().unwrap());
    let flipped = flip_a_byte_in_every_mib(&data);
    assert!(flipped >= 20, "{flipped} MiB hold something");
    (path, sum, flipped)
}

/// Flips a byte in every MiB of a data file that holds something. Says how many.
fn flip_a_byte_in_every_mib(data: &Path) -> u64 {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().read(true).write(true).open(data);
    let file = file.unwrap();
    let mut flipped = 0;
    let mut bytes = vec![0; 1 << 20];
    for at in (0..file.metadata().unwrap().len()).step_by(1 << 20) {
        file.read_exact_at(&mut bytes, at).unwrap();
        if let Some(index) = bytes.iter().position(|byte| *byte != 0) {
            let place = at + u64::try_from(index).unwrap();
            file.write_all_at(&[bytes[index] ^ 0x20], place).unwrap();
            flipped += 1;
        }
    }
    flipped
}

// Fails if copies are compared only when somebody asks, though their class says how often, or what was found is not
// mended and told.
#[test]
fn a_scrub_comes_by_itself_when_its_time_has_come() {
    let service = service();
    let (path, sum, flipped) = mounted_with_rot(&service);
    assert!(target(&service)["status"]["scrub"]["finished"].is_null());
    let volume = service.object("pvc", "data")["spec"]["volumeName"].clone();
    let often = r#"{"spec":{"scrubIntervalSeconds":1}}"#;
    let volume = volume.as_str().unwrap();
    service.kubectl(&[
        "patch",
        "volumes.trellis.dev",
        volume,
        "--type=merge",
        "-p",
        often,
    ]);
    service.wait("a scrub has mended what has rotted", |service| {
        let scrub = target(service)["status"]["scrub"].clone();
        let mended = scrub["rotten"].as_object()?.values().next()?.as_u64()?;
        let is_over = scrub["finished"].is_string() && scrub["found"] == scrub["mended"];
        (is_over && mended > flipped / 2).then_some(())
    });
    let shown = service.trellis(&["volume", "show", "data"]);
    assert!(shown.contains("last scrub"), "{shown}");
    assert_eq!(checksum(&path.join("file")), sum);
    end(&service, &path);
}
