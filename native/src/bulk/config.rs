//! The TLS configurations of an endpoint.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::sign::SingleCertAndKey;
use rustls::version::TLS13;
use rustls::{CipherSuite, ClientConfig, ServerConfig};

use crate::runtime::errors::Failure;
use crate::tls::identity::{provider, Credentials};
use crate::tls::trust::{ClientVerifier, Fingerprint, Rules, ServerVerifier};

/// Keeps a handshake of another protocol with the same certificates from being taken for one of ours.
const ALPN: &[u8] = b"nexar-bulk/1";

/// What an endpoint uses for new connections.
#[derive(Clone)]
pub struct Identity {
    credentials: Credentials,
    rules: Arc<Rules>,
    pub server: Arc<ServerConfig>,
}

impl Identity {
    pub fn new(credentials: Credentials, rules: Arc<Rules>) -> Result<Self, Failure> {
        let verifier = ClientVerifier {
            rules: rules.clone(),
        };
        let mut server = ServerConfig::builder_with_provider(bulk_provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable)?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(credentials.key.clone())));
        server.alpn_protocols = vec![ALPN.to_vec()];
        // No resumption: it would admit a peer that the present trust refuses.
        server.send_tls13_tickets = 0;
        server.max_early_data_size = 0;
        Ok(Identity {
            credentials,
            rules,
            server: Arc::new(server),
        })
    }

    /// The configuration for a dial. With `pin` the peer's public key must be this one, besides all other checks.
    pub fn client(&self, pin: Option<Fingerprint>) -> Result<Arc<ClientConfig>, Failure> {
        let verifier = ServerVerifier {
            rules: Some(self.rules.clone()),
            pin,
        };
        let key = SingleCertAndKey::from(self.credentials.key.clone());
        let mut client = ClientConfig::builder_with_provider(bulk_provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::new(key));
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = Resumption::disabled();
        client.enable_early_data = false;
        Ok(Arc::new(client))
    }
}

/// The provider with the fastest cipher of this processor first: the dialer's order decides.
fn bulk_provider() -> Arc<CryptoProvider> {
    static PROVIDER: std::sync::OnceLock<Arc<CryptoProvider>> = std::sync::OnceLock::new();
    let make = || {
        let mut ordered = CryptoProvider::clone(&provider());
        let first = match has_aes() {
            true => CipherSuite::TLS13_AES_128_GCM_SHA256,
            false => CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
        };
        ordered
            .cipher_suites
            .sort_by_key(|each| each.suite() != first);
        Arc::new(ordered)
    };
    PROVIDER.get_or_init(make).clone()
}

#[cfg(target_arch = "x86_64")]
fn has_aes() -> bool {
    is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "aarch64")]
fn has_aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_aes() -> bool {
    false
}

fn unusable(error: impl std::fmt::Display) -> Failure {
    Failure::Value(format!("credentials: {error}"))
}
