//! The text format of Prometheus, version 0.0.4: families of samples in a fixed order.
//!
//! A family's samples are keyed by their labels, so that a series cannot appear twice: a scraper would refuse the whole
//! answer.

use std::collections::BTreeMap;
use std::fmt::Write;

use trellis_control::metrics::Histogram;

/// The content type of the answer.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The label values of one series, in the order of its family's label names.
pub type Labels = Vec<String>;

/// One number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A count or a size.
    Whole(u64),
    /// Seconds.
    Real(f64),
}

/// The samples of a family.
#[derive(Clone, Debug)]
enum Samples {
    Gauge(BTreeMap<Labels, Value>),
    Counter(BTreeMap<Labels, Value>),
    Histogram(BTreeMap<Labels, Histogram>),
}

/// All samples of one name.
#[derive(Clone, Debug)]
pub struct Family {
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
    samples: Samples,
}

impl Family {
    /// A family of values that rise and fall.
    pub fn gauge(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Family {
        Family {
            name,
            help,
            labels,
            samples: Samples::Gauge(BTreeMap::new()),
        }
    }

    /// A family of values that only rise while the process lives.
    pub fn counter(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Family {
        Family {
            name,
            help,
            labels,
            samples: Samples::Counter(BTreeMap::new()),
        }
    }

    /// A family of times.
    pub fn histogram(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
        times: impl IntoIterator<Item = (Labels, Histogram)>,
    ) -> Family {
        Family {
            name,
            help,
            labels,
            samples: Samples::Histogram(times.into_iter().collect()),
        }
    }

    /// Puts one value; a later one of the same labels replaces it.
    pub fn put(&mut self, labels: Labels, value: Value) {
        debug_assert_eq!(labels.len(), self.labels.len(), "{}", self.name);
        match &mut self.samples {
            Samples::Gauge(samples) | Samples::Counter(samples) => samples.insert(labels, value),
            Samples::Histogram(_) => unreachable!("times are put as a whole"),
        };
    }

    /// The family with one value.
    pub fn with(mut self, labels: Labels, value: Value) -> Family {
        self.put(labels, value);
        self
    }

    fn write(&self, out: &mut String) {
        let (kind, is_empty) = match &self.samples {
            Samples::Gauge(samples) => ("gauge", samples.is_empty()),
            Samples::Counter(samples) => ("counter", samples.is_empty()),
            Samples::Histogram(samples) => ("histogram", samples.is_empty()),
        };
        if is_empty {
            return;
        }
        // Writing to a string does not fail.
        let _ = writeln!(out, "# HELP {} {}", self.name, escaped_help(self.help));
        let _ = writeln!(out, "# TYPE {} {kind}", self.name);
        match &self.samples {
            Samples::Gauge(samples) | Samples::Counter(samples) => {
                for (labels, value) in samples {
                    self.line(out, "", labels, None, *value);
                }
            }
            Samples::Histogram(samples) => {
                for (labels, times) in samples {
                    self.lines(out, labels, times);
                }
            }
        }
    }

    fn lines(&self, out: &mut String, labels: &Labels, times: &Histogram) {
        for (bound, count) in times.cumulative() {
            let bound = bound.map_or_else(
                || "+Inf".to_owned(),
                |bound| bound.as_secs_f64().to_string(),
            );
            self.line(out, "_bucket", labels, Some(bound), Value::Whole(count));
        }
        let sum = Value::Real(times.sum().as_secs_f64());
        self.line(out, "_sum", labels, None, sum);
        self.line(out, "_count", labels, None, Value::Whole(times.count()));
    }

    fn line(
        &self,
        out: &mut String,
        suffix: &str,
        labels: &Labels,
        bound: Option<String>,
        value: Value,
    ) {
        out.push_str(self.name);
        out.push_str(suffix);
        let own = self
            .labels
            .iter()
            .copied()
            .zip(labels.iter().map(String::as_str));
        let bound = bound.as_deref().map(|bound| ("le", bound));
        let mut mark = '{';
        for (name, value) in own.chain(bound) {
            let _ = write!(out, "{mark}{name}=\"{}\"", escaped_label(value));
            mark = ',';
        }
        if mark == ',' {
            out.push('}');
        }
        let _ = match value {
            Value::Whole(number) => writeln!(out, " {number}"),
            Value::Real(number) => writeln!(out, " {number}"),
        };
    }
}

/// The families as one text, in the order of their names.
pub fn encode(mut families: Vec<Family>) -> String {
    families.sort_by_key(|family| family.name);
    let mut out = String::new();
    for family in &families {
        family.write(&mut out);
    }
    out
}

fn escaped_label(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

fn escaped_help(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    // Fails if a byte of the format is off, or the order depends on who came first.
    #[test]
    fn the_format_is_exact_and_in_order() {
        const BOUNDS: &[Duration] = &[Duration::from_micros(250), Duration::from_secs(1)];
        let mut times = Histogram::new(BOUNDS);
        times.observe(Duration::from_micros(200));
        times.observe(Duration::from_millis(1_500));
        let rows = [("b", "x", 2), ("a", "y", 1), ("a", "x", u64::MAX)];
        let mut sizes = Family::gauge("sizes_bytes", "How large.", &["claim", "rung"]);
        for (claim, rung, value) in rows {
            sizes.put(vec![claim.to_owned(), rung.to_owned()], Value::Whole(value));
        }
        let families = vec![
            sizes,
            Family::histogram(
                "raise_seconds",
                "How long.",
                &["rung"],
                [(vec!["x".to_owned()], times)],
            ),
            Family::counter("cpu_seconds_total", "How much.", &[])
                .with(Vec::new(), Value::Real(0.25)),
            Family::gauge("nothing", "A family without samples is left out.", &[]),
        ];
        let expected = "\
# HELP cpu_seconds_total How much.
# TYPE cpu_seconds_total counter
cpu_seconds_total 0.25
# HELP raise_seconds How long.
# TYPE raise_seconds histogram
raise_seconds_bucket{rung=\"x\",le=\"0.00025\"} 1
raise_seconds_bucket{rung=\"x\",le=\"1\"} 1
raise_seconds_bucket{rung=\"x\",le=\"+Inf\"} 2
raise_seconds_sum{rung=\"x\"} 1.5002
raise_seconds_count{rung=\"x\"} 2
# HELP sizes_bytes How large.
# TYPE sizes_bytes gauge
sizes_bytes{claim=\"a\",rung=\"x\"} 18446744073709551615
sizes_bytes{claim=\"a\",rung=\"y\"} 1
sizes_bytes{claim=\"b\",rung=\"x\"} 2
";
        assert_eq!(encode(families), expected);
    }

    // Fails if a label's value could end its quotes or its line, and so forge another sample.
    #[test]
    fn label_values_are_escaped() {
        let wild = "a\\b\"c\nd".to_owned();
        let family =
            Family::gauge("g", "back\\slash\nand line", &["l"]).with(vec![wild], Value::Whole(1));
        let text = encode(vec![family]);
        assert!(
            text.contains("# HELP g back\\\\slash\\nand line\n"),
            "{text}"
        );
        assert!(text.ends_with("g{l=\"a\\\\b\\\"c\\nd\"} 1\n"), "{text}");
    }

    // Fails if the same series could stand in the answer twice, which a scraper refuses as a whole.
    #[test]
    fn a_series_stands_there_once() {
        let family = Family::gauge("g", "h", &["l"])
            .with(vec!["a".to_owned()], Value::Whole(1))
            .with(vec!["a".to_owned()], Value::Whole(2));
        let text = encode(vec![family]);
        assert_eq!(
            text.lines()
                .filter(|line| line.starts_with("g{"))
                .collect::<Vec<_>>(),
            ["g{l=\"a\"} 2"]
        );
    }
}
