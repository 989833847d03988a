//! `Credentials`: a certificate chain and its private key.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use crate::runtime::errors::Failure;

#[pyclass(module = "nexar_native.quic", frozen)]
#[derive(Clone)]
pub struct Credentials {
    pub key: Arc<CertifiedKey>,
}

#[pymethods]
impl Credentials {
    #[new]
    fn new(certificate_chain: &[u8], private_key: &[u8]) -> PyResult<Self> {
        let chain = certificates("certificate_chain", certificate_chain)?;
        if chain.is_empty() {
            // Arbitrary text parses to no certificate at all, which TLS would take for anonymous.
            return Err(PyValueError::new_err(
                "certificate_chain: no certificate found in the PEM",
            ));
        }
        let key = PrivateKeyDer::from_pem_slice(private_key)
            .map_err(|e| PyValueError::new_err(format!("private_key: unreadable PEM: {e}")))?;
        let key = CertifiedKey::from_der(chain, key, &provider())
            .map_err(|e| PyValueError::new_err(format!("private_key: {e}")))?;
        Ok(Credentials { key: Arc::new(key) })
    }
}

impl Credentials {
    /// DER of the certificate that is presented to peers.
    pub fn leaf(&self) -> Vec<u8> {
        self.key
            .cert
            .first()
            .map(|c| c.to_vec())
            .unwrap_or_default()
    }
}

pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: std::sync::OnceLock<Arc<CryptoProvider>> = std::sync::OnceLock::new();
    PROVIDER
        .get_or_init(|| Arc::new(rustls::crypto::ring::default_provider()))
        .clone()
}

/// Unpredictable bytes.
pub fn random_bytes<const N: usize>() -> Result<[u8; N], Failure> {
    let mut bytes = [0; N];
    let filled = provider().secure_random.fill(&mut bytes);
    filled.map_err(|_| Failure::connect("the system has no random bytes"))?;
    Ok(bytes)
}

/// Every certificate in a PEM text.
pub fn certificates(name: &str, pem: &[u8]) -> PyResult<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|e| PyValueError::new_err(format!("{name}: unreadable PEM: {e}")))
}
