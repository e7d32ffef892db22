//! Label selectors: `a=b,c!=d,e in (f,g),h notin (i),j,!k`.

use std::fmt;

/// Requirements in one selector; a longer one is refused.
const REQUIREMENTS_MAX: usize = 1000;

/// All requirements must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LabelSelector {
    requirements: Vec<Requirement>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Exists,
    Absent,
    Equals(String),
    Differs(String),
    In(Vec<String>),
    NotIn(Vec<String>),
}

/// Why a selector cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LabelError {
    #[error("found '{found}' expected: {expected}")]
    Unexpected {
        found: String,
        expected: &'static str,
    },
    #[error("key: Invalid value: {key:?}: {why}")]
    Key { key: String, why: String },
    #[error("values: Invalid value: {value:?}: {why}")]
    Value { value: String, why: String },
    #[error("more than {REQUIREMENTS_MAX} requirements")]
    TooMany,
}

impl LabelSelector {
    pub(crate) fn parse(text: &str) -> Result<LabelSelector, LabelError> {
        let mut parser = Parser { rest: text };
        let mut requirements = Vec::new();
        if parser.peek() == Token::End {
            return Ok(LabelSelector { requirements });
        }
        loop {
            requirements.push(parser.requirement()?);
            if requirements.len() > REQUIREMENTS_MAX {
                return Err(LabelError::TooMany);
            }
            match parser.next() {
                Token::End => return Ok(LabelSelector { requirements }),
                Token::Comma => {}
                other => return Err(other.instead_of("',' or 'end of string'")),
            }
        }
    }

    pub(crate) fn matches<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.requirements.iter().all(|requirement| {
            let have = label(&requirement.key);
            match &requirement.test {
                Test::Exists => have.is_some(),
                Test::Absent => have.is_none(),
                Test::Equals(value) => have == Some(value),
                Test::Differs(value) => have != Some(value),
                Test::In(values) => {
                    have.is_some_and(|have| values.iter().any(|value| value == have))
                }
                Test::NotIn(values) => {
                    have.is_none_or(|have| values.iter().all(|value| value != have))
                }
            }
        })
    }
}

impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Requirement { key, test }) in self.requirements.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            match test {
                Test::Exists => f.write_str(key),
                Test::Absent => write!(f, "!{key}"),
                Test::Equals(value) => write!(f, "{key}={value}"),
                Test::Differs(value) => write!(f, "{key}!={value}"),
                Test::In(values) => write!(f, "{key} in ({})", values.join(",")),
                Test::NotIn(values) => write!(f, "{key} notin ({})", values.join(",")),
            }?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    End,
    Comma,
    Open,
    Close,
    Not,
    Equals,
    Differs,
    Word(&'a str),
}

impl Token<'_> {
    fn instead_of(self, expected: &'static str) -> LabelError {
        let found = match self {
            Token::End => "",
            Token::Comma => ",",
            Token::Open => "(",
            Token::Close => ")",
            Token::Not => "!",
            Token::Equals => "=",
            Token::Differs => "!=",
            Token::Word(word) => word,
        };
        LabelError::Unexpected {
            found: found.to_owned(),
            expected,
        }
    }
}

struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Token<'a> {
        Parser { rest: self.rest }.next()
    }

    fn next(&mut self) -> Token<'a> {
        const SYMBOLS: [(&str, Token<'static>); 7] = [
            ("!=", Token::Differs),
            ("==", Token::Equals),
            ("=", Token::Equals),
            ("!", Token::Not),
            (",", Token::Comma),
            ("(", Token::Open),
            (")", Token::Close),
        ];
        self.rest = self.rest.trim_start();
        if self.rest.is_empty() {
            return Token::End;
        }
        for (symbol, token) in SYMBOLS {
            if let Some(rest) = self.rest.strip_prefix(symbol) {
                self.rest = rest;
                return token;
            }
        }
        let ends = |letter: char| letter.is_whitespace() || "!=,()".contains(letter);
        let (word, rest) = self
            .rest
            .split_at(self.rest.find(ends).unwrap_or(self.rest.len()));
        self.rest = rest;
        Token::Word(word)
    }

    fn requirement(&mut self) -> Result<Requirement, LabelError> {
        let absent = self.peek() == Token::Not;
        if absent {
            self.next();
        }
        let key = match self.next() {
            Token::Word(word) => word.to_owned(),
            other => return Err(other.instead_of("!, identifier, or 'end of string'")),
        };
        if let Some(why) = crate::names::qualified_name(&key).into_iter().next() {
            return Err(LabelError::Key { key, why });
        }
        if absent {
            return Ok(Requirement {
                key,
                test: Test::Absent,
            });
        }
        let test = match self.peek() {
            Token::End | Token::Comma => Test::Exists,
            Token::Equals => {
                self.next();
                Test::Equals(self.value()?)
            }
            Token::Differs => {
                self.next();
                Test::Differs(self.value()?)
            }
            Token::Word("in") => {
                self.next();
                Test::In(self.values()?)
            }
            Token::Word("notin") => {
                self.next();
                Test::NotIn(self.values()?)
            }
            other => return Err(other.instead_of("in, notin, =, ==, !=, gt, lt")),
        };
        Ok(Requirement { key, test })
    }

    fn value(&mut self) -> Result<String, LabelError> {
        match self.peek() {
            Token::Word(word) => {
                self.next();
                checked(word)
            }
            Token::End | Token::Comma | Token::Close => Ok(String::new()),
            other => Err(other.instead_of("identifier")),
        }
    }

    fn values(&mut self) -> Result<Vec<String>, LabelError> {
        match self.next() {
            Token::Open => {}
            other => return Err(other.instead_of("'('")),
        }
        let mut values = Vec::new();
        loop {
            values.push(self.value()?);
            match self.next() {
                Token::Comma => {}
                Token::Close => break,
                other => return Err(other.instead_of("',', or ')'")),
            }
        }
        values.sort();
        values.dedup();
        Ok(values)
    }
}

fn checked(value: &str) -> Result<String, LabelError> {
    match crate::names::label_value(value).into_iter().next() {
        Some(why) => Err(LabelError::Value {
            value: value.to_owned(),
            why,
        }),
        None => Ok(value.to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matches(selector: &str, labels: &[(&str, &str)]) -> bool {
        let find = |key: &str| {
            labels
                .iter()
                .find(|(have, _)| *have == key)
                .map(|(_, value)| *value)
        };
        LabelSelector::parse(selector).unwrap().matches(find)
    }

    #[test]
    fn selectors_select_as_kubernetes_does() {
        // Fails if an operator has another meaning than in Kubernetes.
        let labels = [("a", "1"), ("b", "")];
        for yes in [
            "",
            "a",
            "!c",
            "a=1",
            "a==1",
            "a!=2",
            "c!=1",
            "a in (1,2)",
            "a notin (2)",
            "c notin (1)",
            "b=",
            "a,b,!c",
            "b in ()",
        ] {
            assert!(matches(yes, &labels), "{yes}");
        }
        for no in [
            "c",
            "!a",
            "a=2",
            "a!=1",
            "a in (2,3)",
            "c in (1)",
            "a notin (1)",
            "a=1,c",
        ] {
            assert!(!matches(no, &labels), "{no}");
        }
        for wrong in [
            "a in", "a in (", "=", "a=b=c", ",", "a,", "a b", "a=b c", "!!a", "a/b/c",
        ] {
            assert!(LabelSelector::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            LabelSelector::parse("a in").unwrap_err().to_string(),
            "found '' expected: '('"
        );
    }

    fn requirement() -> impl Strategy<Value = Requirement> {
        let key = "[a-z]([a-z.]{0,5}[a-z])?(/[A-Z][a-z_]{0,4}[a-z])?";
        let value = || "([a-z]([a-z_.]{0,4}[a-z])?)?";
        let values = || {
            proptest::collection::btree_set(value(), 1..4)
                .prop_map(|set| set.into_iter().collect::<Vec<String>>())
        };
        let test = prop_oneof![
            Just(Test::Exists),
            Just(Test::Absent),
            value().prop_map(Test::Equals),
            value().prop_map(Test::Differs),
            values().prop_map(Test::In),
            values().prop_map(Test::NotIn),
        ];
        (key, test)
            .prop_filter("a key is not two dots in a row", |(key, _)| {
                !key.contains("..")
            })
            .prop_map(|(key, test)| Requirement { key, test })
    }

    proptest! {
        #[test]
        fn what_is_printed_is_parsed_to_the_same(requirements in proptest::collection::vec(requirement(), 0..5)) {
            // Fails if printing loses or changes a requirement.
            let selector = LabelSelector { requirements };
            prop_assert_eq!(LabelSelector::parse(&selector.to_string()), Ok(selector));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC{0,40}|[a-z!=,() ]{0,40}") {
            // Fails if a user's text can bring the server down.
            let _ = LabelSelector::parse(&text);
        }
    }
}
