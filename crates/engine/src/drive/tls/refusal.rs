//! Why one node refuses another, as types that become sentences.
//!
//! The side that refuses knows the reason exactly. The other side gets it as a TLS alert, which is a number. The two
//! functions here that turn reasons into alerts and back belong together.

use std::sync::Arc;

use rustls::{AlertDescription, CertificateError, OtherError};

use super::NodeName;
use crate::drive::link::LinkError;
use crate::wire::{Objection, VERSION, WireError};

/// Who has refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// This process refused the peer.
    Here,
    /// The peer refused this process.
    There,
}

/// Why a connection between nodes was refused. The certificate is that of the side that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// There was none.
    #[error("no certificate was shown; only nodes of this home may connect")]
    NoCertificate,
    /// Its chain does not lead to the authority of the home.
    #[error("the certificate was not signed by the authority of this home")]
    OtherHome,
    /// It is sound, and belongs to a node that is not expected: not the one at that address, or not one that may serve
    /// the volume.
    #[error("the certificate belongs to node {found}, which is not expected here")]
    OtherNode {
        /// The node that it names.
        found: NodeName,
    },
    /// Its time is over.
    #[error("the certificate has expired; renew it")]
    Expired,
    /// Its time has not come.
    #[error("the certificate is not valid yet; compare the clocks of both nodes")]
    NotYetValid,
    /// It names no node, or more than one.
    #[error("the certificate does not name one node as trellis://node/NAME")]
    NoName,
    /// It cannot be read, may not be used for this, or does not belong to the key.
    #[error("the certificate is damaged, or is not one for a node")]
    Unusable,
    /// The two sides speak different versions.
    #[error(
        "the other side speaks version {theirs} of the protocol, and version {ours} is spoken here; run the same \
         release on both nodes"
    )]
    Wire {
        /// The version of the other side.
        theirs: u16,
        /// The version that is spoken here.
        ours: u16,
    },
    /// One side needs what the other does not know.
    #[error("the release on one of the nodes is too old: features {missing:#x} are missing")]
    Features {
        /// What is missing, as bits.
        missing: u32,
    },
    /// The other side knows no TLS that is secure enough.
    #[error("the two sides know no common TLS; version 1.3 is needed")]
    NoCommonTls,
    /// Something that is neither TLS nor the protocol of copies.
    #[error("what was sent is not the protocol of copies")]
    Nonsense,
    /// The handshake took too long.
    #[error("the handshake was not finished in time")]
    Late,
    /// The peer went away before the handshake was finished.
    #[error("the connection ended before the handshake did")]
    Left,
    /// This side has no certificate yet.
    #[error("this node has no certificate of its own yet")]
    Unready,
    /// There are too many connections.
    #[error("there are too many connections already")]
    Crowded,
    /// The other side gave a reason that means nothing here.
    #[error("the other side refused the connection for a reason that is unknown here")]
    Unknown,
}

impl Refusal {
    /// What rustls sends an alert for. [`Refusal::of_alert`] is the way back.
    pub(super) fn certificate_error(&self) -> CertificateError {
        match self {
            Refusal::OtherHome => CertificateError::UnknownIssuer,
            Refusal::OtherNode { .. } => CertificateError::ApplicationVerificationFailure,
            Refusal::Expired => CertificateError::Expired,
            // There is no alert for this one. The general one is free: nothing else here leads to it.
            Refusal::NotYetValid => CertificateError::Other(OtherError(Arc::new(self.clone()))),
            _ => CertificateError::BadEncoding,
        }
    }

    /// Why the peer has refused the certificate of the node `own`.
    fn of_alert(alert: AlertDescription, own: &NodeName) -> Refusal {
        match alert {
            AlertDescription::CertificateRequired => Refusal::NoCertificate,
            AlertDescription::UnknownCA => Refusal::OtherHome,
            AlertDescription::AccessDenied => Refusal::OtherNode { found: own.clone() },
            AlertDescription::CertificateExpired => Refusal::Expired,
            AlertDescription::CertificateUnknown => Refusal::NotYetValid,
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::DecryptError => Refusal::Unusable,
            AlertDescription::ProtocolVersion
            | AlertDescription::HandshakeFailure
            | AlertDescription::InsufficientSecurity => Refusal::NoCommonTls,
            AlertDescription::DecodeError | AlertDescription::UnexpectedMessage => {
                Refusal::Nonsense
            }
            _ => Refusal::Unknown,
        }
    }

    /// Why the peer has hung up.
    fn of_objection(objection: Objection) -> Refusal {
        match objection {
            Objection::Version { shown } => Refusal::Wire {
                theirs: VERSION,
                ours: shown,
            },
            Objection::Features { missing } => Refusal::Features { missing },
            Objection::Crowded => Refusal::Crowded,
            Objection::Unknown => Refusal::Unknown,
        }
    }

    /// The reason behind an error, if it is one of these: who refused, and why. `own` is the node of this process, and
    /// `found` is what was wrong with the peer's certificate.
    pub(in crate::drive) fn behind(
        error: &LinkError,
        own: Option<&NodeName>,
        found: Option<Refusal>,
    ) -> Option<(Side, Refusal)> {
        let here = |refusal| Some((Side::Here, refusal));
        match error {
            LinkError::Tls(rustls::Error::AlertReceived(alert)) => {
                let refusal = own.map_or(Refusal::Unknown, |own| Refusal::of_alert(*alert, own));
                Some((Side::There, refusal))
            }
            LinkError::Tls(error) => here(match (found, error) {
                (Some(refusal), _) => refusal,
                (None, rustls::Error::NoCertificatesPresented) => Refusal::NoCertificate,
                (None, rustls::Error::PeerIncompatible(_)) => Refusal::NoCommonTls,
                (None, rustls::Error::InvalidCertificate(_)) => Refusal::Unusable,
                (None, _) => Refusal::Nonsense,
            }),
            LinkError::Wire(WireError::Version { theirs, ours }) => here(Refusal::Wire {
                theirs: *theirs,
                ours: *ours,
            }),
            LinkError::Lacks { missing } => here(Refusal::Features { missing: *missing }),
            LinkError::Wire(_) => here(Refusal::Nonsense),
            LinkError::Objected(objection) => {
                Some((Side::There, Refusal::of_objection(*objection)))
            }
            LinkError::Closed | LinkError::Io(_) | LinkError::Choked => None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_that_travels_as_an_alert_arrives_as_the_same_reason() {
        // Fails if the two sides of a refused connection would show different reasons.
        let own: NodeName = "a".parse().unwrap();
        for refusal in [
            Refusal::OtherHome,
            Refusal::OtherNode { found: own.clone() },
            Refusal::Expired,
            Refusal::NotYetValid,
        ] {
            let alert = AlertDescription::from(refusal.certificate_error());
            assert_eq!(Refusal::of_alert(alert, &own), refusal);
        }
        for refusal in [Refusal::NoName, Refusal::Unusable] {
            let alert = AlertDescription::from(refusal.certificate_error());
            assert_eq!(Refusal::of_alert(alert, &own), Refusal::Unusable);
        }
    }
}
