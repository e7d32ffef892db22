//! Named claims, and what is to be seen of each.

use trellis_api::{Bytes, HoldReason, Rung};

use super::scenario::{Scenario, now};
use super::*;

fn ladder(scenario: Scenario) -> Ladder {
    Ladder::of(&scenario.stored(), now())
}

fn state(scenario: Scenario) -> String {
    State::of(&scenario.stored(), now()).to_string()
}

/// Rungs as a person would note them: name, node, size, state.
fn noted(rungs: &[RungView]) -> Vec<String> {
    let note = |rung: &RungView| {
        let node = rung.node.as_deref().unwrap_or("-");
        format!("{} {node} {} {:?}", rung.rung, rung.size, rung.state)
    };
    rungs.iter().map(note).collect()
}

/// A branch as a person would note it: node, path, state, reason.
fn branch(branch: &Branch) -> String {
    let reason = branch.hold.as_ref().map(|held| held.hold.reason.code());
    let (node, path) = (&branch.node, &branch.path);
    format!("{node} {path} {:?} {}", branch.state, reason.unwrap_or("-"))
}

fn branches(ladder: &Ladder) -> Vec<String> {
    ladder.branches.iter().map(branch).collect()
}

// Fails if a rung is on the wrong side of the fork, is left out, or has another size or state than was measured.
#[test]
fn one_use_is_a_trunk_and_one_branch() {
    let ladder = ladder(Scenario::OneUse);
    let trunk = ["replica n1 2Gi Ok", "volume n1 2Gi Ok"];
    assert_eq!(noted(&ladder.trunk), trunk);
    assert_eq!(branches(&ladder), ["n1 /mnt/data Ok -"]);
    let rungs = ["device n1 2Gi Ok", "filesystem n1 2047Mi Ok"];
    assert_eq!(noted(&ladder.branches[0].rungs), rungs);
    assert_eq!(ladder.branches[0].device.as_deref(), Some("/dev/loop7"));
    assert_eq!((ladder.idle, ladder.hold), (None, None));
    assert_eq!(state(Scenario::OneUse), "Bound");
}

// Fails if a branch seems to rise before the trunk was measured at the size.
#[test]
fn a_branch_waits_for_the_trunk() {
    let ladder = ladder(Scenario::Growing);
    let trunk = ["replica n1 1Gi Rising", "volume n1 1Gi Waiting"];
    assert_eq!(noted(&ladder.trunk), trunk);
    assert_eq!(branches(&ladder), ["n1 /mnt/data Waiting -"]);
    assert_eq!(state(Scenario::Growing), "Growing");
}

// Fails if a use that is held makes the other one look held, or if it is not said which one it is.
#[test]
fn of_two_uses_one_is_held_and_the_other_is_done() {
    let ladder = ladder(Scenario::TwoUsesOneHeld);
    assert_eq!(noted(&ladder.trunk).len(), 2, "the trunk stands once");
    let uses = ["n1 /mnt/data Ok -", "n2 /mnt/other Held ReadOnly"];
    assert_eq!(branches(&ladder), uses);
    let rungs = ["device n2 2Gi Ok", "filesystem n2 1023Mi Held"];
    assert_eq!(noted(&ladder.branches[1].rungs), rungs);
    let held = ladder.hold.expect("the claim is held");
    assert_eq!(held.rung, Some(Rung::Filesystem));
    assert_eq!(held.hold.reason, HoldReason::ReadOnly);
    assert_eq!(held.node.as_deref(), Some("n2"));
    assert_eq!(held.path.as_deref(), Some("/mnt/other"));
    assert_eq!(ladder.rungs.len(), 6, "each rung of both nodes once");
    assert_eq!(state(Scenario::TwoUsesOneHeld), "Held ReadOnly");
}

// Fails if a use is left out because it shares its rungs with another, or the shared rungs are counted twice.
#[test]
fn uses_of_one_node_are_branches_with_the_same_rungs() {
    let ladder = ladder(Scenario::TwoUsesOfOneNode);
    let uses = ["n1 /mnt/again Ok -", "n1 /mnt/data Ok -"];
    assert_eq!(branches(&ladder), uses);
    assert_eq!(ladder.branches[0].rungs, ladder.branches[1].rungs);
    assert_eq!(ladder.rungs.len(), 4);
}

// Fails if a use that waits for its turn is not shown with its reason, or gets rungs that nobody measured.
#[test]
fn a_use_that_waits_is_a_branch_without_rungs() {
    let ladder = ladder(Scenario::OneUseWaits);
    let uses = ["n1 /mnt/data Ok -", "n2 /mnt/data Held UsedElsewhere"];
    assert_eq!(branches(&ladder), uses);
    assert!(ladder.branches[1].rungs.is_empty());
}

// Fails if a volume that nobody uses has a branch, or if its filesystem is not shown or not judged.
#[test]
fn an_unused_volume_is_its_trunk_and_an_idle_filesystem() {
    let unused = ladder(Scenario::Unused);
    assert!(unused.branches.is_empty());
    assert_eq!(noted(unused.idle.as_slice()), ["filesystem n1 2Gi Ok"]);
    assert_eq!(unused.hold, None);
    assert_eq!(state(Scenario::Unused), "Bound");
    let behind = ladder(Scenario::UnusedBehind);
    let idle = ["filesystem n1 1Gi GrowsWhenMounted"];
    assert_eq!(noted(behind.idle.as_slice()), idle);
    let held = behind.hold.expect("it waits for a mount");
    assert_eq!((held.rung, held.node), (Some(Rung::Filesystem), None));
    assert_eq!(state(Scenario::UnusedBehind), "Held NotMounted");
}

// Fails if the trunk is said to be where the volume is used.
#[test]
fn a_trunk_is_shown_where_it_is() {
    let ladder = ladder(Scenario::TrunkElsewhere);
    let trunk = ["replica n2 2Gi Ok", "volume n2 2Gi Ok"];
    assert_eq!(noted(&ladder.trunk), trunk);
    let rungs = ["device n1 2Gi Ok", "filesystem n1 2047Mi Ok"];
    assert_eq!(noted(&ladder.branches[0].rungs), rungs);
    assert_eq!(state(Scenario::TrunkElsewhere), "Bound");
}

// Fails if a silent copy passes for one that is well, holds up the others, or does not say since when it is silent.
#[test]
fn a_silent_copy_is_unheard_and_holds_nothing_up() {
    let ladder = ladder(Scenario::OneCopySilent);
    let trunk = [
        "replica na 2Gi Ok",
        "replica nb 2Gi Unheard",
        "replica nc 2Gi Ok",
        "volume n1 2Gi Ok",
    ];
    assert_eq!(noted(&ladder.trunk), trunk);
    assert_eq!(ladder.trunk[1].copy.as_deref(), Some("Silent 90s"));
    assert_eq!(branches(&ladder), ["n1 /mnt/data Ok -"]);
    assert_eq!(ladder.hold, None);
    let lacks = ladder.degraded.expect("a copy is missing").hold.message;
    assert!(lacks.contains("2 of 3 copies hold everything"), "{lacks}");
    assert!(lacks.contains("Silent 90s"), "{lacks}");
    assert_eq!(state(Scenario::OneCopySilent), "Degraded RedundancyLow");
}

// Fails if a growth that was refused is not held at the copies, or seems to be held at a use.
#[test]
fn a_refused_growth_is_held_at_the_trunk() {
    let ladder = ladder(Scenario::Refused);
    let trunk = ["replica n1 1Gi Held", "volume n1 1Gi Waiting"];
    assert_eq!(noted(&ladder.trunk), trunk);
    let held = ladder.hold.expect("it is held");
    assert_eq!((held.rung, held.node), (Some(Rung::Replica), None));
    assert_eq!(state(Scenario::Refused), "Held NoSpaceInPool");
}

// Fails if anything is said of a claim that others serve, but whose it is.
#[test]
fn a_claim_of_another_provisioner_is_theirs() {
    let ladder = ladder(Scenario::OtherProvisioner);
    let theirs = Origin::Other("other.example.com".to_owned());
    assert_eq!(ladder.head.origin, theirs);
    assert!(ladder.rungs.is_empty() && ladder.branches.is_empty());
    assert_eq!(state(Scenario::OtherProvisioner), "Foreign");
    let stored = Scenario::OtherProvisioner.stored();
    let explained = Explanation::of(&stored, &ClaimNow::default(), &[], now());
    assert_eq!(explained.provisioner.as_deref(), Some("other.example.com"));
    assert!(explained.hold.is_none() && explained.trunk.is_empty());
}

// Fails if a claim that cannot be provisioned has rungs, or does not say why.
#[test]
fn a_pending_claim_has_a_reason_and_no_rungs() {
    let ladder = ladder(Scenario::Pending);
    assert!(ladder.rungs.is_empty());
    assert_eq!(state(Scenario::Pending), "Held ClassNotFound");
}

// Fails if what was just measured does not take the place of what a node reported before, or is not told apart from it.
#[test]
fn what_was_measured_now_goes_before_what_was_reported() {
    let stored = Scenario::OneUse.stored();
    let told = ClaimLine::of(&stored, ClaimNow::default(), now());
    let used = |line: &ClaimLine| line.usage.as_ref().map(|usage| usage.used);
    assert_eq!(
        (used(&told), told.measured_now),
        (Some(Bytes::mib(256)), false)
    );
    assert_eq!(told.use_percent, Some(25));
    let mut usage = told.usage.clone().expect("it was reported");
    usage.used = Bytes::mib(300);
    let measured = ClaimNow {
        usage: Some(usage),
        allocated: Some(Bytes::mib(310)),
    };
    let line = ClaimLine::of(&stored, measured, now());
    assert_eq!(
        (used(&line), line.measured_now),
        (Some(Bytes::mib(300)), true)
    );
    assert_eq!(line.allocated, Some(Bytes::mib(310)));
    assert_eq!(line.paths, ["/mnt/data"]);
}

// Fails if the explanation of a claim has other rungs or another hold than its ladder.
#[test]
fn an_explanation_agrees_with_the_ladder() {
    for scenario in Scenario::ALL {
        let stored = scenario.stored();
        let ladder = Ladder::of(&stored, now());
        let explained = Explanation::of(&stored, &ClaimNow::default(), &[], now());
        assert_eq!(explained.trunk, ladder.trunk, "{scenario:?}");
        assert_eq!(explained.branches, ladder.branches, "{scenario:?}");
        assert_eq!(explained.idle, ladder.idle, "{scenario:?}");
        let said = ladder.hold.or(ladder.degraded);
        assert_eq!(explained.hold, said, "{scenario:?}");
    }
}
