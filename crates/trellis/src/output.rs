//! How answers are printed: tables like kubectl's, JSON, YAML, and sizes and times as people read them.

use std::io::{self, IsTerminal, Write};

use anyhow::Context;
use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Row, Table as Grid};
use serde::Serialize;
use trellis_api::{Bytes, Hold};
pub use trellis_control::view::age;

use crate::cli::Format;
use crate::exit::Ended;

/// What is shown if nothing is known.
pub const UNKNOWN: &str = "-";

/// Spaces between two columns, as kubectl has them.
const COLUMN_GAP: u16 = 3;
/// The longest exact size that is shown where a person compares sizes.
const PRECISE_CHARS_MAX: usize = 8;
/// How many characters a bar has.
const BAR_WIDTH: u64 = 10;

/// The tone of a word, for its colour on a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// As it should be.
    Good,
    /// On its way.
    Moving,
    /// A person should look at it.
    Bad,
}

impl Tone {
    fn paint(self, text: &str) -> String {
        let code = match self {
            Tone::Good => 32,
            Tone::Moving => 33,
            Tone::Bad => 31,
        };
        format!("\u{1b}[{code}m{text}\u{1b}[0m")
    }
}

/// A table without borders. One of its columns may have colours.
pub struct Table {
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    toned: Option<&'static str>,
    tones: Vec<Option<Tone>>,
    /// Lines across the columns, each with the row that it stands before.
    headings: Vec<(usize, Heading)>,
}

/// A line across the columns of a table. Its last word may have a colour.
struct Heading {
    text: String,
    word: Option<(String, Tone)>,
}

impl Heading {
    fn render(&self, colours: bool) -> String {
        match &self.word {
            Some((word, tone)) if colours => format!("{}: {}\n", self.text, tone.paint(word)),
            Some((word, _)) => format!("{}: {word}\n", self.text),
            None => format!("{}\n", self.text),
        }
    }
}

impl Table {
    /// A table with these columns.
    pub fn new(header: &[&'static str]) -> Self {
        Table {
            header: header.to_vec(),
            rows: Vec::new(),
            toned: None,
            tones: Vec::new(),
            headings: Vec::new(),
        }
    }

    /// The same, with one column in the colours of its rows.
    pub fn toned(header: &[&'static str], column: &'static str) -> Self {
        Table {
            toned: Some(column),
            ..Table::new(header)
        }
    }

    /// Adds a row; cells beyond the header's columns are left out.
    pub fn row(&mut self, cells: Vec<String>, tone: Option<Tone>) {
        let mut cells = cells;
        cells.truncate(self.header.len());
        self.rows.push(cells);
        self.tones.push(tone);
    }

    /// Adds a line across the columns, above the rows that follow.
    pub fn heading(&mut self, text: String, word: Option<(String, Tone)>) {
        self.headings
            .push((self.rows.len(), Heading { text, word }));
    }

    /// The headings that stand before a row.
    fn headings_before(&self, row: usize, colours: bool) -> String {
        let here = self.headings.iter().filter(|(before, _)| *before == row);
        here.map(|(_, heading)| heading.render(colours)).collect()
    }

    /// The text, with a line break at its end.
    pub fn render(&self, colours: bool) -> String {
        let mut grid = Grid::new();
        grid.load_style(NOTHING)
            .set_content_arrangement(ContentArrangement::Disabled);
        grid.set_header(Row::from(self.header.clone()));
        for row in &self.rows {
            grid.add_row(Row::from(row.clone()));
        }
        for column in grid.column_iter_mut() {
            column.set_padding((0, COLUMN_GAP));
        }
        let lines: Vec<String> = grid
            .lines()
            .map(|line| line.trim_end().to_owned())
            .collect();
        let header = lines.first().map(String::as_str).unwrap_or_default();
        let start = self
            .toned
            .filter(|_| colours)
            .and_then(|name| header.find(name));
        let mut text = format!("{header}\n");
        for (row, line) in lines.iter().skip(1).enumerate() {
            text.push_str(&self.headings_before(row, colours));
            let tone = self.tones.get(row).copied().flatten();
            let painted = start
                .zip(tone)
                .and_then(|(start, tone)| self.painted(line, row, start, tone));
            text.push_str(painted.as_deref().unwrap_or(line));
            text.push('\n');
        }
        text.push_str(&self.headings_before(self.rows.len(), colours));
        text
    }

    /// The line with its toned cell in colour. The cell stands below its header; where it does not,
    /// because a name before it is wider than its characters, the line stays plain.
    fn painted(&self, line: &str, row: usize, start: usize, tone: Tone) -> Option<String> {
        let column = self
            .header
            .iter()
            .position(|each| Some(*each) == self.toned)?;
        let cell = self.rows.get(row)?.get(column)?;
        let end = start + cell.len();
        (line.get(start..end)? == cell.as_str())
            .then(|| format!("{}{}{}", &line[..start], tone.paint(cell), &line[end..]))
    }
}

/// Whether standard output takes colours: it is a terminal, and its owner has not turned them off.
pub fn colours() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
    terminal() && !refused && !dumb
}

/// Whether standard output is a terminal.
pub fn terminal() -> bool {
    io::stdout().is_terminal()
}

/// The text of `value` in a format for programs.
pub fn structured<T: Serialize>(format: Format, value: &T) -> anyhow::Result<String> {
    match format {
        Format::Yaml => {
            serde_saphyr::to_string(value).context("the answer cannot be put into YAML")
        }
        Format::Json | Format::Wide => {
            let text = serde_json::to_string_pretty(value);
            Ok(text.context("the answer cannot be put into JSON")? + "\n")
        }
    }
}

/// The text of `value` in the format that was asked for: one for programs, or a table by `table`, which is told whether
/// to be wide.
pub fn text<T: Serialize>(
    format: Option<Format>,
    value: &T,
    table: impl FnOnce(bool) -> String,
) -> anyhow::Result<String> {
    match format {
        None => Ok(table(false)),
        Some(Format::Wide) => Ok(table(true)),
        Some(format) => structured(format, value),
    }
}

/// Prints to standard output. A reader that has gone away (`| head`) has seen enough: that is the end, and not an
/// error.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => other.context("standard output cannot be written to"),
    }
}

/// Prints a message on standard error. If nobody listens, the work goes on.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Ends a verb that has already reported a hold, with the exit code of a hold and no further message.
pub fn end_held(hold: Hold) -> ! {
    std::process::exit(i32::from(Ended::Held(hold).code()))
}

/// A size for a person: in the largest binary unit that it fills, with one decimal where it is not whole.
pub fn human(size: Bytes) -> String {
    const UNITS: [(u32, &str); 6] = [
        (60, "Ei"),
        (50, "Pi"),
        (40, "Ti"),
        (30, "Gi"),
        (20, "Mi"),
        (10, "Ki"),
    ];
    let bytes = size.get();
    let Some(first) = UNITS.iter().position(|(shift, _)| bytes >> shift > 0) else {
        return bytes.to_string();
    };
    let tenths_of = |shift: u32| (u128::from(bytes) * 10 + (1u128 << (shift - 1))) >> shift;
    let (mut shift, mut unit) = UNITS[first];
    // What rounds to 1024 of a unit is one of the next.
    if first > 0 && tenths_of(shift) >= 10_240 {
        (shift, unit) = UNITS[first - 1];
    }
    let tenths = tenths_of(shift);
    match (tenths / 10, tenths % 10) {
        (whole, 0) => format!("{whole}{unit}"),
        (whole, tenth) => format!("{whole}.{tenth}{unit}"),
    }
}

/// A size for a person who compares it with another: exact where that is short, since two sizes that
/// differ by little must not look the same.
pub fn precise(size: Bytes) -> String {
    let exact = size.to_string();
    if exact.ends_with('i') && exact.len() <= PRECISE_CHARS_MAX {
        exact
    } else {
        human(size)
    }
}

/// A size that may not be known, for a person who compares it.
pub fn precise_or_unknown(size: Option<Bytes>) -> String {
    size.map_or_else(|| UNKNOWN.to_owned(), precise)
}

/// A size that may not be known.
pub fn human_or_unknown(size: Option<Bytes>) -> String {
    size.map_or_else(|| UNKNOWN.to_owned(), human)
}

/// A time that was measured in microseconds.
pub fn took(micros: u64) -> String {
    let tenths = |unit: u64| {
        let tenths = (micros + unit / 20) / (unit / 10);
        format!("{}.{}", tenths / 10, tenths % 10)
    };
    match micros {
        0..1_000 => format!("{micros} us"),
        1_000..1_000_000 => format!("{} ms", tenths(1_000)),
        _ => format!("{} s", tenths(1_000_000)),
    }
}

/// How much of `want` there is, as a bar. Only a complete size fills it.
pub fn bar(size: Bytes, want: Bytes) -> String {
    let percent = percent(size, want);
    let filled = usize::try_from(percent.min(100) * BAR_WIDTH / 100).unwrap_or_default();
    let width = usize::try_from(BAR_WIDTH).unwrap_or_default();
    format!(
        "[{}{}] {percent:>3}%",
        "#".repeat(filled),
        "-".repeat(width - filled)
    )
}

/// The percentage that `part` is of `whole`, rounded down: 100 means all of it.
pub fn percent(part: Bytes, whole: Bytes) -> u64 {
    if whole == Bytes::ZERO {
        return 100;
    }
    let percent = u128::from(part.get()) * 100 / u128::from(whole.get());
    u64::try_from(percent).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    // Fails if a size is shown in a wrong unit, or rounds to 1024 of one.
    #[test]
    fn sizes_are_shown_in_the_largest_unit_they_fill() {
        let cases = [
            (0, "0"),
            (1023, "1023"),
            (1024, "1Ki"),
            (1536, "1.5Ki"),
            ((1 << 20) - 1, "1Mi"),
            (1 << 30, "1Gi"),
            ((1 << 30) + (1 << 20), "1Gi"),
            (1025 << 20, "1Gi"),
            (1200 << 20, "1.2Gi"),
            (u64::MAX, "16Ei"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(human(Bytes::new(bytes)), expected, "{bytes}");
        }
    }

    // Fails if two sizes that differ look the same, or an odd size becomes a number to count digits of.
    #[test]
    fn sizes_to_compare_are_exact_where_that_is_short() {
        assert_eq!(precise(Bytes::mib(9226)), "9226Mi");
        assert_eq!(precise(Bytes::gib(9)), "9Gi");
        assert_eq!(precise(Bytes::new(71_848_696 << 10)), "68.5Gi");
        assert_eq!(precise(Bytes::new((1 << 30) + 1)), "1Gi");
    }

    // Fails if a time loses its unit or is rounded in the wrong place.
    #[test]
    fn times_have_one_decimal() {
        let cases = [
            (0, "0 us"),
            (999, "999 us"),
            (1_240, "1.2 ms"),
            (1_250, "1.3 ms"),
            (12_300, "12.3 ms"),
            (2_000_000, "2.0 s"),
        ];
        for (micros, expected) in cases {
            assert_eq!(took(micros), expected, "{micros}");
        }
    }

    // Fails if a bar looks full before the size is there, or divides by a size of nothing.
    #[test]
    fn a_bar_is_full_only_when_all_is_there() {
        assert_eq!(bar(Bytes::gib(2), Bytes::gib(2)), "[##########] 100%");
        assert_eq!(
            bar(Bytes::new((2 << 30) - 1), Bytes::gib(2)),
            "[#########-]  99%"
        );
        assert_eq!(bar(Bytes::gib(3), Bytes::gib(2)), "[##########] 150%");
        assert_eq!(bar(Bytes::ZERO, Bytes::ZERO), "[##########] 100%");
    }

    // Fails if colours shift the columns, or paint a name that looks like a state.
    #[test]
    fn only_the_state_is_painted() {
        let mut table = Table::toned(&["CLAIM", "STATE", "PATH"], "STATE");
        table.row(
            vec!["ok".into(), "ok".into(), "/ok".into()],
            Some(Tone::Good),
        );
        assert_eq!(
            table.render(false),
            "CLAIM   STATE   PATH\nok      ok      /ok\n"
        );
        assert_eq!(
            table.render(true),
            "CLAIM   STATE   PATH\nok      \u{1b}[32mok\u{1b}[0m      /ok\n"
        );
    }
}
