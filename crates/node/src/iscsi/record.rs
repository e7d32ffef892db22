//! open-iscsi's record of a target: lines of the form `name = value` between two comments.

use super::{Credentials, Login, SETTING_BYTES_MAX};

/// What a record ends with.
const END: &str = "# END RECORD";
/// What we offer for CHAP, the best first.
const CHAP_ALGORITHMS: &str = "SHA256,MD5";

/// A name and a value.
pub(super) type Setting = (&'static str, String);

/// What a login changes in a record; `None` if a user or secret cannot stand in one.
pub(super) fn settings(login: &Login) -> Option<Vec<Setting>> {
    let mut settings = Vec::new();
    let mut add = |name, value: &str| settings.push((name, value.to_owned()));
    let everybody = login.ours.iter().chain(&login.theirs);
    if !everybody.into_iter().all(is_plain) || (login.ours.is_none() && login.theirs.is_some()) {
        return None;
    }
    if let Some(ours) = &login.ours {
        add("node.session.auth.authmethod", "CHAP");
        add("node.session.auth.chap_algs", CHAP_ALGORITHMS);
        add("node.session.auth.username", &ours.user);
        add("node.session.auth.password", &ours.secret);
    }
    if let Some(theirs) = &login.theirs {
        add("node.session.auth.username_in", &theirs.user);
        add("node.session.auth.password_in", &theirs.secret);
    }
    if login.digests {
        add("node.conn[0].iscsi.HeaderDigest", "CRC32C");
        add("node.conn[0].iscsi.DataDigest", "CRC32C");
    }
    Some(settings)
}

fn is_plain(credentials: &Credentials) -> bool {
    [&credentials.user, &credentials.secret]
        .into_iter()
        .all(|text| {
            let visible = |c: char| !c.is_whitespace() && !c.is_control();
            (1..=SETTING_BYTES_MAX).contains(&text.len()) && text.chars().all(visible)
        })
}

/// The record with these settings instead of those that it has.
pub(super) fn with(record: &str, settings: &[Setting]) -> String {
    let is_replaced = |line: &str| {
        let name = line.split_once('=').map(|(name, _)| name.trim());
        settings.iter().any(|(other, _)| name == Some(*other))
    };
    let mut text = String::new();
    for line in record.lines().filter(|line| *line != END) {
        if !is_replaced(line) {
            text.push_str(line);
            text.push('\n');
        }
    }
    for (name, value) in settings {
        text.push_str(&format!("{name} = {value}\n"));
    }
    text.push_str(END);
    text.push('\n');
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn somebody(user: &str, secret: &str) -> Option<Credentials> {
        Some(Credentials {
            user: user.to_owned(),
            secret: secret.to_owned(),
        })
    }

    #[test]
    fn settings_replace_those_of_the_record_and_nothing_else() {
        // Fails if an old value stays beside the new one, another line is lost, or the end is not at the end.
        let record = "# BEGIN RECORD 2.1.8\nnode.name = iqn.a\nnode.session.auth.authmethod = None\n\
                      node.conn[0].iscsi.HeaderDigest = None\n# END RECORD\n";
        let login = Login {
            ours: somebody("a", "one=secret"),
            theirs: None,
            digests: false,
        };
        let text = with(record, &settings(&login).unwrap());
        assert_eq!(
            text,
            "# BEGIN RECORD 2.1.8\nnode.name = iqn.a\nnode.conn[0].iscsi.HeaderDigest = None\n\
             node.session.auth.authmethod = CHAP\nnode.session.auth.chap_algs = SHA256,MD5\n\
             node.session.auth.username = a\nnode.session.auth.password = one=secret\n# END RECORD\n"
        );
        assert_eq!(with(&text, &settings(&login).unwrap()), text);
    }

    #[test]
    fn no_secret_can_add_a_line() {
        // Fails if a user or secret with a line's end, or with blanks that open-iscsi would cut off, is taken.
        let long = "a".repeat(SETTING_BYTES_MAX + 1);
        for bad in ["", " secret", "a\nnode.startup = automatic", "a\0b", &long] {
            for ours in [somebody(bad, "secret"), somebody("user", bad)] {
                let login = Login {
                    ours,
                    ..Login::default()
                };
                assert_eq!(settings(&login), None, "{bad:?}");
            }
        }
    }
}
