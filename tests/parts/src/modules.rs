//! Which kernel modules a module needs, as the modules themselves say.
//!
//! An unpacked kernel package has no `modules.dep`: that is made at installation. Each module carries the same in a
//! text of the form `depends=a,b`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Context, Error, Result};

/// The modules of a kernel, by name. `-` and `_` are the same in a name.
pub struct Modules {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
    dir: PathBuf,
}

impl Modules {
    /// Finds the modules in a directory `lib/modules/VERSION`.
    pub fn find(dir: &Path) -> Result<Modules> {
        let list = dir.join("modules.builtin");
        let builtin = fs::read_to_string(&list).context("read", &list)?;
        let builtin = builtin
            .lines()
            .filter_map(|line| name_of(Path::new(line)))
            .collect();
        let mut files = BTreeMap::new();
        let mut to_read = vec![dir.to_owned()];
        while let Some(next) = to_read.pop() {
            for entry in fs::read_dir(&next).context("read", &next)? {
                let entry = entry.context("read", &next)?;
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    to_read.push(entry.path());
                } else if let Some(name) = name_of(&entry.path()) {
                    files.insert(name, entry.path());
                }
            }
        }
        Ok(Modules {
            files,
            builtin,
            dir: dir.to_owned(),
        })
    }

    /// The files of the named modules and of all that they need, each after what it needs.
    pub fn with_needed(&self, names: &[&str]) -> Result<Vec<(String, PathBuf)>> {
        let mut ordered = Vec::new();
        let mut seen = BTreeSet::new();
        for name in names {
            self.add(&name.replace('-', "_"), &mut seen, &mut ordered)?;
        }
        Ok(ordered)
    }

    fn add(
        &self,
        name: &str,
        seen: &mut BTreeSet<String>,
        ordered: &mut Vec<(String, PathBuf)>,
    ) -> Result<()> {
        if self.builtin.contains(name) || !seen.insert(name.to_owned()) {
            return Ok(());
        }
        let file = self.files.get(name).ok_or_else(|| Error::Incomplete {
            path: self.dir.clone(),
            what: format!("module {name}"),
        })?;
        let content = fs::read(file).context("read", file)?;
        for needed in needed_by(&content) {
            self.add(&needed, seen, ordered)?;
        }
        ordered.push((name.to_owned(), file.clone()));
        Ok(())
    }
}

/// The name of a module by its path.
fn name_of(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?.strip_suffix(".ko")?;
    Some(name.replace('-', "_"))
}

/// What stands behind `depends=` in a module.
fn needed_by(content: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = content.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = &content[at + KEY.len()..];
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(0);
    String::from_utf8_lossy(&value[..end])
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn modules(dir: &Path, files: &[(&str, &str)]) -> Modules {
        fs::create_dir(dir.join("kernel")).unwrap();
        fs::write(dir.join("modules.builtin"), "kernel/lib/crc-one.ko\n").unwrap();
        for (name, needed) in files {
            let content = format!("ELF\0license=GPL\0depends={needed}\0name={name}\0");
            fs::write(dir.join(format!("kernel/{name}.ko")), content).unwrap();
        }
        Modules::find(dir).unwrap()
    }

    #[test]
    fn a_module_comes_after_what_it_needs_and_only_once() {
        // Fails if a module would be loaded before a module whose symbols it uses, or twice.
        let dir = tempfile::tempdir().unwrap();
        let files = [
            ("top", "mid-dle,low,crc_one"),
            ("mid-dle", "low"),
            ("low", ""),
            ("other", ""),
        ];
        let found = modules(dir.path(), &files)
            .with_needed(&["top", "low"])
            .unwrap();
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["low", "mid_dle", "top"]);
    }

    #[test]
    fn a_module_that_the_kernel_does_not_have_is_named() {
        // Fails if a missing module is passed over and noticed only in the guest.
        let dir = tempfile::tempdir().unwrap();
        let error = modules(dir.path(), &[("top", "gone")])
            .with_needed(&["top"])
            .unwrap_err();
        assert!(error.to_string().contains("module gone"), "{error}");
    }
}
