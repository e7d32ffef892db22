//! The promises of the project, and the tests that keep them: `docs/promises.md` names both.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;

/// What stands between backticks.
fn quoted(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

#[test]
fn every_promise_names_tests_that_exist() {
    // Fails if a promise has no test, or if a test was renamed or removed and the page still names it.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = std::fs::read_to_string(root.join("docs/promises.md")).unwrap();
    let sections: Vec<&str> = page.split("\n## ").skip(1).collect();
    for (index, section) in sections.iter().enumerate() {
        let title = section.lines().next().unwrap();
        assert!(title.starts_with(&format!("P{}: ", index + 1)), "{title}");
        let named = section.lines().filter(|line| line.starts_with("- "));
        let mut tests = 0;
        for line in named {
            let [file, names @ ..] = &quoted(line)[..] else {
                panic!("no file: {line}");
            };
            let source = std::fs::read_to_string(root.join(file)).expect(file);
            for name in names {
                let is_test = source.contains(&format!("fn {name}("));
                assert!(
                    is_test,
                    "{file} has no test {name}, which {title:?} rests on"
                );
                tests += 1;
            }
        }
        assert!(tests > 0, "no test keeps {title:?}");
    }
    assert_eq!(sections.len(), 9, "the promises are P1 to P9");
}
