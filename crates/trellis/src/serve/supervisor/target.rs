//! A target from the agent's side: started, asked, told to grow, and ended.

use std::ffi::OsStr;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use trellis_api::kinds::{ReplicaSeen, ReplicaState};
use trellis_api::{Bytes, Hold, HoldReason};
use trellis_control::node::machine::{TargetFound, TargetPlace};
use trellis_keeper::message::{Request as KeeperRequest, Wanted, send};
use trellis_keeper::paths::{ProcessPaths, RunDir};
use trellis_keeper::process::living;
use trellis_node::iscsi;
use trellis_node::volume::Carrier;

use super::super::message::{Answer, Request, Settings, TargetStatus, ask};
use super::{END_TIME_MAX, Supervisor, TARGET, down, lock};

/// How long a new target may take until it serves, before others are served first.
const READY_TIME_MAX: Duration = Duration::from_secs(5);
const READY_LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long a question may take.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// How long a growth may take: longer than the target gives its copies.
const GROWTH_TIME_MAX: Duration = Duration::from_secs(30);
/// The start of every iSCSI name that we give.
const IQN_PREFIX: &str = "iqn.2026-11.dev.trellis:";

impl Supervisor {
    /// The volume's file.
    pub fn backing(&self, volume: &str) -> PathBuf {
        RunDir::of(&self.run, volume).file().join("volume")
    }

    /// The volume as the kernel's iSCSI initiator gets it. If nothing was served yet, nobody will answer.
    pub fn by_iscsi(&self, volume: &str) -> Carrier {
        let run = RunDir::of(&self.run, volume);
        let read = |path: PathBuf| trellis_files::read_whole(&path, |_| true).ok().flatten();
        let port = read(run.port()).and_then(|text| text.parse().ok());
        let secret = read(run.secret());
        Carrier::Target {
            target: iscsi::Target {
                name: iqn(volume),
                portal: SocketAddr::from((Ipv4Addr::LOCALHOST, port.unwrap_or_default())),
            },
            login: iscsi::Login {
                ours: secret.map(|secret| iscsi::Credentials {
                    user: volume.to_owned(),
                    secret,
                }),
                ..iscsi::Login::default()
            },
        }
    }

    /// What initiators of a volume know from when the target made it.
    pub fn earlier_secret(&self, volume: &str) -> Option<String> {
        let path = RunDir::of(&self.run, volume).secret();
        trellis_files::read_whole(&path, |_| true).ok().flatten()
    }

    /// Makes the target run with these copies, and asks for its status.
    pub fn serve_target(&self, place: &TargetPlace) -> Result<TargetFound, Hold> {
        let run = self.run_dir(&place.volume)?;
        let paths = run.process(TARGET);
        let settings = Settings {
            volume: place.volume.clone(),
            volume_id: place.volume_id.clone(),
            members: place.members.clone(),
            wanted: place.wanted.clone(),
            term: place.term,
            recovery: place.recovery.clone(),
            is_recovered: place.is_recovered,
            fails_after: place.fails_after,
            asks_every: place.asks_every,
            when_full: place.when_full,
            addresses: place.addresses.clone(),
            iqn: iqn(&place.volume),
            scrub: place.scrub.clone(),
            iscsi: place.iscsi.clone(),
            portal: self.links.portal(&place.volume, place.iscsi.portal)?,
            proof: Some(self.links.proof()),
        };
        self.write_settings(&run, &settings)?;
        write_secret(&run, place)?;
        self.refuse_outbid(&run, place)?;
        if lock(&self.silent).contains(&place.volume) {
            let message = format!(
                "The target of volume {} does not answer; it is replaced when it has been silent for {} s (its log is {}).",
                place.volume,
                self.silence_max.as_secs(),
                paths.log.display()
            );
            return Err(Hold::new(HoldReason::TargetSilent, message));
        }
        let keeper = self.keeper.socket();
        let arguments = [
            OsStr::new("serve-target"),
            OsStr::new("--run"),
            run.path().as_os_str(),
            OsStr::new("--keeper"),
            keeper.as_os_str(),
        ];
        self.ensure(Wanted {
            volume: place.volume.clone(),
            name: TARGET.to_owned(),
            arguments: arguments.map(OsStr::to_owned).to_vec(),
        })?;
        let configure = Request::Configure(Box::new(settings.clone()));
        self.wish(&paths, &configure, ANSWER_TIME_MAX)?;
        let status = self.ready(&paths)?;
        self.follow(&place.volume, &paths);
        self.found(&run, settings, status)
    }

    /// What the target of a volume says; none if it does not run or does not answer.
    pub fn target_status(&self, volume: &str) -> Option<TargetStatus> {
        let paths = RunDir::of(&self.run, volume).process(TARGET);
        status(&paths.socket).ok()
    }

    /// Raises what the target serves.
    pub fn raise_target(&self, volume: &str, to: Bytes) -> Result<(), Hold> {
        let paths = RunDir::of(&self.run, volume).process(TARGET);
        self.wish(&paths, &Request::Grow { to }, GROWTH_TIME_MAX)
    }

    /// Whether there is a target of the volume here, or something that is left of one.
    pub fn has_target(&self, volume: &str) -> bool {
        RunDir::of(&self.run, volume).target_settings().exists()
    }

    /// The term that the target here was given last; none if there is nothing of one.
    pub fn given_term(&self, volume: &str) -> Option<u32> {
        if let Some(settings) = lock(&self.settings).get(volume) {
            return Some(settings.term);
        }
        let bytes = std::fs::read(RunDir::of(&self.run, volume).target_settings()).ok()?;
        let settings: Settings = serde_json::from_slice(&bytes).ok()?;
        Some(settings.term)
    }

    /// The term that copies have followed instead of the target here.
    pub fn outbid(&self, volume: &str) -> Option<u32> {
        let is_term = |text: &str| text.parse::<u32>().is_ok();
        let path = RunDir::of(&self.run, volume).outbid();
        let text = trellis_files::read_whole(&path, is_term).ok().flatten()?;
        text.parse().ok()
    }

    /// A target whose copies have followed one of a later term is not started again before it has a term above that.
    fn refuse_outbid(&self, run: &RunDir, place: &TargetPlace) -> Result<(), Hold> {
        let Some(term) = self.outbid(&place.volume) else {
            return Ok(());
        };
        if place.term > term {
            let _ = std::fs::remove_file(run.outbid());
            return Ok(());
        }
        self.dismiss(&place.volume, TARGET)?;
        let message = format!(
            "Copies of volume {} have followed a target of term {term}; the one here has term {}.",
            place.volume, place.term
        );
        Err(Hold::new(HoldReason::TargetOutbid, message))
    }

    /// Ends the target and its connection, whoever waits for it. What stands on the file is left to whoever put it there.
    pub fn abandon_target(&self, volume: &str) -> Result<(), Hold> {
        let paths = RunDir::of(&self.run, volume).process(TARGET);
        self.dismiss(volume, TARGET)?;
        self.end(volume, TARGET, &paths)?;
        self.release(volume)
    }

    fn release(&self, volume: &str) -> Result<(), Hold> {
        if self.keeper.is_living() {
            let volume = volume.to_owned();
            self.keeper.ask(&KeeperRequest::Release { volume })?;
        }
        Ok(())
    }

    /// Removes the file and ends the target.
    pub fn retire_target(&self, volume: &str) -> Result<(), Hold> {
        let run = RunDir::of(&self.run, volume);
        let paths = run.process(TARGET);
        self.dismiss(volume, TARGET)?;
        if !matches!(living(&paths.lock), Ok(None)) {
            self.wish(&paths, &Request::Stop, END_TIME_MAX)?;
            self.end(volume, TARGET, &paths)?;
        }
        self.release(volume)?;
        lock(&self.settings).remove(volume);
        lock(&self.turns).remove(volume);
        let place = run.file();
        if place.exists() {
            trellis_node::fuse::dismantle(&place).map_err(|error| down(error.to_string()))?;
            let _ = std::fs::remove_dir(&place);
        }
        let recovered = run.path().join(super::super::RECOVERED);
        let others = [
            run.port(),
            run.secret(),
            run.target_secret(),
            run.scrubbed(),
            run.outbid(),
            recovered,
            // Last: it says that there is something left of a target.
            run.target_settings(),
        ];
        let of_process = [&paths.socket, &paths.deaf_socket, &paths.lock, &paths.log];
        for file in of_process.into_iter().chain(&others) {
            let _ = std::fs::remove_file(file);
        }
        let _ = std::fs::remove_dir(run.path());
        Ok(())
    }

    /// Writes what the next target of the volume starts with, if that has changed: the keeper starts it without asking.
    fn write_settings(&self, run: &RunDir, settings: &Settings) -> Result<(), Hold> {
        if lock(&self.settings).get(&settings.volume) == Some(settings) {
            return Ok(());
        }
        let path = run.target_settings();
        let write = || -> std::io::Result<bool> {
            trellis_files::ensure(&path, &serde_json::to_vec(settings)?)
        };
        write().map_err(|error| down(format!("{} cannot be written: {error}.", path.display())))?;
        lock(&self.settings).insert(settings.volume.clone(), settings.clone());
        Ok(())
    }

    /// Makes the target report changes.
    fn follow(&self, volume: &str, paths: &ProcessPaths) {
        let source = (volume.to_owned(), TARGET.to_owned());
        let Some(watch) = self.watch.get().filter(|watch| !watch.has(&source)) else {
            return;
        };
        let follow = || -> std::io::Result<()> {
            let stream = UnixStream::connect(&paths.socket)?;
            send(&stream, &Request::Watch, &[])?;
            watch.add(source, stream)
        };
        if let Err(error) = follow() {
            tracing::warn!(%error, volume, "a target cannot be followed; its changes are seen at the resync");
        }
    }

    /// The status of a target, which may take a moment after its start.
    fn ready(&self, paths: &ProcessPaths) -> Result<TargetStatus, Hold> {
        let deadline = Instant::now() + READY_TIME_MAX;
        loop {
            let status = status(&paths.socket)?;
            if (status.available && status.file) || Instant::now() >= deadline {
                return Ok(status);
            }
            std::thread::sleep(READY_LOOK_EVERY);
        }
    }

    fn found(
        &self,
        run: &RunDir,
        settings: Settings,
        status: TargetStatus,
    ) -> Result<TargetFound, Hold> {
        let there = || {
            let counts = |each: &&ReplicaSeen| settings.members.replicas.contains(&each.id);
            let answers = |each: &&ReplicaSeen| {
                !matches!(each.state, ReplicaState::Away | ReplicaState::Silent)
            };
            let answering = status.replicas.iter().filter(counts).filter(answers);
            let mut answering = answering.peekable();
            let is_behind = |each: &ReplicaSeen| each.state == ReplicaState::Repairing;
            let all_behind = answering.peek().is_some() && answering.clone().all(is_behind);
            format!(
                "{} of {} copies of volume {} answer, and {} must have a write.{}",
                answering.count(),
                settings.members.replicas.len(),
                settings.volume,
                settings.members.consistency_factor,
                if all_behind {
                    " None of them holds everything."
                } else {
                    ""
                }
            )
        };
        let too_few = || Hold::new(HoldReason::TooFewReplicas, there());
        let Some(served) = status.served else {
            return Err(too_few());
        };
        if status.available && !status.file {
            let message = format!(
                "The file of volume {} is not there (the log of its target is {}).",
                settings.volume,
                run.process(TARGET).log.display()
            );
            return Err(down(message));
        }
        let growth_hold = |reason: HoldReason| Hold::new(reason, there());
        Ok(TargetFound {
            copies: status.copies,
            served,
            backing: run.file().join("volume"),
            iqn: Some(settings.iqn.clone()),
            portal: status.portal.clone(),
            sessions: status.sessions,
            hold: if status.available {
                status.growth_held.map(growth_hold)
            } else {
                Some(too_few())
            },
            members: status.members.clone(),
            lineage: status.lineage.clone(),
            replicas: status.replicas.clone(),
            available: status.available,
            redundancy_met: status.redundancy_met,
            size_converged: status.size_converged,
            scrub: status.scrub.clone(),
        })
    }

    fn wish(&self, paths: &ProcessPaths, request: &Request, limit: Duration) -> Result<(), Hold> {
        match ask(&paths.socket, request, limit) {
            Ok(Answer::Held { reason, message }) => Err(Hold::new(reason, message)),
            Ok(_) => Ok(()),
            Err(error) => Err(down(format!("The target does not answer: {error}."))),
        }
    }
}

/// Writes what initiators must know where the target finds it: the keeper starts it without asking.
fn write_secret(run: &RunDir, place: &TargetPlace) -> Result<(), Hold> {
    let Some(secret) = &place.secret else {
        return Ok(());
    };
    let files = [
        (run.secret(), &secret.initiator),
        (run.target_secret(), &secret.target),
    ];
    for (path, text) in files {
        trellis_files::ensure(&path, text.as_bytes())
            .map_err(|error| down(format!("{} cannot be written: {error}.", path.display())))?;
    }
    Ok(())
}

/// The iSCSI name of a volume.
pub fn iqn(volume: &str) -> String {
    format!("{IQN_PREFIX}{volume}")
}

fn status(socket: &Path) -> Result<TargetStatus, Hold> {
    match ask(socket, &Request::Status, ANSWER_TIME_MAX) {
        Ok(Answer::Status(status)) => Ok(*status),
        Ok(other) => Err(down(format!("The target answers {other:?}."))),
        Err(error) => Err(down(format!("The target does not answer: {error}."))),
    }
}
