//! What was measured, in words: figures, ratios with their spread, and whether the aims are met.

use super::server::{Role, Sample, Server};
use super::targets::BackingDir;
use super::{Options, WORK, Work};

/// All samples of one backing.
pub struct Report<'a> {
    servers: &'a [Server],
    /// For each work and each server, one a round, unless it failed.
    samples: Vec<Vec<Vec<Option<Sample>>>>,
    /// For each work and round, how many operations a second the backing file alone does.
    bare: Vec<Vec<f64>>,
}

/// The middle of some figures, and how far they go.
#[derive(Clone, Copy, Debug)]
struct Spread {
    median: f64,
    least: f64,
    most: f64,
}

impl Spread {
    fn of(figures: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut sorted: Vec<f64> = figures.into_iter().collect();
        sorted.sort_unstable_by(f64::total_cmp);
        Some(Spread {
            median: *sorted.get(sorted.len() / 2)?,
            least: *sorted.first()?,
            most: *sorted.last()?,
        })
    }
}

/// What is wanted of ours on a file in memory.
struct Aim {
    /// Whether it is said of three copies, or of one.
    copies: bool,
    work: Work,
    against: Against,
    at_least: f64,
}

enum Against {
    Named(&'static str),
    /// The fastest of the peers, round by round.
    BestPeer,
    Limit,
    /// Our own single copy.
    OneCopy,
    /// Our own three copies, without sums of their blocks.
    Unsummed,
}

/// What copies with sums of their blocks shall do of what they do without.
const SUMS_OF_NONE: f64 = 0.9;

/// What three copies shall do of what one does, whatever the work is.
const COPIES_OF_ONE: f64 = 0.5;

const fn aim(work: usize, against: Against, at_least: f64) -> Aim {
    Aim {
        copies: false,
        work: WORK[work],
        against,
        at_least,
    }
}

const AIMS: [Aim; 8] = [
    aim(2, Against::Named("tgt aio"), 1.5),
    aim(3, Against::Named("tgt aio"), 1.2),
    aim(2, Against::Limit, 0.8),
    aim(3, Against::Limit, 0.8),
    aim(0, Against::Named("tgt aio"), 1.0),
    aim(1, Against::Named("tgt aio"), 1.0),
    aim(6, Against::BestPeer, 1.5),
    aim(7, Against::BestPeer, 1.0),
];

impl<'a> Report<'a> {
    pub fn new(servers: &'a [Server]) -> Report<'a> {
        Report {
            servers,
            samples: vec![vec![Vec::new(); servers.len()]; WORK.len()],
            bare: vec![Vec::new(); WORK.len()],
        }
    }

    pub fn add(&mut self, work: Work, server: usize, sample: Option<Sample>) {
        if let Some(row) =
            index_of(work).and_then(|work| self.samples.get_mut(work)?.get_mut(server))
        {
            row.push(sample);
        }
    }

    pub fn add_bare(&mut self, work: Work, a_second: f64) {
        if let Some(rounds) = index_of(work).and_then(|work| self.bare.get_mut(work)) {
            rounds.push(a_second);
        }
    }

    pub fn print(&self, backing_dir: &BackingDir, options: &Options) {
        let kind = if backing_dir.in_memory {
            "tmpfs"
        } else {
            "disk"
        };
        println!(
            "\n{kind} ({} MiB), one copy and three, {} rounds of {} s each; ratio = trellis / it, median [least..most] of the rounds",
            backing_dir.size_mib, options.rounds, options.seconds
        );
        for work in WORK {
            println!("{work}");
            for (index, server) in self.servers.iter().enumerate() {
                self.print_line(work, index, &server.name);
            }
        }
        for server in self.servers {
            if let Some(mib) = server.memory_mib() {
                println!("memory of {}: {} MiB at most", server.name, list(&mib));
            }
        }
        if backing_dir.in_memory {
            for aim in &AIMS {
                self.print_aim(aim);
            }
            for work in WORK {
                self.print_aim(&Aim {
                    copies: true,
                    work,
                    against: Against::OneCopy,
                    at_least: COPIES_OF_ONE,
                });
            }
            for work in WORK {
                self.print_aim(&Aim {
                    copies: true,
                    work,
                    against: Against::Unsummed,
                    at_least: SUMS_OF_NONE,
                });
            }
        }
    }

    fn print_line(&self, work: Work, server: usize, name: &str) {
        let rounds: Vec<Sample> = self
            .rounds(work, server)
            .iter()
            .flatten()
            .copied()
            .collect();
        let middle = |of: fn(&Sample) -> f64| {
            Spread::of(rounds.iter().map(of)).map_or(0.0, |spread| spread.median)
        };
        let Some(rate) = Spread::of(rounds.iter().map(|sample| sample.a_second)) else {
            return println!("  {name:14} failed in every round");
        };
        let megabytes = rate.median * f64::from(work.block) / 1e6;
        print!(
            "  {name:14} {:8.0}/s [{:.0}..{:.0}] {megabytes:6.0} MB/s  p50 {:6.0} us  p99 {:6.0} us  CPU {:6.1} us each",
            rate.median,
            rate.least,
            rate.most,
            middle(|sample| sample.p50.as_secs_f64() * 1e6),
            middle(|sample| sample.p99.as_secs_f64() * 1e6),
            middle(|sample| sample.cpu.as_secs_f64() * 1e6),
        );
        let ratio = self
            .ours()
            .and_then(|ours| self.ratio(work, ours, &[server]));
        match ratio.zip(self.cpu_ratio(work, server)) {
            Some((ratio, cpu)) if self.ours() != Some(server) => println!(
                "  ratio {:.2} [{:.2}..{:.2}], by CPU {:.2}",
                ratio.median, ratio.least, ratio.most, cpu.median
            ),
            _ => println!(),
        }
    }

    /// What another needs of a processor for what ours does in one second of it. Others on the machine change
    /// it little, unlike everything that a clock measures.
    fn cpu_ratio(&self, work: Work, server: usize) -> Option<Spread> {
        let ours = self.rounds(work, self.ours()?);
        let pairs = ours.iter().zip(self.rounds(work, server));
        Spread::of(pairs.filter_map(|(ours, other)| {
            let (ours, other) = (ours.as_ref()?.cpu, other.as_ref()?.cpu);
            (!ours.is_zero()).then(|| other.as_secs_f64() / ours.as_secs_f64())
        }))
    }

    fn print_aim(&self, aim: &Aim) {
        let is = |server: &Server| match aim.against {
            Against::Named(name) => server.name == name,
            Against::BestPeer => server.role == Role::Peer,
            Against::Limit => server.role == Role::Limit,
            Against::OneCopy => server.role == Role::Ours,
            Against::Unsummed => server.role == Role::Unsummed,
        };
        let against: Vec<usize> = (0..self.servers.len())
            .filter(|index| is(&self.servers[*index]))
            .collect();
        let who = if aim.copies {
            self.position(Role::Copies)
        } else {
            self.ours()
        };
        let Some(ratio) = who.and_then(|who| self.ratio(aim.work, who, &against)) else {
            return;
        };
        let name = match aim.against {
            Against::Named(name) => name,
            Against::BestPeer => "the best peer",
            Against::Limit => "the limit",
            Against::OneCopy => "one copy",
            Against::Unsummed => "the same without sums",
        };
        let whose = if aim.copies { "three copies, " } else { "" };
        let met = if ratio.median >= aim.at_least {
            "met"
        } else {
            "NOT met"
        };
        println!(
            "aim: {whose}{}, at least {} of {name}: {:.2} [{:.2}..{:.2}], {met}",
            aim.work, aim.at_least, ratio.median, ratio.least, ratio.most
        );
        if matches!(aim.against, Against::Limit) {
            self.print_fair_limit(aim.work);
        }
    }

    /// The limit fetches and stores nothing, which no target on a file can do. So ours is also shown beside
    /// the limit and a bare operation on the file, one after the other.
    fn print_fair_limit(&self, work: Work) {
        let limit = self.position(Role::Limit);
        let Some((ours, limit)) = self.ours().zip(limit) else {
            return;
        };
        let bare = index_of(work).and_then(|work| self.bare.get(work));
        let rounds = bare
            .into_iter()
            .flatten()
            .enumerate()
            .filter_map(|(round, bare)| {
                let limit = self.rounds(work, limit).get(round)?.as_ref()?.a_second;
                let ours = self.rounds(work, ours).get(round)?.as_ref()?.a_second;
                Some((*bare, ours * (1.0 / limit + 1.0 / bare)))
            });
        let (bare, ratios): (Vec<f64>, Vec<f64>) = rounds.unzip();
        if let Some((bare, ratio)) = Spread::of(bare).zip(Spread::of(ratios)) {
            println!(
                "     the file alone does {:.0}/s; of the limit and that together it is {:.2} [{:.2}..{:.2}]",
                bare.median, ratio.median, ratio.least, ratio.most
            );
        }
    }

    /// One of them over the fastest of these, round by round.
    fn ratio(&self, work: Work, who: usize, against: &[usize]) -> Option<Spread> {
        let ours = self.rounds(work, who);
        Spread::of(ours.iter().enumerate().filter_map(|(round, sample)| {
            let others = against
                .iter()
                .filter_map(|server| self.rounds(work, *server).get(round)?.as_ref());
            let best = others.map(|other| other.a_second).max_by(f64::total_cmp)?;
            Some(sample.as_ref()?.a_second / best)
        }))
    }

    fn ours(&self) -> Option<usize> {
        self.position(Role::Ours)
    }

    fn position(&self, role: Role) -> Option<usize> {
        self.servers.iter().position(|server| server.role == role)
    }

    fn rounds(&self, work: Work, server: usize) -> &[Option<Sample>] {
        index_of(work)
            .and_then(|work| self.samples.get(work)?.get(server))
            .map_or(&[], Vec::as_slice)
    }
}

fn index_of(work: Work) -> Option<usize> {
    WORK.iter().position(|other| *other == work)
}

fn list(figures: &[u64]) -> String {
    let words: Vec<String> = figures.iter().map(u64::to_string).collect();
    words.join(" + ")
}

/// What others with several copies do, which this run does not measure.
pub fn print_others() {
    println!(
        "\nfor comparison, not measured here:\n  \
         cStor's target with three of its own test replicas, once, on a busy machine with two cores: 757 writes/s of \
         4 KiB at depth 1, 1,600 at depth 32, 4,000 reads/s at depth 32; tgt with one copy in the same hours \
         3,200..4,800, 12,700 and 17,000: three copies of one 0.16..0.24, 0.13 and 0.24\n  \
         Longhorn v1, as published (m5zn.2xlarge, gp3, three replicas, RTT 0.3 ms): 1,150 random writes/s of a \
         disk's 9,980 (0.12), 22,180 random reads/s of 10,000 (it reads from all of them)"
    );
    let ceph = std::process::Command::new("rbd").arg("--version").output();
    println!(
        "  Ceph RBD: {}",
        if ceph.is_ok() {
            "installed, but this benchmark starts no cluster: skipped"
        } else {
            "not installed: skipped"
        }
    );
}
