//! Images from a web server on this machine that is honest, lies, stalls, breaks off or leads astray.
#![allow(clippy::unwrap_used, missing_docs)]

mod deaths;
mod server;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};
use tokio_rustls::TlsAcceptor;
use trellis_vm::ImageDigest;
use trellis_vm::image::{
    ATTEMPTS_MAX, DownloadProgress, ImageCache, ImageError, ImageFormat, ImageReference,
    ImageSettings, PullPolicy, StoredImage,
};

use server::{Ending, answer, honest, liar, serve, whole};

const IMAGE_BYTES: usize = 1_300_000;
const CUT_AT: usize = 800_000;

fn image(seed: u8) -> Vec<u8> {
    (0..IMAGE_BYTES)
        .map(|index| u8::try_from(index % 253).unwrap() ^ seed)
        .collect()
}

fn digest(bytes: &[u8]) -> ImageDigest {
    ImageDigest::new(Sha256::digest(bytes).into())
}

fn settings() -> ImageSettings {
    ImageSettings {
        stall: Duration::from_millis(600),
        pause: Duration::from_millis(1),
        plain_http: true,
        ..ImageSettings::default()
    }
}

struct Bench {
    directory: tempfile::TempDir,
    cache: ImageCache,
}

impl Bench {
    fn with(settings: ImageSettings) -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let cache = ImageCache::open(directory.path(), settings).unwrap();
        Bench { directory, cache }
    }

    fn new() -> Bench {
        Bench::with(settings())
    }

    async fn get(&self, reference: &str, policy: PullPolicy) -> Result<StoredImage, ImageError> {
        let reference: ImageReference = reference.parse().unwrap();
        self.cache.get(&reference, policy, &mut |_| {}).await
    }

    fn files(&self, part: &str) -> usize {
        std::fs::read_dir(self.directory.path().join(part))
            .unwrap()
            .count()
    }
}

#[tokio::test]
async fn an_image_is_fetched_once_and_found_by_its_digest() {
    // Fails if the bytes differ, if a policy asks more or less than it should, or if progress does not reach the end.
    let bytes = image(1);
    let served = bytes.clone();
    let (address, seen) = serve(None, move |request, _| honest(request, &served, "\"one\"")).await;
    let bench = Bench::new();
    let url = format!("http://{address}/disk.img");
    let never = bench.get(&url, PullPolicy::Never).await;
    assert!(matches!(never, Err(ImageError::NotPresent { .. })));
    let mut last = DownloadProgress::default();
    let reference: ImageReference = url.parse().unwrap();
    let found = bench
        .cache
        .get(&reference, PullPolicy::IfNotPresent, &mut |so_far| {
            last = so_far
        })
        .await
        .unwrap();
    assert_eq!(
        (found.digest, found.format),
        (digest(&bytes), ImageFormat::Raw)
    );
    assert!(std::fs::read(&found.path).unwrap() == bytes);
    let all = u64::try_from(IMAGE_BYTES).unwrap();
    assert!(
        last.received <= all && last.of.is_none_or(|of| of == all),
        "{last:?}"
    );
    assert_eq!(
        bench.get(&url, PullPolicy::IfNotPresent).await.unwrap(),
        found
    );
    assert_eq!(bench.get(&url, PullPolicy::Never).await.unwrap(), found);
    let pinned = format!("{url}@{}", found.digest);
    assert_eq!(bench.get(&pinned, PullPolicy::Always).await.unwrap(), found);
    assert_eq!(seen.lock().unwrap().len(), 1);
    assert_eq!(bench.get(&url, PullPolicy::Always).await.unwrap(), found);
    assert_eq!(seen.lock().unwrap().len(), 2);
    assert_eq!((bench.files("sha256"), bench.files("partial")), (1, 0));
}

#[tokio::test]
async fn a_download_that_breaks_off_is_gone_on_with() {
    // Fails if a second try begins anew, mixes up bytes, or goes on with another version of the file.
    let bytes = image(1);
    let served = bytes.clone();
    let (address, seen) = serve(None, move |request, before| {
        let length = served.len().to_string();
        let headers = [("content-length", length.as_str()), ("etag", "\"one\"")];
        match before {
            0 => answer(200, &headers, &served[..CUT_AT], Ending::Cut),
            _ => honest(request, &served, "\"one\""),
        }
    })
    .await;
    let bench = Bench::new();
    let found = bench
        .get(
            &format!("http://{address}/disk.img"),
            PullPolicy::IfNotPresent,
        )
        .await
        .unwrap();
    assert!(std::fs::read(&found.path).unwrap() == bytes);
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen.len(), 2, "{seen:?}");
    let from: usize = seen[1]
        .rsplit_once('=')
        .unwrap()
        .1
        .trim_end_matches('-')
        .parse()
        .unwrap();
    println!("gone on with from byte {from} of {IMAGE_BYTES}");
    assert!(from > 0 && from <= CUT_AT, "{seen:?}");
}

#[tokio::test]
async fn a_file_that_changed_meanwhile_is_fetched_from_its_beginning() {
    // Fails if the halves of two versions become one image.
    let (one, two) = (image(1), image(2));
    let expected = digest(&two);
    let (address, _) = serve(None, move |request, before| {
        let length = one.len().to_string();
        match before {
            0 => answer(
                200,
                &[("content-length", &length), ("etag", "\"one\"")],
                &one[..CUT_AT],
                Ending::Cut,
            ),
            _ => honest(request, &two, "\"two\""),
        }
    })
    .await;
    let found = Bench::new()
        .get(
            &format!("http://{address}/disk.img"),
            PullPolicy::IfNotPresent,
        )
        .await
        .unwrap();
    assert_eq!(found.digest, expected);
}

#[tokio::test]
async fn a_length_that_lies_is_an_error_that_says_so() {
    // Fails if a short file becomes an image, if tries have no end, or if a strange range is believed.
    let bench = Bench::new();
    let get = async |address: SocketAddr| {
        bench
            .get(&format!("http://{address}/x"), PullPolicy::IfNotPresent)
            .await
            .unwrap_err()
    };
    let body = vec![7; 4000];
    let short = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n".as_slice(),
        &body,
    ]
    .concat();
    let (address, asked) = liar(short).await;
    let error = get(address).await;
    assert!(
        matches!(
            error,
            ImageError::CutOff {
                said: 5000,
                received: 4000,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(
        asked.load(Ordering::SeqCst),
        usize::try_from(ATTEMPTS_MAX).unwrap()
    );
    let unsaid = [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n".as_slice(),
        &body,
    ]
    .concat();
    let error = get(liar(unsaid).await.0).await;
    assert!(
        matches!(error, ImageError::BadAnswer { what: "length", .. }),
        "{error}"
    );
    let (address, _) = serve(None, |request, before| {
        let headers = [("content-range", "bytes 0-9/10"), ("content-length", "10")];
        match before {
            0 => answer(
                200,
                &[("content-length", "1500000"), ("etag", "\"x\"")],
                &[7; 1_000_000],
                Ending::Cut,
            ),
            _ if request.headers().contains_key("range") => {
                answer(206, &headers, &[7; 10], Ending::Well)
            }
            _ => answer(500, &[], &[], Ending::Well),
        }
    })
    .await;
    let error = get(address).await;
    assert!(
        matches!(
            error,
            ImageError::BadAnswer {
                what: "Content-Range",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(bench.files("sha256"), 0);
}

#[tokio::test]
async fn a_server_that_says_nothing_more_is_given_up() {
    // Fails if a stall lasts for ever, or if what had arrived is fetched again.
    let (address, seen) = serve(None, |request, _| {
        let length = "2000000";
        let headers = [
            ("content-length", length),
            ("etag", "\"x\""),
            ("content-range", "bytes 1048576-1999999/2000000"),
        ];
        match request.uri().path() {
            "/silent" => answer(200, &headers[..2], &[7; 1000], Ending::Never),
            _ => unreachable!("nobody asks for anything else"),
        }
    })
    .await;
    let short = ImageSettings {
        stall: Duration::from_millis(60),
        ..settings()
    };
    let bench = Bench::with(short);
    let error = bench
        .get(
            &format!("http://{address}/silent"),
            PullPolicy::IfNotPresent,
        )
        .await
        .unwrap_err();
    assert!(
        matches!(error, ImageError::Stalled { received: 1000, .. }),
        "{error}"
    );
    let seen = seen.lock().unwrap().clone();
    assert!(seen[1].contains("bytes=1000-"), "{seen:?}");
}

#[tokio::test]
async fn redirects_are_followed_and_loops_are_not() {
    // Fails if a relative address is not understood, or a loop is followed for ever.
    let bytes = image(1);
    let expected = digest(&bytes);
    let (address, seen) = serve(None, move |request, _| match request.uri().path() {
        "/a/here" => answer(302, &[("location", "there")], &[], Ending::Well),
        "/a/there" => answer(307, &[("location", "/b/disk.img")], &[], Ending::Well),
        "/b/disk.img" => whole(&bytes, "\"one\""),
        "/nowhere" => answer(301, &[("location", "ftp://host/x")], &[], Ending::Well),
        _ => answer(302, &[("location", "/loop")], &[], Ending::Well),
    })
    .await;
    let bench = Bench::new();
    let found = bench
        .get(
            &format!("http://{address}/a/here"),
            PullPolicy::IfNotPresent,
        )
        .await
        .unwrap();
    assert_eq!(found.digest, expected);
    seen.lock().unwrap().clear();
    let error = bench
        .get(&format!("http://{address}/loop"), PullPolicy::IfNotPresent)
        .await
        .unwrap_err();
    assert!(
        matches!(error, ImageError::TooManyRedirects { .. }),
        "{error}"
    );
    assert_eq!(seen.lock().unwrap().len(), 6);
    let error = bench
        .get(
            &format!("http://{address}/nowhere"),
            PullPolicy::IfNotPresent,
        )
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            ImageError::BadAnswer {
                what: "Location",
                ..
            }
        ),
        "{error}"
    );
}

#[tokio::test]
async fn what_is_too_large_another_image_or_no_disk_is_refused_and_not_kept() {
    // Fails if a bound holds only for honest lengths, or if bytes that were refused stay on the disk.
    let (address, _) = serve(None, |request, _| match request.uri().path() {
        "/said" => answer(200, &[("content-length", "9000000")], &[], Ending::Never),
        "/chunked" => answer(200, &[], &vec![7; 3_000_000], Ending::Well),
        "/page" => whole(b"  <!DOCTYPE html><html>not found</html>", "\"p\""),
        "/archive" => whole(b"\x1f\x8b\x08 and so on", "\"p\""),
        "/empty" => answer(200, &[("transfer-encoding", "chunked")], &[], Ending::Well),
        "/qcow2" => whole(b"QFI\xfb\0\0\0\x03 but no header", "\"p\""),
        "/missing" => answer(404, &[], b"no", Ending::Well),
        _ => whole(&[7; 5000], "\"p\""),
    })
    .await;
    let small = ImageSettings {
        size_max: trellis_api::Bytes::mib(1),
        ..settings()
    };
    let bench = Bench::with(small);
    let get = async |path: &str| {
        bench
            .get(
                &format!("http://{address}/{path}"),
                PullPolicy::IfNotPresent,
            )
            .await
            .unwrap_err()
    };
    for path in ["said", "chunked"] {
        let error = get(path).await;
        assert!(
            matches!(error, ImageError::TooLarge { .. }),
            "{path}: {error}"
        );
    }
    for (path, expected) in [
        ("page", "a web page"),
        ("archive", "compressed by gzip"),
        ("empty", "empty"),
    ] {
        let error = get(path).await;
        assert!(
            matches!(&error, ImageError::NotADisk { what, .. } if *what == expected),
            "{path}: {error}"
        );
    }
    assert!(matches!(get("qcow2").await, ImageError::Qcow2 { .. }));
    assert!(matches!(
        get("missing").await,
        ImageError::Status { status: 404, .. }
    ));
    let wrong = get(&format!("any@sha256:{}", "00".repeat(32))).await;
    assert!(
        matches!(&wrong, ImageError::OtherDigest { found, .. } if *found == digest(&[7; 5000])),
        "{wrong}"
    );
    assert_eq!(
        (
            bench.files("sha256"),
            bench.files("partial"),
            bench.files("names")
        ),
        (0, 0, 0)
    );
}

#[tokio::test]
async fn several_who_ask_wait_for_one_download() {
    // Fails if an image is fetched twice at a time, or if one who goes takes the download with them.
    let bytes = image(1);
    let (address, seen) = serve(None, move |request, _| honest(request, &bytes, "\"one\"")).await;
    let bench = Bench::new();
    let url = format!("http://{address}/disk.img");
    {
        // The first is gone before anything arrives.
        let first = bench.get(&url, PullPolicy::IfNotPresent);
        assert!(
            tokio::time::timeout(Duration::from_millis(1), first)
                .await
                .is_err()
        );
    }
    let all = (0..8).map(|_| bench.get(&url, PullPolicy::IfNotPresent));
    let mut waiting = tokio::task::JoinSet::new();
    for _ in all {
        let (cache, reference) = (bench.cache.clone(), url.parse::<ImageReference>().unwrap());
        waiting.spawn(async move {
            cache
                .get(&reference, PullPolicy::IfNotPresent, &mut |_| {})
                .await
        });
    }
    let found = waiting.join_all().await;
    let first = found[0].as_ref().unwrap();
    assert!(found.iter().all(|one| one.as_ref().unwrap() == first));
    assert_eq!(seen.lock().unwrap().len(), 1);
}

fn authority() -> (TlsAcceptor, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let certificate = made.cert.der().clone();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    let config = config
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    (TlsAcceptor::from(Arc::new(config)), certificate)
}

#[tokio::test]
async fn tls_is_checked_and_not_left() {
    // Fails if a certificate of a stranger is accepted, if a redirect leaves TLS, or if plain HTTP is taken unasked.
    let bytes = image(1);
    let expected = digest(&bytes);
    let (tls, certificate) = authority();
    let (address, _) = serve(Some(tls), move |request, _| match request.uri().path() {
        "/down" => answer(
            302,
            &[("location", "http://127.0.0.1:1/x")],
            &[],
            Ending::Well,
        ),
        _ => whole(&bytes, "\"one\""),
    })
    .await;
    let strict = ImageSettings {
        plain_http: false,
        ..settings()
    };
    let stranger = Bench::with(strict.clone());
    let bare = format!("{address}/disk.img");
    let error = stranger
        .get(&bare, PullPolicy::IfNotPresent)
        .await
        .unwrap_err();
    assert!(matches!(error, ImageError::Connect { .. }), "{error}");
    let trusting = Bench::with(ImageSettings {
        extra_roots: vec![certificate],
        ..strict
    });
    let found = trusting.get(&bare, PullPolicy::IfNotPresent).await.unwrap();
    assert_eq!(found.digest, expected);
    let error = trusting
        .get(&format!("https://{address}/down"), PullPolicy::IfNotPresent)
        .await
        .unwrap_err();
    assert!(matches!(error, ImageError::Downgrade { .. }), "{error}");
    let error = trusting
        .get("http://127.0.0.1:1/x", PullPolicy::IfNotPresent)
        .await
        .unwrap_err();
    assert!(matches!(error, ImageError::PlainHttp { .. }), "{error}");
}

#[tokio::test]
async fn a_file_of_the_node_is_an_image_only_where_the_node_says_so() {
    // Fails if a pod can read any file of the node, directly or through a link.
    let lent = tempfile::tempdir().unwrap();
    let bytes = image(3);
    std::fs::write(lent.path().join("disk.img"), &bytes).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", lent.path().join("link")).unwrap();
    let bench = Bench::with(ImageSettings {
        local_directories: vec![lent.path().to_owned()],
        ..settings()
    });
    let path = |name: &str| lent.path().join(name).display().to_string();
    let found = bench
        .get(&path("disk.img"), PullPolicy::IfNotPresent)
        .await
        .unwrap();
    assert_eq!(found.digest, digest(&bytes));
    for path in [
        path("link"),
        "/etc/passwd".to_owned(),
        "file:///etc/passwd".to_owned(),
    ] {
        let error = bench.get(&path, PullPolicy::Always).await.unwrap_err();
        assert!(
            matches!(error, ImageError::NotLent { .. }),
            "{path}: {error}"
        );
    }
    std::fs::write(lent.path().join("disk.img"), image(4)).unwrap();
    let same = bench
        .get(&path("disk.img"), PullPolicy::IfNotPresent)
        .await
        .unwrap();
    let other = bench
        .get(&path("disk.img"), PullPolicy::Always)
        .await
        .unwrap();
    assert_eq!(
        (same.digest, other.digest),
        (found.digest, digest(&image(4)))
    );
}

#[tokio::test]
async fn images_that_nobody_keeps_go_when_they_are_old() {
    // Fails if an image in use or one just fetched goes, or if an unused one stays.
    let (address, _) = serve(None, |request, _| {
        let fill = request.uri().path().bytes().last().unwrap();
        whole(&[fill; 4096], "\"x\"")
    })
    .await;
    let bench = Bench::new();
    let mut found = Vec::new();
    for name in ["a", "b", "c"] {
        found.push(
            bench
                .get(
                    &format!("http://{address}/{name}"),
                    PullPolicy::IfNotPresent,
                )
                .await
                .unwrap(),
        );
    }
    let keep = BTreeSet::from([found[0].digest]);
    let young = bench
        .cache
        .collect(keep.clone(), Duration::from_secs(3600))
        .await
        .unwrap();
    assert!(young.images.is_empty());
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(7200);
    for image in &found[..2] {
        std::fs::File::open(&image.path)
            .unwrap()
            .set_modified(long_ago)
            .unwrap();
    }
    let old = bench
        .cache
        .collect(keep, Duration::from_secs(3600))
        .await
        .unwrap();
    assert_eq!((old.images, old.bytes), (vec![found[1].digest], 4096));
    assert!(found[0].path.exists() && !found[1].path.exists() && found[2].path.exists());
    let again = bench
        .get(&format!("http://{address}/b"), PullPolicy::Never)
        .await;
    assert!(matches!(again, Err(ImageError::NotPresent { .. })));
}

#[tokio::test]
async fn a_cache_belongs_to_one_process() {
    // Fails if two could write one download.
    let bench = Bench::new();
    let second = ImageCache::open(bench.directory.path(), settings());
    assert!(matches!(second, Err(ImageError::InUse { .. })));
}
