//! Copies that die inside their own process, at the steps that the engine names.

use trellis_api::step::Step;

use super::{end, mounted, wait_whole, with_pools};
use crate::harness::{Service, checksum, filesystem_mib, write_file};

// Fails if copies that have died at any step of their own, each of them once, leave a volume that cannot be served, lose
// what was written, or do not grow; or if a step is not reached in the process of a copy.
#[test]
fn copies_that_die_at_any_step_of_their_own_are_served_again() {
    for step in Step::ALL.iter().filter(|step| step.is_of_a_copy()) {
        let marks = tempfile::tempdir().unwrap();
        let at = format!("{}:{}", step.name(), marks.path().display());
        let service = Service::start_with(&[("TRELLIS_COPY_CRASH_AT", &at)]);
        with_pools(&service);
        let path = mounted(&service);
        let sum = write_file(&path.join("file"), 8 << 20, 3);
        service.trellis(&["grow", "data", "640Mi", "--wait"]);
        wait_whole(&service);
        let died = std::fs::read_dir(marks.path()).unwrap().count();
        assert_eq!(died, 3, "copies have died at {}", step.name());
        assert_eq!(filesystem_mib(&path), 640);
        assert_eq!(checksum(&path.join("file")), sum);
        end(&service, &path);
    }
}
