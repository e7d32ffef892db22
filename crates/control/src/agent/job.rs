//! What one node has to do for one volume: pure, from a view of what is stored.

use std::path::PathBuf;
use std::sync::Arc;

use kube::ResourceExt;
use trellis_api::kinds::{Attachment, Pool, Replica, RungStatus};
use trellis_api::{Bytes, Hold, HoldReason};

use super::machine::{ReplicaPlace, Stage, Use};
use crate::view::View;

/// The work of one node for one volume.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// The size that every rung shall have.
    pub goal: Bytes,
    /// The copy on this node.
    pub replica: Option<ReplicaJob>,
    /// Uses that shall end.
    pub endings: Vec<UseJob>,
    /// Uses that shall be.
    pub uses: Vec<UseJob>,
    /// How the volume is brought into use, apart from where its bytes lie.
    pub staging: Option<Stage>,
    /// The rungs as they were last reported.
    pub reported: Vec<RungStatus>,
}

/// The work for one replica.
#[derive(Clone, Debug)]
pub struct ReplicaJob {
    /// The stored object.
    pub object: Arc<Replica>,
    /// Where it is.
    pub place: ReplicaPlace,
    /// What shall become of it.
    pub fate: Fate,
}

/// What shall become of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It has never been there, and shall be made.
    Make,
    /// It has been there, so it must be found. One that is missing is a loss to report, not a reason
    /// to make an empty one in its place.
    Find,
    /// It shall go.
    Remove,
}

/// The work for one use.
#[derive(Clone, Debug)]
pub struct UseJob {
    /// The stored object.
    pub object: Arc<Attachment>,
    /// Where and how.
    pub usage: Use,
    /// Why it cannot be, as far as the objects tell.
    pub hold: Option<Hold>,
}

/// The work of `node` for the volume in `view`; `pool_of` finds a pool by its name.
pub fn job(view: &View, node: &str, pool_of: &dyn Fn(&str) -> Option<Arc<Pool>>) -> Job {
    let mine: Vec<&Arc<Attachment>> = view
        .attachments
        .iter()
        .filter(|each| each.spec.node == node)
        .collect();
    let (endings, uses): (Vec<_>, Vec<_>) = mine
        .into_iter()
        .partition(|each| each.metadata.deletion_timestamp.is_some());
    let uses: Vec<UseJob> = ordered(uses)
        .into_iter()
        .enumerate()
        .map(|(index, each)| use_job(view, each, index))
        .collect();
    let endings = endings
        .into_iter()
        .map(|each| use_job(view, each, 0))
        .collect();
    let replica = view.replicas.iter().find(|each| each.spec.node == node);
    let replica = replica.and_then(|each| replica_job(each, pool_of));
    let staging = view.volume.as_ref().map(|volume| Stage {
        volume: view.key.clone(),
        backing: PathBuf::new(),
        filesystem: volume.spec.filesystem,
        read_only: !uses.is_empty() && uses.iter().all(|each| each.usage.read_only),
    });
    let goal = view
        .volume
        .as_ref()
        .map(|volume| volume.spec.capacity)
        .unwrap_or_default();
    let reported = reported(view);
    Job {
        goal,
        replica,
        endings,
        uses,
        staging,
        reported,
    }
}

/// All rungs as they were last reported. Those that are found unchanged keep their times, so that a look
/// that finds nothing new writes nothing.
fn reported(view: &View) -> Vec<RungStatus> {
    let replicas = view
        .replicas
        .iter()
        .filter_map(|each| each.status.as_ref()?.rung.clone());
    let target = view
        .target
        .iter()
        .filter_map(|each| each.status.as_ref()?.rung.clone());
    let attached = view
        .attachments
        .iter()
        .filter_map(|each| each.status.as_ref());
    replicas
        .chain(target)
        .chain(attached.flat_map(|status| status.rungs.clone()))
        .collect()
}

/// The oldest use comes first: it is the one that a claim for a single use goes to.
fn ordered(mut uses: Vec<&Arc<Attachment>>) -> Vec<&Arc<Attachment>> {
    uses.sort_by_key(|each| (each.creation_timestamp(), each.name_any()));
    uses
}

fn replica_job(
    object: &Arc<Replica>,
    pool_of: &dyn Fn(&str) -> Option<Arc<Pool>>,
) -> Option<ReplicaJob> {
    let pool = pool_of(&object.spec.pool)?;
    let place = ReplicaPlace {
        pool: PathBuf::from(&pool.spec.path),
        name: object.name_any(),
        volume_id: object.spec.volume_id.clone(),
        replica_id: object.spec.replica_id.clone(),
        thick: object.spec.thick,
    };
    let measured = object
        .status
        .as_ref()
        .and_then(|status| status.capacity)
        .is_some();
    let fate = match (object.metadata.deletion_timestamp.is_some(), measured) {
        (true, _) => Fate::Remove,
        (false, true) => Fate::Find,
        (false, false) => Fate::Make,
    };
    Some(ReplicaJob {
        object: object.clone(),
        place,
        fate,
    })
}

fn use_job(view: &View, object: &Arc<Attachment>, index: usize) -> UseJob {
    let modes = view
        .claim
        .as_ref()
        .and_then(|claim| claim.spec.as_ref()?.access_modes.clone())
        .unwrap_or_default();
    let allows = |mode: &str| modes.iter().any(|each| each == mode);
    let only_reads = !modes.is_empty() && modes.iter().all(|mode| mode == "ReadOnlyMany");
    let usage = Use {
        path: PathBuf::from(&object.spec.path),
        read_only: object.spec.read_only || only_reads,
    };
    let bound = view.claim.as_ref().is_some_and(|claim| {
        claim
            .status
            .as_ref()
            .is_some_and(|status| status.phase.as_deref() == Some("Bound"))
            && claim.metadata.deletion_timestamp.is_none()
    });
    let attached = object
        .status
        .as_ref()
        .is_some_and(|status| status.volume.is_some());
    let hold = if !bound && !attached {
        let message = format!("Claim {:?} is not bound.", object.spec.claim_name);
        Some(Hold::new(HoldReason::ClaimNotBound, message))
    } else if allows("ReadWriteOncePod") && index > 0 {
        let message = format!(
            "Claim {:?} allows a single use (ReadWriteOncePod).",
            object.spec.claim_name
        );
        Some(Hold::new(HoldReason::AccessModeUnsupported, message))
    } else {
        None
    };
    UseJob {
        object: object.clone(),
        usage,
        hold,
    }
}
