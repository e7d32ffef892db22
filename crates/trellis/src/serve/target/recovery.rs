//! How a target starts: with a quorum of its copies, or, after others were lost for good, with those that are left.
//!
//! A recovery starts with the survivors until the volume was served once. From then on new copies may hold what the
//! survivors alone do not, so the target starts with a quorum again. That the volume was served is recorded durably
//! before any other copy may count.

use std::fs::File;
use std::io::{self, Write};

use anyhow::Context;
use trellis_api::kinds::{Members, Recovery};
use trellis_engine::coordinator::Takeover;
use trellis_engine::proto::Lineage;
use trellis_keeper::paths::RunDir;

use crate::serve::RECOVERED;
use crate::serve::message::Settings;

/// What a target starts with.
pub struct Beginning {
    /// Who counts.
    pub members: Members,
    /// Whose reports it takes.
    pub takeover: Takeover,
    /// Which history.
    pub lineage: Lineage,
}

impl Beginning {
    /// What the settings and an earlier start say.
    pub fn of(settings: &Settings, run: &RunDir) -> anyhow::Result<Beginning> {
        let members = settings.members.clone();
        let Some(recovery) = &settings.recovery else {
            return Ok(Beginning {
                members,
                takeover: Takeover::Quorum,
                lineage: Lineage::Original,
            });
        };
        let lineage = lineage(recovery)?;
        if settings.is_recovered || was_served(run, recovery) {
            return Ok(Beginning {
                members,
                takeover: Takeover::Quorum,
                lineage,
            });
        }
        Ok(Beginning {
            members: Members {
                version: 1,
                consistency_factor: recovery.consistency_factor,
                replicas: recovery.survivors.clone(),
            },
            takeover: Takeover::Survivors,
            lineage,
        })
    }
}

/// The history that a recovery begins.
pub fn lineage(recovery: &Recovery) -> anyhow::Result<Lineage> {
    let text = &recovery.lineage;
    text.parse()
        .with_context(|| format!("{text:?} names no history of a volume"))
}

fn was_served(run: &RunDir, recovery: &Recovery) -> bool {
    let known = std::fs::read_to_string(run.path().join(RECOVERED));
    known.is_ok_and(|text| text == recovery.lineage)
}

/// Records that the volume was served with the copies that were left.
pub fn note_served(run: &RunDir, lineage: Lineage) -> io::Result<()> {
    let (place, draft) = (run.path().join(RECOVERED), run.path().join("recovered.new"));
    let mut file = File::create(&draft)?;
    file.write_all(lineage.to_string().as_bytes())?;
    file.sync_all()?;
    std::fs::rename(draft, place)?;
    File::open(run.path())?.sync_all()
}
