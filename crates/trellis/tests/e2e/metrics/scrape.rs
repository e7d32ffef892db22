//! A scraper that forgives nothing: it takes the text format by the letter, and the order and uniqueness of
//! families and series with it.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

use crate::harness::PATIENCE;

/// Name and labels of a series.
pub type Series = (String, BTreeMap<String, String>);

/// All samples of one answer, in its order.
#[derive(Debug)]
pub struct Scrape(Vec<(Series, f64)>);

/// Asks by HTTP and answers status, type and body.
pub fn get(address: &str, path: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap();
    let header = |name: &str| {
        let found = lines.clone().find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then(|| value.to_owned())
        });
        found.unwrap_or_else(|| panic!("no {name} in {head}"))
    };
    assert_eq!(header("content-length"), body.len().to_string());
    (
        status.parse().unwrap(),
        header("content-type"),
        body.to_owned(),
    )
}

impl Scrape {
    /// Reads a whole answer.
    pub fn parse(text: &str) -> Scrape {
        assert!(text.ends_with('\n'), "the last line is not ended");
        let mut samples: Vec<(Series, f64)> = Vec::new();
        let mut families: Vec<(String, String)> = Vec::new();
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            let help = line.strip_prefix("# HELP ");
            let help = help.unwrap_or_else(|| panic!("a family begins with its help: {line}"));
            let (name, words) = help.split_once(' ').unwrap();
            assert_name(name);
            assert!(!words.is_empty(), "{name} is not explained");
            let kind = lines.next().unwrap();
            let kind = kind.strip_prefix(&format!("# TYPE {name} ")).unwrap();
            assert!(["gauge", "counter", "histogram"].contains(&kind), "{kind}");
            let later = families.last().is_none_or(|(last, _)| last.as_str() < name);
            assert!(later, "{name} stands in the wrong place or twice");
            families.push((name.to_owned(), kind.to_owned()));
            let first = samples.len();
            while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
                let sample = sample(line);
                let suffix = sample.0.0.strip_prefix(name).unwrap();
                let fits = match kind {
                    "histogram" => ["_bucket", "_sum", "_count"].contains(&suffix),
                    _ => suffix.is_empty(),
                };
                assert!(fits, "{line} is no sample of {kind} {name}");
                let known = samples.iter().any(|(series, _)| *series == sample.0);
                assert!(!known, "{line} stands there twice");
                samples.push(sample);
            }
            assert!(samples.len() > first, "{name} has no samples");
            if kind == "histogram" {
                assert_histograms(name, &samples[first..]);
            }
            if kind == "counter" {
                assert!(name.ends_with("_total"), "{name}");
            }
        }
        Scrape(samples)
    }

    /// The value of the series with exactly these labels.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let labels: BTreeMap<String, String> = labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        let found = self
            .0
            .iter()
            .find(|((each, own), _)| each == name && *own == labels);
        found
            .unwrap_or_else(|| panic!("no {name} {labels:?} in {self:#?}"))
            .1
    }

    /// The value of the only series of that name that has these labels and others.
    pub fn value_with(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |own: &BTreeMap<String, String>| {
            labels
                .iter()
                .all(|(key, value)| own.get(*key).is_some_and(|own| own == value))
        };
        let found: Vec<f64> = self
            .0
            .iter()
            .filter(|((each, own), _)| each == name && has(own))
            .map(|(_, value)| *value)
            .collect();
        assert_eq!(found.len(), 1, "{name} {labels:?} in {self:#?}");
        found[0]
    }

    /// Every value of that name.
    pub fn family(&self, name: &str) -> Vec<f64> {
        let of_name = self.0.iter().filter(|((each, _), _)| each == name);
        of_name.map(|(_, value)| *value).collect()
    }

    /// All values of that name together.
    pub fn sum(&self, name: &str) -> f64 {
        self.family(name).iter().sum()
    }

    /// The series in their order.
    pub fn series(&self) -> Vec<&Series> {
        self.0.iter().map(|(series, _)| series).collect()
    }
}

fn assert_name(name: &str) {
    let mut letters = name.chars();
    let first = letters.next().unwrap();
    assert!(first.is_ascii_alphabetic() || first == '_', "{name}");
    let fits = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    assert!(letters.all(fits), "{name}");
}

/// `name{label="value",…} number`
fn sample(line: &str) -> (Series, f64) {
    let end = line.find(['{', ' ']).unwrap();
    let (name, mut rest) = line.split_at(end);
    assert_name(name);
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, quoted) = rest.split_once("=\"").unwrap();
            assert_name(label);
            let (value, after) = unquoted(quoted);
            let fresh = labels.insert(label.to_owned(), value).is_none();
            assert!(fresh, "{line} has a label twice");
            if let Some(after) = after.strip_prefix(',') {
                rest = after;
                continue;
            }
            rest = after.strip_prefix('}').unwrap();
            break;
        }
    }
    let number = rest.strip_prefix(' ').unwrap();
    assert!(!number.contains(' '), "{line} has more than a number");
    ((name.to_owned(), labels), number.parse().unwrap())
}

/// The value up to its closing quote, and what stands after it.
fn unquoted(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.push(match letters.next().unwrap().1 {
                'n' => '\n',
                plain @ ('\\' | '"') => plain,
                other => panic!("{other:?} is no escape"),
            }),
            plain => value.push(plain),
        }
    }
    panic!("{text} has no closing quote");
}

/// In each histogram, buckets rise by bound and by count, and the last one holds as many as there are.
fn assert_histograms(name: &str, samples: &[(Series, f64)]) {
    let mut buckets: BTreeMap<BTreeMap<String, String>, Vec<(f64, f64)>> = BTreeMap::new();
    for ((each, labels), value) in samples {
        if each.ends_with("_bucket") {
            let mut labels = labels.clone();
            let bound = labels.remove("le").unwrap().parse().unwrap();
            buckets.entry(labels).or_default().push((bound, *value));
        }
    }
    assert!(!buckets.is_empty());
    for (labels, buckets) in buckets {
        let rises = |pair: &[(f64, f64)]| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1;
        assert!(buckets.windows(2).all(rises), "{name} {labels:?}");
        let last = buckets.last().unwrap();
        assert_eq!(last.0, f64::INFINITY);
        let whole = |suffix: &str| {
            let series = (format!("{name}{suffix}"), labels.clone());
            let found = samples.iter().find(|(each, _)| *each == series);
            found.unwrap().1
        };
        assert_eq!(last.1, whole("_count"));
        assert!(whole("_sum") >= 0.0);
    }
}
