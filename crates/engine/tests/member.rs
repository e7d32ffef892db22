//! Rules of a replica's state machine that a random history seldom meets, one at a time.
#![allow(clippy::unwrap_used)]

#[path = "common/puppet.rs"]
mod puppet;

use bytes::Bytes;
use puppet::{PROMISE, VOLUME, replica};
use trellis_engine::member::{self, DiskOp, DiskResult, Member};
use trellis_engine::proto::{
    Answer, Body, Config, Content, Entry, EntryOp, Envelope, Epoch, Geometry, JoinTerms, Key, Meta,
    MetaChange, Past, Region, Request, Stale, View,
};

const MIB: u64 = 1 << 20;

/// A member that takes part, with what it asks of its disk.
struct Puppet {
    member: Member,
    out: Vec<member::Effect>,
    index: u64,
}

impl Puppet {
    fn taking_part(size: u64) -> Puppet {
        Puppet::with_past(size, &MetaChange::default())
    }

    /// One that has been through something before.
    fn with_past(size: u64, past: &MetaChange) -> Puppet {
        let view = View::first(Config::majority([replica(0)].into()));
        let mut meta = Meta::fresh(Geometry::STANDARD, size, view.clone());
        meta.update(Geometry::STANDARD, past);
        let mut puppet = Puppet {
            member: Member::open(VOLUME, replica(0), Geometry::STANDARD, meta, None),
            out: Vec::new(),
            index: 0,
        };
        puppet.ask(Request::Hello);
        puppet.go_on();
        puppet.disk_done();
        let key = Key {
            epoch: Epoch::first(PROMISE.generation),
            seq: 0,
        };
        puppet.ask(Request::Join(JoinTerms {
            past: Past::Counts,
            key,
            size,
            size_version: 1,
            view,
        }));
        puppet.go_on();
        // The sync, then the record.
        puppet.disk_done();
        puppet.disk_done();
        puppet.out.clear();
        puppet
    }

    fn ask(&mut self, request: Request) {
        let envelope = Envelope {
            volume: VOLUME,
            replica: replica(0),
            promise: PROMISE,
            size_version: 1,
            index: self.index,
            body: Body::Request(request),
        };
        self.index += 1;
        let session = 1;
        let event = member::Event::Received { session, envelope };
        self.member.take(event, &mut self.out);
    }

    fn go_on(&mut self) {
        self.member.pump(&mut self.out);
    }

    /// The disk finishes the operation that it was asked for last.
    fn disk_done(&mut self) {
        let (token, _) = self.disk_op().expect("nothing is at the disk");
        self.out.clear();
        let result = DiskResult::Done;
        self.member
            .take(member::Event::Disk { token, result }, &mut self.out);
        self.go_on();
    }

    fn disk_op(&self) -> Option<(u64, &DiskOp)> {
        self.out.iter().rev().find_map(|effect| match effect {
            member::Effect::Disk { token, op } => Some((*token, op)),
            _ => None,
        })
    }

    fn write(&mut self, seq: u64, region: u64) {
        let key = Key {
            epoch: Epoch::first(PROMISE.generation),
            seq,
        };
        let op = EntryOp::Write {
            offset: region * MIB,
            data: Bytes::from(vec![1; 4096]),
        };
        self.ask(Request::Entry(Entry { key, op }));
    }
}

#[test]
fn the_first_writes_of_an_epoch_share_the_sync_of_their_stamps() {
    // Fails if random writes cost a sync a region.
    let mut puppet = Puppet::taking_part(64 * MIB);
    for (seq, region) in (1..).zip([9, 3, 9, 40, 5]) {
        puppet.write(seq, region);
    }
    puppet.go_on();
    let Some((_, DiskOp::Persist(change))) = puppet.disk_op() else {
        panic!("{:?}", puppet.out);
    };
    let regions: Vec<u32> = change.stamps.iter().map(|(region, _)| region.0).collect();
    assert_eq!(regions, [3, 5, 9, 40]);
    // From here on there are only writes.
    puppet.disk_done();
    for _ in 0..5 {
        assert!(matches!(puppet.disk_op(), Some((_, DiskOp::Write { .. }))));
        puppet.disk_done();
    }
    assert!(puppet.disk_op().is_none());
}

#[test]
fn writes_from_region_to_region_are_stamped_ahead() {
    // Fails if a long sequential write costs a sync a region, or regions far away are stamped.
    let mut puppet = Puppet::taking_part(64 * MIB);
    let mut syncs = Vec::new();
    for (seq, region) in (1..).zip(10..50) {
        puppet.write(seq, region);
        puppet.go_on();
        if let Some((_, DiskOp::Persist(change))) = puppet.disk_op() {
            let stamps = change.stamps.iter();
            syncs.push(stamps.map(|(region, _)| region.0).collect::<Vec<_>>());
            puppet.disk_done();
        }
        puppet.disk_done();
    }
    let runs: Vec<Vec<u32>> = vec![
        vec![10],
        (11..27).collect(),
        (27..43).collect(),
        (43..59).collect(),
    ];
    assert_eq!(syncs, runs);
}

#[test]
fn many_entries_are_answered_once_and_noted_before_that() {
    // Fails if every entry costs a message, or a coordinator hears of one that a death would take.
    let mut puppet = Puppet::taking_part(4 * MIB);
    for seq in 1..=8 {
        puppet.write(seq, 0);
    }
    puppet.go_on();
    for _ in 0..9 {
        puppet.disk_done();
        assert!(!puppet.out.iter().any(is_word), "{:?}", puppet.out);
    }
    puppet.member.speak(&mut puppet.out);
    let words: Vec<_> = puppet.out.iter().filter(|effect| is_word(effect)).collect();
    let [
        member::Effect::Note { key },
        member::Effect::Send { envelope, .. },
    ] = words[..]
    else {
        panic!("{words:?}");
    };
    assert_eq!(key.seq, 8);
    assert_eq!(envelope.body, Body::Answer(Answer::Done { seq: 8 }));
}

fn is_word(effect: &member::Effect) -> bool {
    matches!(
        effect,
        member::Effect::Note { .. } | member::Effect::Send { .. }
    )
}

/// What is recorded of a region when its repair is over, with `stamp` as the stamp of its bytes.
fn recorded_after_repair(
    puppet: &mut Puppet,
    region: Region,
    stamp: Epoch,
) -> Vec<(Region, Epoch)> {
    puppet.ask(Request::RepairData {
        region,
        stamp,
        content: Content::Data(Bytes::from(vec![7; usize::try_from(MIB).unwrap()])),
    });
    puppet.go_on();
    // The bytes, then the sync, then the record.
    while !matches!(puppet.disk_op(), Some((_, DiskOp::Persist(_)))) {
        puppet.disk_done();
    }
    let Some((_, DiskOp::Persist(change))) = puppet.disk_op() else {
        panic!("{:?}", puppet.out);
    };
    assert_eq!(change.stale, [(region, None)]);
    change.stamps.clone()
}

/// A region that was written in a history which nobody counts any more.
fn with_discarded_write(region: Region) -> Puppet {
    let key = Key {
        epoch: Epoch::first(PROMISE.generation - 2),
        seq: 1,
    };
    let past = MetaChange {
        stamps: vec![(region, Epoch::first(PROMISE.generation - 1))],
        stale: vec![(region, Some(Stale { key, mixed: true }))],
        ..MetaChange::default()
    };
    let mut puppet = Puppet::with_past(64 * MIB, &past);
    puppet.ask(Request::RepairBegin { region });
    puppet.go_on();
    puppet
}

#[test]
fn a_repaired_region_takes_the_stamp_of_its_new_bytes() {
    // Fails if the stamp of a write that does not count stays: a replica that still has its bytes would look the same.
    let region = Region(3);
    let mut puppet = with_discarded_write(region);
    let stamp = Epoch::first(PROMISE.generation - 2);
    let recorded = recorded_after_repair(&mut puppet, region, stamp);
    assert_eq!(recorded, [(region, stamp)]);
}

#[test]
fn a_write_during_a_repair_keeps_its_stamp() {
    // Fails if the repair takes the stamp of an entry away that was applied meanwhile.
    let region = Region(3);
    let mut puppet = with_discarded_write(region);
    puppet.write(1, 3);
    puppet.go_on();
    // Its stamp, then its bytes.
    puppet.disk_done();
    puppet.disk_done();
    let stamp = Epoch::first(PROMISE.generation - 2);
    let recorded = recorded_after_repair(&mut puppet, region, stamp);
    assert_eq!(recorded, [(region, Epoch::first(PROMISE.generation))]);
}
