//! Checks the certificate of a peer: first its chain, then its name.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use webpki::{EndEntityCert, KeyUsage};

use super::credentials::Keys;
use super::{NodeName, PROVIDER, Refusal};

/// Whose certificate is accepted.
#[derive(Debug)]
pub(super) enum Expected {
    /// The node that was dialled.
    Only(NodeName),
    /// Any of the nodes that may serve the volume.
    OneOf(Arc<BTreeSet<NodeName>>),
}

/// Checks the peer of one connection, and remembers what it found.
#[derive(Debug)]
pub(super) struct Verifier {
    keys: Arc<Keys>,
    expected: Expected,
    found: OnceLock<Result<NodeName, Refusal>>,
}

impl Verifier {
    pub(super) fn new(keys: Arc<Keys>, expected: Expected) -> Verifier {
        Verifier {
            keys,
            expected,
            found: OnceLock::new(),
        }
    }

    /// The node at the other end, once it has been checked.
    pub(super) fn peer(&self) -> Option<NodeName> {
        self.found.get()?.clone().ok()
    }

    /// What is wrong with the peer's certificate.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        self.found.get()?.clone().err()
    }

    fn check(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        usage: KeyUsage,
    ) -> Result<(), Error> {
        let found = self.judge(certificate, intermediates, now, usage);
        let error = found.as_ref().err().map(Refusal::certificate_error);
        // A connection has one peer, which is checked once.
        let _ = self.found.set(found);
        error.map_or(Ok(()), |error| Err(Error::InvalidCertificate(error)))
    }

    fn judge(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
        usage: KeyUsage,
    ) -> Result<NodeName, Refusal> {
        let certificate = EndEntityCert::try_from(certificate).map_err(|_| Refusal::Unusable)?;
        certificate
            .verify_for_usage(
                PROVIDER.signature_verification_algorithms.all,
                self.keys.anchors(),
                intermediates,
                now,
                usage,
                None,
                None,
            )
            .map_err(of_chain)?;
        let found = NodeName::only_of(certificate.valid_uri_names()).ok_or(Refusal::NoName)?;
        let is_expected = match &self.expected {
            Expected::Only(node) => *node == found,
            Expected::OneOf(nodes) => nodes.contains(&found),
        };
        if is_expected {
            Ok(found)
        } else {
            Err(Refusal::OtherNode { found })
        }
    }

    fn signature_13(
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &PROVIDER.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    /// Never asked for: only TLS 1.3 is offered and accepted.
    fn signature_12(
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &PROVIDER.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }
}

/// What the check of a chain means. The authorities of two homes may have the same name; then it is the signature that
/// does not fit.
fn of_chain(error: webpki::Error) -> Refusal {
    match error {
        webpki::Error::CertExpired { .. } => Refusal::Expired,
        webpki::Error::CertNotValidYet { .. } => Refusal::NotYetValid,
        webpki::Error::UnknownIssuer | webpki::Error::InvalidSignatureForPublicKey => {
            Refusal::OtherHome
        }
        _ => Refusal::Unusable,
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity, intermediates, now, KeyUsage::server_auth())
            .map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Verifier::signature_12(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Verifier::signature_13(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        PROVIDER
            .signature_verification_algorithms
            .supported_schemes()
    }
}

impl ClientCertVerifier for Verifier {
    /// The authority's name is nobody's business before the peer has shown who it is.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity, intermediates, now, KeyUsage::client_auth())
            .map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Verifier::signature_12(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Verifier::signature_13(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        PROVIDER
            .signature_verification_algorithms
            .supported_schemes()
    }
}
