//! Handles: a connection or stream without a handle is abandoned.
//!
//! Python objects, pending operations and results hold handles. Dropping the last one only records
//! the fact; the next call or round acts on it. So a handle may be dropped in any place and under
//! any lock.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};

use quinn_proto::StreamId;

use crate::quic::endpoint_shared::Shared;
use crate::runtime::errors::Failure;
use crate::runtime::process;

/// A stream without a handle, or (None) the whole connection.
pub type Dropped = (u64, Option<StreamId>);

pub struct ConnectionHandle {
    shared: Weak<Shared>,
    generation: u32,
    pub serial: u64,
    pub dialed: bool,
    pub remote: SocketAddr,
    pub local_certificate: Option<Vec<u8>>,
    /// Set when the handshake has completed.
    pub peer: OnceLock<PeerIdentity>,
    /// Set when the connection is lost.
    pub lost: OnceLock<Failure>,
}

pub struct PeerIdentity {
    pub certificate: Option<Vec<u8>>,
    pub verified: bool,
}

pub struct StreamHandle {
    pub connection: Arc<ConnectionHandle>,
    pub id: StreamId,
}

impl ConnectionHandle {
    pub fn new(
        shared: Weak<Shared>,
        serial: u64,
        dialed: bool,
        remote: SocketAddr,
        local_certificate: Option<Vec<u8>>,
    ) -> Self {
        ConnectionHandle {
            shared,
            generation: process::generation(),
            serial,
            dialed,
            remote,
            local_certificate,
            peer: OnceLock::new(),
            lost: OnceLock::new(),
        }
    }

    fn note(&self, stream: Option<StreamId>) {
        if self.generation != process::generation() {
            return;
        }
        if let Some(shared) = self.shared.upgrade() {
            shared.note_dropped((self.serial, stream));
        }
    }
}

impl Drop for ConnectionHandle {
    fn drop(&mut self) {
        self.note(None);
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        self.connection.note(Some(self.id));
    }
}
