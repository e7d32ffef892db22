//! Each node in turn is cut off, frozen or killed, in the middle of each thing that a volume goes through. Nothing that
//! was durable is lost, and everything goes on.

use std::time::Duration;

use trellis_nodes_tests::cluster::Cluster;
use trellis_nodes_tests::writer::{Writer, held};

const NODES: [&str; 3] = ["a", "b", "c"];
/// How long a node is disturbed: shorter than the time after which it counts as lost.
const LASTS: Duration = Duration::from_millis(1500);
/// By how much each growth raises the volume, in MiB.
const BY: u64 = 16;

/// What happens to a node.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Disturbance {
    Cut,
    Freeze,
    Kill,
}

/// What a volume goes through meanwhile.
#[derive(Clone, Copy, Debug, PartialEq)]
enum During {
    Growth,
    Repair,
    Move,
    Attach,
}

const ALL: [During; 4] = [During::Growth, During::Repair, During::Move, During::Attach];

/// A volume, its user, and what was durable.
struct Scene {
    cluster: Cluster,
    /// The node of its user.
    user: &'static str,
    mib: u64,
    noted: Vec<u64>,
    longest: Duration,
    writers: usize,
}

impl Scene {
    fn new() -> Scene {
        let cluster = Cluster::up(&[]).unwrap();
        cluster.claim("data", "320Mi").unwrap();
        cluster.mount("data", "b").unwrap();
        Scene {
            cluster,
            user: "b",
            mib: 320,
            noted: Vec::new(),
            longest: Duration::ZERO,
            writers: 0,
        }
    }

    fn writer(&mut self) -> Writer {
        self.writers += 1;
        let machine = self.cluster.machine(self.user).unwrap();
        let path = self.cluster.path("data", self.user).unwrap();
        Writer::start(machine, &path, &self.writers.to_string()).unwrap()
    }

    fn take(&mut self, writer: Writer) {
        let (numbers, stall) = writer.stop().unwrap();
        self.noted.extend(numbers);
        self.longest = self.longest.max(stall);
    }

    /// Disturbs a node for a while.
    fn disturb(&mut self, node: &str, how: Disturbance) {
        let machine = self.cluster.machine(node).unwrap().clone();
        match how {
            Disturbance::Cut => machine.cut().unwrap(),
            Disturbance::Freeze => machine.freeze().unwrap(),
            Disturbance::Kill => self.cluster.kill(node).unwrap(),
        }
        std::thread::sleep(LASTS);
        match how {
            Disturbance::Cut => machine.heal().unwrap(),
            Disturbance::Freeze => machine.thaw(),
            Disturbance::Kill => self.cluster.start(node).unwrap(),
        }
    }

    /// Mounts the volume where its user is, and looks whether everything is there.
    fn mount(&mut self) {
        let (path, _) = self.cluster.mount("data", self.user).unwrap();
        let expected: Vec<u64> = (0..self.noted.last().map_or(0, |last| last + 1)).collect();
        let numbers = held(&path).unwrap_or_default();
        let there = numbers.get(..expected.len());
        assert_eq!(there, Some(expected.as_slice()), "a durable number is lost");
    }

    fn unmount(&self) {
        self.cluster.ask_unmount("data", self.user).unwrap();
        self.cluster.wait_unmounted("data", self.user).unwrap();
    }

    /// One round: something begins, a node is disturbed in the middle of it, and it ends well.
    fn round(&mut self, during: During, node: &str, how: Disturbance) {
        let is_user_killed = node == self.user && how == Disturbance::Kill;
        let writer = self.writer();
        writer.wait_for(5).unwrap();
        match during {
            During::Growth => {
                self.mib += BY;
                self.cluster
                    .ask_growth("data", &format!("{}Mi", self.mib))
                    .unwrap();
            }
            During::Repair => {
                let other = NODES
                    .into_iter()
                    .find(|each| *each != node && *each != self.user);
                let other = self.cluster.machine(other.unwrap()).unwrap().clone();
                other.cut().unwrap();
                writer.wait_for(5).unwrap();
                std::thread::sleep(LASTS);
                other.heal().unwrap();
            }
            During::Move => {
                self.take(writer);
                self.cluster.ask_unmount("data", self.user).unwrap();
                let left = self.user;
                self.user = NODES[(NODES.iter().position(|each| *each == left).unwrap() + 1) % 3];
                self.cluster.ask_mount("data", self.user).unwrap();
                self.disturb(node, how);
                self.cluster.wait_unmounted("data", left).unwrap();
                return self.settle(node, how);
            }
            During::Attach => {
                self.take(writer);
                self.unmount();
                self.cluster.ask_mount("data", self.user).unwrap();
                self.disturb(node, how);
                return self.settle(node, how);
            }
        }
        self.disturb(node, how);
        if is_user_killed {
            self.take(writer);
            return self.settle(node, how);
        }
        writer.wait_for(5).unwrap();
        self.take(writer);
        self.settle(node, how);
    }

    /// Everything comes to rest, and the volume is used again. A node that was killed has lost its connection to the
    /// volume's file, so that its user has to begin again.
    fn settle(&mut self, node: &str, how: Disturbance) {
        if node == self.user && how == Disturbance::Kill {
            self.unmount();
        }
        self.mount();
        self.cluster
            .wait_grown("data", &format!("{}Mi", self.mib))
            .unwrap();
        self.cluster.wait_whole(&format!("{}Mi", self.mib)).unwrap();
    }
}

fn disturbed(how: Disturbance) {
    let mut scene = Scene::new();
    for during in ALL {
        for node in NODES {
            eprintln!("{how:?} of {node} during {during:?}");
            scene.round(during, node, how);
        }
    }
    eprintln!(
        "{how:?}: {} numbers, longest stall {:?}",
        scene.noted.len(),
        scene.longest
    );
}

#[test]
fn each_node_is_cut_off_during_everything() {
    // Fails if a node that the others do not reach for a while costs a durable byte, or stops something for ever.
    disturbed(Disturbance::Cut);
}

#[test]
fn each_node_freezes_during_everything() {
    // Fails if a node that stands still for a while costs a durable byte, or stops something for ever.
    disturbed(Disturbance::Freeze);
}

#[test]
fn each_node_is_killed_during_everything() {
    // Fails if the death of everything on a node costs a durable byte, or stops something for ever.
    disturbed(Disturbance::Kill);
}
