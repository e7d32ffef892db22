//! The tests' guest by hand: a shell, or scenarios by name.

use std::io::Write;

use clap::{Args, Subcommand};
use trellis_guest_tests::artifacts::Artifacts;
use trellis_guest_tests::image::Image;
use trellis_guest_tests::run::{Progress, run as run_orders};
use trellis_guest_tests::{qemu, scenario};

#[derive(Args)]
pub struct Guest {
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(Subcommand)]
enum What {
    /// Run scenarios and show what they print; the usual ones if none is named
    Run {
        /// Names of scenarios
        names: Vec<String>,
    },
    /// List the scenarios
    List,
}

/// Does what is asked for; without anything a shell.
pub fn run(guest: Guest) -> anyhow::Result<()> {
    match guest.what {
        None => {
            let image = Image::pack(&Artifacts::build()?)?;
            qemu::shell(&image)?;
            Ok(())
        }
        Some(What::List) => {
            for each in scenario::ALL {
                let note = if each.always {
                    ""
                } else {
                    "  (only when named)"
                };
                println!("{}{note}", each.name);
            }
            Ok(())
        }
        Some(What::Run { names }) => run_scenarios(&names),
    }
}

fn run_scenarios(names: &[String]) -> anyhow::Result<()> {
    let chosen: Vec<_> = if names.is_empty() {
        let usual = scenario::ALL.iter().filter(|each| each.always);
        usual.copied().collect()
    } else {
        let named = names.iter().map(|name| scenario::named(name));
        named.collect::<Result<_, _>>()?
    };
    let artifacts = Artifacts::build()?;
    let image = Image::pack(&artifacts)?;
    let orders = chosen.iter().map(|each| each.order(&artifacts, &image));
    let orders = orders.collect::<Result<Vec<_>, _>>()?;
    let outcomes = run_orders(&image, &orders, 1, &mut |progress| match progress {
        Progress::Booted { kernel, took } => println!("guest with {kernel} up in {took:.1?}"),
        Progress::Said(text) => {
            print!("{text}");
            let _ = std::io::stdout().flush();
        }
        Progress::Ended(outcome) => println!("{outcome}"),
    })?;
    let failed: Vec<_> = outcomes.iter().filter(|each| !each.passed()).collect();
    for outcome in &failed {
        println!(
            "--- the console at the end of {}\n{}",
            outcome.name, outcome.console
        );
    }
    anyhow::ensure!(
        failed.is_empty(),
        "{} of {} scenarios failed",
        failed.len(),
        outcomes.len()
    );
    Ok(())
}
