//! The process of a target: one replicated volume, as a FUSE file and over iSCSI.

mod bytewise;
mod control;
mod file;
mod keeping;
mod lun;
mod recovery;
mod scrub;
pub(super) mod status;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use k8s_openapi::jiff::Timestamp;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use trellis_api::kinds::Members;
use trellis_api::{Bytes, HoldReason};
use trellis_control::node::target_user;
use trellis_control::volume::members::who_counts;
use trellis_engine::coordinator::{Status, Takeover};
use trellis_engine::drive::{Address, Credentials, Ended, Volume, VolumeError, VolumeSettings};
use trellis_engine::proto::{Config, Lineage, ReplicaId, Term};
use trellis_iscsi::login::Chap;
use trellis_iscsi::{Access, Server, ServerConfig};
use trellis_keeper::paths::RunDir;
use trellis_keeper::process::Life;
use trellis_node::fuse;
use uuid::Uuid;

use self::bytewise::Bytewise;
use self::file::VolumeFile;
use self::keeping::Keeping;
use self::lun::{VolumeLun, VolumeMemory};
use self::recovery::Beginning;
use self::status::{
    current, held_reason, holds_everything, members, reason, redundancy_met, repairs_left, seen,
    sentence, size_of_quorum,
};
use super::message::{Answer, Settings, TargetStatus};

/// How long the volume keeps a request that it cannot serve before it says so. The FUSE file asks again. An initiator
/// is told that the target is busy, before it takes the command for lost (30 s).
const BUSY_AFTER: Duration = Duration::from_secs(10);
/// How long a growth may take before the agent gets an answer.
const GROWTH_TIME_MAX: Duration = Duration::from_secs(20);
/// The shortest time between two reports of a changed status.
const TELL_EVERY: Duration = Duration::from_millis(100);
/// How often to look who is logged in.
const SESSIONS_LOOK_EVERY: Duration = Duration::from_secs(2);
/// How long sessions have to log out.
const FAREWELL: Duration = Duration::from_secs(2);

/// `trellis serve-target`
#[derive(Args, Debug)]
pub struct ServeTarget {
    /// The run directory of the volume
    #[arg(long)]
    run: PathBuf,
    /// The socket of the keeper
    #[arg(long)]
    keeper: PathBuf,
}

/// A volume that is being served.
pub struct Target {
    /// When the volume's clock began.
    began: Timestamp,
    volume: Volume,
    bytes: Bytewise,
    settings: Mutex<Settings>,
    /// The history that it was started with.
    lineage: Lineage,
    /// A later start does not depend on the survivors of a recovery alone.
    is_begun: AtomicBool,
    /// What was last asked of the volume.
    wish: Mutex<Option<Wish>>,
    /// Held while it is decided who counts.
    adjusting: tokio::sync::Mutex<()>,
    run: RunDir,
    runtime: Handle,
    file: Mutex<Option<fuse::Server>>,
    keeping: Keeping,
    /// Where initiators find it.
    portal: Mutex<Option<Arc<Server>>>,
    /// What scrubs have found, and when.
    scrubs: scrub::Scrubs,
    /// Counts what the agent should know.
    changed: watch::Sender<u64>,
    end: watch::Sender<bool>,
}

/// What is asked of the volume: which copies should count, if that can be decided, and where the copies are.
#[derive(PartialEq)]
struct Wish {
    members: Option<Members>,
    addresses: BTreeMap<String, String>,
}

/// Serves a volume until it is told to stop, or another target has taken over.
pub async fn run(verb: &ServeTarget) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be heard")?;
    let run = RunDir::at(verb.run.clone());
    let paths = run.process("target");
    let Some(_life) = Life::begin(&paths.lock)? else {
        bail!("the volume is served already");
    };
    let text = std::fs::read(run.target_settings()).context("the settings cannot be read")?;
    let settings: Settings = serde_json::from_slice(&text).context("the settings are damaged")?;
    let beginning = Beginning::of(&settings, &run)?;
    let (config, addresses) = (config(&beginning.members)?, addresses(&settings)?);
    let id: Uuid = settings.volume_id.parse().context("no identity")?;
    let limits = [settings.fails_after, settings.asks_every, Some(BUSY_AFTER)];
    let patience = limits.into_iter().flatten().min().unwrap_or(BUSY_AFTER);
    let volume = Volume::start(VolumeSettings {
        patience,
        when_full: status::when_full(settings.when_full),
        lineage: beginning.lineage,
        takeover: beginning.takeover,
        term: Term::new(settings.term),
        credentials: credentials(&settings)?,
        ..VolumeSettings::new(id, config, addresses)
    });
    let began = Timestamp::now();
    let (end, mut ends) = watch::channel(false);
    let scrubs = scrub::Scrubs::remembered(run.scrubbed(), &settings.scrub);
    let target = Arc::new(Target {
        began,
        bytes: Bytewise::new(volume.clone()),
        volume: volume.clone(),
        keeping: Keeping::new(verb.keeper.clone(), settings.volume.clone()),
        settings: Mutex::new(settings),
        wish: Mutex::default(),
        adjusting: tokio::sync::Mutex::default(),
        lineage: beginning.lineage,
        is_begun: AtomicBool::new(beginning.takeover == Takeover::Quorum),
        run,
        runtime: Handle::current(),
        file: Mutex::default(),
        portal: Mutex::default(),
        scrubs,
        changed: watch::channel(0).0,
        end,
    });
    control::listen(target.clone(), &paths).context("the agent cannot be listened to")?;
    let serving = serve(target.clone(), id);
    let told = tell_changes(target.clone());
    tokio::spawn(scrub::run(target.clone()));
    tokio::select! {
        result = serving => result?,
        result = told => result?,
        ended = volume.ended() => return over(&target, ended),
        _ = terminate.recv() => {}
        _ = ends.wait_for(|end| *end) => {}
    }
    // The file stays for a successor, unless it was removed.
    let leaving = target.clone();
    tokio::task::spawn_blocking(move || leaving.leave_file()).await?;
    volume.stop().await;
    Ok(())
}

fn over(target: &Target, ended: Ended) -> anyhow::Result<()> {
    target.leave_file();
    match ended {
        Ended::Deposed { by } => {
            target.note_outbid(by.generation)?;
            bail!("another target has taken over: {by:?}")
        }
        Ended::Stopped => Ok(()),
    }
}

/// Shows the volume, as soon as it serves, as long as the process lives.
async fn serve(target: Arc<Target>, id: Uuid) -> anyhow::Result<()> {
    target.volume.ready().await?;
    target.serve_by_iscsi(id)?;
    let showing = target.clone();
    tokio::task::spawn_blocking(move || showing.show_file()).await??;
    target.tell();
    std::future::pending().await
}

/// Tells whoever uses the volume that it has grown, and the agent of every change.
async fn tell_changes(target: Arc<Target>) -> anyhow::Result<()> {
    let mut statuses = target.volume.watch();
    let mut troubles = target.volume.watch_troubles();
    let mut told = target.status();
    loop {
        let changed = tokio::select! {
            changed = statuses.changed() => changed,
            changed = troubles.changed() => changed,
            // Nobody else says that initiators come and go.
            () = tokio::time::sleep(SESSIONS_LOOK_EVERY) => Ok(()),
        };
        if changed.is_err() {
            break;
        }
        if let Err(error) = target.adjust_members().await {
            tracing::warn!(%error, "who counts cannot be changed; it is tried again");
        }
        let now = target.status();
        if now.served != told.served {
            let telling = target.clone();
            tokio::task::spawn_blocking(move || telling.tell_size()).await?;
        }
        // Under load something changes all the time; the agent is told only of what it would write down.
        if now != told {
            told = now;
            target.tell();
        }
        tokio::time::sleep(TELL_EVERY).await;
    }
    std::future::pending().await
}

impl Target {
    fn file(&self) -> MutexGuard<'_, Option<fuse::Server>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_file(&self) -> bool {
        self.file().as_ref().is_some_and(|file| !file.ended())
    }

    /// Whether somebody has unmounted the file, or ended its connection by force.
    fn has_lost_file(&self) -> bool {
        self.file().as_ref().is_some_and(fuse::Server::ended)
    }

    /// Does something with the file, if it is there.
    pub fn with_file<T>(&self, act: impl FnOnce(&fuse::Server) -> T) -> Option<T> {
        self.file().as_ref().map(act)
    }

    /// Writes down that copies have followed a coordinator that this term cannot outbid. Whoever starts targets decides
    /// what becomes of it.
    fn note_outbid(&self, generation: u64) -> anyhow::Result<()> {
        let own = Term::new(self.settings().term);
        if Term::of_generation(own.above(generation)) > own {
            let term = Term::of_generation(generation).max(own).number();
            trellis_files::ensure(&self.run.outbid(), term.to_string().as_bytes())?;
        }
        Ok(())
    }

    fn tell(&self) {
        self.changed
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// The changes from now on.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Waits for the next change. To be called on a thread of its own.
    pub fn wait(&self, changes: &mut watch::Receiver<u64>) -> Result<(), watch::error::RecvError> {
        self.runtime.block_on(changes.changed())
    }

    fn tell_size(&self) {
        if let Some(Err(error)) = self.with_file(fuse::Server::grown) {
            tracing::warn!(%error, "the file's new size could not be told");
        }
    }

    fn backing(&self) -> Arc<VolumeFile> {
        Arc::new(VolumeFile::new(self.bytes.clone(), self.runtime.clone()))
    }

    /// Continues with the file of a predecessor, or mounts one. It does so once the volume serves: until then its size
    /// is not known, and a file of no size would refuse what it is asked.
    fn show_file(self: &Arc<Self>) -> anyhow::Result<()> {
        let server = match self.resume_file() {
            Some(server) => server,
            None => self.mount_file()?,
        };
        // The file is shown to nobody before the keeper holds its connection.
        let link = self.keeping.deposit(&server)?;
        *self.file() = Some(server);
        Keeping::stay(self, link)?;
        Ok(())
    }

    fn file_options(&self) -> fuse::Options {
        fuse::Options {
            patience: self.settings().fails_after,
            ..fuse::Options::default()
        }
    }

    fn resume_file(&self) -> Option<fuse::Server> {
        let kept = self.keeping.take()?;
        let resumed =
            fuse::Server::resume(kept, &self.run.file(), self.backing(), self.file_options());
        resumed
            .inspect_err(|error| tracing::warn!(%error, "the predecessor's file cannot go on"))
            .ok()
    }

    fn mount_file(&self) -> anyhow::Result<fuse::Server> {
        let place = self.run.file();
        // Whoever waits for the old file gets an error now, and does not stop us from removing it.
        self.keeping.release();
        fuse::dismantle(&place).context("what is left of an earlier file is in the way")?;
        std::fs::create_dir_all(&place)
            .with_context(|| format!("{} cannot be made", place.display()))?;
        let server = fuse::Server::mount(&place, self.backing(), self.file_options())?;
        Ok(server)
    }

    /// Leaves the file to a successor.
    fn leave_file(&self) {
        if let Some(file) = self.file().take() {
            file.leave(FAREWELL);
        }
    }

    /// Serves the volume over iSCSI, at the old address if that is free.
    fn serve_by_iscsi(&self, id: Uuid) -> anyhow::Result<()> {
        let settings = self.settings();
        let port_file = self.run.port();
        let is_port = |text: &str| text.parse::<u16>().is_ok();
        let last = trellis_files::read_whole(&port_file, is_port)?;
        let last = last.and_then(|text| text.parse().ok());
        let bind = |port: u16| {
            let address = SocketAddr::from((settings.portal, port));
            let config = ServerConfig {
                memory: Some(Arc::new(VolumeMemory::new(self.bytes.clone()))),
                ..ServerConfig::default()
            };
            Server::bind(address, config)
        };
        let server = match last.map(bind) {
            Some(Ok(server)) => server,
            _ => bind(0).context("no port can be listened on")?,
        };
        let address = server.local_addr();
        trellis_files::ensure(&port_file, address.port().to_string().as_bytes())?;
        let mut chap = Chap::one_way(&settings.volume, &secret(&self.run.secret())?)?;
        if settings.iscsi.mutual_chap {
            let user = target_user(&settings.volume);
            chap = chap.mutual(&user, &secret(&self.run.target_secret())?)?;
        }
        let initiators = settings.iscsi.initiators.iter().cloned().collect();
        let access = Access {
            chap: Some(chap),
            initiators: Some(initiators).filter(|names: &BTreeSet<String>| !names.is_empty()),
        };
        let target = trellis_iscsi::Target::new(&settings.iqn, access)?;
        target.add_unit(
            0,
            Arc::new(VolumeLun::new(
                self.bytes.clone(),
                id,
                settings.iscsi.read_only,
            )),
        )?;
        server.portal().add_target(target)?;
        *self.portal.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(server));
        Ok(())
    }

    fn settings(&self) -> Settings {
        let settings = self.settings.lock();
        settings.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes new copies, if they have changed.
    pub fn configure(&self, settings: Settings) -> Answer {
        let held = |reason: HoldReason, message: String| Answer::Held { reason, message };
        if let Err(error) = addresses(&settings) {
            return held(HoldReason::ReplicaUnavailable, format!("{error:#}"));
        }
        let begun = settings.recovery.as_ref().map(recovery::lineage);
        let is_other = |lineage: Lineage| lineage.number() > self.lineage.number();
        if let Some(Ok(lineage)) = begun
            && is_other(lineage)
        {
            // The next process starts with the copies that are left.
            tracing::warn!(%lineage, "copies were given up; the volume is begun anew with the others");
            self.end();
            return Answer::Done;
        }
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner) = settings;
        match self.runtime.block_on(self.adjust_members()) {
            Ok(()) => Answer::Done,
            Err(error) => held(reason(error), error.to_string()),
        }
    }

    /// Decides from the present state of the copies which should count, and where they are reached. It does not use
    /// what is stored about them, which may be outdated. A change that is under way ends first.
    async fn adjust_members(&self) -> Result<(), VolumeError> {
        // One at a time: a decision from outdated settings must not follow one from newer settings, or a copy that is to
        // go could count again after the agent was told that it does not.
        let _turn = self.adjusting.lock().await;
        let status = self.volume.status();
        let settings = self.settings();
        if !self.has_begun(&status) {
            return Ok(());
        }
        let is_at_rest = self.volume.size() > 0 && status.view.next.is_none();
        let full = |id: &str| status.available && holds_everything(&status, id);
        let members = is_at_rest.then(|| who_counts(&settings.wanted, &current(&status), &full));
        let wish = Wish {
            members,
            addresses: settings.addresses.clone(),
        };
        if self.wish().as_ref() == Some(&wish) {
            return Ok(());
        }
        let addresses = addresses(&settings).map_err(|_| VolumeError::ConfigBad)?;
        match &wish.members {
            None => self.volume.reach(addresses).await?,
            Some(members) => {
                let config = config(members).map_err(|_| VolumeError::ConfigBad)?;
                let from = Some(members.version);
                self.volume
                    .reconfigure_from(from, config, addresses)
                    .await?;
            }
        }
        *self.wish() = Some(wish);
        Ok(())
    }

    /// Whether copies other than the survivors of a recovery may count.
    fn has_begun(&self, status: &Status) -> bool {
        if self.is_begun.load(Ordering::Relaxed) {
            return true;
        }
        if !status.available {
            return false;
        }
        match recovery::note_served(&self.run, self.lineage) {
            Ok(()) => self.is_begun.store(true, Ordering::Relaxed),
            Err(error) => {
                tracing::warn!(%error, "that the volume was recovered cannot be written down; it is tried again");
            }
        }
        self.is_begun.load(Ordering::Relaxed)
    }

    fn wish(&self) -> MutexGuard<'_, Option<Wish>> {
        self.wish.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Grows, and tells the users of the volume before it answers.
    pub fn grow(&self, to: Bytes) -> Answer {
        if self.volume.size() < to.get() {
            let growth =
                async { tokio::time::timeout(GROWTH_TIME_MAX, self.volume.grow(to.get())).await };
            match self.runtime.block_on(growth) {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    return Answer::Held {
                        reason: reason(error),
                        message: sentence(error, &self.volume.status()),
                    };
                }
                Err(_) => {
                    return Answer::Held {
                        reason: HoldReason::TooFewReplicas,
                        message: "The copies did not answer in time.".to_owned(),
                    };
                }
            }
        }
        self.tell_size();
        Answer::Done
    }

    /// Removes the file, for good.
    pub fn stop(&self) -> Answer {
        let mut file = self.file();
        if let Some(server) = file.as_mut()
            && let Err(error) = server.unmount()
        {
            return Answer::Held {
                reason: HoldReason::StillInUse,
                message: error.to_string(),
            };
        }
        *file = None;
        Answer::Done
    }

    /// Ends the process.
    pub fn end(&self) {
        self.end.send_replace(true);
    }

    /// Its status.
    pub fn status(&self) -> TargetStatus {
        let status = self.volume.status();
        let troubles = self.volume.troubles();
        let portal = self.portal.lock();
        let portal = portal.unwrap_or_else(PoisonError::into_inner).clone();
        let sessions = portal
            .as_ref()
            .map(|server| server.portal().session_count());
        TargetStatus {
            served: Some(self.volume.size())
                .filter(|size| *size > 0)
                .map(Bytes::new),
            copies: Bytes::new(size_of_quorum(&status)),
            available: status.available,
            redundancy_met: redundancy_met(&status, &self.settings().wanted),
            size_converged: status.size_converged,
            members: members(&status),
            lineage: (status.available && self.is_begun.load(Ordering::Relaxed))
                .then(|| status.view.lineage.to_string()),
            replicas: status
                .replicas
                .iter()
                .map(|each| seen(self.began, each, troubles.get(each.0)))
                .collect(),
            growth_held: status.growth_held.map(held_reason),
            portal: portal.map(|server| server.local_addr().to_string()),
            sessions: sessions
                .and_then(|count| count.try_into().ok())
                .unwrap_or_default(),
            file: self.has_file(),
            scrub: self.scrubs.seen(&status.scrub),
            repairs_left: repairs_left(&status),
        }
    }
}

/// A secret for CHAP: any user of this machine can reach the port, and only root can read the file. The agent has written
/// it before it had the target started.
fn secret(path: &Path) -> anyhow::Result<String> {
    let found = trellis_files::read_whole(path, |_| true);
    let found = found.with_context(|| format!("{} cannot be read", path.display()))?;
    found.with_context(|| format!("{} is not there; the agent writes it", path.display()))
}

fn identity(id: &String) -> anyhow::Result<ReplicaId> {
    id.parse().with_context(|| format!("{id:?} is no identity"))
}

/// Who counts, in the engine's terms.
fn config(members: &Members) -> anyhow::Result<Config> {
    let config = Config {
        members: members
            .replicas
            .iter()
            .map(identity)
            .collect::<anyhow::Result<_>>()?,
        consistency: usize::try_from(members.consistency_factor)?,
    };
    anyhow::ensure!(config.is_sound(), "a volume has 1 to 5 copies");
    Ok(config)
}

/// What the target proves itself with to other nodes. The files may come later.
fn credentials(settings: &Settings) -> anyhow::Result<Option<Credentials>> {
    let Some(proof) = &settings.proof else {
        return Ok(None);
    };
    let node = proof.node.parse().context("no name of a node")?;
    Ok(Some(Credentials::expect(&proof.credentials, node)))
}

/// Where the copies are reached, in the engine's terms.
fn addresses(settings: &Settings) -> anyhow::Result<BTreeMap<ReplicaId, Address>> {
    let address = |(id, address): (&String, &String)| {
        let address = address
            .parse::<Address>()
            .with_context(|| format!("{address:?} is no address"))?;
        anyhow::Ok((identity(id)?, address))
    };
    settings.addresses.iter().map(address).collect()
}
