//! Whether a request for a node's certificate is granted, and the certificate.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use rcgen::{
    CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose, PublicKeyData, SanType,
};
use trellis_api::NodeName;

use crate::certificate::{Lifetime, set_life};
use crate::{Authority, SIGNER, USAGES};

/// Clocks that are behind that of the signer accept a new certificate at once. Of a short life it is a part.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(5 * 60);
const CLOCK_SKEW_PART: u32 = 10;

/// The shortest life that can be asked for: certificates know whole seconds.
const LIFE_MIN: Duration = Duration::from_secs(1);

/// What a request says, and who made it.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The user, as the API has found it out.
    pub user: &'a str,
    /// The signer that it names.
    pub signer: &'a str,
    /// What the certificate shall be used for.
    pub usages: &'a [String],
    /// The request itself, as PEM.
    pub request: &'a str,
    /// How long the certificate shall last, if that is asked for.
    pub life: Option<Duration>,
}

/// The public key of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyId(Vec<u8>);

impl KeyId {
    /// The key of a request as PEM; none if it is no request, or does not prove that its maker has the key.
    pub fn of(request: &str) -> Option<KeyId> {
        let read = CertificateSigningRequestParams::from_pem(request).ok()?;
        Some(KeyId(read.public_key.der_bytes().to_vec()))
    }
}

/// What the signer knows of the home.
#[derive(Clone, Copy, Debug)]
pub struct Home<'a> {
    /// Who signs.
    pub authority: &'a Authority,
    /// The nodes that there are. One that was removed gets nothing.
    pub nodes: &'a BTreeSet<NodeName>,
    /// The keys for which certificates were signed, and whose they are.
    pub keys: &'a BTreeMap<KeyId, NodeName>,
    /// How long a certificate lasts.
    pub life: Duration,
}

/// Why there is no certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is for another signer.
    #[error("the request is for the signer {found:?}, and this one is {SIGNER:?}")]
    OtherSigner {
        /// The one that it names.
        found: String,
    },
    /// Who asks is no node.
    #[error("user {user:?} is not a node; a node asks as system:node:NAME")]
    NotANode {
        /// Who asks.
        user: String,
    },
    /// The node was removed, or never joined.
    #[error("there is no node {node}; a node that was removed gets no certificate")]
    UnknownNode {
        /// Which one.
        node: NodeName,
    },
    /// It cannot be read, or its signature is not by its key.
    #[error("the request cannot be read, or is not signed with its own key")]
    Unreadable,
    /// It names another node than the one that asks, or none, or more than that.
    #[error("node {user} asks for a certificate that does not name exactly that node")]
    OtherName {
        /// Who asks.
        user: NodeName,
    },
    /// It wants to sign others.
    #[error("the request is for an authority, and a node signs nobody")]
    WantsAuthority,
    /// It wants to be used for something else.
    #[error("the request asks for the usage {usage:?}; a node's certificate is for {}", USAGES.join(", "))]
    OtherUsage {
        /// What for.
        usage: String,
    },
    /// The key is that of another node, or of the authority.
    #[error("the key of the request is that of {owner}; every node makes its own")]
    KeyTaken {
        /// Whose it is.
        owner: String,
    },
    /// The authority's time is over.
    #[error("the authority of this home has ended; make another one (docs/operating.md)")]
    AuthorityEnded,
    /// The certificate could not be made.
    #[error("the certificate could not be made")]
    Failed,
}

impl Refused {
    /// One word for it, as conditions have it.
    pub const fn code(&self) -> &'static str {
        match self {
            Refused::OtherSigner { .. } => "OtherSigner",
            Refused::NotANode { .. } => "NotANode",
            Refused::UnknownNode { .. } => "UnknownNode",
            Refused::Unreadable => "Unreadable",
            Refused::OtherName { .. } => "OtherName",
            Refused::WantsAuthority => "WantsAuthority",
            Refused::OtherUsage { .. } => "OtherUsage",
            Refused::KeyTaken { .. } => "KeyTaken",
            Refused::AuthorityEnded => "AuthorityEnded",
            Refused::Failed => "SigningFailed",
        }
    }
}

/// The certificate, as PEM, or why there is none.
pub fn sign(asked: &Asked<'_>, home: &Home<'_>, now: SystemTime) -> Result<String, Refused> {
    if asked.signer != SIGNER {
        let found = asked.signer.to_owned();
        return Err(Refused::OtherSigner { found });
    }
    let node = NodeName::of_user(asked.user).ok_or_else(|| Refused::NotANode {
        user: asked.user.to_owned(),
    })?;
    if !home.nodes.contains(&node) {
        return Err(Refused::UnknownNode { node });
    }
    let read = CertificateSigningRequestParams::from_pem(asked.request)
        .map_err(|_| Refused::Unreadable)?;
    check(asked, home, &node, &read)?;
    let life = life(asked, home, now)?;
    certificate(&node, &read, home.authority, life).map_err(|_| Refused::Failed)
}

/// Whether the request asks for what that node may have, and no more.
fn check(
    asked: &Asked<'_>,
    home: &Home<'_>,
    node: &NodeName,
    read: &CertificateSigningRequestParams,
) -> Result<(), Refused> {
    let name = match read.params.subject_alt_names.as_slice() {
        [SanType::URI(uri)] => NodeName::only_of([uri.as_str()].into_iter()),
        _ => None,
    };
    if name.as_ref() != Some(node) {
        let user = node.clone();
        return Err(Refused::OtherName { user });
    }
    if matches!(read.params.is_ca, IsCa::Ca(_)) {
        return Err(Refused::WantsAuthority);
    }
    let is_other = |usage: &&String| !USAGES.contains(&usage.as_str());
    if let Some(usage) = asked.usages.iter().find(is_other) {
        let usage = usage.clone();
        return Err(Refused::OtherUsage { usage });
    }
    let key = KeyId(read.public_key.der_bytes().to_vec());
    let taken = |owner: String| Err(Refused::KeyTaken { owner });
    if key.0 == home.authority.public_key() {
        return taken("the authority".to_owned());
    }
    match home.keys.get(&key) {
        Some(owner) if owner != node => taken(format!("node {owner}")),
        _ => Ok(()),
    }
}

/// From when to when the certificate counts: never longer than the authority, and never longer than is allowed.
fn life(asked: &Asked<'_>, home: &Home<'_>, now: SystemTime) -> Result<Lifetime, Refused> {
    let authority = home.authority.life();
    if now >= authority.until || now < authority.from {
        return Err(Refused::AuthorityEnded);
    }
    let wanted = asked.life.unwrap_or(home.life).min(home.life).max(LIFE_MIN);
    let skew = (wanted / CLOCK_SKEW_PART).min(CLOCK_SKEW_MAX);
    Ok(Lifetime {
        from: now - skew,
        until: (now + wanted).min(authority.until),
    })
}

fn certificate(
    node: &NodeName,
    read: &CertificateSigningRequestParams,
    authority: &Authority,
    life: Lifetime,
) -> Result<String, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, node.as_str());
    params.subject_alt_names = vec![SanType::URI(node.uri().try_into()?)];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    params.use_authority_key_identifier_extension = true;
    set_life(&mut params, life);
    let signed = params.signed_by(&read.public_key, &authority.issuer()?)?;
    Ok(signed.pem())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::UNIX_EPOCH;

    use rcgen::{BasicConstraints, KeyPair};

    use super::*;
    use crate::{AuthorityFault, CertificateFault, NodeKey, chains_to, trusted};

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    struct Fixture {
        authority: Authority,
        nodes: BTreeSet<NodeName>,
        keys: BTreeMap<KeyId, NodeName>,
        now: SystemTime,
    }

    impl Fixture {
        fn new() -> Fixture {
            // A whole second, as certificates have it.
            let now = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
            Fixture {
                authority: Authority::make(now).unwrap(),
                nodes: [name("a"), name("b")].into(),
                keys: BTreeMap::new(),
                now,
            }
        }

        fn sign(&self, asked: &Asked<'_>) -> Result<String, Refused> {
            let home = Home {
                authority: &self.authority,
                nodes: &self.nodes,
                keys: &self.keys,
                life: 90 * DAY,
            };
            sign(asked, &home, self.now)
        }
    }

    fn name(node: &str) -> NodeName {
        node.parse().unwrap()
    }

    fn asked<'a>(user: &'a str, request: &'a str) -> Asked<'a> {
        Asked {
            user,
            signer: SIGNER,
            usages: &[],
            request,
            life: None,
        }
    }

    /// A request with these parameters.
    fn request(change: impl FnOnce(&mut CertificateParams)) -> String {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        let uri = name("a").uri();
        params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        params.serialize_request(&key).unwrap().pem().unwrap()
    }

    #[test]
    fn a_node_gets_a_certificate_for_itself() {
        // Fails if a node gets none, for another key, for another time, or one that does not lead to the authority.
        let home = Fixture::new();
        let key = NodeKey::make(&name("a")).unwrap();
        let request = key.request().unwrap();
        let usages = USAGES.map(str::to_owned);
        let signed = home.sign(&Asked {
            usages: &usages,
            ..asked("system:node:a", &request)
        });
        let certificate = signed.unwrap();
        let text = key.with(&certificate).unwrap();
        assert!(text.contains("PRIVATE KEY") && text.ends_with(&certificate));
        let life = Lifetime::of(&text).unwrap();
        assert_eq!(life.until, home.now + 90 * DAY);
        assert_eq!(life.from, home.now - CLOCK_SKEW_MAX);
        let third =
            (life.until.duration_since(life.renew_at()).unwrap()).as_secs() / (24 * 60 * 60);
        assert_eq!(third, 30);
        assert!(chains_to(&text, home.authority.certificate()));
        let other = Authority::make(home.now).unwrap();
        assert!(!chains_to(&text, other.certificate()));
        let stranger = NodeKey::make(&name("a")).unwrap();
        assert_eq!(stranger.with(&certificate), Err(CertificateFault::OtherKey));
        assert_eq!(key.with("x"), Err(CertificateFault::NoCertificate));
    }

    #[test]
    fn nobody_gets_the_certificate_of_another() {
        // Fails if a user, a node or a person with the wrong name, signer or usage gets a node's certificate.
        let home = Fixture::new();
        let request = NodeKey::make(&name("a")).unwrap().request().unwrap();
        for user in [
            "system:admin",
            "a",
            "system:node:",
            "system:serviceaccount:x:a",
        ] {
            let refused = Refused::NotANode {
                user: user.to_owned(),
            };
            assert_eq!(home.sign(&asked(user, &request)), Err(refused));
        }
        let refused = Refused::OtherName { user: name("b") };
        assert_eq!(home.sign(&asked("system:node:b", &request)), Err(refused));
        let refused = Refused::UnknownNode { node: name("c") };
        assert_eq!(home.sign(&asked("system:node:c", &request)), Err(refused));
        let found = "kubernetes.io/kubelet-serving".to_owned();
        let other = Asked {
            signer: &found,
            ..asked("system:node:a", &request)
        };
        let refused = Refused::OtherSigner {
            found: found.clone(),
        };
        assert_eq!(home.sign(&other), Err(refused));
        let usages = ["client auth".to_owned(), "cert sign".to_owned()];
        let other = Asked {
            usages: &usages,
            ..asked("system:node:a", &request)
        };
        let refused = Refused::OtherUsage {
            usage: "cert sign".to_owned(),
        };
        assert_eq!(home.sign(&other), Err(refused));
    }

    #[test]
    fn a_request_that_names_more_or_less_than_its_node_is_refused() {
        // Fails if a second name, a host name, an authority or a broken request comes through.
        let home = Fixture::new();
        let uri = |node: &str| SanType::URI(name(node).uri().try_into().unwrap());
        let other = Err(Refused::OtherName { user: name("a") });
        for names in [
            vec![],
            vec![uri("a"), uri("b")],
            vec![uri("a"), SanType::DnsName("a".try_into().unwrap())],
            vec![SanType::DnsName("a".try_into().unwrap())],
        ] {
            let request = request(|params| params.subject_alt_names = names);
            assert_eq!(home.sign(&asked("system:node:a", &request)), other);
        }
        let authority = request(|params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained));
        let refused = Err(Refused::WantsAuthority);
        assert_eq!(home.sign(&asked("system:node:a", &authority)), refused);
        // Another signature than that of its key: two requests, mixed.
        let sound = request(|_| {});
        let mut broken = sound.clone();
        let at = broken.len() - 60;
        let flipped = if &broken[at..=at] == "A" { "B" } else { "A" };
        broken.replace_range(at..=at, flipped);
        for text in ["", "x", &broken] {
            let refused = Err(Refused::Unreadable);
            assert_eq!(home.sign(&asked("system:node:a", text)), refused, "{text}");
        }
        assert!(home.sign(&asked("system:node:a", &sound)).is_ok());
    }

    #[test]
    fn a_key_belongs_to_one_node() {
        // Fails if two nodes, or a node and the authority, can have the same key; or if a node cannot ask again.
        let mut home = Fixture::new();
        let request = NodeKey::make(&name("a")).unwrap().request().unwrap();
        let id = KeyId::of(&request).unwrap();
        home.keys.insert(id.clone(), name("a"));
        assert!(home.sign(&asked("system:node:a", &request)).is_ok());
        home.keys.insert(id, name("b"));
        let refused = Refused::KeyTaken {
            owner: "node b".to_owned(),
        };
        assert_eq!(home.sign(&asked("system:node:a", &request)), Err(refused));
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = vec![SanType::URI(name("a").uri().try_into().unwrap())];
        let key = KeyPair::from_pem(&home.authority.text()).unwrap();
        let request = params.serialize_request(&key).unwrap().pem().unwrap();
        let refused = Refused::KeyTaken {
            owner: "the authority".to_owned(),
        };
        assert_eq!(home.sign(&asked("system:node:a", &request)), Err(refused));
    }

    #[test]
    fn a_certificate_never_outlives_its_authority_or_what_is_allowed() {
        // Fails if a certificate lasts longer than somebody is there to vouch for it, or an ended authority signs.
        let mut home = Fixture::new();
        let request = NodeKey::make(&name("a")).unwrap().request().unwrap();
        let signed = |home: &Fixture, life: Option<Duration>| {
            home.sign(&Asked {
                life,
                ..asked("system:node:a", &request)
            })
        };
        let until = |text: &str| Lifetime::of(text).unwrap().until;
        let short = signed(&home, Some(Duration::from_secs(10))).unwrap();
        assert_eq!(until(&short), home.now + Duration::from_secs(10));
        assert!(Lifetime::of(&short).unwrap().renew_at() > home.now);
        let long = signed(&home, Some(365 * DAY)).unwrap();
        assert_eq!(until(&long), home.now + 90 * DAY);
        home.authority = Authority::make_for(home.now, DAY).unwrap();
        assert_eq!(until(&signed(&home, None).unwrap()), home.now + DAY);
        home.now += DAY;
        assert_eq!(signed(&home, None), Err(Refused::AuthorityEnded));
        home.now -= 3 * DAY;
        assert_eq!(signed(&home, None), Err(Refused::AuthorityEnded));
    }

    #[test]
    fn an_authority_is_read_as_it_was_written_and_those_before_count_until_they_end() {
        // Fails if a restart changes the authority, if a broken file passes, or if an ended one is still believed.
        let home = Fixture::new();
        let read = Authority::read(&home.authority.text()).unwrap();
        assert_eq!(read.certificate(), home.authority.certificate());
        assert_eq!(read.text(), home.authority.text());
        let other = Authority::make_for(home.now, DAY).unwrap();
        let own_key = home
            .authority
            .text()
            .replace(home.authority.certificate(), "");
        let fault = |text: &str| Authority::read(text).unwrap_err();
        assert_eq!(fault(""), AuthorityFault::NoKey);
        assert_eq!(fault(&own_key), AuthorityFault::NoCertificate);
        let mixed = format!("{own_key}{}", other.certificate());
        assert_eq!(fault(&mixed), AuthorityFault::OtherKey);
        let earlier = format!("{}{}", other.text(), home.authority.certificate());
        let both = trusted(&home.authority, &earlier, home.now);
        let expected = format!("{}{}", home.authority.certificate(), other.certificate());
        assert_eq!(both, expected);
        let later = trusted(&home.authority, &earlier, home.now + DAY);
        assert_eq!(later, home.authority.certificate());
    }
}
