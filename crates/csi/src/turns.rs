//! One operation on a volume at a time. Whoever comes second is told at once, and comes again.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use tonic::Status;
use trellis_api::{Hold, HoldReason};

use crate::codes;

/// The volumes that something is being done with.
#[derive(Clone, Debug, Default)]
pub struct Turns(Arc<Mutex<HashSet<String>>>);

/// The right to do something with one volume, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    turns: Turns,
    volume: String,
}

impl Turns {
    /// Takes the turn of a volume, or says that it is taken.
    pub fn take(&self, volume: &str) -> Result<Turn, Status> {
        let is_free = self.with(|taken| taken.insert(volume.to_owned()));
        if !is_free {
            let message = format!("Another call for volume {volume} is not done yet.");
            return Err(codes::refused(&Hold::new(
                HoldReason::OperationRunning,
                message,
            )));
        }
        Ok(Turn {
            turns: self.clone(),
            volume: volume.to_owned(),
        })
    }

    fn with<T>(&self, act: impl FnOnce(&mut HashSet<String>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.with(|taken| taken.remove(&self.volume));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if two calls work on one volume at a time, if one waits for the other, or if a call that was given up keeps
    // its turn.
    #[test]
    fn a_second_call_for_a_volume_is_aborted_until_the_first_is_over() {
        let turns = Turns::default();
        let first = turns.take("a").expect("free");
        let second = turns.take("a").expect_err("taken");
        assert_eq!(second.code(), tonic::Code::Aborted);
        assert!(turns.take("b").is_ok());
        drop(first);
        assert!(turns.take("a").is_ok());
    }
}
