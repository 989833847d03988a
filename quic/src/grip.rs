//! Grips: what keeps a connection or a stream from being abandoned.
//!
//! Python objects, pending operations and results hold a grip. When the last one goes, wherever and
//! under whatever lock that happens, the fact is only noted; whoever next drives or calls acts on
//! it. So a grip may be dropped anywhere.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};

use quinn_proto::StreamId;

use crate::errors::Failure;
use crate::fork;
use crate::shared::Shared;

/// Something nobody holds any more: a stream, or (None) the whole connection.
pub type Dropped = (u64, Option<StreamId>);

pub struct ConnectionGrip {
    shared: Weak<Shared>,
    generation: u32,
    pub serial: u64,
    pub dialed: bool,
    pub remote: SocketAddr,
    pub local_certificate: Option<Vec<u8>>,
    /// Known once the handshake is through.
    pub peer: OnceLock<PeerIdentity>,
    /// Set when the connection is gone.
    pub lost: OnceLock<Failure>,
}

pub struct PeerIdentity {
    pub certificate: Option<Vec<u8>>,
    pub verified: bool,
}

pub struct StreamGrip {
    pub connection: Arc<ConnectionGrip>,
    pub id: StreamId,
}

impl ConnectionGrip {
    pub fn new(
        shared: Weak<Shared>,
        serial: u64,
        dialed: bool,
        remote: SocketAddr,
        local_certificate: Option<Vec<u8>>,
    ) -> Self {
        ConnectionGrip {
            shared,
            generation: fork::generation(),
            serial,
            dialed,
            remote,
            local_certificate,
            peer: OnceLock::new(),
            lost: OnceLock::new(),
        }
    }

    fn note(&self, stream: Option<StreamId>) {
        if self.generation != fork::generation() {
            return;
        }
        if let Some(shared) = self.shared.upgrade() {
            shared.note_dropped((self.serial, stream));
        }
    }
}

impl Drop for ConnectionGrip {
    fn drop(&mut self) {
        self.note(None);
    }
}

impl Drop for StreamGrip {
    fn drop(&mut self) {
        self.connection.note(Some(self.id));
    }
}
