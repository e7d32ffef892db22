//! `trellis down`: stops the service, and with `--all` everything else that runs or is mounted for a data directory.
//!
//! `--all` looks at everything first, and changes nothing if somebody uses a volume. Then it stops the service and
//! opens the store itself, so that no other service can start meanwhile. It finds mounts, devices and processes in the
//! kernel, not in the store, so it finds them after any crash. The store only says which pools are ours, and which
//! mounts we made.

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use kube::api::ListParams;
use kube::{Api, Client};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use trellis_api::kinds::{Attachment, Pool};
use trellis_apiserver::EmbeddedApi;
use trellis_keeper::process::has_ended;
use trellis_node::sys::mountinfo::{self, Mount};
use trellis_node::volume::{self, Carried, CarriedBy, carried, lock_holder, refuse_used_mount};

use super::measured::resolved;
use crate::cli::{Down, Global};
use crate::connect::connect;
use crate::exit::Ended;
use crate::incarnation;
use crate::output;
use crate::serve::{Outliving, Stays};

/// How long a running service may take to say what it knows, before we go on without that.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// Stops the service, or everything.
pub async fn run(global: &Global, verb: &Down) -> anyhow::Result<()> {
    let data = data_directory(&global.data)?;
    let service = running(&data.join("store.redb"))?;
    if !verb.all {
        return match service {
            Some(service) => {
                stop(service, global.patience()).await?;
                let count = Outliving::of(&data).count()?;
                let more = if count > 0 || !private_mounts(&data)?.is_empty() {
                    "; mounts, copies and targets go on (`trellis down --all` ends them)"
                } else {
                    ""
                };
                output::print(&format!("the service is stopped{more}\n"))
            }
            None => output::print(&format!("no service runs for {}\n", data.display())),
        };
    }
    require_same_mounts(service.or_else(|| Outliving::of(&data).keeper()))?;
    if service.is_some() {
        // A service that does not say what it knows is stopped first, and its store is read instead.
        let known = tokio::time::timeout(ANSWER_TIME_MAX, asked(global, &data)).await;
        if let Ok(Ok(known)) = known {
            off_the_runtime(&data, move |data| {
                Everything::look(data, &known)?.refuse_used(service)
            })
            .await?;
        }
    }
    let had_service = service.is_some();
    if let Some(service) = service {
        say(format!("stopping the service (process {service})"));
        stop(service, global.patience()).await?;
    }
    let (store, known) = own_store(&data).await?;
    let ended = off_the_runtime(&data, move |data| end_everything(data, &known)).await;
    drop(store);
    let ended = ended?;
    output::print(&if had_service || ended {
        format!(
            "nothing of {} runs any more; `trellis up` brings back what was mounted\n",
            data.display()
        )
    } else {
        format!("nothing runs for {}\n", data.display())
    })
}

/// Progress is reported before it is made, so that it shows what something waits for.
fn say(text: String) {
    output::say(&text);
}

/// Runs what may block in the kernel.
async fn off_the_runtime<T: Send + 'static>(
    data: &Path,
    act: impl FnOnce(&Path) -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let data = data.to_owned();
    let done = tokio::task::spawn_blocking(move || act(&data)).await;
    done.context("this is a bug: the work has panicked")?
}

fn data_directory(path: &Path) -> anyhow::Result<PathBuf> {
    path.canonicalize().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Ended::NotFound(format!(
            "the data directory {} does not exist; name the right one with --data",
            path.display()
        ))
        .into(),
        _ => anyhow!(error).context(format!("{} cannot be read", path.display())),
    })
}

/// The service that has the store open, if there is one.
fn running(store: &Path) -> anyhow::Result<Option<u32>> {
    let file = match File::open(store) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => {
            other.with_context(|| format!("{} cannot be opened; are you root?", store.display()))?
        }
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => return Ok(None),
        Err(Errno::WOULDBLOCK) => {}
        Err(errno) => {
            return Err(errno).with_context(|| format!("{} cannot be locked", store.display()));
        }
    }
    let Some(pid) = lock_holder(store) else {
        let text = format!(
            "{} is open in a process that cannot be seen from here, such as one in a container; run this there",
            store.display()
        );
        return Err(Ended::Refused(text).into());
    };
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    // The arguments of a process that was killed and is not gone yet cannot be read.
    if !command.is_empty() && !command.split(|byte| *byte == 0).any(|word| word == b"up") {
        let text = format!(
            "process {pid} has {} open and is no service; wait for its end",
            store.display()
        );
        return Err(Ended::Refused(text).into());
    }
    Ok(Some(pid))
}

/// Ends the service, and waits for that.
async fn stop(service: u32, limit: Duration) -> anyhow::Result<()> {
    let pid = i32::try_from(service).ok().and_then(Pid::from_raw);
    let pid = pid.context("the service has no number")?;
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(()),
        other => other.with_context(|| format!("process {service} cannot be watched"))?,
    };
    match pidfd_send_signal(&pidfd, Signal::TERM) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(errno) => {
            return Err(errno).with_context(|| {
                format!("the service (process {service}) cannot be told to stop; are you root?")
            });
        }
    }
    let ended = tokio::task::spawn_blocking(move || has_ended(&pidfd, limit)).await??;
    if ended {
        return Ok(());
    }
    let text = format!(
        "the service (process {service}) has not ended within {limit:?}; `kill -9 {service}` harms nothing that is stored, and \
         `trellis down` goes on from there"
    );
    Err(Ended::TimedOut(text).into())
}

/// Refuses if the process has mounts of its own: what it has mounted cannot be seen from here.
fn require_same_mounts(process: Option<u32>) -> anyhow::Result<()> {
    let Some(pid) = process else { return Ok(()) };
    let namespace = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/mnt")).ok();
    let (theirs, ours) = (namespace(&pid.to_string()), namespace("self"));
    if theirs.is_none() || theirs == ours {
        return Ok(());
    }
    let text = format!(
        "process {pid} has a mount namespace of its own, so that its mounts cannot be seen from here; run `nsenter --target \
         {pid} --mount trellis down --all`"
    );
    Err(Ended::Refused(text).into())
}

/// What the store says about where to look.
#[derive(Default)]
struct Known {
    /// The directories of pools.
    pools: Vec<PathBuf>,
    /// Where volumes were asked to appear.
    paths: HashSet<PathBuf>,
}

impl Known {
    async fn by(client: &Client) -> anyhow::Result<Known> {
        let all = ListParams::default();
        let pools = Api::<Pool>::all(client.clone()).list(&all).await?;
        let uses = Api::<Attachment>::all(client.clone()).list(&all).await?;
        let directory = |pool: &Pool| Path::new(&pool.spec.path).canonicalize().ok();
        Ok(Known {
            pools: pools.iter().filter_map(directory).collect(),
            paths: uses
                .iter()
                .filter_map(|each| resolved(Path::new(each.spec.consumer.path())))
                .collect(),
        })
    }
}

/// What the service of that data directory says.
async fn asked(global: &Global, data: &Path) -> anyhow::Result<Known> {
    let own = Global {
        kubeconfig: Some(data.join("kubeconfig")),
        ..global.clone()
    };
    Known::by(&connect(&own).await?.client).await
}

/// Opens the store, so that no service starts meanwhile, and reads what it says. A damaged store does not stop anything
/// from being ended, but then only what is below the data directory is found.
async fn own_store(data: &Path) -> anyhow::Result<(Option<EmbeddedApi>, Known)> {
    let path = data.join("store.redb");
    if !path.exists() {
        return Ok((None, Known::default()));
    }
    match EmbeddedApi::open(&path) {
        Ok(api) => {
            let known = Known::by(&api.client()).await?;
            Ok((Some(api), known))
        }
        Err(error @ trellis_apiserver::Error::InUse { .. }) => {
            Err(Ended::Refused(format!("{error}: a service was started meanwhile")).into())
        }
        Err(error) => {
            say(format!(
                "the store cannot be read ({error}); volumes on pools elsewhere than below {} are not looked for, and mounts \
                 elsewhere are left to you",
                data.display()
            ));
            Ok((None, Known::default()))
        }
    }
}

/// The existing private mounts.
fn private_mounts(data: &Path) -> anyhow::Result<Vec<Mount>> {
    let private = data.join("mounts");
    let mut mounts = mountinfo::read()?;
    mounts.retain(|mount| mount.mount_point.starts_with(&private));
    Ok(mounts)
}

/// Everything of a data directory that exists in the kernel.
struct Everything {
    private: PathBuf,
    paths: HashSet<PathBuf>,
    devices: Vec<Carried>,
    /// The numbers of all mounts of the machine, in the order in which they were made.
    order: Vec<u64>,
    outliving: Outliving,
}

impl Everything {
    fn look(data: &Path, known: &Known) -> anyhow::Result<Everything> {
        let outliving = Outliving::of(data);
        let targets: HashSet<String> = outliving.target_names()?.into_iter().collect();
        let replicas = known.pools.iter().map(|pool| pool.join("replicas"));
        let ours: Vec<PathBuf> = replicas
            .chain([data.join("pools"), data.join("run")])
            .collect();
        let is_our_file = |file: &Path| ours.iter().any(|directory| file.starts_with(directory));
        let private = data.join("mounts");
        let is_our_place = |place: &Path| place.starts_with(&private);
        let devices = carried(is_our_file, |name| targets.contains(name), is_our_place)?;
        let all = mountinfo::read()?.into_iter();
        Ok(Everything {
            order: all.map(|mount| mount.id).collect(),
            private,
            paths: known.paths.clone(),
            devices,
            outliving,
        })
    }

    fn is_private(&self, mount: &Mount) -> bool {
        mount.mount_point.starts_with(&self.private)
    }

    /// Whether we made that mount.
    fn is_ours(&self, mount: &Mount) -> bool {
        self.is_private(mount) || self.paths.contains(&mount.mount_point)
    }

    fn is_idle(&self) -> bool {
        self.devices.is_empty()
    }

    /// All mounts of all volumes with their devices, the latest first: one may be inside another.
    fn latest_first(&self) -> Vec<(&Carried, &Mount)> {
        let each = |device| move |mount| (device, mount);
        let all = self.devices.iter();
        let mut mounts: Vec<(&Carried, &Mount)> = all
            .flat_map(|device| device.mounts.iter().map(each(device)))
            .collect();
        let position = |id: u64| self.order.iter().position(|each| *each == id);
        mounts.sort_by_key(|(_, mount)| std::cmp::Reverse(position(mount.id)));
        mounts
    }

    /// Refuses if something of it is in use by anybody but the service.
    fn refuse_used(&self, service: Option<u32>) -> anyhow::Result<()> {
        let all = mountinfo::read()?;
        let mut used = Vec::new();
        let ids: HashSet<u64> = self
            .latest_first()
            .iter()
            .map(|(_, mount)| mount.id)
            .collect();
        for (_, mount) in self.latest_first() {
            let place = mount.mount_point.display();
            if !self.is_ours(mount) {
                used.push(format!("{place} shows the volume too, and Trellis did not mount it there; unmount it yourself"));
                continue;
            }
            let inside: Vec<&Mount> = all.iter().filter(|each| each.parent == mount.id).collect();
            let foreign = inside.iter().find(|each| !ids.contains(&each.id));
            if let Some(foreign) = foreign {
                let (what, at) = (foreign.describe(), foreign.mount_point.display());
                used.push(format!(
                    "{place} has {what} mounted inside it, at {at}; unmount that"
                ));
            } else if inside.is_empty()
                && let Err(error) = refuse_used_mount(&mount.mount_point)
            {
                used.push(error.to_string());
            }
        }
        for device in &self.devices {
            let has_filesystem = device.mounts.iter().any(|mount| self.is_private(mount));
            if !has_filesystem && let Err(error) = device.refuse_open_device(service) {
                used.push(error.to_string());
            }
        }
        if !used.is_empty() {
            let text = format!(
                "volumes are in use, and nothing was changed:\n  {}",
                used.join("\n  ")
            );
            return Err(Ended::Refused(text).into());
        }
        for device in &self.devices {
            if let CarriedBy::File(backing) = &device.by {
                self.outliving.refuse_unserved(backing).map_err(refused)?;
            }
        }
        Ok(())
    }

    /// Unmounts and detaches everything.
    fn release(&self) -> trellis_node::Result<()> {
        for (device, mount) in self.latest_first() {
            let path = &mount.mount_point;
            say(format!("unmounting {}", path.display()));
            if self.is_private(mount) {
                volume::unstage(path, Some(device.number))?;
            } else {
                volume::unpublish(path, Some(device.number))?;
            }
        }
        for device in &self.devices {
            say(format!("detaching {}", device.device.display()));
            device.detach()?;
        }
        Ok(())
    }
}

/// Whatever keeps a process is a reason to refuse if somebody can do something about it.
fn refused(stays: Stays) -> anyhow::Error {
    match stays {
        Stays::Unserved { .. } | Stays::FileInUse { .. } => {
            Ended::Refused(stays.to_string()).into()
        }
        other => other.into(),
    }
}

/// Ends everything but the service, which is not running. Returns whether there was anything.
fn end_everything(data: &Path, known: &Known) -> anyhow::Result<bool> {
    let everything = Everything::look(data, known)?;
    everything.refuse_used(None)?;
    let was_idle = everything.is_idle() && everything.outliving.count()? == 0;
    if !everything.is_idle() {
        incarnation::begin(data).context("the data directory cannot be written to")?;
    }
    everything.release().map_err(|error| match error {
        error @ trellis_node::Error::Busy { .. } => Ended::Refused(format!(
            "{error}; the service is stopped, and what was not in use is unmounted: `trellis down --all` goes on, `trellis up` \
             brings everything back"
        ))
        .into(),
        error => anyhow!(error),
    })?;
    everything.outliving.end(&mut say).map_err(refused)?;
    let left = Everything::look(data, known)?;
    let mut standing: Vec<String> = left
        .devices
        .iter()
        .map(|device| device.device.display().to_string())
        .collect();
    let below = |mount: &Mount| mount.mount_point.starts_with(data.join("run"));
    let files = mountinfo::read()?.into_iter().filter(below);
    let private = private_mounts(data)?.into_iter();
    standing.extend(
        private
            .chain(files)
            .map(|mount| mount.mount_point.display().to_string()),
    );
    anyhow::ensure!(
        standing.is_empty() && left.outliving.count()? == 0,
        "not everything could be ended; these are left: {}",
        standing.join(", ")
    );
    Ok(!was_idle)
}
