//! TLS records: one connection's state of rustls, driven through its unbuffered interface.

use std::sync::Arc;

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus,
};
use rustls::{AlertDescription, ClientConfig, Error, ServerConfig};

use super::buffers::{Input, Output};
use crate::runtime::errors::Failure;

/// A record of 16 KiB with its header and tag takes less.
pub const RECORD_BYTES: usize = (16 << 10) + 256;
/// More than one handshake message and its records.
pub const HANDSHAKE_BYTES: usize = 80 << 10;
/// Alerts and key updates that a peer may provoke without reading what we answer.
const MAX_ANSWERS: usize = 64 << 10;

enum Tls {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

pub struct Records {
    tls: Tls,
    /// The handshake is complete on this side. The peer may still refuse our certificate.
    pub established: bool,
}

/// What the user of a plaintext wants next.
#[derive(PartialEq)]
pub enum Flow {
    More,
    /// Leave the rest of the input as it is.
    Stop,
}

/// How far `open` came.
#[derive(PartialEq, Debug)]
pub enum Opened {
    NeedsMore,
    Stopped,
    /// The peer has closed the TLS connection: nothing more can be read.
    Closed,
}

/// The two sides have the same states of different types.
macro_rules! with_tls {
    ($records:expr, $connection:ident => $work:expr) => {
        match &mut $records.tls {
            Tls::Client($connection) => $work,
            Tls::Server($connection) => $work,
        }
    };
}

impl Records {
    pub fn client(config: Arc<ClientConfig>, name: ServerName<'static>) -> Result<Self, Failure> {
        let tls = UnbufferedClientConnection::new(config, name).map_err(Failure::connect)?;
        Ok(Records {
            tls: Tls::Client(tls),
            established: false,
        })
    }

    pub fn server(config: Arc<ServerConfig>) -> Result<Self, Failure> {
        let tls = UnbufferedServerConnection::new(config).map_err(Failure::connect)?;
        Ok(Records {
            tls: Tls::Server(tls),
            established: false,
        })
    }

    pub fn peer_certificate(&self) -> Option<&CertificateDer<'static>> {
        let certificates = match &self.tls {
            Tls::Client(connection) => connection.peer_certificates(),
            Tls::Server(connection) => connection.peer_certificates(),
        };
        certificates?.first()
    }

    /// Passes the plaintext of each whole record to `take`, and appends what TLS answers to `output`. After an error
    /// call `alert`.
    pub fn open(
        &mut self,
        input: &mut Input,
        output: &mut Output,
        mut take: impl FnMut(&[u8]) -> Result<Flow, Failure>,
    ) -> Result<Opened, Failure> {
        let first = output.len();
        loop {
            let mut taken = Ok(Flow::More);
            let mut done = None;
            let discard = with_tls!(self, tls => {
                let UnbufferedStatus { mut discard, state } = tls.process_tls_records(input.filled());
                match state.map_err(|error| failure_of(&error))? {
                    ConnectionState::ReadTraffic(mut traffic) => {
                        // rustls returns one record at a time.
                        while let Some(record) = traffic.next_record() {
                            let record = record.map_err(|error| failure_of(&error))?;
                            discard += record.discard;
                            taken = take(record.payload);
                        }
                    }
                    ConnectionState::EncodeTlsData(mut data) => {
                        encode(output, |space| data.encode(space))?;
                    }
                    ConnectionState::TransmitTlsData(data) => data.done(),
                    ConnectionState::WriteTraffic(_) => {
                        self.established = true;
                        done = Some(Opened::NeedsMore);
                    }
                    ConnectionState::BlockedHandshake => done = Some(Opened::NeedsMore),
                    _ => done = Some(Opened::Closed),
                }
                discard
            });
            input.used(discard);
            if output.len() > first + MAX_ANSWERS {
                return Err(violation("the peer provokes answers without end"));
            }
            match taken {
                Ok(Flow::More) => {}
                Ok(Flow::Stop) => return Ok(Opened::Stopped),
                Err(failure) => {
                    input.used(input.len()); // so that `seal` may follow
                    return Err(failure);
                }
            }
            if let Some(opened) = done {
                return Ok(opened);
            }
        }
    }

    /// Appends the records of `plain` to `output`. `open` has used all whole records of the input.
    pub fn seal(
        &mut self,
        plain: &[u8],
        input: &mut Input,
        output: &mut Output,
    ) -> Result<(), Failure> {
        loop {
            let (sealed, discard) = with_tls!(self, tls => {
                // With the input, because rustls may refer to a part of a message that it has seen there. Returns what
                // has to be sent before, or the state that encrypts.
                let UnbufferedStatus { discard, state } = tls.process_tls_records(input.filled());
                let sealed = match state.map_err(|error| failure_of(&error))? {
                    ConnectionState::EncodeTlsData(mut data) => {
                        encode(output, |space| data.encode(space))?;
                        false
                    }
                    ConnectionState::TransmitTlsData(data) => {
                        data.done();
                        false
                    }
                    ConnectionState::WriteTraffic(mut traffic) => {
                        encrypt(output, plain.len(), |space| traffic.encrypt(plain, space))?;
                        true
                    }
                    _ => return Err(violation("TLS cannot send")),
                };
                (sealed, discard)
            });
            input.used(discard);
            if sealed {
                return Ok(());
            }
        }
    }

    /// After an error: appends the alert that tells the peer, if there is one.
    pub fn alert(&mut self, input: &mut Input, output: &mut Output) {
        for _ in 0..4 {
            let more = with_tls!(self, tls => {
                match tls.process_tls_records(input.filled()).state {
                    Ok(ConnectionState::EncodeTlsData(mut data)) => {
                        encode(output, |space| data.encode(space)).is_ok()
                    }
                    _ => false,
                }
            });
            if !more {
                return;
            }
        }
    }
}

fn encode(
    output: &mut Output,
    mut attempt: impl FnMut(&mut [u8]) -> Result<usize, EncodeError>,
) -> Result<(), Failure> {
    let mut least = 4 << 10;
    loop {
        match attempt(output.space(least)) {
            Ok(count) => {
                output.filled(count);
                return Ok(());
            }
            Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size }))
                if required_size > least =>
            {
                least = required_size;
            }
            Err(error) => return Err(Failure::connect(error)),
        }
    }
}

fn encrypt(
    output: &mut Output,
    plain: usize,
    mut attempt: impl FnMut(&mut [u8]) -> Result<usize, EncryptError>,
) -> Result<(), Failure> {
    let mut least = plain + (plain / (16 << 10) + 1) * 64;
    loop {
        match attempt(output.space(least)) {
            Ok(count) => {
                output.filled(count);
                return Ok(());
            }
            Err(EncryptError::InsufficientSize(InsufficientSizeError { required_size }))
                if required_size > least =>
            {
                least = required_size;
            }
            Err(error) => return Err(violation(error)),
        }
    }
}

fn violation(reason: impl ToString) -> Failure {
    Failure::Lost {
        kind: "protocol",
        code: None,
        reason: reason.to_string(),
    }
}

/// The failure that a TLS error means.
fn failure_of(error: &Error) -> Failure {
    match error {
        Error::InvalidCertificate(_) | Error::NoCertificatesPresented => Failure::Verification {
            reason: error.to_string(),
            by: "us",
        },
        Error::AlertReceived(alert) if is_about_a_certificate(*alert) => Failure::Verification {
            reason: format!("{alert:?}"),
            by: "peer",
        },
        other => violation(other),
    }
}

fn is_about_a_certificate(alert: AlertDescription) -> bool {
    matches!(u8::from(alert), 42..=49 | 51 | 116)
}
