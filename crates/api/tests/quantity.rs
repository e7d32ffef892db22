//! The quantity grammar against what Kubernetes answers, and against an independent recogniser.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use trellis_api::Bytes;
use trellis_api::quantity::{Growth, QuantityError, TEXT_BYTES_MAX, parse_nanos};

/// What `resource.ParseQuantity` of k8s.io/apimachinery 0.34.10 answers: the text, its `AsDec` in
/// billionths, and its `Value`.
#[rustfmt::skip]
const KUBERNETES_ANSWERS: [(&str, i128, u64); 47] = [
    ("0", 0, 0),
    ("-0", 0, 0),
    ("0Ei", 0, 0),
    ("0e99", 0, 0),
    ("1", 1_000_000_000, 1),
    ("+1", 1_000_000_000, 1),
    ("007", 7_000_000_000, 7),
    ("5.", 5_000_000_000, 5),
    (".5", 500_000_000, 1),
    ("1500m", 1_500_000_000, 2),
    ("1m", 1_000_000, 1),
    ("1u", 1_000, 1),
    ("1n", 1, 1),
    ("0.1n", 1, 1),
    ("1e-30", 1, 1),
    ("0.0000000000000000000001", 1, 1),
    ("1.0000000001", 1_000_000_001, 2),
    ("1.0000000001Ki", 1_024_000_000_103, 1025),
    ("1e3", 1_000_000_000_000, 1000),
    ("1E3", 1_000_000_000_000, 1000),
    ("1e+3", 1_000_000_000_000, 1000),
    ("1e-3", 1_000_000, 1),
    ("1E-3", 1_000_000, 1),
    ("12e6", 12_000_000_000_000_000, 12_000_000),
    ("1e18", 1_000_000_000_000_000_000_000_000_000, 1_000_000_000_000_000_000),
    ("1000000000000000000000e-9", 1_000_000_000_000_000_000_000, 1_000_000_000_000),
    ("1k", 1_000_000_000_000, 1000),
    ("100M", 100_000_000_000_000_000, 100_000_000),
    ("1G", 1_000_000_000_000_000_000, 1_000_000_000),
    ("1T", 1_000_000_000_000_000_000_000, 1_000_000_000_000),
    ("1P", 1_000_000_000_000_000_000_000_000, 1_000_000_000_000_000),
    ("1E", 1_000_000_000_000_000_000_000_000_000, 1_000_000_000_000_000_000),
    ("9E", 9_000_000_000_000_000_000_000_000_000, 9_000_000_000_000_000_000),
    ("1Ki", 1_024_000_000_000, 1024),
    ("0.1Ki", 102_400_000_000, 103),
    ("0.9Ki", 921_600_000_000, 922),
    ("1.1Ki", 1_126_400_000_000, 1127),
    ("0.1Mi", 104_857_600_000_000, 104_858),
    ("0.5Gi", 536_870_912_000_000_000, 536_870_912),
    (".5Gi", 536_870_912_000_000_000, 536_870_912),
    ("1.5Gi", 1_610_612_736_000_000_000, 1_610_612_736),
    ("3.3Gi", 3_543_348_019_200_000_000, 3_543_348_020),
    ("5.Gi", 5_368_709_120_000_000_000, 5_368_709_120),
    ("1Ti", 1_099_511_627_776_000_000_000, 1_099_511_627_776),
    ("1Pi", 1_125_899_906_842_624_000_000_000, 1_125_899_906_842_624),
    ("7Ei", 8_070_450_532_247_928_832_000_000_000, 8_070_450_532_247_928_832),
    ("9223372036854775807", 9_223_372_036_854_775_807_000_000_000, 9_223_372_036_854_775_807),
];

/// What `NewQuantity(n, BinarySI).String()` of k8s.io/apimachinery 0.34.10 prints.
const KUBERNETES_TEXTS: [(u64, &str); 16] = [
    (0, "0"),
    (1, "1"),
    (999, "999"),
    (1000, "1k"),
    (1001, "1001"),
    (1023, "1023"),
    (1024, "1Ki"),
    (1025, "1025"),
    (1536, "1536"),
    (2000, "2000"),
    (10_240, "10Ki"),
    (1_000_000, "1000000"),
    (1 << 20, "1Mi"),
    (1_610_612_736, "1536Mi"),
    (1 << 60, "1Ei"),
    (9_223_372_036_854_775_807, "9223372036854775807"),
];

/// Texts that Kubernetes refuses too, parted by bars.
const REFUSED: &str = "1e|1e+|1e-|1ki|1K|1mi|1KiB|1i|1e3Ki|1e3.5|1.1.1|--1|+-1| 1|1 |1 Gi|0x10|1_000|1,5Gi|\
    1Ee3|1\u{661}|\u{661}|1Gi\n|inf|nan|20GiGi";

/// Texts without a number, which Kubernetes reads as zero against its own grammar.
const WITHOUT_NUMBER: [&str; 8] = [".", "+", "-", "Ki", "+Ki", ".Ki", "e3", "+e3"];

const SUFFIXES: [(&str, u32, i32); 16] = [
    ("", 0, 0),
    ("n", 0, -9),
    ("u", 0, -6),
    ("m", 0, -3),
    ("k", 0, 3),
    ("M", 0, 6),
    ("G", 0, 9),
    ("T", 0, 12),
    ("P", 0, 15),
    ("E", 0, 18),
    ("Ki", 10, 0),
    ("Mi", 20, 0),
    ("Gi", 30, 0),
    ("Ti", 40, 0),
    ("Pi", 50, 0),
    ("Ei", 60, 0),
];

#[test]
fn answers_are_those_of_kubernetes() {
    // Fails when a suffix, a rounding or the place of the point differs from Kubernetes.
    for (text, nanos, value) in KUBERNETES_ANSWERS {
        assert_eq!(parse_nanos(text), Ok(nanos), "{text}");
        assert_eq!(text.parse(), Ok(Bytes::new(value)), "{text}");
    }
    assert_eq!(parse_nanos("-0.1"), Ok(-100_000_000));
    assert_eq!(parse_nanos("-1.5Gi"), Ok(-1_610_612_736_000_000_000));
    assert_eq!(parse_nanos("-0.1n"), Ok(-1), "rounded away from zero");
}

#[test]
fn sizes_print_as_kubernetes_prints_them() {
    // Fails when our text for a size differs from the one that the API server stores.
    for (size, text) in KUBERNETES_TEXTS {
        assert_eq!(Bytes::new(size).to_quantity(), text);
    }
}

#[test]
fn malformed_texts_are_refused() {
    // Fails when a text outside the grammar is taken for a size.
    for text in REFUSED.split('|').chain(WITHOUT_NUMBER) {
        let error = text.parse::<Bytes>().unwrap_err();
        assert!(
            matches!(
                error,
                QuantityError::NoNumber { .. } | QuantityError::UnknownSuffix { .. }
            ),
            "{text:?}: {error}"
        );
        assert!(
            error.to_string().contains(&format!("{text:?}")),
            "{text:?} is quoted: {error}"
        );
    }
    assert_eq!("".parse::<Bytes>(), Err(QuantityError::Empty));
}

#[test]
fn a_size_beyond_the_range_is_an_error_and_not_a_cap() {
    // Fails when a size is capped as Kubernetes caps 8Ei, or wraps around as its 10E does.
    for text in [
        "8Ei",
        "9223372036854775808",
        "9223372036854775807.1",
        "10E",
        "1e19",
        "1e4294967299",
    ] {
        let error = text.parse::<Bytes>().unwrap_err();
        assert_eq!(
            error,
            QuantityError::TooLarge {
                text: text.to_owned()
            }
        );
    }
    let exponent = "1e99999999999999999999";
    assert!(matches!(
        exponent.parse::<Bytes>(),
        Err(QuantityError::TooLarge { .. })
    ));
    assert!(matches!(
        parse_nanos(exponent),
        Err(QuantityError::BeyondNanos { .. })
    ));
    assert_eq!(parse_nanos("1e-99999999999999999999"), Ok(1));
}

#[test]
fn a_negative_size_is_an_error_whatever_its_magnitude() {
    // Fails when a size below zero is rounded up to zero or reported as too large.
    for text in ["-1", "-0.1", "-0.1n", "-1.5Gi", "-1e99"] {
        let error = text.parse::<Bytes>().unwrap_err();
        assert_eq!(
            error,
            QuantityError::Negative {
                text: text.to_owned()
            }
        );
    }
}

#[test]
fn the_length_of_a_text_is_bounded() {
    // Fails when the bound is off by one, or when the error carries the whole of a huge text.
    let longest = format!("{}1Gi", "0".repeat(TEXT_BYTES_MAX - 3));
    assert_eq!(longest.parse(), Ok(Bytes::GIB));
    let longer = format!("0{longest}");
    assert!(matches!(
        longer.parse::<Bytes>(),
        Err(QuantityError::TooLong { length: 129, .. })
    ));
    assert!(matches!(
        longer.parse::<Growth>(),
        Err(QuantityError::TooLong { .. })
    ));
    let huge = "\u{10ffff}".repeat(1 << 20);
    assert!(huge.parse::<Bytes>().unwrap_err().to_string().len() < 1024);
}

#[test]
fn growth_reads_what_the_command_line_offers() {
    // Fails when a sign or a percent sign is read as another kind of growth.
    assert_eq!("20Gi".parse(), Ok(Growth::To(Bytes::gib(20))));
    assert_eq!("+10Gi".parse(), Ok(Growth::By(Bytes::gib(10))));
    assert_eq!("+.1".parse(), Ok(Growth::By(Bytes::new(1))));
    assert_eq!("+25%".parse(), Ok(Growth::ByPercent(25)));
    assert_eq!("+4294967295%".parse(), Ok(Growth::ByPercent(u32::MAX)));
}

#[test]
fn growth_by_nothing_and_shrinking_are_refused() {
    // Fails when a growth that changes nothing, or a request to shrink, gets past the parser.
    for text in ["+0", "+0Gi", "+0.0", "+0%", "+000%"] {
        let error = text.parse::<Growth>().unwrap_err();
        assert_eq!(
            error,
            QuantityError::NoGrowth {
                text: text.to_owned()
            }
        );
    }
    for text in ["-5Gi", "-0", "-1e99", "-25%", "-0%"] {
        let error = text.parse::<Growth>().unwrap_err();
        assert_eq!(
            error,
            QuantityError::Shrink {
                text: text.to_owned()
            }
        );
        assert!(
            error.to_string().contains("volumes never shrink"),
            "{error}"
        );
    }
    for text in [
        "25%",
        "+%",
        "%",
        "+1.5%",
        "++5%",
        "+-5%",
        "+5%%",
        "+ 5%",
        "+4294967296%",
    ] {
        let error = text.parse::<Growth>().unwrap_err();
        assert_eq!(
            error,
            QuantityError::BadPercent {
                text: text.to_owned()
            }
        );
    }
    for text in ["++5Gi", "+-5Gi", "-Gi", "+", "+8Ei", "10 Gi"] {
        assert!(text.parse::<Growth>().is_err(), "{text}");
    }
}

#[test]
fn growth_applies_to_the_current_size() {
    // Fails when a growth is applied to the wrong base, shrinks, or goes past the largest size.
    let apply = |text: &str, current| text.parse::<Growth>().unwrap().apply(current);
    let ten = Bytes::gib(10);
    assert_eq!(apply("20Gi", ten), Ok(Bytes::gib(20)));
    assert_eq!(apply("10Gi", ten), Ok(ten));
    assert_eq!(apply("+10Gi", ten), Ok(Bytes::gib(20)));
    assert_eq!(
        apply("+1", ten),
        Ok(Bytes::new((10 << 30) + 1)),
        "an amount is not rounded"
    );
    assert_eq!(apply("+25%", ten), Ok(Bytes::mib(12_800)));
    assert_eq!(apply("+1%", Bytes::new(1)), Ok(Bytes::MIB));
    assert_eq!(apply("+1%", Bytes::mib(1)), Ok(Bytes::mib(2)));
    assert_eq!(apply("+25%", Bytes::ZERO), Ok(Bytes::ZERO));

    let below = apply("5Gi", ten);
    let target = Bytes::gib(5);
    assert_eq!(
        below,
        Err(QuantityError::BelowCurrent {
            current: ten,
            target
        })
    );
    assert!(
        below
            .unwrap_err()
            .to_string()
            .contains("volumes never shrink")
    );

    for text in ["+1", "+1%", "+4294967295%"] {
        let error = apply(text, Bytes::MAX).unwrap_err();
        let growth = text.parse().unwrap();
        assert_eq!(
            error,
            QuantityError::GrowsTooLarge {
                current: Bytes::MAX,
                growth
            }
        );
    }
}

/// Decides by a state machine over single bytes whether a text is in the grammar. It shares no
/// structure with the parser, which splits the text and looks the pieces up.
fn conforms(text: &str) -> bool {
    #[derive(Clone, Copy, PartialEq)]
    enum At {
        Start,
        Signed,
        Whole,
        BarePoint,
        Fraction,
        Kilo,
        MaybeBinary,
        Exa,
        SmallE,
        ExponentSigned,
        Exponent,
        End,
    }
    let mut at = At::Start;
    for byte in text.bytes() {
        at = match (at, byte) {
            (At::Start, b'+' | b'-') => At::Signed,
            (At::Start | At::Signed | At::Whole, b'0'..=b'9') => At::Whole,
            (At::Start | At::Signed, b'.') => At::BarePoint,
            (At::Whole, b'.') => At::Fraction,
            (At::BarePoint | At::Fraction, b'0'..=b'9') => At::Fraction,
            (At::Whole | At::Fraction, b'n' | b'u' | b'm' | b'k') => At::End,
            (At::Whole | At::Fraction, b'K') => At::Kilo,
            (At::Whole | At::Fraction, b'M' | b'G' | b'T' | b'P') => At::MaybeBinary,
            (At::Whole | At::Fraction, b'E') => At::Exa,
            (At::Whole | At::Fraction, b'e') => At::SmallE,
            (At::Kilo | At::MaybeBinary | At::Exa, b'i') => At::End,
            (At::Exa | At::SmallE, b'+' | b'-') => At::ExponentSigned,
            (At::Exa | At::SmallE | At::ExponentSigned | At::Exponent, b'0'..=b'9') => At::Exponent,
            _ => return false,
        };
    }
    matches!(
        at,
        At::Whole | At::Fraction | At::MaybeBinary | At::Exa | At::Exponent | At::End
    )
}

/// Whether the parser takes the text as well-formed, be it in range or not.
fn is_read(text: &str) -> bool {
    match parse_nanos(text) {
        Ok(_) | Err(QuantityError::BeyondNanos { .. }) => true,
        Err(_) => false,
    }
}

fn any_suffix() -> impl Strategy<Value = String> {
    prop_oneof![
        proptest::sample::select(SUFFIXES.as_slice()).prop_map(|(name, _, _)| name.to_owned()),
        "[eE][+-]?[0-9]{1,3}",
        "[eE][+-]?[0-9]{1,25}",
    ]
}

fn conforming_text() -> impl Strategy<Value = String> {
    let number = prop_oneof![
        "[0-9]{1,12}",
        "[0-9]{1,40}\\.[0-9]{0,40}",
        "\\.[0-9]{1,40}",
        "0{1,9}[0-9]\\."
    ];
    ("[+-]?", number, any_suffix()).prop_map(|(sign, number, suffix)| sign + &number + &suffix)
}

/// A conforming text with one character put in, taken out or replaced. Some still conform.
fn mutated_text() -> impl Strategy<Value = String> {
    let stranger = proptest::char::ranges(std::borrow::Cow::Borrowed(&[
        '!'..='~',
        ' '..=' ',
        '٠'..='٩',
    ]));
    let character = prop_oneof![
        proptest::sample::select("0123456789+-.eEinumkKMGTP".chars().collect::<Vec<_>>()),
        stranger,
    ];
    (
        conforming_text(),
        any::<prop::sample::Index>(),
        character,
        0..3u8,
    )
        .prop_map(|(text, place, character, edit)| {
            let mut characters: Vec<char> = text.chars().collect();
            let place = place.index(characters.len());
            match edit {
                0 => characters.insert(place, character),
                1 => characters[place] = character,
                _ => drop(characters.remove(place)),
            }
            characters.into_iter().collect()
        })
}

fn any_size() -> impl Strategy<Value = Bytes> {
    // Every power of two gets its turn, so that every suffix does.
    (0..=Bytes::MAX.get(), 0..63u32).prop_map(|(bits, shift)| {
        let shifted = (bits >> shift) << shift;
        Bytes::new(if bits & 1 == 0 {
            shifted
        } else {
            bits >> shift
        })
    })
}

/// A failing case is kept next to this file and tried first from then on.
fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 1024,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_size_survives_the_round_trip(size in any_size()) {
        // Fails when a size changes on its way through an object's text.
        prop_assert_eq!(size.to_quantity().parse(), Ok(size));
        prop_assert_eq!(size.to_string().parse(), Ok(size));
        let nanos = i128::from(size.get()) * 1_000_000_000;
        prop_assert_eq!(parse_nanos(&size.to_quantity()), Ok(nanos));
    }

    #[test]
    fn order_survives_parsing(left in any_size(), right in any_size()) {
        // Fails when a text sorts otherwise than the size that it stands for.
        let nanos = |size: Bytes| parse_nanos(&size.to_quantity()).unwrap();
        prop_assert_eq!(left.cmp(&right), nanos(left).cmp(&nanos(right)));
    }

    #[test]
    fn rounding_to_bytes_keeps_the_order(left in conforming_text(), right in conforming_text()) {
        // Fails when a larger quantity becomes a smaller size.
        if let (Ok(left_size), Ok(right_size)) = (left.parse::<Bytes>(), right.parse::<Bytes>()) {
            let (left, right) = (parse_nanos(&left).unwrap(), parse_nanos(&right).unwrap());
            prop_assert!(left > right || left_size <= right_size);
            prop_assert!(left < right || left_size >= right_size);
        }
    }

    #[test]
    fn a_size_is_its_nanos_rounded_up(text in conforming_text()) {
        // Fails when the two readers disagree on a number, a sign or the range.
        match (text.parse::<Bytes>(), parse_nanos(&text)) {
            (Ok(size), Ok(nanos)) => {
                let above = i128::from(size.get()) * 1_000_000_000 - nanos;
                prop_assert!((0..1_000_000_000).contains(&above));
            }
            (Err(QuantityError::Negative { .. }), Ok(nanos)) => prop_assert!(nanos < 0),
            (Err(QuantityError::Negative { .. }), Err(_)) => prop_assert!(text.starts_with('-')),
            (Err(QuantityError::TooLarge { .. }), Ok(nanos)) => {
                prop_assert!(nanos > i128::from(Bytes::MAX.get()) * 1_000_000_000);
            }
            (Err(QuantityError::TooLarge { .. }), Err(QuantityError::BeyondNanos { .. })) => {}
            other => prop_assert!(false, "{other:?}"),
        }
    }

    #[test]
    fn nanos_are_the_exact_product_rounded_up(
        whole in 0..1_000_000u64,
        fraction in 0..1_000_000_000_000u64,
        places in 0..=12u32,
        (suffix, shift, exponent) in proptest::sample::select(SUFFIXES.as_slice()),
    ) {
        // Fails when the digit arithmetic differs from a fraction of two 128-bit integers.
        // The digits are below 10^18 and the shift is at most 60, so the product fits 128 bits.
        let fraction = fraction % 10u64.pow(places);
        let digits = u128::from(whole) * 10u128.pow(places) + u128::from(fraction);
        let text = match usize::try_from(places).unwrap() {
            0 => format!("{whole}{suffix}"),
            width => format!("{whole}.{fraction:0width$}{suffix}"),
        };
        let power = exponent + 9 - i32::try_from(places).unwrap();
        let scaled = digits << shift;
        let ten = 10u128.pow(power.unsigned_abs());
        let expected = if power >= 0 { scaled.checked_mul(ten) } else { Some(scaled.div_ceil(ten)) };
        let expected = expected.and_then(|nanos| i128::try_from(nanos).ok());
        prop_assert_eq!(parse_nanos(&text).ok(), expected, "{}", text);
    }

    #[test]
    fn every_conforming_text_is_read(text in conforming_text()) {
        // Fails when the parser refuses a text of the grammar.
        prop_assert!(conforms(&text), "the generator and the recogniser disagree on {}", text);
        prop_assert!(is_read(&text), "{}", text);
    }

    #[test]
    fn a_mutated_text_is_read_exactly_when_it_conforms(text in mutated_text()) {
        // Fails when the parser is more lenient or more strict than the recogniser.
        prop_assert_eq!(is_read(&text), conforms(&text), "{:?}", text);
    }

    #[test]
    fn short_texts_of_the_alphabet_are_read_exactly_when_they_conform(
        text in "[0-9.+eEiKMn-]{0,6}",
    ) {
        // Fails on a small combination that no mutation of a long text reaches.
        prop_assert_eq!(is_read(&text), conforms(&text), "{:?}", text);
    }

    #[test]
    fn arbitrary_texts_never_panic(text in any::<String>(), growth in "[+-]?[0-9]{0,24}[A-Za-z%]{0,3}") {
        // Fails by a panic, or when an error of either reader is no sentence.
        for text in [&text, &growth] {
            prop_assert_eq!(is_read(text), conforms(text) && text.len() <= TEXT_BYTES_MAX);
            if let Err(error) = text.parse::<Growth>() {
                prop_assert!(!error.to_string().is_empty());
            }
        }
    }

    #[test]
    fn growth_never_shrinks_and_reads_back(
        current in any_size(),
        size in any_size(),
        percent in 1..=u32::MAX,
        kind in 0..3u8,
    ) {
        // Fails when a volume would get less than it has, or when a growth prints as another.
        let growth = match kind {
            0 => Growth::To(size),
            1 if size > Bytes::ZERO => Growth::By(size),
            _ => Growth::ByPercent(percent % 1000 + 1),
        };
        prop_assert_eq!(growth.to_string().parse(), Ok(growth));
        match growth.apply(current) {
            Ok(target) => {
                prop_assert!(target >= current && target <= Bytes::MAX);
                if let Growth::ByPercent(_) = growth {
                    prop_assert_eq!(target.get() % Bytes::MIB.get(), 0);
                }
            }
            Err(QuantityError::BelowCurrent { .. }) => prop_assert!(size < current),
            Err(error) => {
                let too_large = matches!(error, QuantityError::GrowsTooLarge { .. });
                prop_assert!(too_large, "{}", error);
            }
        }
    }
}
