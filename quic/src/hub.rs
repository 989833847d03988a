//! What the sessions of one endpoint have in common: the socket, the protocol's endpoint, the door.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use quinn_proto::{Endpoint, Transmit};

use crate::address;
use crate::channel::STAGE_BYTES;
use crate::grip::ConnectionGrip;
use crate::handshake_budget::HandshakeBudget;
use crate::handshakes::Handshakes;
use crate::op::{Op, Value};
use crate::pool::Pool;
use crate::settings::Settings;
use crate::socket::Socket;

const REFUSALS_KEPT: usize = 256;
/// Pieces of outgoing data remembered for use again (8 MiB: twice the usual send window).
const PIECES_LENT: usize = 128;

#[derive(Default)]
pub struct Counters {
    pub datagrams_sent: u64,
    pub datagrams_received: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub refused: u64,
    pub retried: u64,
    pub ignored: u64,
    pub rounds: u64,
    pub background_rounds: u64,
}

pub struct Hub {
    pub settings: Settings,
    pub endpoint: Endpoint,
    /// None once the endpoint is closed.
    pub socket: Option<Socket>,
    /// Inbound connections that nobody has accepted yet, at most `max_connections`. Those lost
    /// meanwhile count too, since what they brought can be read.
    pub arrivals: VecDeque<Arc<ConnectionGrip>>,
    pub acceptors: VecDeque<Arc<Op>>,
    pub refusals: VecDeque<(SocketAddr, String)>,
    pub counters: Counters,
    /// Connections not lost, and those among them still in their handshake.
    pub live: usize,
    pub half_open: usize,
    /// The inbound ones among those still in their handshake.
    pub handshakes: Handshakes,
    pub budget: HandshakeBudget,
    /// Sessions with a transmit that waits for the socket to be writable.
    pub blocked: Vec<u64>,
    /// Where packets are built.
    pub scratch: Vec<u8>,
    /// Copies of borrowed data on their way out.
    pub pool: Pool,
}

impl Hub {
    pub fn new(endpoint: Endpoint, socket: Socket, settings: Settings) -> Self {
        let handshakes = Handshakes::new(settings.max_handshakes);
        let budget = HandshakeBudget::new(
            settings.max_handshakes,
            settings.handshake_budget,
            Instant::now(),
        );
        Hub {
            settings,
            endpoint,
            socket: Some(socket),
            arrivals: VecDeque::new(),
            acceptors: VecDeque::new(),
            refusals: VecDeque::new(),
            counters: Counters::default(),
            live: 0,
            half_open: 0,
            handshakes,
            budget,
            blocked: Vec::new(),
            scratch: Vec::new(),
            pool: Pool::new(STAGE_BYTES, PIECES_LENT),
        }
    }

    /// To whoever accepts first, or to the queue.
    pub fn deliver(&mut self, grip: Arc<ConnectionGrip>) {
        match self.acceptors.pop_front() {
            Some(op) => op.complete(Ok(Value::Connection(grip))),
            None => {
                if self.arrivals.len() == self.settings.max_connections {
                    self.arrivals.pop_front();
                }
                self.arrivals.push_back(grip);
            }
        }
    }

    pub fn refuse(&mut self, remote: SocketAddr, reason: String) {
        self.counters.refused += 1;
        if self.refusals.len() == REFUSALS_KEPT {
            self.refusals.pop_front();
        }
        self.refusals
            .push_back((address::canonical(remote), reason));
    }

    pub fn segments(&self, mtu: u16) -> usize {
        self.socket.as_ref().map_or(1, |s| s.segments(mtu))
    }

    /// False: the kernel has no room.
    pub fn send(&mut self, transmit: &Transmit, contents: &[u8]) -> bool {
        let Some(socket) = &self.socket else {
            return true;
        };
        if !socket.send(transmit, contents) {
            return false;
        }
        let size = transmit.size;
        let segment = transmit.segment_size.unwrap_or(size).max(1);
        self.counters.datagrams_sent += size.div_ceil(segment) as u64;
        self.counters.bytes_sent += size as u64;
        true
    }
}
