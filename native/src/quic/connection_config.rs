//! The protocol's configurations, made of credentials, trust and settings.

use std::sync::Arc;

use quinn_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn_proto::{ClientConfig, ServerConfig, TransportConfig};
use rustls::client::Resumption;
use rustls::sign::SingleCertAndKey;
use rustls::version::TLS13;

use crate::quic::settings::Settings;
use crate::runtime::errors::Failure;
use crate::tls::identity::{provider, Credentials};
use crate::tls::trust::{ClientVerifier, Rules, ServerVerifier};

/// What an endpoint uses for new connections.
pub struct ConnectionConfig {
    pub credentials: Option<Credentials>,
    pub rules: Arc<Rules>,
    alpn: Vec<u8>,
    max_connections: usize,
    /// For dials to other hosts, and to this host.
    dialing: [Arc<TransportConfig>; 2],
    /// For inbound connections from other hosts, and from this host.
    inbound: [Arc<TransportConfig>; 2],
    servers: Option<[Arc<ServerConfig>; 2]>,
}

/// Options of one dial.
pub struct Dial {
    pub rules: Option<Arc<Rules>>,
    pub verify: bool,
    pub anonymous: bool,
    /// The caller limits the time of the dial, so `handshake_timeout` does not apply.
    pub timed: bool,
}

impl ConnectionConfig {
    pub fn new(
        settings: &Settings,
        credentials: Option<Credentials>,
        rules: Arc<Rules>,
    ) -> Result<Self, Failure> {
        let mut connection_config = ConnectionConfig {
            credentials: None,
            rules: rules.clone(),
            alpn: settings.alpn.clone(),
            max_connections: settings.max_connections,
            dialing: [false, true].map(|loopback| Arc::new(settings.transport(loopback))),
            inbound: [false, true]
                .map(|loopback| Arc::new(settings.unverified_transport(loopback))),
            servers: None,
        };
        connection_config.replace(credentials, rules)?;
        Ok(connection_config)
    }

    pub fn replace(
        &mut self,
        credentials: Option<Credentials>,
        rules: Arc<Rules>,
    ) -> Result<(), Failure> {
        self.servers = match &credentials {
            Some(credentials) => Some(self.listening(credentials, &rules)?),
            None => None,
        };
        self.credentials = credentials;
        self.rules = rules;
        Ok(())
    }

    /// The configuration for an inbound connection; None if this endpoint only dials.
    pub fn server(&self, loopback: bool) -> Option<Arc<ServerConfig>> {
        self.servers
            .as_ref()
            .map(|both| both[usize::from(loopback)].clone())
    }

    fn listening(
        &self,
        credentials: &Credentials,
        rules: &Arc<Rules>,
    ) -> Result<[Arc<ServerConfig>; 2], Failure> {
        let verifier = ClientVerifier {
            rules: rules.clone(),
        };
        let mut tls = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable)?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(credentials.key.clone())));
        tls.alpn_protocols = vec![self.alpn.clone()];
        // No resumption: it would admit a peer that the present trust refuses.
        tls.send_tls13_tickets = 0;
        tls.max_early_data_size = 0;
        let crypto = Arc::new(QuicServerConfig::try_from(tls).map_err(unusable)?);
        let with = |transport: &Arc<TransportConfig>| {
            let mut config = ServerConfig::with_crypto(crypto.clone());
            config
                .transport_config(transport.clone())
                .migration(false)
                .max_incoming(self.max_connections);
            Arc::new(config)
        };
        Ok(self.inbound.each_ref().map(with))
    }

    /// The configuration for one dial, and the certificate it presents.
    pub fn client(
        &self,
        dial: &Dial,
        loopback: bool,
    ) -> Result<(ClientConfig, Option<Vec<u8>>), Failure> {
        let rules = dial.rules.as_ref().unwrap_or(&self.rules);
        let verifier = ServerVerifier {
            rules: dial.verify.then(|| rules.clone()),
            pin: None,
        };
        let builder = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let shown = self.credentials.as_ref().filter(|_| !dial.anonymous);
        let mut tls = match shown {
            Some(credentials) => builder.with_client_cert_resolver(Arc::new(
                SingleCertAndKey::from(credentials.key.clone()),
            )),
            None => builder.with_no_client_auth(),
        };
        tls.alpn_protocols = vec![self.alpn.clone()];
        tls.resumption = Resumption::disabled();
        tls.enable_early_data = false;
        let crypto = QuicClientConfig::try_from(tls).map_err(unusable)?;
        let mut config = ClientConfig::new(Arc::new(crypto));
        config.transport_config(self.dialing[usize::from(loopback)].clone());
        Ok((config, shown.map(Credentials::leaf)))
    }
}

fn unusable(error: impl std::fmt::Display) -> Failure {
    Failure::Value(format!("credentials: {error}"))
}
