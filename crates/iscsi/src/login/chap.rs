//! CHAP, in one direction or both.
//!
//! The algorithms are MD5 (5), which every initiator has, and SHA-256 (7), which is preferred when it is offered.

use md5::Md5;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::text::{from_binary, to_hex};
use crate::error::Error;
use crate::limits::CHALLENGE_BYTES_MAX;

const SECRET_BYTES_MIN: usize = 12;
const SECRET_BYTES_MAX: usize = 255;
const CHALLENGE_BYTES: usize = 32;

/// A name and what proves it.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    user: String,
    secret: Vec<u8>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

/// What an initiator has to prove, and what we prove to it if it asks.
#[derive(Clone, Debug)]
pub struct Chap {
    initiator: Credentials,
    target: Option<Credentials>,
}

impl Chap {
    /// The initiator proves `user` with `secret`.
    ///
    /// # Errors
    /// The secret is too short or too long.
    pub fn one_way(user: &str, secret: &str) -> Result<Self, Error> {
        Ok(Chap {
            initiator: credentials(user, secret)?,
            target: None,
        })
    }

    /// In addition, we prove `user` with `secret` to an initiator that asks.
    ///
    /// # Errors
    /// The secret is too short or too long, or is the initiator's: it could then be reflected.
    pub fn mutual(mut self, user: &str, secret: &str) -> Result<Self, Error> {
        let ours = credentials(user, secret)?;
        if ours.secret == self.initiator.secret {
            return Err(Error::Secret);
        }
        self.target = Some(ours);
        Ok(self)
    }
}

fn credentials(user: &str, secret: &str) -> Result<Credentials, Error> {
    if secret.len() < SECRET_BYTES_MIN || secret.len() > SECRET_BYTES_MAX {
        return Err(Error::Secret);
    }
    Ok(Credentials {
        user: user.to_owned(),
        secret: secret.as_bytes().to_vec(),
    })
}

/// Proof was not given, or was asked of us and we have none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Denied;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Algorithm {
    Md5,
    Sha256,
}

impl Algorithm {
    fn choose(list: &str) -> Option<Algorithm> {
        let offered = |name: &str| list.split(',').any(|each| each == name);
        if offered("7") {
            Some(Algorithm::Sha256)
        } else if offered("5") {
            Some(Algorithm::Md5)
        } else {
            None
        }
    }

    fn name(self) -> &'static str {
        match self {
            Algorithm::Md5 => "5",
            Algorithm::Sha256 => "7",
        }
    }

    fn respond(self, id: u8, secret: &[u8], challenge: &[u8]) -> Vec<u8> {
        match self {
            Algorithm::Md5 => Md5::new()
                .chain_update([id])
                .chain_update(secret)
                .chain_update(challenge)
                .finalize()
                .to_vec(),
            Algorithm::Sha256 => Sha256::new()
                .chain_update([id])
                .chain_update(secret)
                .chain_update(challenge)
                .finalize()
                .to_vec(),
        }
    }
}

/// The target's side of one exchange: a challenge, then the check of the response.
#[derive(Debug)]
pub struct Exchange {
    algorithm: Algorithm,
    id: u8,
    challenge: [u8; CHALLENGE_BYTES],
}

/// The pairs of an answer.
pub type Pairs = Vec<(&'static str, String)>;

impl Exchange {
    /// Begin, with the algorithms that the initiator offers in `CHAP_A`. Also returns what to send.
    ///
    /// # Errors
    /// There is no algorithm in common, or the system gives no randomness.
    pub fn begin(algorithms: &str) -> Result<(Exchange, Pairs), Denied> {
        let algorithm = Algorithm::choose(algorithms).ok_or(Denied)?;
        let mut challenge = [0; CHALLENGE_BYTES];
        let mut id = [0];
        getrandom::fill(&mut challenge).map_err(|_| Denied)?;
        getrandom::fill(&mut id).map_err(|_| Denied)?;
        let exchange = Exchange {
            algorithm,
            id: id[0],
            challenge,
        };
        let pairs = vec![
            ("CHAP_A", algorithm.name().to_owned()),
            ("CHAP_I", exchange.id.to_string()),
            ("CHAP_C", to_hex(&challenge)),
        ];
        Ok((exchange, pairs))
    }

    /// Check the initiator's response. Returns what to send, which is our own proof if it was requested.
    ///
    /// # Errors
    /// The name or the response is wrong, our challenge was sent back to us, or our proof is asked for
    /// and we have none.
    pub fn finish(
        self,
        chap: &Chap,
        value: impl Fn(&str) -> Option<String>,
    ) -> Result<Pairs, Denied> {
        let user = value("CHAP_N").ok_or(Denied)?;
        let response = from_binary(&value("CHAP_R").ok_or(Denied)?, 64).ok_or(Denied)?;
        let expected = self
            .algorithm
            .respond(self.id, &chap.initiator.secret, &self.challenge);
        let proven = bool::from(expected.as_slice().ct_eq(response.as_slice()));
        if !proven || user != chap.initiator.user {
            return Err(Denied);
        }
        let (Some(id), Some(challenge)) = (value("CHAP_I"), value("CHAP_C")) else {
            return Ok(Vec::new());
        };
        let ours = chap.target.as_ref().ok_or(Denied)?;
        let id: u8 = id.parse().map_err(|_| Denied)?;
        let challenge = from_binary(&challenge, CHALLENGE_BYTES_MAX).ok_or(Denied)?;
        if challenge == self.challenge {
            return Err(Denied);
        }
        let proof = self.algorithm.respond(id, &ours.secret, &challenge);
        Ok(vec![
            ("CHAP_N", ours.user.clone()),
            ("CHAP_R", to_hex(&proof)),
        ])
    }

    /// What an initiator with this secret answers: the other side of [`Exchange::finish`].
    #[cfg(test)]
    pub fn answer(&self, secret: &str) -> String {
        to_hex(
            &self
                .algorithm
                .respond(self.id, secret.as_bytes(), &self.challenge),
        )
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn value<'a>(pairs: &'a [(&'a str, String)]) -> impl Fn(&str) -> Option<String> + 'a {
        move |key| {
            pairs
                .iter()
                .find(|(k, _)| *k == key)
                .map(|(_, v)| v.clone())
        }
    }

    #[test]
    fn a_response_is_taken_only_from_who_knows_the_secret() {
        // Fails if a wrong secret, a wrong name or no response at all is let through.
        let chap = Chap::one_way("alice", "correct horse").unwrap();
        for (user, secret, good) in [
            ("alice", "correct horse", true),
            ("alice", "wrong password", false),
            ("bob", "correct horse", false),
        ] {
            let (exchange, _) = Exchange::begin("5").unwrap();
            let pairs = [
                ("CHAP_N", user.to_owned()),
                ("CHAP_R", exchange.answer(secret)),
            ];
            assert_eq!(
                exchange.finish(&chap, value(&pairs)).is_ok(),
                good,
                "{user}"
            );
        }
        let (exchange, _) = Exchange::begin("7,5").unwrap();
        assert_eq!(exchange.algorithm, Algorithm::Sha256);
        assert_eq!(exchange.finish(&chap, value(&[])), Err(Denied));
        assert_eq!(Exchange::begin("6").map(|_| ()), Err(Denied));
    }

    #[test]
    fn our_own_challenge_is_not_answered() {
        // Fails if an initiator can have us compute the response to our own challenge.
        let chap = Chap::one_way("alice", "correct horse")
            .unwrap()
            .mutual("target", "battery staple")
            .unwrap();
        let (exchange, _) = Exchange::begin("5").unwrap();
        let pairs = [
            ("CHAP_N", "alice".to_owned()),
            ("CHAP_R", exchange.answer("correct horse")),
            ("CHAP_I", "7".to_owned()),
            ("CHAP_C", to_hex(&exchange.challenge)),
        ];
        assert_eq!(exchange.finish(&chap, value(&pairs)), Err(Denied));
        assert!(
            Chap::one_way("a", "correct horse")
                .unwrap()
                .mutual("b", "correct horse")
                .is_err()
        );
        assert!(Chap::one_way("a", "short").is_err());
    }

    #[test]
    fn md5_responses_are_those_of_the_standard() {
        // Fails if id, secret and challenge are hashed in another order. MD5("abc") is the RFC 1321 vector.
        let digest = Algorithm::Md5.respond(b'a', b"b", b"c");
        assert_eq!(to_hex(&digest), "0x900150983cd24fb0d6963f7d28e17f72");
    }
}
