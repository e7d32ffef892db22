# Two commands do everything on a fresh Debian 12 with Rust and root: `make demo` and `make test`.

.PHONY: demo test setup check build install deb clean

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

## The program, its service, manual, completion and documents, below PREFIX (/usr/local) and DESTDIR.
install: build
	scripts/install target/release/trellis

## Debian packages of the program and of its symbols, in target/deb.
deb: build
	scripts/deb target/release/trellis target/deb

clean:
	cargo clean
