//! Columns of pods: the words that people read first when something does not start.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::read::{condition, count, item, or, since};
use super::{AGE, NAME, NONE, column, str_of};
use crate::kind::Column;

pub(crate) static POD: &[Column] = &[
    NAME,
    column(
        "Ready",
        0,
        "The aggregate readiness state of this pod for accepting traffic.",
        |pod, _| {
            let summary = Summary::of(pod);
            json!(format!("{}/{}", summary.ready, summary.containers))
        },
    ),
    column(
        "Status",
        0,
        "The aggregate status of the containers in this pod.",
        |pod, _| json!(Summary::of(pod).reason),
    ),
    column(
        "Restarts",
        0,
        "The number of times the containers in this pod have been restarted and when the last container in this pod has restarted.",
        |pod, now| json!(Summary::of(pod).restarts.show(now)),
    ),
    AGE,
    column("IP", 1, "First address of the pod.", |pod, _| {
        or(pod, "/status/podIPs/0/ip", NONE)
    }),
    column("Node", 1, "Node on which the pod runs.", |pod, _| {
        or(pod, "/spec/nodeName", NONE)
    }),
    column(
        "Nominated Node",
        1,
        "Node that is being cleared for the pod.",
        |pod, _| or(pod, "/status/nominatedNodeName", NONE),
    ),
    column(
        "Readiness Gates",
        1,
        "How many of the pod's readiness gates are open.",
        readiness_gates,
    ),
];

/// What the three middle columns show, found in one walk over the container statuses.
struct Summary {
    ready: usize,
    containers: usize,
    reason: String,
    restarts: Restarts,
}

/// How often containers were restarted, and when the last one ended.
#[derive(Default)]
struct Restarts {
    count: i64,
    last: Option<String>,
}

impl Restarts {
    fn add(&mut self, status: &Value) {
        self.count += item(status, "/restartCount")
            .and_then(Value::as_i64)
            .unwrap_or(0);
        let finished = item(status, "/lastState/terminated/finishedAt").and_then(Value::as_str);
        // Kubernetes writes its timestamps in UTC at one precision, so they sort as text.
        if finished > self.last.as_deref() {
            self.last = finished.map(str::to_owned);
        }
    }

    fn show(&self, now: Timestamp) -> String {
        match &self.last {
            Some(last) if self.count != 0 => {
                format!("{} ({} ago)", self.count, since(Some(&json!(last)), now))
            }
            _ => self.count.to_string(),
        }
    }
}

impl Summary {
    fn of(pod: &Value) -> Self {
        let sidecars = list(pod, "/spec/initContainers")
            .iter()
            .filter(|container| is_sidecar(container))
            .count();
        let mut summary = Summary {
            ready: 0,
            containers: count(pod, "/spec/containers") + sidecars,
            reason: reason_of_the_pod(pod),
            restarts: Restarts::default(),
        };
        let initializing = summary.walk_init_containers(pod);
        if !initializing || condition(pod, "Initialized") == Some("True") {
            summary.walk_containers(pod);
        }
        if item(pod, "/metadata/deletionTimestamp").is_some() {
            if str_of(pod, "/status/reason") == "NodeLost" {
                summary.reason = "Unknown".to_owned();
            } else if !matches!(str_of(pod, "/status/phase"), "Succeeded" | "Failed") {
                summary.reason = "Terminating".to_owned();
            }
        }
        summary
    }

    /// Stops at the first init container that has not done its work; returns whether there is one.
    fn walk_init_containers(&mut self, pod: &Value) -> bool {
        let specs = list(pod, "/spec/initContainers");
        let mut of_sidecars = Restarts::default();
        for (index, status) in list(pod, "/status/initContainerStatuses")
            .iter()
            .enumerate()
        {
            let sidecar = specs
                .iter()
                .find(|spec| spec["name"] == status["name"])
                .is_some_and(is_sidecar);
            self.restarts.add(status);
            if sidecar {
                of_sidecars.add(status);
            }
            let terminated = item(status, "/state/terminated");
            if terminated.is_some_and(|terminated| terminated["exitCode"] == 0) {
                continue;
            }
            if sidecar && status["started"] == true {
                self.ready += usize::from(status["ready"] == true);
                continue;
            }
            let waiting = str_of(status, "/state/waiting/reason");
            self.reason = match terminated {
                Some(terminated) => format!("Init:{}", reason_of_the_end(terminated)),
                None if !matches!(waiting, "" | "PodInitializing") => format!("Init:{waiting}"),
                None => format!("Init:{index}/{}", specs.len()),
            };
            if condition(pod, "Initialized") == Some("True") {
                self.restarts = of_sidecars;
            }
            return true;
        }
        // Restarts of init containers that are done no longer matter; those of sidecars do.
        self.restarts = of_sidecars;
        false
    }

    /// The reason of the first container that has one wins, so the walk goes backwards.
    fn walk_containers(&mut self, pod: &Value) {
        let mut one_runs = false;
        for status in list(pod, "/status/containerStatuses").iter().rev() {
            self.restarts.add(status);
            let waiting = str_of(status, "/state/waiting/reason");
            if !waiting.is_empty() {
                self.reason = waiting.to_owned();
            } else if let Some(terminated) = item(status, "/state/terminated") {
                self.reason = reason_of_the_end(terminated);
            } else if status["ready"] == true && item(status, "/state/running").is_some() {
                one_runs = true;
                self.ready += 1;
            }
        }
        if self.reason == "Completed" && one_runs {
            let ready = condition(pod, "Ready") == Some("True");
            self.reason = if ready { "Running" } else { "NotReady" }.to_owned();
        }
    }
}

fn list<'a>(object: &'a Value, path: &str) -> &'a [Value] {
    item(object, path)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// An init container that stays: it is restarted for ever and counts as a container.
fn is_sidecar(container: &Value) -> bool {
    container["restartPolicy"] == "Always"
}

fn reason_of_the_pod(pod: &Value) -> String {
    let gated = list(pod, "/status/conditions").iter().any(|condition| {
        condition["type"] == "PodScheduled" && condition["reason"] == "SchedulingGated"
    });
    if gated {
        return "SchedulingGated".to_owned();
    }
    match str_of(pod, "/status/reason") {
        "" => str_of(pod, "/status/phase").to_owned(),
        reason => reason.to_owned(),
    }
}

fn reason_of_the_end(terminated: &Value) -> String {
    let number = |field| item(terminated, field).and_then(Value::as_i64).unwrap_or(0);
    match (str_of(terminated, "/reason"), number("/signal")) {
        ("", 0) => format!("ExitCode:{}", number("/exitCode")),
        ("", signal) => format!("Signal:{signal}"),
        (reason, _) => reason.to_owned(),
    }
}

fn readiness_gates(pod: &Value, _now: Timestamp) -> Value {
    let gates = list(pod, "/spec/readinessGates");
    if gates.is_empty() {
        return json!(NONE);
    }
    let open = gates
        .iter()
        .filter(|gate| condition(pod, str_of(gate, "/conditionType")) == Some("True"))
        .count();
    json!(format!("{open}/{}", gates.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(pod: &Value) -> (String, String, String) {
        let summary = Summary::of(pod);
        let now = Timestamp::UNIX_EPOCH + jiff::SignedDuration::from_hours(1);
        (
            format!("{}/{}", summary.ready, summary.containers),
            summary.reason,
            summary.restarts.show(now),
        )
    }

    fn row(ready: &str, reason: &str, restarts: &str) -> (String, String, String) {
        (ready.to_owned(), reason.to_owned(), restarts.to_owned())
    }

    #[test]
    fn a_waiting_container_gives_its_reason_to_the_pod() {
        // Fails when the phase hides why a container does not start.
        let pod = json!({
            "spec": {"containers": [{"name": "a"}, {"name": "b"}]},
            "status": {"phase": "Running", "containerStatuses": [
                {"name": "a", "restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                 "lastState": {"terminated": {"finishedAt": "1970-01-01T00:55:00Z"}}},
                {"name": "b", "ready": true, "restartCount": 0, "state": {"running": {}}},
            ]},
        });
        assert_eq!(show(&pod), row("1/2", "CrashLoopBackOff", "3 (5m ago)"));
    }

    #[test]
    fn an_init_container_at_work_is_counted() {
        // Fails when a pod that initialises looks as if its main containers were at fault.
        let pod = json!({
            "spec": {"initContainers": [{"name": "i"}, {"name": "j"}], "containers": [{"name": "a"}]},
            "status": {"phase": "Pending",
                "initContainerStatuses": [
                    {"name": "i", "restartCount": 2, "state": {"terminated": {"exitCode": 0}}},
                    {"name": "j", "restartCount": 0, "state": {"running": {}}},
                ],
                "containerStatuses": [{"name": "a", "state": {"waiting": {"reason": "PodInitializing"}}}],
            },
        });
        assert_eq!(show(&pod), row("0/1", "Init:1/2", "2"));
    }

    #[test]
    fn a_sidecar_counts_as_a_container() {
        // Fails when a restartable init container is left out of the READY column or of the restarts.
        let pod = json!({
            "spec": {"initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "a"}]},
            "status": {"phase": "Running",
                "initContainerStatuses": [
                    {"name": "s", "started": true, "ready": true, "restartCount": 1, "state": {"running": {}}}],
                "containerStatuses": [
                    {"name": "a", "ready": true, "restartCount": 1, "state": {"running": {}}}],
            },
        });
        assert_eq!(show(&pod), row("2/2", "Running", "2"));
    }

    #[test]
    fn a_pod_that_is_being_deleted_is_terminating_unless_it_has_ended() {
        // Fails when deletion hides that a pod has completed, or is itself hidden.
        let mut pod = json!({"metadata": {"deletionTimestamp": "1970-01-01T00:00:00Z"}, "status": {"phase": "Running"}});
        assert_eq!(show(&pod).1, "Terminating");
        pod["status"] = json!({"phase": "Failed"});
        assert_eq!(show(&pod).1, "Failed");
    }
}
