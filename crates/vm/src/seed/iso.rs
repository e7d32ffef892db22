//! Writes a small ISO 9660 image with Rock Ridge and Joliet names.
//!
//! A seed is a few files in at most two directories. The crates that write such images bring hundreds of kilobytes of
//! boot records, hybrid partitions and readers; the one with both kinds of names is a release candidate. The part of the
//! format that a seed needs is this file. The same files give the same bytes: all dates are one date.
//!
//! ```text
//!   sector 0   nothing (16 sectors)
//!         16   volume descriptors: primary, Joliet, end
//!         19   path tables: primary (little, big endian), Joliet (little, big endian)
//!         23   the continuation of the root's Rock Ridge entries
//!         24   directories of the primary tree, then those of Joliet's, one sector each
//!          …   the files, which both trees share
//! ```

use super::SeedError;

/// The largest image.
pub const ISO_BYTES_MAX: usize = 64 << 20;

const SECTOR: usize = 2048;
const DESCRIPTORS_AT: u32 = 16;
const PATH_TABLES_AT: u32 = 19;
const CONTINUATION_AT: u32 = 23;
const DIRECTORIES_AT: u32 = 24;

/// The first of January 1980, in the form that directories have.
const DATE: [u8; 7] = [80, 1, 1, 0, 0, 0, 0];
const NO_DATE: &[u8; 17] = b"0000000000000000\0";

const MODE_DIRECTORY: u32 = 0o040_555;
const MODE_FILE: u32 = 0o100_444;

/// One file of the image.
#[derive(Clone, PartialEq, Eq)]
pub struct IsoFile {
    /// Its path, without a slash at its beginning.
    pub path: String,
    /// What it holds.
    pub bytes: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tree {
    /// Short names in capitals, with the real ones as Rock Ridge entries.
    Primary,
    Joliet,
}

/// A directory. The first is the root, and each comes after the one that it is in.
struct Directory {
    name: String,
    parent: usize,
}

struct Entry<'a> {
    name: &'a str,
    sector: u32,
    bytes: u32,
    is_directory: bool,
}

struct Layout<'a> {
    label: &'a str,
    files: &'a [IsoFile],
    directories: Vec<Directory>,
    /// Which directory each file is in.
    homes: Vec<usize>,
    /// Where each file begins, and where the image ends.
    places: Vec<u32>,
    end: u32,
}

/// The image with these files. The label has at most 16 characters.
pub fn write(label: &str, files: &[IsoFile]) -> Result<Vec<u8>, SeedError> {
    let layout = Layout::plan(label, files)?;
    let mut image = vec![0; usize::try_from(layout.end).unwrap_or_default() * SECTOR];
    let mut put = |sector: u32, bytes: &[u8]| {
        let start = usize::try_from(sector).unwrap_or_default() * SECTOR;
        image[start..start + bytes.len()].copy_from_slice(bytes);
    };
    put(DESCRIPTORS_AT, &layout.descriptor(Tree::Primary));
    put(DESCRIPTORS_AT + 1, &layout.descriptor(Tree::Joliet));
    put(DESCRIPTORS_AT + 2, b"\xffCD001\x01");
    for (index, tree) in [(0, Tree::Primary), (2, Tree::Joliet)] {
        put(
            PATH_TABLES_AT + index,
            &layout.path_table(tree, u32::to_le_bytes, u16::to_le_bytes),
        );
        put(
            PATH_TABLES_AT + index + 1,
            &layout.path_table(tree, u32::to_be_bytes, u16::to_be_bytes),
        );
    }
    put(CONTINUATION_AT, &extension_record());
    for tree in [Tree::Primary, Tree::Joliet] {
        for index in 0..layout.directories.len() {
            let bytes = layout.directory(tree, index);
            if bytes.len() > SECTOR {
                return Err(SeedError::TooLarge);
            }
            put(layout.directory_at(tree, index), &bytes);
        }
    }
    for (file, sector) in files.iter().zip(&layout.places) {
        put(*sector, &file.bytes);
    }
    Ok(image)
}

impl<'a> Layout<'a> {
    fn plan(label: &'a str, files: &'a [IsoFile]) -> Result<Layout<'a>, SeedError> {
        let root = Directory {
            name: String::new(),
            parent: 0,
        };
        let mut layout = Layout {
            label,
            files,
            directories: vec![root],
            homes: Vec::new(),
            places: Vec::new(),
            end: 0,
        };
        for file in files {
            let home = layout.home_of(&file.path);
            layout.homes.push(home);
        }
        let count = u32::try_from(layout.directories.len()).map_err(|_| SeedError::TooLarge)?;
        let mut next = DIRECTORIES_AT + 2 * count;
        for file in files {
            layout.places.push(next);
            let sectors = u32::try_from(file.bytes.len().div_ceil(SECTOR))
                .map_err(|_| SeedError::TooLarge)?;
            next = next.checked_add(sectors).ok_or(SeedError::TooLarge)?;
        }
        let bytes = usize::try_from(next)
            .unwrap_or(usize::MAX)
            .saturating_mul(SECTOR);
        if bytes > ISO_BYTES_MAX {
            return Err(SeedError::TooLarge);
        }
        layout.end = next;
        layout.check_names()?;
        Ok(layout)
    }

    /// The directory of a path, made if it is not there.
    fn home_of(&mut self, path: &str) -> usize {
        let mut home = 0;
        let Some((directories, _)) = path.rsplit_once('/') else {
            return home;
        };
        for name in directories.split('/') {
            let known = self
                .directories
                .iter()
                .skip(1)
                .position(|one| one.name == name && one.parent == home);
            home = known.map_or_else(
                || {
                    self.directories.push(Directory {
                        name: name.to_owned(),
                        parent: home,
                    });
                    self.directories.len() - 1
                },
                |index| index + 1,
            );
        }
        home
    }

    /// Short names are cut off, and must still differ within a directory.
    fn check_names(&self) -> Result<(), SeedError> {
        for index in 0..self.directories.len() {
            let entries = self.entries(Tree::Primary, index);
            let mut names: Vec<Vec<u8>> = entries
                .iter()
                .map(|entry| identifier(Tree::Primary, entry))
                .collect();
            names.sort_unstable();
            if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
                let name = String::from_utf8_lossy(&pair[0]).into_owned();
                return Err(SeedError::SameName { name });
            }
        }
        Ok(())
    }

    fn directory_at(&self, tree: Tree, index: usize) -> u32 {
        let skipped = if tree == Tree::Joliet {
            self.directories.len()
        } else {
            0
        };
        DIRECTORIES_AT + u32::try_from(skipped + index).unwrap_or_default()
    }

    /// What is in a directory, in the order that its tree wants.
    fn entries(&self, tree: Tree, home: usize) -> Vec<Entry<'_>> {
        let below = self.directories.iter().enumerate().skip(1);
        let below = below
            .filter(|(_, one)| one.parent == home)
            .map(|(index, one)| Entry {
                name: &one.name,
                sector: self.directory_at(tree, index),
                bytes: u32::try_from(SECTOR).unwrap_or_default(),
                is_directory: true,
            });
        let files = self.files.iter().zip(&self.places).zip(&self.homes);
        let files = files
            .filter(|(_, in_home)| **in_home == home)
            .map(|((file, sector), _)| Entry {
                name: file.path.rsplit('/').next().unwrap_or_default(),
                sector: *sector,
                bytes: u32::try_from(file.bytes.len()).unwrap_or_default(),
                is_directory: false,
            });
        let mut entries: Vec<Entry<'_>> = below.chain(files).collect();
        entries.sort_by_key(|entry| identifier(tree, entry));
        entries
    }

    fn directory(&self, tree: Tree, index: usize) -> Vec<u8> {
        let with_rock_ridge = tree == Tree::Primary;
        let own = self.directory_at(tree, index);
        let parent = self.directory_at(tree, self.directories[index].parent);
        let mut first = Vec::new();
        if with_rock_ridge && index == 0 {
            first.extend(b"SP\x07\x01\xbe\xef\x00");
            let length = u32::try_from(extension_record().len()).unwrap_or_default();
            first.extend(b"CE\x1c\x01");
            first.extend([both(CONTINUATION_AT), both(0), both(length)].concat());
        }
        let attributes = if with_rock_ridge {
            posix(MODE_DIRECTORY)
        } else {
            Vec::new()
        };
        first.extend(&attributes);
        let sector = u32::try_from(SECTOR).unwrap_or_default();
        let mut bytes = record(&[0], own, sector, true, &first);
        bytes.extend(record(&[1], parent, sector, true, &attributes));
        for entry in self.entries(tree, index) {
            let mut more = Vec::new();
            if with_rock_ridge {
                more = posix(if entry.is_directory {
                    MODE_DIRECTORY
                } else {
                    MODE_FILE
                });
                let length = u8::try_from(entry.name.len() + 5).unwrap_or(u8::MAX);
                more.extend([b'N', b'M', length, 1, 0]);
                more.extend(entry.name.as_bytes());
            }
            bytes.extend(record(
                &identifier(tree, &entry),
                entry.sector,
                entry.bytes,
                entry.is_directory,
                &more,
            ));
        }
        bytes
    }

    /// Directories in the order in which they were met: parents come first, and there is one path to the deepest.
    fn path_table(&self, tree: Tree, four: fn(u32) -> [u8; 4], two: fn(u16) -> [u8; 2]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (index, directory) in self.directories.iter().enumerate() {
            let name = if index == 0 {
                vec![0]
            } else {
                name_in(tree, &directory.name)
            };
            bytes.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
            bytes.push(0);
            bytes.extend(four(self.directory_at(tree, index)));
            bytes.extend(two(u16::try_from(directory.parent + 1).unwrap_or_default()));
            bytes.extend(&name);
            bytes.resize(bytes.len().next_multiple_of(2), 0);
        }
        bytes
    }

    fn descriptor(&self, tree: Tree) -> Vec<u8> {
        let is_joliet = tree == Tree::Joliet;
        let mut bytes = vec![0; SECTOR];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &[if is_joliet { 2 } else { 1 }]);
        put(1, b"CD001\x01");
        put(8, &padded(tree, "", 32));
        put(40, &padded(tree, self.label, 32));
        put(80, &both(self.end));
        if is_joliet {
            // Names have sixteen bits a character.
            put(88, b"%/E");
        }
        put(120, &both_short(1));
        put(124, &both_short(1));
        put(128, &both_short(u16::try_from(SECTOR).unwrap_or_default()));
        let table = self.path_table(tree, u32::to_le_bytes, u16::to_le_bytes);
        put(132, &both(u32::try_from(table.len()).unwrap_or_default()));
        let tables = PATH_TABLES_AT + if is_joliet { 2 } else { 0 };
        put(140, &tables.to_le_bytes());
        put(148, &(tables + 1).to_be_bytes());
        let sector = u32::try_from(SECTOR).unwrap_or_default();
        put(
            156,
            &record(&[0], self.directory_at(tree, 0), sector, true, &[]),
        );
        for (at, length) in [
            (190, 128),
            (318, 128),
            (446, 128),
            (574, 128),
            (702, 37),
            (739, 37),
            (776, 37),
        ] {
            put(at, &padded(tree, "", length));
        }
        for at in [813, 830, 847, 864] {
            put(at, NO_DATE);
        }
        put(881, &[1]);
        bytes
    }
}

/// One record of a directory: 33 bytes, the name, and what Rock Ridge adds.
fn record(name: &[u8], sector: u32, bytes: u32, is_directory: bool, more: &[u8]) -> Vec<u8> {
    let mut record = vec![0, 0];
    record.extend(both(sector));
    record.extend(both(bytes));
    record.extend(DATE);
    record.extend([if is_directory { 2 } else { 0 }, 0, 0]);
    record.extend(both_short(1));
    record.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
    record.extend(name);
    record.resize(record.len().next_multiple_of(2), 0);
    record.extend(more);
    record.resize(record.len().next_multiple_of(2), 0);
    record[0] = u8::try_from(record.len()).unwrap_or(u8::MAX);
    record
}

/// Mode, links, user and group. Everything belongs to root.
fn posix(mode: u32) -> Vec<u8> {
    let links = if mode == MODE_DIRECTORY { 2 } else { 1 };
    [
        b"PX\x24\x01".as_slice(),
        &both(mode),
        &both(links),
        &both(0),
        &both(0),
    ]
    .concat()
}

/// Says that the entries are Rock Ridge's.
fn extension_record() -> Vec<u8> {
    const NAME: &[u8] = b"RRIP_1991A";
    const ABOUT: &[u8] =
        b"THE ROCK RIDGE INTERCHANGE PROTOCOL PROVIDES SUPPORT FOR POSIX FILE SYSTEM SEMANTICS";
    const SOURCE: &[u8] = b"PLEASE CONTACT DISC PUBLISHER FOR SPECIFICATION SOURCE";
    let length = |text: &[u8]| u8::try_from(text.len()).unwrap_or(u8::MAX);
    let whole = 8 + length(NAME) + length(ABOUT) + length(SOURCE);
    let head = [
        b'E',
        b'R',
        whole,
        1,
        length(NAME),
        length(ABOUT),
        length(SOURCE),
        1,
    ];
    [&head, NAME, ABOUT, SOURCE].concat()
}

fn identifier(tree: Tree, entry: &Entry<'_>) -> Vec<u8> {
    if entry.is_directory {
        return name_in(tree, entry.name);
    }
    match tree {
        // Without a version, as the usual programs leave it out.
        Tree::Joliet => wide(entry.name),
        Tree::Primary => {
            let (stem, extension) = entry.name.rsplit_once('.').unwrap_or((entry.name, ""));
            format!("{}.{};1", short(stem, 8), short(extension, 3)).into_bytes()
        }
    }
}

fn name_in(tree: Tree, name: &str) -> Vec<u8> {
    match tree {
        Tree::Joliet => wide(name),
        Tree::Primary => short(name, 8).into_bytes(),
    }
}

/// Capitals, digits and underscores alone.
fn short(name: &str, max: usize) -> String {
    let letters = name.chars().take(max).map(|letter| {
        if letter.is_ascii_alphanumeric() {
            letter.to_ascii_uppercase()
        } else {
            '_'
        }
    });
    letters.collect()
}

fn wide(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_be_bytes).collect()
}

fn padded(tree: Tree, text: &str, length: usize) -> Vec<u8> {
    let mut bytes = match tree {
        Tree::Primary => text.as_bytes().to_vec(),
        Tree::Joliet => wide(text),
    };
    bytes.truncate(length);
    let space: &[u8] = if tree == Tree::Joliet {
        &[0, b' ']
    } else {
        b" "
    };
    while bytes.len() + space.len() <= length {
        bytes.extend(space);
    }
    bytes.resize(length, 0);
    bytes
}

/// Little-endian, then big-endian.
fn both(number: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    bytes[4..].copy_from_slice(&number.to_be_bytes());
    bytes
}

fn both_short(number: u16) -> [u8; 4] {
    let mut bytes = [0; 4];
    bytes[..2].copy_from_slice(&number.to_le_bytes());
    bytes[2..].copy_from_slice(&number.to_be_bytes());
    bytes
}
