//! What the command line answers where it needs no service: help, completion, wrong usage, and the way
//! to say that there is no service. The cases are in `tests/cmd`; `TRYCMD=overwrite` writes them anew.

// Fails if a verb, a flag, an exit code or a sentence changes without its case.
#[test]
fn the_command_line_answers_as_its_cases_say() {
    trycmd::TestCases::new()
        .env("COLUMNS", "100")
        .env("KUBECONFIG", "")
        .env("TRELLIS_DATA", "/nonexistent/trellis")
        .env("NO_COLOR", "1")
        .case("tests/cmd/*.md");
}
