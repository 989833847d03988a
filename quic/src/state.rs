//! Everything of an endpoint that its lock guards, and one round of driving it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use quinn_proto::{Connection, ConnectionHandle, DatagramEvent, Incoming, VarInt};
use ring::rand::{SecureRandom, SystemRandom};

use crate::address;
use crate::crew::Crew;
use crate::errors::Failure;
use crate::grip::{ConnectionGrip, Dropped};
use crate::handshakes::{Place, Source};
use crate::hub::Hub;
use crate::identity::{Dial, Identity};
use crate::op::Op;
use crate::session::{Session, Toll};
use crate::shared::Shared;
use crate::socket::{ecn, Arrival, BATCH};
use crate::timers::Timers;

/// Batches taken in per round, and bytes sent per session and round: a round stays short, so that
/// acknowledgements are taken in while data goes out, and the lock is never held for long.
const BATCHES: usize = 4;
pub const ROUND_BYTES: usize = 512 << 10;

const CROWDED: &str = "too many handshakes are in progress; try again";

pub struct State {
    pub shared: Weak<Shared>,
    pub identity: Identity,
    pub hub: Hub,
    pub crew: Crew,
    pub sessions: HashMap<u64, Session>,
    /// The protocol's handle (a small number, used again) to our serial (never used again).
    routes: Vec<u64>,
    serials: u64,
    timers: Timers,
    dirty: Vec<u64>,
    inbox: Vec<Arrival>,
    /// Why nothing works any more.
    pub closed: Option<Failure>,
    pub panic_wanted: bool,
}

pub struct Round {
    pub busy: bool,
    pub now: Instant,
}

impl State {
    pub fn new(identity: Identity, hub: Hub, crew: Crew) -> Self {
        State {
            shared: Weak::new(),
            identity,
            hub,
            crew,
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

    /// Take in what has arrived, run what is due, send what follows. Never blocks.
    pub fn round(&mut self) -> Round {
        if std::mem::take(&mut self.panic_wanted) {
            panic!("asked for by a test");
        }
        let mut now = Instant::now();
        self.hub.counters.rounds += 1;
        let received = self.receive(now);
        if received {
            now = Instant::now();
        }
        self.crew.driven = now;
        let expired = self.expire(now);
        for serial in std::mem::take(&mut self.hub.blocked) {
            self.soil(serial);
        }
        let unfinished = self.settle(now, ROUND_BYTES);
        Round {
            busy: received || expired || unfinished,
            now,
        }
    }

    fn receive(&mut self, now: Instant) -> bool {
        let mut any = false;
        for _ in 0..BATCHES {
            let mut inbox = std::mem::take(&mut self.inbox);
            let count = match &mut self.hub.socket {
                Some(socket) => socket.receive(|arrival| inbox.push(arrival)),
                None => 0,
            };
            for arrival in inbox.drain(..) {
                self.feed(arrival, now);
            }
            self.inbox = inbox;
            any |= count > 0;
            if count < BATCH {
                break;
            }
        }
        any
    }

    fn feed(&mut self, arrival: Arrival, now: Instant) {
        let Arrival {
            mut data,
            stride,
            meta,
        } = arrival;
        self.hub.counters.bytes_received += data.len() as u64;
        let largest = usize::from(self.hub.settings.largest_mtu());
        while !data.is_empty() {
            self.hub.counters.datagrams_received += 1;
            let datagram = data.split_to(stride.min(data.len()));
            if datagram.len() > largest {
                continue; // the peer was told; reading it would cost its sender less than us
            }
            self.hub.scratch.clear();
            let event = self.hub.endpoint.handle(
                now,
                meta.addr,
                meta.dst_ip,
                ecn(&meta),
                datagram,
                &mut self.hub.scratch,
            );
            match event {
                Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                    let serial = self.routes.get(handle.0).copied().unwrap_or(u64::MAX);
                    if let Some(session) = self.sessions.get_mut(&serial) {
                        session.connection.handle_event(event);
                        session.fed = true;
                        self.soil(serial);
                    }
                }
                Some(DatagramEvent::NewConnection(incoming)) => self.admit(incoming, now),
                Some(DatagramEvent::Response(transmit)) => self.respond(&transmit),
                None => {}
            }
        }
    }

    /// Answer straight from the scratch buffer; what the kernel has no room for is lost.
    fn respond(&mut self, transmit: &quinn_proto::Transmit) {
        let contents = std::mem::take(&mut self.hub.scratch);
        self.hub.send(transmit, &contents);
        self.hub.scratch = contents;
    }

    /// An inbound handshake begins. While many are in progress, or many began lately, the peer first has
    /// to prove that it receives at the address it sends from. Then `HandshakeBudget` decides whether
    /// the handshake begins, and `Handshakes` who gives way when all places are taken.
    ///
    /// A handshake beyond the budget is ignored, not refused: an honest client sends its first packet
    /// again after a moment, and by then its turn may have come.
    fn admit(&mut self, incoming: Incoming, now: Instant) {
        let remote = incoming.remote_address();
        self.hub.scratch.clear();
        if self.hub.endpoint.open_connections() >= self.hub.settings.max_connections {
            return self.turn_away(incoming, "the connection limit is reached");
        }
        let proven = incoming.remote_address_validated();
        let crowded = self.hub.handshakes.len() >= self.hub.settings.retry_handshakes
            || self.hub.budget.is_scarce(now);
        if crowded && !proven {
            self.hub.counters.retried += 1;
            if let Ok(transmit) = self.hub.endpoint.retry(incoming, &mut self.hub.scratch) {
                self.respond(&transmit);
            }
            return;
        }
        let source = Source::of(remote.ip());
        if !self.hub.budget.take(source, proven, now) {
            self.hub.counters.ignored += 1;
            return self.hub.endpoint.ignore(incoming);
        }
        match self.hub.handshakes.place(source, now, random_below) {
            Place::Free => {}
            Place::InsteadOf(serial) => self.displace(serial, now),
            Place::Refused => return self.turn_away(incoming, CROWDED),
        }
        let loopback = address::canonical(remote).ip().is_loopback();
        let config = self.identity.server(loopback);
        let accepted = self
            .hub
            .endpoint
            .accept(incoming, now, &mut self.hub.scratch, config);
        match accepted {
            Ok((handle, connection)) => {
                let leaf = self.identity.credentials.as_ref().map(|c| c.leaf());
                let grip = self.grip(false, remote, leaf);
                let serial = grip.serial;
                let mut session = self.session(&grip, handle, connection, true, now);
                session.hold = Some(grip);
                session.toll = Some(Toll {
                    source,
                    blamed: proven,
                });
                self.hub.handshakes.enter(serial, source, now);
                self.install(session, serial);
            }
            Err(error) => {
                if let Some(transmit) = &error.response {
                    self.respond(transmit);
                }
                let failure = Failure::handshake(&error.cause);
                self.hub.refuse(remote, failure.describe());
            }
        }
    }

    fn turn_away(&mut self, incoming: Incoming, reason: &str) {
        let remote = incoming.remote_address();
        let transmit = self.hub.endpoint.refuse(incoming, &mut self.hub.scratch);
        self.respond(&transmit);
        self.hub.refuse(remote, reason.to_owned());
    }

    /// End a handshake whose place a newcomer gets.
    fn displace(&mut self, serial: u64, now: Instant) {
        if let Some(session) = self.sessions.get_mut(&serial) {
            let remote = session.connection.remote_address();
            self.hub.refuse(remote, CROWDED.to_owned());
            session.close(&mut self.hub, now, VarInt::from_u32(0), CROWDED);
        }
        self.soil(serial);
    }

    /// Start the dial that `op` stands for.
    pub fn dial(
        &mut self,
        remote: SocketAddr,
        name: &str,
        dial: &Dial,
        op: &Arc<Op>,
    ) -> Result<(), Failure> {
        let socket = self.hub.socket.as_ref();
        let reachable = socket.and_then(|socket| socket.reach(remote));
        let Some(reachable) = reachable else {
            return Err(Failure::Value(format!(
                "address: {remote} is of another family than the endpoint's"
            )));
        };
        if self.hub.endpoint.open_connections() >= self.hub.settings.max_connections {
            return Err(Failure::Connect {
                reason: "the connection limit is reached".to_owned(),
            });
        }
        let now = Instant::now();
        let (config, shown) = self.identity.client(dial, remote.ip().is_loopback())?;
        let (handle, connection) = self
            .hub
            .endpoint
            .connect(now, config, reachable, name)
            .map_err(Failure::dial)?;
        let grip = self.grip(true, remote, shown);
        let serial = grip.serial;
        let mut session = self.session(&grip, handle, connection, dial.verify, now);
        session.connector = Some(op.clone());
        if dial.timed {
            session.handshake_deadline = None;
        }
        op.cell().dialing(grip);
        self.install(session, serial);
        Ok(())
    }

    fn grip(
        &mut self,
        dialed: bool,
        remote: SocketAddr,
        leaf: Option<Vec<u8>>,
    ) -> Arc<ConnectionGrip> {
        self.serials += 1;
        Arc::new(ConnectionGrip::new(
            self.shared.clone(),
            self.serials,
            dialed,
            address::canonical(remote),
            leaf,
        ))
    }

    fn session(
        &self,
        grip: &Arc<ConnectionGrip>,
        handle: ConnectionHandle,
        connection: Connection,
        verify: bool,
        now: Instant,
    ) -> Session {
        let settings = &self.hub.settings;
        Session::new(
            grip,
            handle,
            connection,
            verify,
            settings.send_window_bytes,
            now,
            settings.handshake_timeout,
        )
    }

    fn install(&mut self, session: Session, serial: u64) {
        let index = session.handle.0;
        if self.routes.len() <= index {
            self.routes.resize(index + 1, u64::MAX);
        }
        self.routes[index] = serial;
        self.hub.live += 1;
        self.hub.half_open += 1;
        self.sessions.insert(serial, session);
        self.soil(serial);
    }

    /// Note that a session has to be processed.
    pub fn soil(&mut self, serial: u64) {
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
                session.expire(&mut self.hub, now);
                any = true;
                self.soil(serial);
            } else {
                self.timers.arm(serial, &mut session.queued_timer, due);
            }
        }
        any
    }

    /// The next timer that is really due then: early entries are pushed back first.
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

    /// Process every session that was touched. True if one stopped at the budget.
    pub fn settle(&mut self, now: Instant, budget: usize) -> bool {
        self.let_go();
        let mut unfinished = false;
        for serial in std::mem::take(&mut self.dirty) {
            let Some(session) = self.sessions.get_mut(&serial) else {
                continue;
            };
            session.dirty = false;
            let more = session.process(&mut self.hub, now, budget);
            let timer = session.timer();
            self.timers.arm(serial, &mut session.queued_timer, timer);
            if session.over() {
                self.sessions.remove(&serial);
            } else if more {
                unfinished = true;
                self.soil(serial);
            }
        }
        unfinished
    }

    pub fn unfinished(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Act on grips that were dropped since.
    fn let_go(&mut self) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        while let Some(dropped) = shared.next_dropped() {
            self.forget(dropped);
        }
    }

    fn forget(&mut self, (serial, stream): Dropped) {
        let Some(session) = self.sessions.get_mut(&serial) else {
            return;
        };
        match stream {
            Some(id) => session.abandon(id),
            None => {
                session.dropped = true;
                let code = VarInt::from_u32(0);
                session.close(&mut self.hub, Instant::now(), code, "abandoned");
            }
        }
        self.soil(serial);
    }
}

/// A random number below `bound`, which is not 0. Others cannot predict it.
fn random_below(bound: usize) -> usize {
    let mut bytes = [0; 8];
    // Without randomness of the system any choice is as good as another.
    let _ = SystemRandom::new().fill(&mut bytes);
    (u64::from_ne_bytes(bytes) % bound as u64) as usize
}
