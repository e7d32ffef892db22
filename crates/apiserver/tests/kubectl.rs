//! Stock kubectl against the server: what a person types on the first day.
//!
//! `KUBECTL` names the kubectl to run; otherwise it is the one on the PATH.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use serde_json::json;
use support::Server;

const CLASS: &str = "
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: trellis, annotations: {storageclass.kubernetes.io/is-default-class: 'true'}}
provisioner: trellis.dev
allowVolumeExpansion: true
";

const CLAIM: &str = "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, labels: {app: shop}}
spec:
  storageClassName: trellis
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 2Gi}}
";

const POOL: &str = "
apiVersion: trellis.dev/v1alpha1
kind: Pool
metadata: {name: default}
spec: {node: n1, path: /srv/pool}
";

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: shop}
spec:
  containers:
  - {name: web, image: web:1}
  - {name: log, image: log:1}
";

const CONFIG: &str = "
apiVersion: v1
kind: ConfigMap
metadata: {name: c}
data: {a: '1'}
";

fn server_with(manifests: &[&str]) -> Server {
    let server = Server::start();
    server
        .kubectl_with("apply -f -", &manifests.join("\n---\n"))
        .unwrap();
    server
}

#[test]
fn apply_creates_then_leaves_alone_then_changes() {
    // Fails when a second apply of the same file is not quiet, or when a changed file changes nothing.
    let server = Server::start();
    let all = [CLASS, CLAIM, POOL, POD].join("\n---\n");
    let names = [
        "storageclass.storage.k8s.io/trellis",
        "persistentvolumeclaim/data",
        "pool.trellis.dev/default",
        "pod/shop",
    ];
    let expect = |verbs: [&str; 4]| -> String {
        names
            .iter()
            .zip(verbs)
            .map(|(name, verb)| format!("{name} {verb}\n"))
            .collect()
    };
    assert_eq!(
        server.kubectl_with("apply -f -", &all).unwrap(),
        expect(["created"; 4])
    );
    assert_eq!(
        server.kubectl_with("apply -f -", &all).unwrap(),
        expect(["unchanged"; 4])
    );
    let changed = all
        .replace("app: shop", "app: store")
        .replace("n1,", "n1, overcommitPercent: 150,")
        .replace("web:1", "web:2");
    let verbs = ["unchanged", "configured", "configured", "configured"];
    assert_eq!(
        server.kubectl_with("apply -f -", &changed).unwrap(),
        expect(verbs)
    );
    assert_eq!(
        server.json("get pvc data")["metadata"]["labels"],
        json!({"app": "store"})
    );
    assert_eq!(
        server.json("get pool default")["spec"]["overcommitPercent"],
        150
    );
    let containers = &server.json("get pod shop")["spec"]["containers"];
    assert_eq!(
        (&containers[0]["image"], &containers[1]["image"]),
        (&json!("web:2"), &json!("log:1"))
    );
}

#[test]
fn auth_can_i_is_answered() {
    // Fails when a client that asks before it acts is told that it may not, or that nobody knows.
    let server = Server::start();
    assert_eq!(
        server.kubectl("auth can-i create pvc").unwrap().trim(),
        "yes"
    );
    assert_eq!(
        server.kubectl("auth can-i get /healthz").unwrap().trim(),
        "yes"
    );
    let all = server.kubectl("auth can-i --list").unwrap();
    let mut lines = all
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    assert!(
        lines.any(|words| words == ["*.*", "[]", "[]", "[*]"]),
        "{all}"
    );
}

#[test]
fn requests_for_certificates_are_approved_and_denied() {
    // Fails when kubectl cannot decide on a request, changes it by that, or does not show what was decided.
    let server = Server::start();
    for name in ["good", "bad"] {
        let request = format!(
            "apiVersion: certificates.k8s.io/v1\nkind: CertificateSigningRequest\nmetadata: {{name: {name}, labels: {{a: b}}}}\nspec: {{request: eA==, signerName: example.com/x, usages: [client auth], expirationSeconds: 3600}}\n"
        );
        server.kubectl_with("apply -f -", &request).unwrap();
    }
    let before = server.json("get csr good -o json");
    server.kubectl("certificate approve good").unwrap();
    server.kubectl("certificate deny bad").unwrap();
    let after = server.json("get csr good -o json");
    assert_eq!(after["spec"], before["spec"]);
    assert_eq!(after["metadata"]["labels"], before["metadata"]["labels"]);
    let condition = &after["status"]["conditions"][0];
    assert_eq!(
        (&condition["type"], &condition["status"]),
        (&"Approved".into(), &"True".into())
    );
    assert!(condition["lastUpdateTime"].is_string(), "{condition}");
    let all = server.kubectl("get csr").unwrap();
    let words: Vec<Vec<&str>> = all
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        words[0],
        [
            "NAME",
            "AGE",
            "SIGNERNAME",
            "REQUESTOR",
            "REQUESTEDDURATION",
            "CONDITION"
        ]
    );
    for (name, decided) in [("good", "Approved"), ("bad", "Denied")] {
        let line = words.iter().find(|line| line[0] == name).unwrap();
        assert_eq!(line[2..], ["example.com/x", "system:admin", "60m", decided]);
    }
    let refused = server.kubectl("certificate deny good").unwrap_err();
    assert!(refused.contains("is already Approved"), "{refused}");
}

#[test]
fn a_field_that_leaves_the_file_leaves_the_object() {
    // Fails when the three-way merge of kubectl apply meets a server that merges otherwise.
    let server = Server::start();
    server
        .kubectl_with("apply -f -", &CONFIG.replace("a: '1'", "a: '1', b: '2'"))
        .unwrap();
    server.kubectl_with("apply -f -", CONFIG).unwrap();
    assert_eq!(server.json("get cm c")["data"], json!({"a": "1"}));
}

#[test]
fn get_prints_tables_json_yaml_and_names() {
    // Fails when the table of a kind, or an encoding, does not reach the terminal.
    let server = server_with(&[CLASS, CLAIM, POOL]);
    let words = |text: String| -> Vec<Vec<String>> {
        text.lines()
            .map(|line| line.split_whitespace().map(str::to_owned).collect())
            .collect()
    };
    let wide = words(server.kubectl("get pvc -o wide").unwrap());
    let headings =
        "NAME STATUS VOLUME CAPACITY ACCESS MODES STORAGECLASS VOLUMEATTRIBUTESCLASS AGE VOLUMEMODE".split(' ').collect::<Vec<_>>();
    assert_eq!(wide[0], headings);
    assert_eq!(
        (&wide[1][..4], wide[1].last().unwrap().as_str()),
        (
            &["data", "Pending", "trellis", "<unset>"].map(str::to_owned)[..],
            "Filesystem"
        )
    );
    assert!(
        server
            .kubectl("get sc")
            .unwrap()
            .contains("trellis (default)")
    );
    let all_namespaces = words(server.kubectl("get pvc -A --no-headers").unwrap());
    assert_eq!(all_namespaces[0][..2], ["default", "data"]);
    assert!(
        server
            .kubectl("get trellis -o wide")
            .unwrap()
            .contains("/srv/pool")
    );
    assert_eq!(
        server.kubectl("get pvc,sc -o name").unwrap(),
        "persistentvolumeclaim/data\nstorageclass.storage.k8s.io/trellis\n"
    );
    assert_eq!(server.json("get pvc data")["kind"], "PersistentVolumeClaim");
    assert_eq!(server.json("get pvc")["items"][0]["apiVersion"], "v1");
    assert!(
        server
            .kubectl("get pvc data -o yaml")
            .unwrap()
            .contains("storageClassName: trellis\n")
    );
    assert!(
        server
            .kubectl("get pvc --show-labels")
            .unwrap()
            .contains("app=shop")
    );
    assert!(
        server
            .kubectl("get pvc nothing")
            .unwrap_err()
            .contains(r#"(NotFound): persistentvolumeclaims "nothing" not found"#)
    );
}

#[test]
fn describe_shows_a_claim_with_its_events() {
    // Fails when one of the lists that describe reads (events, pods) cannot be selected.
    let server = server_with(&[CLASS, CLAIM]);
    let uid = server.json("get pvc data")["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    let event = format!(
        "apiVersion: v1\nkind: Event\nmetadata: {{name: e}}\nreason: Resizing\nmessage: it grows\ntype: Normal\n\
         involvedObject: {{kind: PersistentVolumeClaim, apiVersion: v1, namespace: default, name: data, uid: {uid}}}"
    );
    server.kubectl_with("create -f -", &event).unwrap();
    let shown = server.kubectl("describe pvc data").unwrap();
    for part in [
        "Name:          data",
        "StorageClass:  trellis",
        "Used By:       <none>",
        "Resizing",
        "it grows",
    ] {
        assert!(shown.contains(part), "{part:?} is not in\n{shown}");
    }
}

#[test]
fn every_type_of_patch_works_where_a_cluster_takes_it() {
    // Fails when a type of patch is refused, or when a strategic one is taken for a kind that has none.
    let server = server_with(&[CLASS, CLAIM, POOL, POD]);
    let strategic = r#"{"spec":{"containers":[{"name":"log","image":"log:2"}]}}"#;
    server
        .kubectl(&format!("patch pod shop --type=strategic -p {strategic}"))
        .unwrap();
    let containers = &server.json("get pod shop")["spec"]["containers"];
    assert_eq!(
        (&containers[0]["image"], &containers[1]["image"]),
        (&json!("web:1"), &json!("log:2"))
    );
    let merge = r#"{"metadata":{"labels":{"app":null,"tier":"db"}}}"#;
    server
        .kubectl(&format!("patch pvc data --type=merge -p {merge}"))
        .unwrap();
    assert_eq!(
        server.json("get pvc data")["metadata"]["labels"],
        json!({"tier": "db"})
    );
    let json_patch = r#"[{"op":"replace","path":"/spec/overcommitPercent","value":150}]"#;
    server
        .kubectl(&format!("patch pool default --type=json -p {json_patch}"))
        .unwrap();
    assert_eq!(
        server.json("get pool default")["spec"]["overcommitPercent"],
        150
    );
    let refused = server
        .kubectl(r#"patch pool default --type=strategic -p {"spec":{"overcommitPercent":200}}"#)
        .unwrap_err();
    // Newer kubectl puts the media type into its sentence, older kubectl the reason.
    assert!(
        refused.contains("strategic-merge-patch+json")
            || refused.contains("(UnsupportedMediaType)"),
        "{refused}"
    );
    let unchanged = server
        .kubectl(&format!("patch pvc data --type=merge -p {merge}"))
        .unwrap();
    assert_eq!(
        unchanged,
        "persistentvolumeclaim/data patched (no change)\n"
    );
}

#[test]
fn label_and_annotate_add_change_and_remove() {
    // Fails when the patches that these commands build do not fit.
    let server = server_with(&[CLASS, CLAIM]);
    server.kubectl("label pvc data tier=db").unwrap();
    assert!(
        server
            .kubectl("label pvc data tier=cache")
            .unwrap_err()
            .contains("--overwrite")
    );
    server
        .kubectl("label --overwrite pvc data tier=cache app-")
        .unwrap();
    server.kubectl("annotate pvc data note=small").unwrap();
    let metadata = &server.json("get pvc data")["metadata"];
    assert_eq!(metadata["labels"], json!({"tier": "cache"}));
    assert_eq!(metadata["annotations"]["note"], "small");
}

#[test]
fn selectors_choose() {
    // Fails when a selector is ignored and everything is shown, or deleted.
    let labelled = |name: &str, app: &str| {
        CONFIG.replace("name: c", &format!("name: {name}, labels: {{app: {app}}}"))
    };
    let server = server_with(&[&labelled("one", "shop"), &labelled("two", "blog")]);
    let names = |selector: &str| {
        server
            .kubectl(&format!("get cm -o name {selector}"))
            .unwrap()
    };
    assert_eq!(names("-l app=shop"), "configmap/one\n");
    assert_eq!(names("-l app!=shop"), "configmap/two\n");
    assert_eq!(names("-l app"), "configmap/one\nconfigmap/two\n");
    assert_eq!(
        names("--field-selector metadata.name=two"),
        "configmap/two\n"
    );
    server.kubectl("delete cm -l app=blog").unwrap();
    assert_eq!(names(""), "configmap/one\n");
}

#[test]
fn a_watch_shows_changes_as_they_come() {
    // Fails when a watch does not start after the list, misses a change, or prints no table rows.
    let server = server_with(&[POOL]);
    let watch = server.watch("get pools --watch --output-watch-events");
    watch.expect(&["ADDED", "default"]);
    server
        .kubectl_with("apply -f -", &POOL.replace("name: default", "name: other"))
        .unwrap();
    watch.expect(&["ADDED", "other"]);
    server.kubectl("label pool default tier=db").unwrap();
    watch.expect(&["MODIFIED", "default"]);
    server.kubectl("delete pool other").unwrap();
    watch.expect(&["DELETED", "other"]);
}

#[test]
fn delete_waits_for_the_finalizers() {
    // Fails when an object with a finalizer is gone at once, or when kubectl never learns that it went.
    let server = server_with(&[&POOL.replace(
        "name: default",
        "name: default, finalizers: [trellis.dev/data]",
    )]);
    let delete = server.watch("delete pool default --timeout=60s");
    delete.expect(&["default", "deleted"]);
    let metadata = &server.json("get pool default")["metadata"];
    assert!(metadata["deletionTimestamp"].is_string());
    server
        .kubectl(r#"patch pool default --type=merge -p {"metadata":{"finalizers":null}}"#)
        .unwrap();
    assert!(delete.succeeded());
    assert_eq!(server.kubectl("get pools -o name").unwrap(), "");
}

#[test]
fn delete_deletes() {
    // Fails when delete hangs waiting for an object that is gone, or leaves it.
    let server = server_with(&[POOL, POD]);
    assert!(
        server
            .kubectl("delete pool default")
            .unwrap()
            .starts_with("pool.trellis.dev \"default\" deleted")
    );
    assert!(
        server
            .kubectl("delete pool default")
            .unwrap_err()
            .contains("(NotFound)")
    );
    server
        .kubectl("delete pool default --ignore-not-found")
        .unwrap();
    server
        .kubectl("delete pod shop --grace-period=0 --force")
        .unwrap();
    assert_eq!(server.kubectl("get pods,pools -o name").unwrap(), "");
}

#[test]
fn explain_explains_kubernetes_kinds_and_ours() {
    // Fails when the OpenAPI documents lack a kind, a field, or the way between them.
    let server = Server::start();
    for (path, parts) in [
        ("pvc.spec", ["accessModes", "storageClassName", "resources"]),
        ("pods.spec.containers.env", ["name", "value", "valueFrom"]),
        ("pools.spec", ["node", "path", "overcommitPercent"]),
        ("volumes.status.growths", ["from", "to", "result"]),
    ] {
        let shown = server.kubectl(&format!("explain {path}")).unwrap();
        for part in parts {
            assert!(shown.contains(part), "{path}: {part:?} is not in\n{shown}");
        }
    }
    assert!(server.kubectl("explain pvc.spec.nothing").is_err());
}

#[test]
fn server_side_apply_keeps_owners_apart() {
    // Fails when two managers overwrite each other silently, or when force does not take over.
    let server = Server::start();
    let apply = |manager: &str, options: &str, text: &str| {
        server.kubectl_with(
            &format!("apply --server-side --field-manager={manager} {options} -f -"),
            text,
        )
    };
    assert_eq!(
        apply("one", "", CONFIG).unwrap(),
        "configmap/c serverside-applied\n"
    );
    apply("two", "", &CONFIG.replace("a: '1'", "b: '2'")).unwrap();
    assert_eq!(server.json("get cm c")["data"], json!({"a": "1", "b": "2"}));
    let other = CONFIG.replace("'1'", "'3'");
    assert!(
        apply("two", "", &other)
            .unwrap_err()
            .contains(r#"conflict with "one""#)
    );
    apply("two", "--force-conflicts", &other).unwrap();
    assert_eq!(server.json("get cm c")["data"], json!({"a": "3"}));
}

#[test]
fn a_misspelt_field_is_refused_unless_validation_is_off() {
    // Fails when a typo is dropped in silence, so that a claim is not what its author wrote.
    let server = server_with(&[CLASS]);
    let typo = CLAIM.replace("storageClassName", "storageClasName");
    let refused = server.kubectl_with("create -f -", &typo).unwrap_err();
    assert!(refused.contains("storageClasName"), "{refused}");
    assert!(
        refused.to_lowercase().contains("unknown field"),
        "{refused}"
    );
    let pool = POOL.replace("path:", "paht: x, path:");
    assert!(
        server
            .kubectl_with("create -f -", &pool)
            .unwrap_err()
            .contains("paht")
    );
    server
        .kubectl_with("create --validate=false -f -", &typo)
        .unwrap();
    assert_eq!(
        server.json("get pvc data")["spec"].get("storageClasName"),
        None
    );
}

#[test]
fn a_dry_run_and_a_diff_change_nothing() {
    // Fails when dryRun is ignored.
    let server = server_with(&[POOL]);
    let changed = POOL.replace("/srv/pool", "/srv/pool, overcommitPercent: 150");
    server
        .kubectl_with("apply --dry-run=server -f -", &changed)
        .unwrap();
    // diff ends with 1 when there is a difference, and prints it.
    let difference = server.kubectl_with("diff -f -", &changed).unwrap_err();
    assert!(
        difference.contains("+  overcommitPercent: 150")
            && difference.contains("-  overcommitPercent: 100"),
        "{difference}"
    );
    assert_eq!(
        server.json("get pool default")["spec"]["overcommitPercent"],
        100
    );
    assert_eq!(server.kubectl_with("diff -f -", POOL).unwrap(), "");
}

#[test]
fn a_claim_that_is_not_bound_does_not_grow() {
    // Fails when kubectl does not show a person why a write was refused, field by field.
    let server = server_with(&[CLASS, CLAIM]);
    let refused = server
        .kubectl_with("apply -f -", &CLAIM.replace("2Gi", "4Gi"))
        .unwrap_err();
    assert!(
        refused.contains(
            r#"The PersistentVolumeClaim "data" is invalid: spec: Forbidden: spec is immutable"#
        ),
        "{refused}"
    );
}

#[test]
fn replace_and_create_conflict_as_in_a_cluster() {
    // Fails when a stale write wins, or when a second create succeeds.
    let server = server_with(&[CLASS, CLAIM]);
    assert!(
        server
            .kubectl_with("create -f -", CLAIM)
            .unwrap_err()
            .contains("(AlreadyExists)")
    );
    let stale = server.kubectl("get pvc data -o json").unwrap();
    server.kubectl("label pvc data tier=db").unwrap();
    let refused = server.kubectl_with("replace -f -", &stale).unwrap_err();
    assert!(
        refused.contains("(Conflict)") && refused.contains("the object has been modified"),
        "{refused}"
    );
    let fresh = server.kubectl("get pvc data -o json").unwrap();
    server
        .kubectl_with("replace -f -", &fresh.replace("\"db\"", "\"cache\""))
        .unwrap();
    assert_eq!(
        server.json("get pvc data")["metadata"]["labels"]["tier"],
        "cache"
    );
}

#[test]
fn a_wrong_token_is_not_let_in() {
    // Fails when a stranger on the machine can read a secret.
    let server = Server::start();
    let refused = server
        .kubectl_with_token("get secrets", "wrong")
        .unwrap_err();
    assert!(
        refused.contains("Unauthorized") || refused.contains("must be logged in"),
        "{refused}"
    );
}

#[test]
fn kubectl_knows_the_server_and_its_kinds() {
    // Fails when discovery or the version is not what kubectl can read.
    let server = Server::start();
    assert!(server.kubectl("version").unwrap().contains("v1.34"));
    let kinds = server.kubectl("api-resources --no-headers").unwrap();
    for name in [
        "persistentvolumeclaims",
        "storageclasses",
        "leases",
        "pools",
        "attachments",
    ] {
        assert!(kinds.contains(name), "{name} is not in\n{kinds}");
    }
    let of_ours = server
        .kubectl("api-resources --api-group=trellis.dev -o name")
        .unwrap();
    assert_eq!(of_ours.lines().count(), 5);
    assert_eq!(server.kubectl("get --raw /readyz").unwrap(), "ok");
}

#[test]
fn create_makes_namespaces_config_maps_and_secrets() {
    // Fails when newer kubectl, which sends these three in protobuf, is not understood.
    let server = Server::start();
    server.kubectl("create namespace shop").unwrap();
    server
        .kubectl("create configmap c --from-literal=a=b -n shop")
        .unwrap();
    server
        .kubectl("create secret generic s --from-literal=a=b -n shop")
        .unwrap();
    assert_eq!(server.json("get cm c -n shop")["data"], json!({"a": "b"}));
    let secret = server.json("get secret s -n shop");
    assert_eq!(
        (&secret["type"], &secret["data"]),
        (&json!("Opaque"), &json!({"a": "Yg=="}))
    );
    assert!(
        server
            .kubectl("create namespace shop")
            .unwrap_err()
            .contains("already exists")
    );
}
