//! What became of a commit that failed.
//!
//! A commit can fail after its last byte has reached the file. So the file is read once it is open again: it holds
//! what memory holds, or that and the batch. Anything else means that another process has written to it.

use super::file::Loaded;
use super::memory::State;
use super::txn::Staged;

/// What a file that was opened again holds of the batch whose commit failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// Nothing: it is as it was before the batch.
    Nothing,
    /// All of it.
    Batch,
    /// Neither the one nor the other.
    Other,
}

/// Compares the file with memory, which is as it was before the batch.
pub(super) fn held(loaded: &Loaded, state: &State, batch: &Staged) -> Held {
    if is(loaded, state, &Staged::at(state.revision)) {
        Held::Nothing
    } else if is(loaded, state, batch) {
        Held::Batch
    } else {
        Held::Other
    }
}

/// Whether the file holds memory with the batch on top, byte for byte.
fn is(loaded: &Loaded, state: &State, batch: &Staged) -> bool {
    let untouched = state
        .ids()
        .filter(|id| !batch.objects.contains_key(id))
        .count();
    let made = batch.objects.values().flatten().count();
    loaded.revision == batch.revision
        && loaded.objects.len() == untouched + made
        && loaded.objects.iter().all(|(id, json)| {
            let expected = match batch.objects.get(id) {
                Some(staged) => staged.as_ref(),
                None => state.get(id),
            };
            expected.is_some_and(|stored| stored.json == json[..])
        })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::memory::{Id, Stored};

    fn stored(revision: u64) -> (Vec<u8>, Arc<Stored>) {
        let json = format!(r#"{{"metadata":{{"resourceVersion":"{revision}"}}}}"#).into_bytes();
        let stored = Stored::from_json(json.clone().into()).unwrap();
        (json, Arc::new(stored))
    }

    #[test]
    fn a_file_holds_the_batch_or_nothing_of_it_or_is_not_ours() {
        // Fails if a batch is believed to be there, or not to be there, because the revision alone says so.
        let kinds = crate::kinds::all();
        let [kept, gone, fresh] = ["kept", "gone", "fresh"].map(|name| Id::new(0, "", name));
        let (one, two, three) = (stored(1), stored(2), stored(3));
        let mut state = State::new(kinds, 2);
        state.set(&kept, Some(Arc::clone(&one.1)));
        state.set(&gone, Some(Arc::clone(&two.1)));
        let mut batch = Staged::at(4);
        batch.objects.insert(gone.clone(), None);
        batch.objects.insert(fresh.clone(), Some(three.1));
        let file = |revision, objects: &[(&Id, &Vec<u8>)]| Loaded {
            revision,
            objects: objects
                .iter()
                .map(|(id, json)| ((*id).clone(), (*json).clone()))
                .collect(),
        };
        let before = [(&kept, &one.0), (&gone, &two.0)];
        let after = [(&kept, &one.0), (&fresh, &three.0)];
        assert_eq!(held(&file(2, &before), &state, &batch), Held::Nothing);
        assert_eq!(held(&file(4, &after), &state, &batch), Held::Batch);
        assert_eq!(held(&file(4, &before), &state, &batch), Held::Other);
        assert_eq!(held(&file(2, &after), &state, &batch), Held::Other);
        let foreign = [(&kept, &one.0), (&fresh, &two.0)];
        assert_eq!(held(&file(4, &foreign), &state, &batch), Held::Other);
        assert_eq!(held(&file(4, &after[..1]), &state, &batch), Held::Other);
    }
}
