//! Processes that die while they fetch or remove an image.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use trellis_api::step::{self, Step};
use trellis_vm::image::{ImageCache, ImageReference, PullPolicy};

use crate::server::{honest, serve};
use crate::{digest, image, settings};

const STEP: &str = "TRELLIS_TEST_STEP";
const PLACE: &str = "TRELLIS_TEST_PLACE";
const URL: &str = "TRELLIS_TEST_URL";

/// What the process that is to die does.
async fn die() {
    step::install_hook(|reached| {
        if std::env::var(STEP).is_ok_and(|wanted| wanted == reached.name()) {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
    });
    let place = PathBuf::from(std::env::var(PLACE).unwrap());
    let cache = ImageCache::open(&place, settings()).unwrap();
    let reference: ImageReference = std::env::var(URL).unwrap().parse().unwrap();
    let _ = cache
        .get(&reference, PullPolicy::IfNotPresent, &mut |_| {})
        .await;
    let _ = cache.collect(BTreeSet::new(), Duration::ZERO).await;
}

fn dead_at(step: Step, place: &Path, url: &str) {
    let name = "deaths::a_death_at_any_step_leaves_no_image_that_is_not_whole";
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(STEP, step.name())
        .env(PLACE, place)
        .env(URL, url)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(9), "nothing reaches {step:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_death_at_any_step_leaves_no_image_that_is_not_whole() {
    // Fails if a killed download leaves a wrong image, or if what had arrived is fetched again.
    if std::env::var(STEP).is_ok() {
        return die().await;
    }
    let bytes = image(5);
    let expected = digest(&bytes);
    let (address, seen) = serve(None, move |request, _| honest(request, &bytes, "\"one\"")).await;
    let url = format!("http://{address}/disk.img");
    let steps = [
        Step::ImageReceived,
        Step::FileInPlace,
        Step::ImageStored,
        Step::ImageRemoved,
    ];
    for step in steps {
        seen.lock().unwrap().clear();
        let place = tempfile::tempdir().unwrap();
        let (path, from) = (place.path().to_owned(), url.clone());
        tokio::task::spawn_blocking(move || dead_at(step, &path, &from))
            .await
            .unwrap();
        let cache = ImageCache::open(place.path(), settings()).unwrap();
        let reference: ImageReference = url.parse().unwrap();
        let found = cache
            .get(&reference, PullPolicy::IfNotPresent, &mut |_| {})
            .await
            .unwrap();
        assert_eq!(found.digest, expected, "{step:?}");
        assert_eq!(
            digest(&std::fs::read(&found.path).unwrap()),
            expected,
            "{step:?}"
        );
        let requests = seen.lock().unwrap().len();
        let fetched_again = matches!(step, Step::ImageRemoved);
        assert_eq!(requests, if fetched_again { 2 } else { 1 }, "{step:?}");
    }
}
