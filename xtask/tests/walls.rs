//! The walls between crates, licences and sources: `deny.toml`, checked against what cargo would build.
//!
//! cargo-deny checks the same file (`cargo xtask deny`), but takes longer to build than the project.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde::Deserialize;

#[derive(Deserialize)]
struct Rules {
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Deserialize)]
struct Licenses {
    allow: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Bans {
    deny: Vec<Wall>,
}

/// A crate, and the crates that alone may depend on it.
#[derive(Deserialize)]
struct Wall {
    #[serde(rename = "crate")]
    name: String,
    wrappers: BTreeSet<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    unknown_registry: String,
    unknown_git: String,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    license: Option<String>,
    source: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    dependencies: Vec<String>,
}

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

fn rules() -> Rules {
    let text = std::fs::read_to_string(format!("{ROOT}/deny.toml")).unwrap();
    toml::from_str(&text).unwrap()
}

fn metadata() -> Metadata {
    let asked = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version=1",
            "--all-features",
            "--locked",
        ])
        .current_dir(ROOT)
        .output()
        .unwrap();
    assert!(
        asked.status.success(),
        "{}",
        String::from_utf8_lossy(&asked.stderr)
    );
    serde_json::from_slice(&asked.stdout).unwrap()
}

/// The dependencies that the rules forbid, as `who -> whom`.
fn breaches(rules: &Rules, metadata: &Metadata) -> Vec<String> {
    let names: BTreeMap<&str, &str> = metadata
        .packages
        .iter()
        .map(|package| (package.id.as_str(), package.name.as_str()))
        .collect();
    let mut breaches = Vec::new();
    for node in &metadata.resolve.nodes {
        let who = names[node.id.as_str()];
        for whom in node.dependencies.iter().map(|id| names[id.as_str()]) {
            let wall = rules.bans.deny.iter().find(|wall| wall.name == whom);
            if wall.is_some_and(|wall| !wall.wrappers.contains(who)) {
                breaches.push(format!("{who} -> {whom}"));
            }
        }
    }
    breaches
}

/// Whether a licence expression can be met with allowed licences: `A OR B`, `A AND B`, `A/B`. Of one with brackets,
/// every licence must be allowed.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let plain = expression.replace('/', " OR ").replace(['(', ')'], " ");
    let every = |list: &str| list.split(" AND ").all(|one| allowed.contains(one.trim()));
    let mut alternatives = plain.split(" OR ");
    if expression.contains('(') {
        alternatives.all(every)
    } else {
        alternatives.any(every)
    }
}

#[test]
fn no_crate_reaches_over_a_wall() {
    // Fails when a crate depends on one that `deny.toml` keeps from it.
    let found = breaches(&rules(), &metadata());
    assert!(found.is_empty(), "deny.toml forbids: {found:#?}");
}

#[test]
fn a_breach_is_seen() {
    // Fails when the check above could not fail.
    let mut rules = rules();
    let wall = rules.bans.deny.iter_mut().find(|wall| wall.name == "redb");
    wall.unwrap().wrappers.clear();
    assert_eq!(breaches(&rules, &metadata()), ["trellis-apiserver -> redb"]);
}

#[test]
fn every_wall_is_about_a_crate_that_is_there() {
    // Fails when a crate was renamed and its wall guards nothing any more.
    let metadata = metadata();
    let names: BTreeSet<&str> = metadata
        .packages
        .iter()
        .map(|each| each.name.as_str())
        .collect();
    for wall in rules().bans.deny {
        assert!(names.contains(wall.name.as_str()), "{}", wall.name);
        for wrapper in &wall.wrappers {
            assert!(names.contains(wrapper.as_str()), "{}: {wrapper}", wall.name);
        }
    }
}

#[test]
fn every_dependency_has_an_allowed_licence_and_comes_from_the_registry() {
    // Fails when a dependency brings a licence that nobody has agreed to, or comes from elsewhere.
    let rules = rules();
    assert_eq!(rules.sources.unknown_registry, "deny");
    assert_eq!(rules.sources.unknown_git, "deny");
    for package in metadata().packages {
        let licence = package.license.as_deref().unwrap_or_default();
        let name = &package.name;
        assert!(
            is_allowed(licence, &rules.licenses.allow),
            "{name}: {licence:?}"
        );
        if let Some(source) = &package.source {
            assert_eq!(source, REGISTRY, "{name}");
        }
    }
}
