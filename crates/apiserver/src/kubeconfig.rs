//! The kubeconfig: the file that lets stock kubectl find the server, trust it and log in.

use std::path::Path;

use k8s_openapi::ByteString;

use crate::pki::{AccessError, Token};

/// The name of cluster and context in the file, and of the administrator.
const NAME: &str = "trellis";

/// Writes the administrator's kubeconfig, readable by its owner alone; a file that already says the same is left as it is.
pub fn write(
    path: &Path,
    server_url: &str,
    ca_pem: &str,
    token: &Token,
) -> Result<(), AccessError> {
    trellis_files::ensure(
        path,
        text(server_url, ca_pem, NAME, token.as_str()).as_bytes(),
    )
    .map(|_| ())
    .map_err(|source| AccessError::Write {
        path: path.to_owned(),
        source,
    })
}

/// The text of a kubeconfig for a user with this token.
pub fn text(server_url: &str, ca_pem: &str, user: &str, token: &str) -> String {
    // A ByteString is base64 in JSON, and a JSON string is a YAML string.
    let ca = serde_json::json!(ByteString(ca_pem.as_bytes().to_vec()));
    let [server, user, token] = [server_url, user, token].map(|text| serde_json::json!(text));
    format!(
        "apiVersion: v1
kind: Config
clusters:
- name: {NAME}
  cluster:
    server: {server}
    certificate-authority-data: {ca}
users:
- name: {user}
  user:
    token: {token}
contexts:
- name: {NAME}
  context:
    cluster: {NAME}
    user: {user}
current-context: {NAME}
"
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;
    use crate::pki::Pki;

    #[test]
    fn the_kubeconfig_is_private_and_stable() {
        // Fails when others may read the token, or when a restart replaces a file that is right.
        let directory = tempfile::tempdir().unwrap();
        let pki = Pki::open(directory.path(), None).unwrap();
        let path = directory.path().join("kubeconfig");
        write(&path, "https://127.0.0.1:6443", &pki.ca_pem, &pki.token).unwrap();
        let first = std::fs::metadata(&path).unwrap();
        assert_eq!(first.permissions().mode() & 0o777, 0o600);
        write(&path, "https://127.0.0.1:6443", &pki.ca_pem, &pki.token).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().ino(), first.ino());
        write(&path, "https://127.0.0.1:6444", &pki.ca_pem, &pki.token).unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().contains("6444"));
    }

    #[test]
    fn kube_reads_the_kubeconfig() {
        // Fails when the text is not YAML, or the authority is not base64 of its PEM.
        let directory = tempfile::tempdir().unwrap();
        let pki = Pki::open(directory.path(), None).unwrap();
        let text = text(
            "https://127.0.0.1:6443",
            &pki.ca_pem,
            "system:node:b",
            "b.x",
        );
        let config = kube::config::Kubeconfig::from_yaml(&text).unwrap();
        assert_eq!(config.current_context.as_deref(), Some(NAME));
        let cluster = config.clusters[0].cluster.as_ref().unwrap();
        assert_eq!(cluster.server.as_deref(), Some("https://127.0.0.1:6443"));
        let ca: ByteString = serde_json::from_value(serde_json::json!(
            cluster.certificate_authority_data.as_ref().unwrap()
        ))
        .unwrap();
        assert_eq!(ca.0, pki.ca_pem.as_bytes());
        let user = &config.auth_infos[0];
        assert_eq!(user.name, "system:node:b");
        assert!(user.auth_info.as_ref().unwrap().token.is_some());
    }
}
