//! The state of an endpoint that its lock guards, and one round of driving.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use quinn_proto::{
    Connection, ConnectionHandle as ProtocolHandle, DatagramEvent, Incoming, VarInt,
};
use ring::rand::{SecureRandom, SystemRandom};

use crate::quic::connection_config::{ConnectionConfig, Dial};
use crate::quic::driver::{DriverElection, Timers};
use crate::quic::endpoint_shared::{EndpointCore, Shared};
use crate::quic::handles::{ConnectionHandle, Dropped};
use crate::quic::handshakes::{Place, Source};
use crate::quic::operation::OperationState;
use crate::quic::session::{BudgetUnit, Session};
use crate::quic::socket::{self, ecn, Arrival, BATCH};
use crate::runtime::errors::Failure;

/// Batches received per round, and bytes sent per session and round. A round is short, so that
/// acknowledgements are processed while data is sent, and the lock is released often.
const BATCHES: usize = 4;
pub const ROUND_BYTES: usize = 512 << 10;

const TOO_MANY_HANDSHAKES: &str = "too many handshakes are in progress; try again";

pub struct State {
    pub shared: Weak<Shared>,
    pub connection_config: ConnectionConfig,
    pub core: EndpointCore,
    pub election: DriverElection,
    pub sessions: HashMap<u64, Session>,
    /// Our serial numbers (never reused) by the protocol's handles (small numbers, reused).
    routes: Vec<u64>,
    serials: u64,
    timers: Timers,
    dirty: Vec<u64>,
    inbox: Vec<Arrival>,
    /// Why the endpoint is closed.
    pub closed: Option<Failure>,
    pub panic_wanted: bool,
}

pub struct Round {
    pub busy: bool,
    pub now: Instant,
}

impl State {
    pub fn new(
        connection_config: ConnectionConfig,
        core: EndpointCore,
        election: DriverElection,
    ) -> Self {
        State {
            shared: Weak::new(),
            connection_config,
            core,
            election,
            sessions: HashMap::new(),
            routes: Vec::new(),
            serials: 0,
            timers: Timers::default(),
            dirty: Vec::new(),
            inbox: Vec::new(),
            closed: None,
            panic_wanted: false,
        }
    }

    /// Receives datagrams, runs due timers, sends what follows. Never blocks.
    pub fn round(&mut self) -> Round {
        if std::mem::take(&mut self.panic_wanted) {
            panic!("asked for by a test");
        }
        let mut now = Instant::now();
        self.core.counters.rounds += 1;
        let received = self.receive(now);
        if received {
            now = Instant::now();
        }
        self.election.last_driven = now;
        let expired = self.expire(now);
        for serial in std::mem::take(&mut self.core.blocked) {
            self.mark_dirty(serial);
        }
        let unfinished = self.process_dirty(now, ROUND_BYTES);
        Round {
            busy: received || expired || unfinished,
            now,
        }
    }

    fn receive(&mut self, now: Instant) -> bool {
        let mut any = false;
        for _ in 0..BATCHES {
            let mut inbox = std::mem::take(&mut self.inbox);
            let count = match &mut self.core.socket {
                Some(socket) => socket.receive(|arrival| inbox.push(arrival)),
                None => 0,
            };
            for arrival in inbox.drain(..) {
                self.handle_arrival(arrival, now);
            }
            self.inbox = inbox;
            any |= count > 0;
            if count < BATCH {
                break;
            }
        }
        any
    }

    fn handle_arrival(&mut self, arrival: Arrival, now: Instant) {
        let Arrival {
            mut data,
            stride,
            meta,
        } = arrival;
        self.core.counters.bytes_received += data.len() as u64;
        let largest = usize::from(self.core.settings.largest_mtu());
        while !data.is_empty() {
            self.core.counters.datagrams_received += 1;
            let datagram = data.split_to(stride.min(data.len()));
            if datagram.len() > largest {
                continue; // the peer was told the limit; decrypting more would cost us more than the sender
            }
            self.core.scratch.clear();
            let event = self.core.endpoint.handle(
                now,
                meta.addr,
                meta.dst_ip,
                ecn(&meta),
                datagram,
                &mut self.core.scratch,
            );
            match event {
                Some(DatagramEvent::ConnectionEvent(protocol_handle, event)) => {
                    let serial = self
                        .routes
                        .get(protocol_handle.0)
                        .copied()
                        .unwrap_or(u64::MAX);
                    if let Some(session) = self.sessions.get_mut(&serial) {
                        session.connection.handle_event(event);
                        session.packets_arrived = true;
                        self.mark_dirty(serial);
                    }
                }
                Some(DatagramEvent::NewConnection(incoming)) => self.admit(incoming, now),
                Some(DatagramEvent::Response(transmit)) => self.respond(&transmit),
                None => {}
            }
        }
    }

    /// Sends an answer from the scratch buffer. It is lost if the kernel's buffer is full.
    fn respond(&mut self, transmit: &quinn_proto::Transmit) {
        let contents = std::mem::take(&mut self.core.scratch);
        self.core.send(transmit, &contents);
        self.core.scratch = contents;
    }

    /// Handles the start of an inbound handshake. While many are in progress, or many began lately,
    /// the peer must first prove that it receives at its address. Then `HandshakeBudget` decides
    /// whether the handshake begins, and `Handshakes` which one is ended when the limit is reached.
    ///
    /// A handshake beyond the budget is ignored, not refused: an honest client repeats its first
    /// packet after a moment, and may be admitted then.
    fn admit(&mut self, incoming: Incoming, now: Instant) {
        let remote = incoming.remote_address();
        self.core.scratch.clear();
        if self.core.endpoint.open_connections() >= self.core.settings.max_connections {
            return self.refuse_incoming(incoming, "the connection limit is reached");
        }
        let proven = incoming.remote_address_validated();
        let busy = self.core.handshakes.len() >= self.core.settings.retry_handshakes
            || self.core.budget.is_scarce(now);
        if busy && !proven {
            self.core.counters.retried += 1;
            if let Ok(transmit) = self.core.endpoint.retry(incoming, &mut self.core.scratch) {
                self.respond(&transmit);
            }
            return;
        }
        let source = Source::of(remote.ip());
        if !self.core.budget.take(source, proven, now) {
            self.core.counters.ignored += 1;
            return self.core.endpoint.ignore(incoming);
        }
        match self.core.handshakes.place(source, now, random_below) {
            Place::Free => {}
            Place::InsteadOf(serial) => self.displace(serial, now),
            Place::Refused => return self.refuse_incoming(incoming, TOO_MANY_HANDSHAKES),
        }
        let loopback = socket::canonical_address(remote).ip().is_loopback();
        let config = self.connection_config.server(loopback);
        let accepted = self
            .core
            .endpoint
            .accept(incoming, now, &mut self.core.scratch, config);
        match accepted {
            Ok((protocol_handle, connection)) => {
                let leaf = self
                    .connection_config
                    .credentials
                    .as_ref()
                    .map(|c| c.leaf());
                let handle = self.handle(false, remote, leaf);
                let serial = handle.serial;
                let mut session = self.session(&handle, protocol_handle, connection, true, now);
                session.unaccepted = Some(handle);
                session.budget_unit = Some(BudgetUnit {
                    source,
                    charged: proven,
                });
                self.core.handshakes.enter(serial, source, now);
                self.install(session, serial);
            }
            Err(error) => {
                if let Some(transmit) = &error.response {
                    self.respond(transmit);
                }
                let failure = Failure::handshake(&error.cause);
                self.core.refuse(remote, failure.describe());
            }
        }
    }

    fn refuse_incoming(&mut self, incoming: Incoming, reason: &str) {
        let remote = incoming.remote_address();
        let transmit = self.core.endpoint.refuse(incoming, &mut self.core.scratch);
        self.respond(&transmit);
        self.core.refuse(remote, reason.to_owned());
    }

    /// Ends a handshake in favour of a new one.
    fn displace(&mut self, serial: u64, now: Instant) {
        if let Some(session) = self.sessions.get_mut(&serial) {
            let remote = session.connection.remote_address();
            self.core.refuse(remote, TOO_MANY_HANDSHAKES.to_owned());
            session.close(
                &mut self.core,
                now,
                VarInt::from_u32(0),
                TOO_MANY_HANDSHAKES,
            );
        }
        self.mark_dirty(serial);
    }

    /// Starts the dial of the operation `op`.
    pub fn dial(
        &mut self,
        remote: SocketAddr,
        name: &str,
        dial: &Dial,
        op: &Arc<OperationState>,
    ) -> Result<(), Failure> {
        let socket = self.core.socket.as_ref();
        let reachable = socket.and_then(|socket| socket.to_family(remote));
        let Some(reachable) = reachable else {
            return Err(Failure::Value(format!(
                "address: {remote} is of another family than the endpoint's"
            )));
        };
        if self.core.endpoint.open_connections() >= self.core.settings.max_connections {
            return Err(Failure::connect("the connection limit is reached"));
        }
        let now = Instant::now();
        let (config, shown) = self
            .connection_config
            .client(dial, remote.ip().is_loopback())?;
        let (protocol_handle, connection) = self
            .core
            .endpoint
            .connect(now, config, reachable, name)
            .map_err(Failure::dial)?;
        let handle = self.handle(true, remote, shown);
        let serial = handle.serial;
        let mut session = self.session(&handle, protocol_handle, connection, dial.verify, now);
        session.pending_connect = Some(op.clone());
        if dial.timed {
            session.handshake_deadline = None;
        }
        op.cell().set_connecting(handle);
        self.install(session, serial);
        Ok(())
    }

    fn handle(
        &mut self,
        dialed: bool,
        remote: SocketAddr,
        leaf: Option<Vec<u8>>,
    ) -> Arc<ConnectionHandle> {
        self.serials += 1;
        Arc::new(ConnectionHandle::new(
            self.shared.clone(),
            self.serials,
            dialed,
            socket::canonical_address(remote),
            leaf,
        ))
    }

    fn session(
        &self,
        handle: &Arc<ConnectionHandle>,
        protocol_handle: ProtocolHandle,
        connection: Connection,
        verify: bool,
        now: Instant,
    ) -> Session {
        let settings = &self.core.settings;
        Session::new(
            handle,
            protocol_handle,
            connection,
            verify,
            settings.send_window_bytes,
            now,
            settings.handshake_timeout,
        )
    }

    fn install(&mut self, session: Session, serial: u64) {
        let index = session.protocol_handle.0;
        if self.routes.len() <= index {
            self.routes.resize(index + 1, u64::MAX);
        }
        self.routes[index] = serial;
        self.core.live += 1;
        self.core.half_open += 1;
        self.sessions.insert(serial, session);
        self.mark_dirty(serial);
    }

    /// Marks a session for processing.
    pub fn mark_dirty(&mut self, serial: u64) {
        if let Some(session) = self.sessions.get_mut(&serial) {
            if !std::mem::replace(&mut session.dirty, true) {
                self.dirty.push(serial);
            }
        }
    }

    fn expire(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some((at, serial)) = self.timers.first().filter(|(at, _)| *at <= now) {
            self.timers.pop();
            let Some(session) = self.sessions.get_mut(&serial) else {
                continue;
            };
            if session.queued_timer != Some(at) {
                continue;
            }
            session.queued_timer = None;
            let due = session.timer();
            if due.is_some_and(|due| due <= now) {
                session.expire(&mut self.core, now);
                any = true;
                self.mark_dirty(serial);
            } else {
                self.timers.arm(serial, &mut session.queued_timer, due);
            }
        }
        any
    }

    /// The next timer that is due. Entries that turn out to be early are inserted again first.
    pub fn next_timer(&mut self) -> Option<Instant> {
        while let Some((at, serial)) = self.timers.first() {
            let Some(session) = self.sessions.get_mut(&serial) else {
                self.timers.pop();
                continue;
            };
            if session.queued_timer != Some(at) {
                self.timers.pop();
                continue;
            }
            let due = session.timer();
            if due == Some(at) {
                return due;
            }
            self.timers.pop();
            session.queued_timer = None;
            self.timers.arm(serial, &mut session.queued_timer, due);
        }
        None
    }

    /// Processes every session that was marked. True if one stopped at the budget.
    pub fn process_dirty(&mut self, now: Instant, budget: usize) -> bool {
        self.process_dropped();
        let mut unfinished = false;
        for serial in std::mem::take(&mut self.dirty) {
            let Some(session) = self.sessions.get_mut(&serial) else {
                continue;
            };
            session.dirty = false;
            let more = session.process(&mut self.core, now, budget);
            let timer = session.timer();
            self.timers.arm(serial, &mut session.queued_timer, timer);
            if session.is_finished() {
                self.sessions.remove(&serial);
            } else if more {
                unfinished = true;
                self.mark_dirty(serial);
            }
        }
        unfinished
    }

    pub fn unfinished(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Acts on handles that were dropped since.
    fn process_dropped(&mut self) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        while let Some(dropped) = shared.next_dropped() {
            self.handle_dropped(dropped);
        }
    }

    fn handle_dropped(&mut self, (serial, stream): Dropped) {
        let Some(session) = self.sessions.get_mut(&serial) else {
            return;
        };
        match stream {
            Some(id) => session.abandon(id),
            None => {
                session.dropped = true;
                let code = VarInt::from_u32(0);
                session.close(&mut self.core, Instant::now(), code, "abandoned");
            }
        }
        self.mark_dirty(serial);
    }
}

/// A random number below `bound`, which is not 0. Unpredictable for others.
fn random_below(bound: usize) -> usize {
    let mut bytes = [0; 8];
    // If the system has no randomness, any choice is as good as another.
    let _ = SystemRandom::new().fill(&mut bytes);
    (u64::from_ne_bytes(bytes) % bound as u64) as usize
}
