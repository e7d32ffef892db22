//! The authority of the embedded home, in a file.

use std::path::Path;
use std::time::SystemTime;

use anyhow::Context;
use trellis_api::step::{self, Step};
use trellis_pki::Authority;

use super::directory;

/// Key and certificate.
const AUTHORITY: &str = "authority.pem";
/// Authorities from before.
const EARLIER: &str = "authority-earlier.pem";

/// The authority in the data directory, made if there is none, and the certificates of earlier ones.
///
/// To have another one made, move `authority.pem` to `authority-earlier.pem` and start the service again.
pub fn open(data: &Path) -> anyhow::Result<(Authority, String)> {
    let directory = directory(data);
    trellis_files::make_private_directory(&directory)
        .with_context(|| format!("{} cannot be made", directory.display()))?;
    let read = |name: &str| {
        let path = directory.join(name);
        trellis_files::read_whole(&path, |_| true)
            .with_context(|| format!("{} cannot be read", path.display()))
    };
    let earlier = read(EARLIER)?.unwrap_or_default();
    let path = directory.join(AUTHORITY);
    if let Some(text) = read(AUTHORITY)? {
        let authority = Authority::read(&text).with_context(|| {
            format!(
                "{} is no authority; restore it, or move it to {EARLIER} to have another one made",
                path.display()
            )
        })?;
        return Ok((authority, earlier));
    }
    let made = Authority::make(SystemTime::now()).context("an authority could not be made")?;
    trellis_files::replace(&path, made.text().as_bytes())
        .with_context(|| format!("{} cannot be written", path.display()))?;
    step::reached(Step::AuthorityMade);
    Ok((made, earlier))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    // Fails if a restart makes another authority, if others can read its key, or if one that was put aside is lost.
    #[test]
    fn an_authority_is_made_once_and_the_one_before_is_remembered() {
        let data = tempfile::tempdir().unwrap();
        let (first, earlier) = open(data.path()).unwrap();
        assert_eq!(earlier, "");
        let (again, _) = open(data.path()).unwrap();
        assert_eq!(first.text(), again.text());
        let path = directory(data.path()).join(AUTHORITY);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(&directory(data.path())), 0o700);
        std::fs::rename(&path, directory(data.path()).join(EARLIER)).unwrap();
        let (second, earlier) = open(data.path()).unwrap();
        assert_ne!(first.certificate(), second.certificate());
        let both = trellis_pki::trusted(&second, &earlier, SystemTime::now());
        assert!(both.contains(first.certificate()) && both.contains(second.certificate()));
        assert!(!both.contains("PRIVATE"));
        std::fs::write(&path, "x").unwrap();
        let said = format!("{:#}", open(data.path()).unwrap_err());
        assert!(said.contains("move it to authority-earlier.pem"), "{said}");
    }
}
