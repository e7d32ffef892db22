//! The initiator's sessions and their disks, as the kernel shows them in sysfs.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use super::SYSFS;
use crate::error::{Context, Result};

/// A session that is logged in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Its number, which no later session gets.
    pub id: u32,
    /// The target's name.
    pub target: String,
    /// Where it was logged in.
    pub portal: SocketAddr,
    /// Whether headers carry checksums.
    pub header_digest: bool,
    /// Whether data does.
    pub data_digest: bool,
    /// Where sysfs describes what the session has found.
    place: PathBuf,
}

/// The sessions of this machine.
pub fn sessions() -> Result<Vec<Session>> {
    sessions_in(Path::new(SYSFS))
}

fn sessions_in(sysfs: &Path) -> Result<Vec<Session>> {
    let class = sysfs.join("class/iscsi_session");
    let mut found = Vec::new();
    for name in names(&class)? {
        // What vanishes while it is looked at is gone.
        found.extend(name.strip_prefix("session").and_then(|id| {
            let place = class.join(&name).join("device");
            session(sysfs, id.parse().ok()?, place)
        }));
    }
    Ok(found)
}

fn session(sysfs: &Path, id: u32, place: PathBuf) -> Option<Session> {
    let about = sysfs.join(format!("class/iscsi_session/session{id}"));
    let connection = sysfs.join(format!("class/iscsi_connection/connection{id}:0"));
    let of_connection = |name: &str| text(&connection.join(name));
    let address: IpAddr = of_connection("persistent_address")?.parse().ok()?;
    let port = of_connection("persistent_port")?.parse().ok()?;
    Some(Session {
        id,
        target: text(&about.join("targetname"))?,
        portal: SocketAddr::new(address, port),
        header_digest: of_connection("header_digest")? == "1",
        data_digest: of_connection("data_digest")? == "1",
        place,
    })
}

impl Session {
    /// The node of the disk that is the unit of that number, once there is one.
    pub fn device(&self, unit: u64) -> Result<Option<PathBuf>> {
        let units = self.units()?;
        let found = units.into_iter().find(|(number, _)| *number == unit);
        Ok(found
            .map(|(_, device)| device)
            .filter(|device| device.exists()))
    }

    /// The nodes of all its disks.
    pub fn devices(&self) -> Result<Vec<PathBuf>> {
        let units = self.units()?;
        Ok(units.into_iter().map(|(_, device)| device).collect())
    }

    /// Its disks by the number of the unit: `targetH:C:T/H:C:T:UNIT/block/NAME` below the session.
    fn units(&self) -> Result<Vec<(u64, PathBuf)>> {
        let mut units = Vec::new();
        for target in names(&self.place)? {
            if !target.starts_with("target") {
                continue;
            }
            let target = self.place.join(target);
            for address in names(&target)? {
                let number = address
                    .rsplit_once(':')
                    .and_then(|(_, unit)| unit.parse().ok());
                let Some(number) = number else { continue };
                let disks = names(&target.join(&address).join("block"))?;
                let nodes = disks.into_iter().map(|name| Path::new("/dev").join(name));
                units.extend(nodes.map(|node| (number, node)));
            }
        }
        Ok(units)
    }
}

/// The names in a directory; none if it is not there.
fn names(dir: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.context("read", dir)?,
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    Ok(names.filter_map(|name| name.into_string().ok()).collect())
}

fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn sessions_and_their_units_are_found_by_number() {
        // Fails if a session is mixed up with another, or a unit with the next, or a session that is going is an error.
        let sysfs = tempfile::tempdir().unwrap();
        let class = sysfs.path().join("class");
        for (id, port) in [(3, "3260"), (11, "3261")] {
            let about = class.join(format!("iscsi_session/session{id}"));
            write(&about.join("targetname"), &format!("iqn.a:{id}\n"));
            let units = about.join("device/target2:0:0");
            for (unit, disk) in [(0, "sda"), (10, "sdb")] {
                let block = units.join(format!("2:0:0:{unit}/block/{disk}"));
                fs::create_dir_all(block).unwrap();
            }
            fs::create_dir_all(units.join("power")).unwrap();
            let connection = class.join(format!("iscsi_connection/connection{id}:0"));
            write(&connection.join("persistent_address"), "127.0.0.1\n");
            write(&connection.join("persistent_port"), port);
            write(&connection.join("header_digest"), "1\n");
            write(&connection.join("data_digest"), "0\n");
        }
        fs::create_dir_all(class.join("iscsi_session/session12")).unwrap();
        let mut found = sessions_in(sysfs.path()).unwrap();
        found.sort_by_key(|session| session.id);
        let [first, second] = found.as_slice() else {
            panic!("{found:?}")
        };
        assert_eq!((first.id, first.target.as_str()), (3, "iqn.a:3"));
        assert_eq!(second.portal, "127.0.0.1:3261".parse().unwrap());
        assert_eq!((first.header_digest, first.data_digest), (true, false));
        let mut units = first.units().unwrap();
        units.sort();
        assert_eq!(units, [(0, "/dev/sda".into()), (10, "/dev/sdb".into())]);
        assert!(sessions_in(&sysfs.path().join("none")).unwrap().is_empty());
    }
}
