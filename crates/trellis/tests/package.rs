//! What an administrator gets: the Debian package, installed into a root of its own, where it does the demo.
//!
//! Needs root. The root is an overlay on that of this machine, in a mount namespace that ends with the test.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;
use std::process::{Command, Stdio};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Runs in a new mount namespace: `$1` is the directory for everything, `$2` the project.
const IN_A_ROOT_OF_ITS_OWN: &str = r#"
set -eu
mount --make-rprivate /
mount -t tmpfs none "$1/root"
mkdir "$1/root/upper" "$1/root/work" "$1/root/merged"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/root/upper,workdir=$1/root/work" "$1/root/merged"
root=$1/root/merged
for each in proc sys dev; do mount --rbind "/$each" "$root/$each"; done
# The demo's files are on a real filesystem: loop devices want one.
mkdir -p "$1/tmp"
mount --bind "$1/tmp" "$root/tmp"
cp -r "$2/examples" "$2/scripts" "$root/opt/"
cp "$1"/packages/trellis_*.deb "$root/opt/trellis.deb"
chroot "$root" dpkg --install --force-depends /opt/trellis.deb
chroot "$root" /usr/bin/trellis --version
chroot "$root" test -f /usr/lib/systemd/system/trellis.service
chroot "$root" grep -q '^KillMode=process$' /usr/lib/systemd/system/trellis.service
chroot "$root" grep -q '^ExecStart=/usr/bin/trellis up' /usr/lib/systemd/system/trellis.service
chroot "$root" sh -c 'zcat /usr/share/man/man1/trellis-grow.1.gz | grep -q "Grow a claim while it is in use"'
chroot "$root" test -s /usr/share/bash-completion/completions/trellis
chroot "$root" test -f /usr/share/doc/trellis/docs/holds.md
chroot "$root" /opt/scripts/demo /usr/bin/trellis
chroot "$root" dpkg --purge trellis
! test -e "$root/usr/bin/trellis"
"#;

fn run(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{command:?}: {said}");
    said
}

fn length(path: &Path) -> u64 {
    path.metadata().unwrap().len()
}

#[test]
fn the_package_installs_and_does_the_demo() {
    // Fails when the package lacks a file, its program does not run, or a growth from it fails.
    let directory = tempfile::Builder::new()
        .prefix("trellis-package-")
        .tempdir()
        .unwrap();
    let packages = directory.path().join("packages");
    run(Command::new(format!("{ROOT}/scripts/deb"))
        .args([Path::new(env!("CARGO_BIN_EXE_trellis")), &packages])
        .env("DEB_COMPRESSION", "none"));
    let program = std::fs::read_dir(&packages)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_str().unwrap().contains("/trellis_"))
        .unwrap();
    assert!(
        length(&program) < length(Path::new(env!("CARGO_BIN_EXE_trellis"))) / 2,
        "the packaged program has no symbols in it"
    );
    std::fs::create_dir(directory.path().join("root")).unwrap();
    let said = run(Command::new("unshare")
        .args(["--mount", "--kill-child", "--fork", "sh", "-c"])
        .args([IN_A_ROOT_OF_ITS_OWN, "sh"])
        .args([directory.path(), Path::new(ROOT)]));
    assert!(
        said.contains("mounts left: 0, loop devices left: 0"),
        "{said}"
    );
}

#[test]
fn an_installation_goes_where_it_is_told() {
    // Fails when DESTDIR or PREFIX is ignored, which would write into the machine that builds a package.
    let directory = tempfile::tempdir().unwrap();
    run(Command::new(format!("{ROOT}/scripts/install"))
        .arg(env!("CARGO_BIN_EXE_trellis"))
        .env("DESTDIR", directory.path())
        .env("PREFIX", "/opt/trellis"));
    let at = |path: &str| directory.path().join("opt/trellis").join(path);
    let unit = std::fs::read_to_string(at("lib/systemd/system/trellis.service")).unwrap();
    assert!(
        unit.contains("ExecStart=/opt/trellis/bin/trellis up"),
        "{unit}"
    );
    assert!(at("share/man/man1/trellis.1.gz").exists());
    assert!(at("lib/debug/opt/trellis/bin/trellis.debug").exists());
    run(Command::new(at("bin/trellis")).arg("--version"));
}
