//! The quantity grammar against a second implementation.
#![allow(clippy::unwrap_used)]

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube_quantity::ParsedQuantity;
use proptest::prelude::*;
use trellis_api::quantity::{QuantityError, parse_nanos};

// kube_quantity 0.9 is a second opinion, and it is itself not Kubernetes. The inputs below are where
// it differs from k8s.io/apimachinery, and why; the generated inputs keep away from them.
//
// - `1E`, `1.5Ei`: it reads the number with a parser of floating-point numbers, to which the `E`
//   begins an exponent that never comes. It refuses every exa and every exbi. (Kubernetes: 10^18,
//   and 1.5 * 2^60.)
// - `1E3Ki`: the same parser eats `1E3`, so that an exponent and a unit can stand together.
//   (Kubernetes refuses.)
// - `--1`, `+-1`: the same parser eats a second sign. (Kubernetes refuses.)
// - `1.0000000000000001`, `123456789012345678`, `9223372036854775807`, `1e27`: a number passes
//   through 64 bits of floating point, so that only about 15 digits are safe. (Kubernetes is exact.)
// - `0.1n`, `1e-28`: it keeps what is finer than a billionth. (Kubernetes rounds up to a billionth.)
// - `1e-30`: it falls to zero. (Kubernetes never lets something become nothing.)
// - `1e29`: past its 96-bit decimal, and refused. (Kubernetes reads it.)
// - `Ki`, `+`: zero, as in Kubernetes, whose grammar forbids both. Ours refuses them.

const BILLION: i64 = 1_000_000_000;

fn oracle(text: &str) -> Option<ParsedQuantity> {
    Quantity(text.to_owned()).try_into().ok()
}

/// The oracle's count of billionths, for units from one upwards and at most nine decimal places.
fn oracle_nanos(text: &str) -> Option<i128> {
    (oracle(text)? * BILLION).to_bytes_i128()
}

#[test]
fn where_the_oracle_differs_from_kubernetes_ours_does_not() {
    // Fails when ours makes one of the oracle's mistakes, or when a newer oracle no longer makes it
    // and the inputs can be compared again.
    for (text, kubernetes) in [
        ("1E", Some(10i128.pow(27))),
        ("1.5Ei", Some((3i128 << 59) * i128::from(BILLION))),
        ("1E3Ki", None),
        ("--1", None),
        ("+-1", None),
        ("1.0000000000000001", Some(1_000_000_001)),
        (
            "123456789012345678",
            Some(123_456_789_012_345_678_000_000_000),
        ),
        (
            "9223372036854775807",
            Some(9_223_372_036_854_775_807_000_000_000),
        ),
        ("1e29", Some(10i128.pow(38))),
        ("1e-30", Some(1)),
    ] {
        assert_eq!(parse_nanos(text).ok(), kubernetes, "{text}");
        assert_ne!(
            oracle_nanos(text),
            kubernetes,
            "{text}: the oracle has been repaired"
        );
    }
}

/// A number of at most 15 digits, of which at most 9 are decimal places.
fn number_within_the_oracle() -> impl Strategy<Value = String> {
    prop_oneof![
        "[+-]?[0-9]{1,15}\\.?",
        "[+-]?[0-9]{1,6}\\.[0-9]{1,9}",
        "[+-]?\\.[0-9]{1,9}"
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn units_from_one_upwards_agree_with_the_oracle(
        number in number_within_the_oracle(),
        suffix in proptest::sample::select(vec!["", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti", "Pi"]),
    ) {
        // Fails when a unit stands for another power than the oracle thinks.
        let text = number + suffix;
        match parse_nanos(&text) {
            Ok(nanos) => prop_assert_eq!(oracle_nanos(&text), Some(nanos), "{}", text),
            // Only fifteen digits of pebibytes go past the range.
            Err(error) => prop_assert!(
                suffix == "Pi" && matches!(error, QuantityError::BeyondNanos { .. }),
                "{}", error
            ),
        }
    }

    #[test]
    fn exponents_agree_with_the_oracle(
        number in "[+-]?[0-9]{1,6}",
        letter in "[eE]",
        exponent in -9..=9i32,
    ) {
        // Fails when an exponent is read with the wrong sign or as exa.
        let text = format!("{number}{letter}{exponent}");
        prop_assert_eq!(oracle_nanos(&text), parse_nanos(&text).ok(), "{}", text);
    }

    #[test]
    fn units_below_one_agree_with_the_oracle(
        number in "[+-]?[0-9]{1,9}",
        suffix in "[num]",
    ) {
        // Fails when a fraction's unit is off. The oracle cannot count in units below one, so it
        // compares the text with our answer, written in billionths.
        let text = number + &suffix;
        let nanos = parse_nanos(&text).unwrap();
        prop_assert_eq!(oracle(&text), oracle(&format!("{nanos}n")), "{}", text);
    }

    #[test]
    fn the_order_of_quantities_agrees_with_the_oracle(
        left in "[0-9]{1,6}[kMG]?",
        right in "[0-9]{1,6}[kMG]?",
    ) {
        // Fails when two quantities sort otherwise than the oracle sorts them.
        let ours = parse_nanos(&left).unwrap().cmp(&parse_nanos(&right).unwrap());
        prop_assert_eq!(oracle(&left).unwrap().cmp(&oracle(&right).unwrap()), ours);
    }
}
