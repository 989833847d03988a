//! `Trust`: whose certificates are accepted, and the verifiers that TLS calls.

use std::collections::HashSet;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    SignatureScheme,
};

use crate::tls::identity::{certificates, provider};

pub type Fingerprint = [u8; 32];

#[pyclass(module = "nexar_native.quic", frozen)]
#[derive(Clone)]
pub struct Trust {
    pub rules: Arc<Rules>,
}

#[pymethods]
impl Trust {
    #[new]
    #[pyo3(signature = (authorities=None, fingerprints=None, *, allow_anonymous=false),
        text_signature = "(authorities=b'', fingerprints=(), *, allow_anonymous=False)")]
    fn new(
        authorities: Option<&[u8]>,
        fingerprints: Option<&Bound<'_, PyAny>>,
        allow_anonymous: bool,
    ) -> PyResult<Self> {
        let roots = roots(authorities.unwrap_or_default())?;
        let clients = if roots.is_empty() {
            None
        } else {
            let roots = Arc::new(roots.clone());
            let built = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
            Some(built.map_err(|e| PyValueError::new_err(format!("authorities: {e}")))?)
        };
        let mut pins = HashSet::new();
        if let Some(fingerprints) = fingerprints {
            for item in fingerprints.try_iter()? {
                pins.insert(fingerprint(&item?)?);
            }
        }
        let rules = Rules {
            roots,
            clients,
            pins,
            allow_anonymous,
        };
        Ok(Trust {
            rules: Arc::new(rules),
        })
    }
}

fn roots(pem: &[u8]) -> PyResult<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("authorities", pem)? {
        roots
            .add(certificate)
            .map_err(|e| PyValueError::new_err(format!("authorities: {e}")))?;
    }
    if roots.is_empty() && !pem.trim_ascii().is_empty() {
        return Err(PyValueError::new_err(
            "authorities: no certificate found in the PEM",
        ));
    }
    Ok(roots)
}

pub fn fingerprint(item: &Bound<'_, PyAny>) -> PyResult<Fingerprint> {
    let bytes: Vec<u8> = item.extract()?;
    Fingerprint::try_from(bytes)
        .map_err(|_| PyValueError::new_err("fingerprints: each must be 32 bytes long (SHA-256)"))
}

/// The checks, without Python. A pinned public key is accepted by itself: name, issuer and dates of
/// its certificate are not checked.
#[derive(Debug)]
pub struct Rules {
    roots: RootCertStore,
    clients: Option<Arc<dyn ClientCertVerifier>>,
    pins: HashSet<Fingerprint>,
    pub allow_anonymous: bool,
}

impl Rules {
    pub fn verify_server(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), Error> {
        let parsed = ParsedCertificate::try_from(leaf)?;
        if self.pinned(&parsed) {
            return Ok(());
        }
        if self.roots.is_empty() {
            return Err(self.unpinned());
        }
        let algorithms = provider().signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, others, now, algorithms)?;
        verify_server_name(&parsed, name)
    }

    pub fn verify_client(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        if self.pinned(&ParsedCertificate::try_from(leaf)?) {
            return Ok(());
        }
        match &self.clients {
            Some(verifier) => verifier.verify_client_cert(leaf, others, now).map(|_| ()),
            None => Err(self.unpinned()),
        }
    }

    fn pinned(&self, certificate: &ParsedCertificate<'_>) -> bool {
        !self.pins.is_empty() && self.pins.contains(&digest(certificate))
    }

    /// The error for a key that is not pinned, where there are no authorities.
    fn unpinned(&self) -> Error {
        Error::InvalidCertificate(CertificateError::UnknownIssuer)
    }
}

fn digest(certificate: &ParsedCertificate<'_>) -> Fingerprint {
    let key = certificate.subject_public_key_info();
    let digest = ring::digest::digest(&ring::digest::SHA256, &key);
    let mut out = Fingerprint::default();
    out.copy_from_slice(digest.as_ref());
    out
}

/// SHA-256 of the certificate's SubjectPublicKeyInfo.
#[pyfunction]
pub fn spki_fingerprint(certificate_der: &[u8]) -> PyResult<std::borrow::Cow<'static, [u8]>> {
    let der = CertificateDer::from(certificate_der);
    let parsed = ParsedCertificate::try_from(&der)
        .map_err(|e| PyValueError::new_err(format!("certificate_der: {e}")))?;
    Ok(digest(&parsed).to_vec().into())
}

/// Verifies the server that we dial. Without rules every certificate is accepted, but the server
/// must prove that it owns the key.
#[derive(Debug)]
pub struct ServerVerifier {
    pub rules: Option<Arc<Rules>>,
    /// The only public key that is accepted. The rules must accept it too.
    pub pin: Option<Fingerprint>,
}

/// Verifies the clients that dial us.
#[derive(Debug)]
pub struct ClientVerifier {
    pub rules: Arc<Rules>,
}

fn algorithms() -> WebPkiSupportedAlgorithms {
    provider().signature_verification_algorithms
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Some(rules) = &self.rules {
            rules.verify_server(leaf, others, name, now)?;
        }
        if let Some(pin) = &self.pin {
            if digest(&ParsedCertificate::try_from(leaf)?) != *pin {
                return Err(CertificateError::ApplicationVerificationFailure.into());
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, leaf, signed, &algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, leaf, signed, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        !self.rules.allow_anonymous
    }

    /// No hints: a client always presents the certificate it has.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.rules.verify_client(leaf, others, now)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, leaf, signed, &algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, leaf, signed, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}
