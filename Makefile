# Two commands do everything on a fresh Debian 12 with Rust and root: `make demo` and `make test`.

.PHONY: demo test setup check build clean

## The main job, in front of your eyes: provision, mount, write, grow twice, verify, clean up.
demo: setup
	cargo build --release --package trellis
	scripts/demo target/release/trellis

## All tests.
test: setup
	cargo test --workspace

## What a change must pass: format, lints, tests.
check: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- --deny warnings
	cargo test --workspace

## The programs that the two commands need. Installs only what is missing.
setup:
	scripts/setup

build:
	cargo build --release --package trellis

clean:
	cargo clean
