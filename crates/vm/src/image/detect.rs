//! What a file is: a qcow2 image, or the bytes of a disk.
//!
//! Whatever is not qcow2 counts as raw, so what is certainly neither is refused by name. A server that answers with a web
//! page or an archive would otherwise give a VM that does not start, without a reason.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use trellis_api::Bytes;

use super::{ImageError, ImageFormat, path_error};
use crate::medium::BytesAt;
use crate::qcow2::{MAGIC, Qcow2Header};

const SECTOR: Bytes = Bytes::new(512);

/// What files begin with that are no disks.
const OTHERS: &[(usize, &[u8], &str)] = &[
    (0, b"\x1f\x8b", "compressed by gzip"),
    (0, b"\xfd7zXZ\0", "compressed by xz"),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (0, b"BZh", "compressed by bzip2"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"KDMV", "a VMDK image"),
    (0, b"# Disk DescriptorFile", "a VMDK description"),
    (0, b"vhdxfile", "a VHDX image"),
    (0, b"conectix", "a VHD image"),
    (64, b"\x7f\x10\xda\xbe", "a VDI image"),
    (0, b"QED\0", "a QED image"),
    (0, b"\x7fELF", "a program"),
];
const HEAD_BYTES: usize = 512;

/// The format of an image and the size of the disk in it.
pub(super) fn detect(
    file: &File,
    path: &Path,
    reference: &str,
) -> Result<(ImageFormat, Bytes), ImageError> {
    let reference = || reference.to_owned();
    let mut head = [0; HEAD_BYTES];
    let found = file
        .read(&mut head, 0)
        .map_err(|error| path_error(path, error))?;
    let head = &head[..found];
    if head.starts_with(&MAGIC) {
        let header = Qcow2Header::read(file).map_err(|error| ImageError::Qcow2 {
            reference: reference(),
            source: Arc::new(error),
        })?;
        return Ok((ImageFormat::Qcow2, header.virtual_size));
    }
    let not_a_disk = |what| ImageError::NotADisk {
        reference: reference(),
        what,
    };
    if head.is_empty() {
        return Err(not_a_disk("empty"));
    }
    let text = String::from_utf8_lossy(head)
        .trim_start()
        .to_ascii_lowercase();
    if text.starts_with("<!doctype html") || text.starts_with("<html") || text.starts_with("<?xml")
    {
        return Err(not_a_disk("a web page"));
    }
    let other = OTHERS
        .iter()
        .find(|(at, magic, _)| head.get(*at..).is_some_and(|rest| rest.starts_with(magic)));
    if let Some((_, _, what)) = other {
        return Err(not_a_disk(what));
    }
    let bytes = file.size().map_err(|error| path_error(path, error))?;
    let size = Bytes::new(bytes).checked_next_multiple_of(SECTOR);
    Ok((
        ImageFormat::Raw,
        size.ok_or_else(|| not_a_disk("too large"))?,
    ))
}
