//! Rules of the coordinator that a random history seldom meets, one at a time.
#![allow(clippy::unwrap_used)]

#[path = "common/puppet.rs"]
mod puppet;

use bytes::Bytes;
use puppet::{PROMISE, Stage, is_flush, replica};
use trellis_engine::coordinator::{Effect, Event, IoError, IoOp, Limits};
use trellis_engine::proto::{
    Answer, Content, EntryOp, Epoch, Promise, ReadFault, Region, RegionState, ReplicaId, Request,
};

const MIB: u64 = 1 << 20;

const READ: IoOp = IoOp::Read {
    offset: 0,
    length: 4096,
};

/// The tag of the only read that a replica was asked for, if it was.
fn tag_of(requests: &[Request]) -> Option<u64> {
    match requests {
        [Request::Read { tag, .. }] => Some(*tag),
        [] => None,
        other => panic!("{other:?}"),
    }
}

fn page(byte: u8) -> Content {
    Content::Data(Bytes::from(vec![byte; 4096]))
}

#[test]
fn a_read_that_is_late_is_asked_of_another_holder_and_the_first_answer_counts() {
    // Fails if a replica that hangs costs a read more than the moment after which another is asked.
    let mut stage = Stage::serving(3, 4 * MIB);
    stage.io(1, READ);
    let asked: Vec<_> = (0..3).map(|number| tag_of(&stage.take(number))).collect();
    let slow = (0..3).find(|number| asked[usize::try_from(*number).unwrap()].is_some());
    let slow = slow.unwrap();
    stage.wait(49);
    assert!((0..3).all(|number| stage.take(number).is_empty()));
    stage.wait(2);
    let (second, tag) = (0..3)
        .find_map(|number| Some((number, tag_of(&stage.take(number))?)))
        .expect("nobody else was asked");
    assert_ne!(second, slow);
    // The next read does not go to the one that hangs.
    stage.io(2, READ);
    assert!(stage.take(slow).is_empty());
    let result = Ok(page(7));
    stage.answer(second, Answer::Read { tag, result });
    assert_eq!(stage.replies[&1], Ok(vec![page(7)]));
    // The late answer changes nothing.
    let tag = asked[usize::try_from(slow).unwrap()].unwrap();
    let result = Ok(page(7));
    stage.answer(slow, Answer::Read { tag, result });
    assert!(!stage.replies.contains_key(&2));
}

#[test]
fn where_every_read_is_late_only_some_are_asked_twice() {
    // Fails if slow disks get twice the reads because they are slow.
    let mut stage = Stage::serving(3, 4 * MIB);
    for id in 0..200 {
        stage.io(id, READ);
    }
    for number in 0..3 {
        stage.take(number);
    }
    for _ in 0..10 {
        stage.wait(60);
    }
    let again: usize = (0..3).map(|number| stage.take(number).len()).sum();
    assert!((1..=16).contains(&again), "{again} were asked twice");
}

#[test]
fn a_late_read_is_not_asked_again_while_a_write_of_its_bytes_is_not_acknowledged() {
    // Fails if a client can see what may yet vanish.
    let mut stage = Stage::serving(3, 4 * MIB);
    stage.io(1, READ);
    for number in 0..3 {
        stage.take(number);
    }
    stage.write(2, 0);
    stage.wait(100);
    for number in 0..3 {
        let reads = |request: &Request| matches!(request, Request::Read { .. });
        assert!(!stage.take(number).iter().any(reads));
    }
}

#[test]
fn a_repair_whose_source_hangs_is_read_from_another_holder() {
    // Fails if a frozen replica delays the repair of another one until it is given up.
    let mut stage = Stage::serving(3, 4 * MIB);
    stage.io(1, READ);
    let asked = (0..3).find_map(|number| Some((number, tag_of(&stage.take(number))?)));
    let (damaged, tag) = asked.unwrap();
    let result = Err(ReadFault::Medium);
    stage.answer(damaged, Answer::Read { tag, result });
    for number in 0..3 {
        stage.take(number);
    }
    let source_of = |stage: &mut Stage| {
        let whole = |request: Request| match request {
            Request::Read { tag, length, .. } if length == MIB => Some(tag),
            _ => None,
        };
        (0..3).find_map(|number| {
            let tag = stage.take(number).into_iter().find_map(whole)?;
            Some((number, tag))
        })
    };
    stage.wait(10);
    let (first, slow) = source_of(&mut stage).expect("the repair has not begun");
    stage.wait(40);
    assert_eq!(source_of(&mut stage), None);
    stage.wait(20);
    let (second, tag) = source_of(&mut stage).expect("nobody else was asked");
    assert!(first != second && second != damaged);
    let bytes = || Ok(Content::Zeros(MIB));
    stage.answer(
        second,
        Answer::Read {
            tag,
            result: bytes(),
        },
    );
    let sent = |request: &Request| matches!(request, Request::RepairData { .. });
    assert!(stage.take(damaged).iter().any(sent));
    let (tag, result) = (slow, bytes());
    stage.answer(first, Answer::Read { tag, result });
    assert!(!stage.take(damaged).iter().any(sent), "it was sent twice");
}

#[test]
fn a_repair_that_nobody_can_read_is_tried_again_after_a_while_and_not_before() {
    // Fails if a block that cannot be read keeps disks and processors busy while a client waits for it.
    let mut stage = Stage::new(2);
    for number in 0..2 {
        stage.greet(number, MIB);
    }
    // The first one may have a part of an epoch that the other one does not know.
    for (number, stamp) in [(0, Epoch::FRESH), (1, Epoch::NEVER)] {
        let [Request::Regions { from }] = stage.take(number)[..] else {
            panic!("regions were not asked for");
        };
        let states = vec![RegionState { stamp, stale: None }];
        stage.answer(number, Answer::Regions { from, states });
    }
    for number in 0..2 {
        stage.answer(number, Answer::Joined);
        stage.take(number);
    }
    stage.io(1, READ);
    let begun = |stage: &mut Stage| {
        let begins = |request: &Request| matches!(request, Request::RepairBegin { .. });
        stage.take(0).iter().any(begins)
    };
    assert!(begun(&mut stage), "nobody repairs what a client waits for");
    let tag = tag_of(&stage.take(1)).expect("nobody was asked");
    let result = Err(ReadFault::Medium);
    stage.answer(1, Answer::Read { tag, result });
    for _ in 0..9 {
        assert!(!begun(&mut stage), "it was tried again at once");
        stage.wait(100);
    }
    stage.wait(200);
    assert!(begun(&mut stage), "it was not tried again");
}

/// The only peek that was made since the last one, if one was.
fn peek_of(stage: &mut Stage) -> Option<(ReplicaId, u64)> {
    let others = std::mem::take(&mut stage.others);
    let mut peeks = others.into_iter().filter_map(|effect| match effect {
        Effect::Peek { replica, tag, .. } => Some((replica, tag)),
        _ => None,
    });
    let peek = peeks.next();
    assert!(peeks.next().is_none(), "there was another one");
    peek
}

fn near(stage: &mut Stage, number: u128) {
    let session = u64::try_from(number).unwrap() + 1;
    let replica = replica(number);
    stage.tell(Event::Near { replica, session });
}

#[test]
fn what_a_near_replica_has_is_read_without_asking_and_what_is_not_in_memory_is_asked_for() {
    // Fails if a read on the same machine costs a message, or is lost when the bytes are not at hand.
    let mut stage = Stage::serving(3, 4 * MIB);
    near(&mut stage, 1);
    stage.io(1, READ);
    let (at, tag) = peek_of(&mut stage).expect("nobody looked");
    assert_eq!(at, replica(1));
    assert!((0..3).all(|number| stage.take(number).is_empty()));
    let content = Some(page(7));
    stage.tell(Event::Peeked { tag, content });
    assert_eq!(stage.replies[&1], Ok(vec![page(7)]));
    stage.io(2, READ);
    let (_, tag) = peek_of(&mut stage).expect("nobody looked");
    let content = None;
    stage.tell(Event::Peeked { tag, content });
    assert!(peek_of(&mut stage).is_none(), "it was looked at again");
    let asked = (0..3).filter(|number| tag_of(&stage.take(*number)).is_some());
    assert_eq!(asked.count(), 1);
}

#[test]
fn a_near_replica_is_not_looked_at_while_it_owes_a_write_of_these_bytes() {
    // Fails if a read misses a write that was acknowledged before it.
    let mut stage = Stage::serving(3, 4 * MIB);
    for number in 0..3 {
        near(&mut stage, number);
    }
    stage.write(1, 0);
    stage.io(2, READ);
    assert!(peek_of(&mut stage).is_none(), "it is not acknowledged");
    stage.apply_all(1);
    stage.apply_all(2);
    assert!(stage.replies[&1].is_ok());
    let (at, _) = peek_of(&mut stage).expect("nobody looked");
    assert_ne!(at, replica(0));
    // Bytes that it owes nothing of may be looked at there: the first region is its turn.
    stage.io(
        3,
        IoOp::Read {
            offset: 3 * MIB,
            length: 4096,
        },
    );
    assert_eq!(peek_of(&mut stage).map(|(at, _)| at), Some(replica(0)));
}

#[test]
fn flushes_that_come_together_share_one_entry() {
    // Fails if every client that flushes costs every replica a sync.
    let mut stage = Stage::serving(3, 4 * MIB);
    stage.write(1, 0);
    for id in 2..10 {
        stage.io(id, IoOp::Flush);
    }
    let entries = stage.entries(0);
    assert_eq!(entries.iter().filter(|entry| is_flush(entry)).count(), 1);
    let seq = entries.last().unwrap().key.seq;
    stage.entries(1);
    for number in 0..2 {
        stage.answer(number, Answer::Done { seq });
        stage.answer(number, Answer::Flushed { seq });
    }
    assert!((1..10).all(|id| stage.replies[&id].is_ok()));
}

#[test]
fn a_flush_waits_for_what_was_written_before_it_and_for_nothing_else() {
    // Fails if a flush is answered before CF replicas are durable, or waits for the last of them.
    let mut stage = Stage::serving(3, 4 * MIB);
    stage.write(1, 0);
    stage.io(2, IoOp::Flush);
    let seq = stage.entries(0).last().unwrap().key.seq;
    stage.entries(1);
    stage.answer(0, Answer::Done { seq });
    stage.answer(0, Answer::Flushed { seq });
    stage.answer(1, Answer::Done { seq });
    assert!(stage.replies.contains_key(&1) && !stage.replies.contains_key(&2));
    stage.write(3, 300);
    stage.answer(1, Answer::Flushed { seq });
    assert!(stage.replies.contains_key(&2));
}

#[test]
fn a_replica_that_does_not_answer_holds_up_neither_writes_nor_the_log() {
    // Fails if a full window of one replica stops the others, or the log grows without end.
    let mut stage = Stage::serving(3, 4 * MIB);
    for id in 1..20_000 {
        if id % 100 == 0 {
            stage.wait(1);
        }
        stage.write(id, id % 1024);
        stage.apply_all(0);
        stage.apply_all(1);
        assert!(stage.replies.contains_key(&id), "write {id} waits");
    }
    let gone =
        |effect: &Effect| matches!(effect, Effect::Close { replica: of, .. } if *of == replica(2));
    assert!(stage.others.iter().any(gone), "it was never given up");
}

#[test]
fn a_replica_that_is_behind_and_answers_is_waited_for_rather_than_given_up() {
    // Fails if a replica that is merely slower than the others is repaired again and again under load.
    let mut stage = Stage::serving(3, 4 * MIB);
    let mut owed = Vec::new();
    let mut waits = false;
    for id in 1..40_000 {
        if id % 100 == 0 {
            stage.wait(1);
        }
        stage.write(id, id % 1024);
        stage.apply_all(0);
        stage.apply_all(1);
        owed.extend(stage.entries(2));
        waits = !stage.replies.contains_key(&id);
        // One of them is answered for every two that are written.
        if id % 2 == 0 && !owed.is_empty() {
            let seq = owed.remove(0).key.seq;
            stage.answer(2, Answer::Done { seq });
        }
        if waits {
            break;
        }
    }
    assert!(waits, "nobody has waited for it");
    let gone = |effect: &Effect| matches!(effect, Effect::Close { .. });
    assert!(!stage.others.iter().any(gone), "it was given up");
}

/// The tag of the only question for space that a replica was asked, if it was.
fn question(stage: &mut Stage, number: u128) -> Option<u64> {
    match stage.take(number).as_slice() {
        [Request::Allocate { tag, .. }] => Some(*tag),
        [] => None,
        other => panic!("{other:?}"),
    }
}

/// Three replicas, of which the first two have little space.
fn two_of_three_are_low() -> Stage {
    let mut stage = Stage::serving(3, 4 * MIB);
    for number in 0..2 {
        let is_low = true;
        stage.answer(number, Answer::Space { is_low });
    }
    stage
}

/// Has the two that are low say whether they have space for what they are asked.
fn say(stage: &mut Stage, granted: [bool; 2]) {
    for (number, granted) in (0..2).zip(granted) {
        let tag = question(stage, number).expect("it was not asked");
        stage.answer(number, Answer::Allocated { tag, granted });
    }
}

fn apply(stage: &mut Stage) {
    for number in 0..3 {
        stage.apply_all(number);
    }
}

#[test]
fn a_write_that_too_many_pools_have_no_space_for_is_told_so_at_once() {
    // Fails if it waits or gets a number, or if reads and what gives space back are refused for want of it.
    let mut stage = Stage::serving(3, 4 * MIB);
    let is_low = true;
    stage.answer(0, Answer::Space { is_low });
    stage.write(0, 0);
    // One that has no space leaves enough that have.
    apply(&mut stage);
    assert!(stage.replies[&0].is_ok());
    stage.answer(1, Answer::Space { is_low });
    stage.write(1, 0);
    assert!(!stage.replies.contains_key(&1));
    say(&mut stage, [false, false]);
    assert_eq!(stage.replies[&1], Err(IoError::NoSpace));
    assert!((0..3).all(|number| stage.take(number).is_empty()));
    let (offset, length) = (0, 4096);
    stage.io(2, IoOp::Zero { offset, length });
    apply(&mut stage);
    assert!(stage.replies[&2].is_ok());
    stage.io(3, READ);
    let asked = (0..3).filter(|number| tag_of(&stage.take(*number)).is_some());
    assert_eq!(asked.count(), 1);
    let is_low = false;
    stage.answer(1, Answer::Space { is_low });
    stage.write(4, 0);
    assert!(!stage.replies.contains_key(&4));
    apply(&mut stage);
    assert!(stage.replies[&4].is_ok());
}

#[test]
fn a_write_for_which_enough_have_space_goes_on_and_is_asked_for_once() {
    // Fails if a full pool stops what it has space for, or is asked for it again and again.
    let mut stage = two_of_three_are_low();
    stage.write(1, 0);
    say(&mut stage, [false, true]);
    apply(&mut stage);
    assert!(stage.replies[&1].is_ok());
    stage.write(2, 0);
    apply(&mut stage);
    assert!(stage.replies[&2].is_ok(), "it was asked again");
    // What was given back has to be asked for.
    let (offset, length) = (0, 4096);
    stage.io(3, IoOp::Zero { offset, length });
    apply(&mut stage);
    stage.write(4, 0);
    say(&mut stage, [false, false]);
    assert_eq!(stage.replies[&4], Err(IoError::NoSpace));
}

#[test]
fn a_yes_from_before_the_space_was_given_back_does_not_count() {
    // Fails if zeros overtake a question, and a write gets its number without its space.
    let mut stage = two_of_three_are_low();
    stage.write(1, 0);
    let tags = [0, 1].map(|number| question(&mut stage, number).unwrap());
    let (offset, length) = (0, 4096);
    stage.io(2, IoOp::Zero { offset, length });
    for (number, tag) in (0..2).zip(tags) {
        let granted = true;
        stage.answer(number, Answer::Allocated { tag, granted });
    }
    assert!(!stage.replies.contains_key(&1));
    let again = |request: &Request| matches!(request, Request::Allocate { .. });
    assert!(stage.take(0).iter().any(again), "it was not asked again");
}

#[test]
fn a_replica_that_has_no_space_for_a_region_does_not_count_for_it_and_counts_for_others() {
    // Fails if its answer acknowledges what it has passed over, or if it is given up as a whole.
    let mut stage = Stage::serving(3, 4 * MIB);
    stage.write(1, 0);
    let region = Region(0);
    stage.answer(0, Answer::Behind { region });
    stage.apply_all(0);
    stage.apply_all(1);
    assert!(
        !stage.replies.contains_key(&1),
        "one has it, and it takes two"
    );
    stage.apply_all(2);
    assert!(stage.replies[&1].is_ok());
    // Entries of that region are passed over from now on, those of others are not.
    stage.write(2, 1);
    stage.write(3, 256);
    let ops: Vec<EntryOp> = stage.entries(0).into_iter().map(|it| it.op).collect();
    assert!(matches!(
        ops.as_slice(),
        [EntryOp::Skip { .. }, EntryOp::Write { .. }]
    ));
    let gone = |effect: &Effect| matches!(effect, Effect::Close { .. });
    assert!(!stage.others.iter().any(gone), "it was given up");
}

#[test]
fn a_refusal_for_another_coordinator_of_the_same_generation_is_an_end() {
    // Fails if two that chose the same number try for ever.
    for owner in [PROMISE.owner - 1, PROMISE.owner + 1] {
        let mut stage = Stage::new(1);
        let event = Event::Opened {
            replica: replica(0),
            session: 1,
        };
        stage.tell(event);
        let promise = Promise { owner, ..PROMISE };
        stage.answer_as(0, promise, Answer::Refused { promise });
        let deposed = |effect: &Effect| matches!(effect, Effect::Deposed { by } if *by == promise);
        assert!(stage.others.iter().any(deposed), "owner {owner}");
    }
}

#[test]
fn what_is_given_up_before_it_begins_is_not_done() {
    // Fails if a write that a client was told has failed is sent to a replica later.
    let mut stage = Stage::serving(3, 4 * MIB);
    for number in 0..2 {
        let session = u64::try_from(number).unwrap() + 1;
        let replica = replica(number);
        stage.tell(Event::Closed { replica, session });
    }
    stage.write(1, 0);
    stage.write(2, 1);
    assert!(stage.entries(2).is_empty());
    stage.tell(Event::Cancel { id: 1 });
    stage.greet(1, 4 * MIB);
    stage.report(1, 4 * MIB);
    stage.take(1);
    stage.answer(1, Answer::Joined);
    let entries = stage.entries(2);
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert!(!stage.replies.contains_key(&1));
}

#[test]
fn more_than_may_wait_is_refused_and_not_begun() {
    // Fails if the memory of a volume without replicas has no bound.
    let mut stage = Stage::serving(1, 4 * MIB);
    let closed = Event::Closed {
        replica: replica(0),
        session: 1,
    };
    stage.tell(closed);
    let mut id = 0;
    while stage.coordinator.accepts() {
        id += 1;
        assert!(id < 100_000);
        stage.write(id, 0);
    }
    assert!(stage.replies.is_empty());
    stage.write(id + 1, 0);
    assert_eq!(stage.replies[&(id + 1)], Err(IoError::Busy));
}

/// The replicas of these numbers, with the usual factor.
fn config(numbers: impl Iterator<Item = u128>) -> trellis_engine::proto::Config {
    trellis_engine::proto::Config::majority(numbers.map(replica).collect())
}

/// A replica has applied and made durable everything that was sent to it.
fn flush_all(stage: &mut Stage, number: u128) {
    let entries = stage.entries(number);
    if let Some(flush) = entries.iter().rev().find(|entry| is_flush(entry)) {
        let seq = flush.key.seq;
        stage.answer(number, Answer::Flushed { seq });
    }
    if let Some(last) = entries.last() {
        let seq = last.key.seq;
        stage.answer(number, Answer::Done { seq });
    }
}

#[test]
fn a_full_replica_goes_only_when_another_one_is_full_and_is_needed_until_that_is_known() {
    // Fails if a quorum of the others is taken for enough, or a successor could look for one that is gone.
    let mut stage = Stage::serving(3, 4 * MIB);
    let wanted = config(1..4);
    let goal = Event::Reconfigure {
        config: wanted.clone(),
    };
    stage.tell(goal);
    stage.wait(1000);
    for number in 0..3 {
        flush_all(&mut stage, number);
    }
    let status = stage.coordinator.status();
    assert_eq!(
        status.view.current,
        config(0..3),
        "the new one is not there"
    );
    assert_eq!(status.view.next, None);
    stage.greet(3, 4 * MIB);
    stage.report(3, 4 * MIB);
    assert_eq!(stage.coordinator.status().view.next, None, "it is empty");
    stage.take(3);
    stage.answer(3, Answer::Joined);
    assert_eq!(stage.coordinator.status().view.next, Some(wanted.clone()));
    for number in 0..4 {
        flush_all(&mut stage, number);
    }
    let status = stage.coordinator.status();
    assert_eq!(status.view.current, wanted);
    assert_eq!(status.view.next, None);
    let leaving = status.leaving.into_iter().collect::<Vec<_>>();
    assert_eq!(leaving, [replica(0)], "nobody knows the new view yet");
    for number in 1..4 {
        flush_all(&mut stage, number);
    }
    assert!(stage.coordinator.status().leaving.is_empty());
}

/// How many regions a scrub compares in a second, while a client always has a request or never has one.
fn compared_in_a_second(is_busy: bool) -> u64 {
    const STEP_MS: u64 = 10;
    let mut stage = Stage::serving(3, 512 * MIB);
    for number in 0..3_u64 {
        let replica = replica(u128::from(number));
        let session = number + 1;
        stage.tell(Event::Verifies { replica, session });
    }
    stage.tell(Event::Scrub);
    let mut compared = 0;
    for step in 0..1_000 / STEP_MS {
        if is_busy {
            stage.io(step, READ);
        }
        stage.wait(STEP_MS);
        // What was asked is answered at once, and what is asked then as well.
        while (0..3).any(|number| stage.asked.contains_key(&replica(number))) {
            for number in 0..3 {
                for request in stage.take(number) {
                    match request {
                        Request::Verify { tag, .. } => {
                            compared += u64::from(number == 0);
                            let (digest, bad) = (1, Vec::new());
                            stage.answer(number, Answer::Verified { tag, digest, bad });
                        }
                        Request::Read { tag, .. } => {
                            let result = Ok(page(7));
                            stage.answer(number, Answer::Read { tag, result });
                        }
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
    }
    compared
}

#[test]
fn a_scrub_keeps_to_its_budget_and_leaves_most_of_it_to_clients() {
    // Fails if a scrub takes all that the disks can give, or goes on as fast when clients ask for something.
    let budget = Limits::default().scrub_bytes_per_second / MIB;
    // The last region may not be paid for in full.
    let (idle, busy) = (compared_in_a_second(false), compared_in_a_second(true));
    assert!((budget - 1..=budget).contains(&idle), "{idle}");
    assert!((budget / 4 - 1..=budget / 4).contains(&busy), "{busy}");
}
