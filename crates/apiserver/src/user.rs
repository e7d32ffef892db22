//! Who asks.

/// The name and the groups of the one who may do everything: whoever has the token, and this process itself.
const ADMINISTRATOR: &str = "system:admin";
const ADMINISTRATORS: &str = "system:masters";
/// The group of everybody who has shown who they are.
const AUTHENTICATED: &str = "system:authenticated";

/// Somebody who asks, in Kubernetes' terms. It travels with a request, among its extensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The name.
    pub name: String,
    /// The groups.
    pub groups: Vec<String>,
}

impl User {
    /// Somebody in these groups, who has shown it.
    pub fn new(name: impl Into<String>, groups: &[&str]) -> User {
        let groups = groups.iter().chain(&[AUTHENTICATED]);
        User {
            name: name.into(),
            groups: groups.map(|group| (*group).to_owned()).collect(),
        }
    }
}

/// The administrator.
impl Default for User {
    fn default() -> User {
        User::new(ADMINISTRATOR, &[ADMINISTRATORS])
    }
}
