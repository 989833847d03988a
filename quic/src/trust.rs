//! `Trust`: whose certificates are accepted.

use std::collections::HashSet;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, Error, RootCertStore};

use crate::credentials::{certificates, provider};

pub type Fingerprint = [u8; 32];

#[pyclass(module = "nexar_quic", frozen)]
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

fn fingerprint(item: &Bound<'_, PyAny>) -> PyResult<Fingerprint> {
    let bytes: Vec<u8> = item.extract()?;
    Fingerprint::try_from(bytes)
        .map_err(|_| PyValueError::new_err("fingerprints: each must be 32 bytes long (SHA-256)"))
}

/// The checks themselves, free of Python. A pinned public key is accepted by itself: neither the
/// name nor the issuer nor the dates of the certificate around it are looked at.
#[derive(Debug)]
pub struct Rules {
    roots: RootCertStore,
    clients: Option<Arc<dyn ClientCertVerifier>>,
    pins: HashSet<Fingerprint>,
    pub allow_anonymous: bool,
}

impl Rules {
    pub fn judge_server(
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

    pub fn judge_client(
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

    /// No authority could have signed it, and its key is not among the pinned ones.
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
