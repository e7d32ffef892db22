//! A service that was killed and cannot end.
//!
//! A thread of it may have been waiting in the kernel for I/O of a volume whose target has died as well. The kernel
//! keeps the whole process until that thread is through, and with it the descriptor that keeps the volume's file
//! alive and makes its users wait: everything waits for itself, and the store stays locked. Only ending the file
//! frees it. Its users get errors then, which is what they would have got had the descriptor gone with the process.

use std::path::Path;

use rustix::mount::{UnmountFlags, unmount};
use trellis_node::sys::mountinfo;
use trellis_node::volume::lock_holder;

use super::paths::RunDir;
use super::process::living;

/// Ends the files of targets that are dead, if the service that holds the store is dead too. Answers whether there
/// was anything to end.
pub fn free(data: &Path) -> bool {
    let dead = lock_holder(&data.join("store.redb")).is_some_and(is_dead);
    if !dead {
        return false;
    }
    let run = data.join("run");
    let mounts = mountinfo::read().unwrap_or_default();
    let mut ended = false;
    for mount in mounts
        .iter()
        .filter(|mount| mount.mount_point.starts_with(&run))
    {
        let Some(volume) = mount.mount_point.parent() else {
            continue;
        };
        let target = RunDir::at(volume.to_owned()).process("target");
        if matches!(living(&target.lock), Ok(None)) {
            tracing::warn!(volume = %volume.display(), "its service and its target are dead; whoever uses it gets errors");
            // It is busy; what counts is that the connection is ended on the way.
            let _ = unmount(&mount.mount_point, UnmountFlags::FORCE);
            ended = true;
        }
    }
    ended
}

/// Whether the process has been killed and is only kept by the kernel.
fn is_dead(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().unwrap_or_default();
    state.trim_start().starts_with(['Z', 'X'])
}

#[cfg(test)]
mod tests {
    use super::*;

    // Fails if a living process is taken for a dead one.
    #[test]
    fn this_process_is_not_dead() {
        assert!(!is_dead(std::process::id()));
        assert!(!free(Path::new("/nonexistent")));
    }
}
