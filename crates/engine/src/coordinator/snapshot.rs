//! Snapshot markers: records of a place in the volume's history.

use uuid::Uuid;

use super::{Coordinator, Effect, Phase};
use crate::proto::{EntryOp, Key, SNAPSHOTS_MAX, SnapshotRecord};

impl Coordinator {
    pub(super) fn mark(&mut self, id: Uuid) {
        if self.phase != Phase::Serving
            || self.snapshots.contains_key(&id)
            || self.snapshots.len() >= SNAPSHOTS_MAX
        {
            return;
        }
        let record = SnapshotRecord {
            id,
            size: self.size,
            at: Key {
                epoch: self.epoch,
                seq: self.seq + 1,
            },
        };
        self.snapshots.insert(id, record);
        let seq = self.append(EntryOp::Snapshot(record));
        self.marking.push((seq, record));
    }

    /// The marker of that id, if a quorum keeps it.
    pub fn marker(&self, id: Uuid) -> Option<SnapshotRecord> {
        let on_its_way = self.marking.iter().any(|(_, record)| record.id == id);
        self.snapshots.get(&id).copied().filter(|_| !on_its_way)
    }

    /// Whether the volume can have another marker.
    pub fn has_room_for_marker(&self) -> bool {
        self.snapshots.len() < SNAPSHOTS_MAX
    }

    pub(super) fn settle_markers(&mut self, out: &mut Vec<Effect>) {
        for (seq, record) in std::mem::take(&mut self.marking) {
            if self.view.write_quorum(|id| self.acked_by(id, seq)) {
                out.push(Effect::Marked { snapshot: record });
            } else {
                self.marking.push((seq, record));
            }
        }
    }
}
