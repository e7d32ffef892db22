//! A server in this process, and the real kubectl pointed at it.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use trellis_apiserver::pki::Pki;
use trellis_apiserver::{EmbeddedApi, kubeconfig, listen};

/// A hanging kubectl fails the test instead of hanging it.
const LINE_WAIT_MAX: Duration = Duration::from_secs(60);
const RUN_SECONDS_MAX: &str = "60";
/// Ends a program that takes too long, and says with a code of its own when there is no such program.
const TIMEOUT: &str = "timeout";
const NO_SUCH_PROGRAM: i32 = 127;
const SETUP: &str = "run `make setup` to install kubectl";

/// The API over TLS on a free port, with its own directory.
pub(crate) struct Server {
    directory: TempDir,
    stop: Option<oneshot::Sender<()>>,
    runtime: Option<Runtime>,
    url: String,
    pki: Pki,
}

impl Server {
    /// Starts a server on an empty store.
    pub(crate) fn start() -> Server {
        let directory = tempfile::tempdir().unwrap();
        let runtime = Runtime::new().unwrap();
        let api = runtime
            .block_on(async { EmbeddedApi::open(&directory.path().join("store.redb")).unwrap() });
        let pki = Pki::open(directory.path(), None).unwrap();
        let listener = runtime.block_on(listen::bind(0)).unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let (stop, stopped) = oneshot::channel();
        runtime.spawn({
            let pki = pki.clone();
            async move {
                listen::serve(listener, &pki, api, async {
                    let _ = stopped.await;
                })
                .await;
            }
        });
        let server = Server {
            directory,
            stop: Some(stop),
            runtime: Some(runtime),
            url,
            pki,
        };
        kubeconfig::write(
            &server.kubeconfig(),
            &server.url,
            &server.pki.ca_pem,
            &server.pki.token,
        )
        .unwrap();
        server
    }

    /// The server's kubeconfig.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.directory.path().join("kubeconfig")
    }

    /// A directory that lives as long as the server.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Runs kubectl with these words; what it printed, or what it complained of.
    pub(crate) fn kubectl(&self, arguments: &str) -> Result<String, String> {
        self.kubectl_with(arguments, "")
    }

    /// Runs kubectl with these words and this input.
    pub(crate) fn kubectl_with(&self, arguments: &str, input: &str) -> Result<String, String> {
        let bound = [TIMEOUT, RUN_SECONDS_MAX];
        let mut child = self.spawn(&bound, arguments, &self.kubeconfig());
        // kubectl may end without reading what it is given; what it says then is what counts.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        outcome(child.wait_with_output().unwrap())
    }

    /// Runs kubectl as someone who knows the server but has another token.
    pub(crate) fn kubectl_with_token(
        &self,
        arguments: &str,
        token: &str,
    ) -> Result<String, String> {
        let text = std::fs::read_to_string(self.kubeconfig()).unwrap();
        let path = self.path().join("other-kubeconfig");
        std::fs::write(&path, text.replace(self.pki.token.as_str(), token)).unwrap();
        outcome(
            self.spawn(&[TIMEOUT, RUN_SECONDS_MAX], arguments, &path)
                .wait_with_output()
                .unwrap(),
        )
    }

    /// What kubectl prints as JSON.
    pub(crate) fn json(&self, arguments: &str) -> Value {
        serde_json::from_str(&self.kubectl(&format!("{arguments} -o json")).unwrap()).unwrap()
    }

    /// Starts a kubectl that does not end by itself.
    pub(crate) fn watch(&self, arguments: &str) -> Watch {
        let mut child = self.spawn(&[], arguments, &self.kubeconfig());
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, receiver) = mpsc::channel();
        // Ends when kubectl does, because the pipe does.
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Watch {
            child,
            lines: receiver,
        }
    }

    /// Starts kubectl, behind a program that bounds its time if one is given.
    fn spawn(&self, bound: &[&str], arguments: &str, kubeconfig: &Path) -> Child {
        let kubectl = std::env::var("KUBECTL").unwrap_or_else(|_| "kubectl".to_owned());
        let mut words = bound.iter().copied().chain([kubectl.as_str()]);
        let program = words.next().unwrap();
        Command::new(program)
            .args(words)
            .args(arguments.split_whitespace())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.path())
            .env("KUBECONFIG", kubeconfig)
            .current_dir(self.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{program} cannot be run ({error}); {SETUP}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn outcome(output: Output) -> Result<String, String> {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert_ne!(
        output.status.code(),
        Some(NO_SUCH_PROGRAM),
        "kubectl is missing; {SETUP}"
    );
    if output.status.success() {
        Ok(text(&output.stdout))
    } else {
        Err(text(&output.stderr) + &text(&output.stdout))
    }
}

/// A kubectl that goes on printing.
pub(crate) struct Watch {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Watch {
    /// Waits for kubectl to end by itself; whether it was content.
    pub(crate) fn succeeded(mut self) -> bool {
        self.child.wait().unwrap().success()
    }

    /// Waits for a line that contains all of these words.
    pub(crate) fn expect(&self, words: &[&str]) -> String {
        loop {
            let line = self.lines.recv_timeout(LINE_WAIT_MAX);
            let line = line.unwrap_or_else(|_| panic!("kubectl printed no line with {words:?}"));
            if words.iter().all(|word| line.contains(word)) {
                return line;
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
