//! A copy from the agent's side: started, told who may reach it, and ended.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use trellis_api::{Hold, HoldReason};
use trellis_control::node::machine::ReplicaPlace;
use trellis_keeper::message::{Wanted, send};
use trellis_keeper::paths::{ProcessPaths, RunDir, copy_name};

use super::super::message::{CopyRequest, CopySettings, CopyStatus, tell_copy};
use super::keeper::becomes;
use super::{Supervisor, down, lock};

/// How long a copy may take to answer. It does not touch its disk for that.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// How long it may take from its first socket to the one on which it hears us.
const CONTROL_TIME_MAX: Duration = Duration::from_secs(2);

/// Where a copy can be reached.
pub struct Reached {
    /// On this machine.
    pub address: String,
    /// From other nodes.
    pub links: CopyStatus,
}

impl Supervisor {
    /// Starts the process of a copy unless it runs, and returns where it can be reached.
    pub fn serve_copy(&self, place: &ReplicaPlace, volume: &str) -> Result<Reached, Hold> {
        let run = self.run_dir(volume)?;
        let name = copy_name(volume, &place.name);
        let paths = run.process(name);
        let address = format!("unix:{}", paths.socket.display());
        let directory = place.pool.join("replicas").join(&place.name);
        let mut arguments: Vec<&OsStr> = vec![
            OsStr::new("serve-replica"),
            OsStr::new("--directory"),
            directory.as_os_str(),
            OsStr::new("--volume"),
            OsStr::new(&place.volume_id),
            OsStr::new("--replica"),
            OsStr::new(&place.replica_id),
            OsStr::new("--listen"),
            OsStr::new(&address),
            OsStr::new("--lock"),
            paths.lock.as_os_str(),
        ];
        if let Some(pool) = &place.pool_id {
            arguments.extend([OsStr::new("--pool"), OsStr::new(pool)]);
        }
        if place.thick {
            arguments.push(OsStr::new("--thick"));
        }
        if !place.checksums {
            arguments.push(OsStr::new("--without-checksums"));
        }
        let key = (volume.to_owned(), name.to_owned());
        lock(&self.target_nodes).insert(key, place.target_node.clone());
        let settings = self.links.for_copy(place.target_node.as_deref());
        let is_linked = write_settings(&paths, &settings)?;
        let wanted = Wanted {
            volume: volume.to_owned(),
            name: name.to_owned(),
            arguments: arguments.into_iter().map(OsStr::to_owned).collect(),
        };
        self.ensure(wanted)
            .map_err(|hold| Hold::new(HoldReason::ReplicaUnavailable, hold.message))?;
        let links = if is_linked {
            self.link(volume, name, &paths, settings)
        } else {
            CopyStatus::default()
        };
        Ok(Reached { address, links })
    }

    /// Ends the process of a copy.
    pub fn retire_copy(&self, place: &ReplicaPlace, volume: &str) -> Result<(), Hold> {
        let run = RunDir::of(&self.run, volume);
        let name = copy_name(volume, &place.name);
        let paths = run.process(name);
        self.dismiss(volume, name)?;
        self.end(volume, name, &paths)?;
        lock(&self.target_nodes).remove(&(volume.to_owned(), name.to_owned()));
        let files = [&paths.socket, &paths.lock, &paths.log];
        let sockets = [&paths.control, &paths.deaf_control];
        let of_links = [&paths.settings, &paths.link].into_iter().chain(sockets);
        for file in files.into_iter().chain(of_links) {
            let _ = std::fs::remove_file(file);
        }
        // The last one leaves an empty directory.
        let _ = std::fs::remove_dir(run.path());
        Ok(())
    }

    /// Sets the nodes that there are. Copies let go at once of those that are gone.
    pub fn know_nodes(&self, nodes: BTreeSet<String>) {
        if !self.links.know(nodes) {
            return;
        }
        let copies = lock(&self.target_nodes).clone();
        for ((volume, name), target_node) in copies {
            let paths = RunDir::of(&self.run, &volume).process(&name);
            let settings = self.links.for_copy(target_node.as_deref());
            match write_settings(&paths, &settings) {
                Ok(true) => drop(self.link(&volume, &name, &paths, settings)),
                Ok(false) => {}
                Err(hold) => tracing::warn!(volume, "{}", hold.message),
            }
        }
    }

    /// Tells a copy about other nodes, and listens to what it has to say about them.
    fn link(
        &self,
        volume: &str,
        name: &str,
        paths: &ProcessPaths,
        settings: CopySettings,
    ) -> CopyStatus {
        // It listens for targets before it listens for us.
        becomes(|| paths.control.exists(), || false, CONTROL_TIME_MAX);
        let told = tell_copy(&paths.control, settings, ANSWER_TIME_MAX);
        let told = told.and_then(|status| {
            let source = (volume.to_owned(), name.to_owned());
            if let Some(watch) = self.watch.get().filter(|watch| !watch.has(&source)) {
                let stream = UnixStream::connect(&paths.control)?;
                send(&stream, &CopyRequest::Watch, &[])?;
                watch.add(source, stream)?;
            }
            Ok(status)
        });
        told.unwrap_or_else(|error| {
            // One of an earlier release cannot be told until it is started again.
            let message = format!("The copy cannot be told about other nodes: {error}.");
            CopyStatus {
                link: None,
                hold: Some(Hold::new(HoldReason::LinkMissing, message)),
            }
        })
    }
}

/// Writes what the copy starts with: the keeper starts it without asking. Answers whether it has or had links at all.
fn write_settings(paths: &ProcessPaths, settings: &CopySettings) -> Result<bool, Hold> {
    if settings.link.is_none() && !paths.settings.exists() {
        return Ok(false);
    }
    let path = &paths.settings;
    let write = || trellis_files::ensure(path, &serde_json::to_vec(settings)?);
    let written = write();
    written.map_err(|error| down(format!("{} cannot be written: {error}.", path.display())))?;
    Ok(true)
}
