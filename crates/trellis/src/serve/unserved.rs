//! Connections of volumes where requests wait and nobody serves: finds them, reports them, and ends those that no
//! successor takes over.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use trellis_keeper::paths::RunDir;
use trellis_keeper::process::living;
use trellis_node::fuse::{self, Standing};

/// How long requests wait for a server that will not come, before their connection is ended.
pub const UNSERVED_TIME_MAX: Duration = Duration::from_secs(60);

/// The connections below the run directory where requests wait and no target lives, with their volumes.
pub fn find(run: &Path) -> trellis_node::Result<Vec<(String, Standing)>> {
    let standing = fuse::standing(run)?.into_iter();
    let waits = standing.filter(|each| each.waiting > 0);
    Ok(waits
        .filter_map(|each| {
            let directory = each.mount_point.parent()?;
            let target = RunDir::at(directory.to_owned()).process("target");
            let is_served = !matches!(living(&target.lock), Ok(None));
            let volume = directory.file_name()?.to_str()?.to_owned();
            (!is_served).then_some((volume, each))
        })
        .collect())
}

/// The same as sentences.
pub fn tell(run: &Path) -> trellis_node::Result<Vec<String>> {
    let sentence = |(volume, each): (String, Standing)| {
        let (number, waiting) = (each.number, each.waiting);
        format!(
            "Connection {number} of volume {volume} has {waiting} requests waiting and no server."
        )
    };
    Ok(find(run)?.into_iter().map(sentence).collect())
}

/// What was seen before: since when each connection has been without a server.
#[derive(Default)]
pub struct Unserved {
    since: HashMap<u32, Instant>,
}

impl Unserved {
    /// Takes in the connections found now that nobody will serve, and returns those that have been so for too long.
    pub fn overdue(&mut self, found: &[Standing], now: Instant) -> Vec<u32> {
        self.since
            .retain(|number, _| found.iter().any(|each| each.number == *number));
        for each in found {
            self.since.entry(each.number).or_insert(now);
        }
        let long = |since: &Instant| now.duration_since(*since) >= UNSERVED_TIME_MAX;
        let overdue = self.since.iter().filter(|(_, since)| long(since));
        overdue.map(|(number, _)| *number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a connection is ended at once, although a successor may be about to come, never, or for what another one
    // of before has waited.
    #[test]
    fn only_a_connection_that_nobody_has_served_for_long_is_ended() {
        let one = Standing {
            number: 39,
            mount_point: "/run/v/file".into(),
            waiting: 3,
        };
        let (mut unserved, start) = (Unserved::default(), Instant::now());
        let found = [one];
        assert!(unserved.overdue(&found, start).is_empty());
        let almost = start + UNSERVED_TIME_MAX / 2;
        assert!(unserved.overdue(&found, almost).is_empty());
        assert!(unserved.overdue(&[], almost).is_empty());
        let end = start + UNSERVED_TIME_MAX;
        assert!(unserved.overdue(&found, end).is_empty());
        assert_eq!(unserved.overdue(&found, end + UNSERVED_TIME_MAX), [39]);
    }
}
