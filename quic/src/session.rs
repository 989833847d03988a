//! One connection, as the driver sees it: the protocol's state machine and what is posted on it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn_proto::{
    Connection, ConnectionError, ConnectionHandle, Dir, Event, StreamEvent, StreamId, Transmit,
    VarInt,
};
use rustls::pki_types::CertificateDer;

use crate::channel::{stopped, Channel};
use crate::errors::Failure;
use crate::farewell::Farewell;
use crate::governor;
use crate::grip::{ConnectionGrip, PeerIdentity};
use crate::handshakes::Source;
use crate::hub::Hub;
use crate::op::{Op, Value};
use crate::window::Window;

/// Bytes handed to the protocol between two transmits: small enough to still be in the cache when
/// they are encrypted.
const CHUNK_BYTES: usize = 128 << 10;

#[derive(PartialEq, Clone, Copy)]
pub enum Phase {
    Handshaking,
    /// Dialed, and through for us; the peer has yet to judge our certificate. It tells by
    /// HANDSHAKE_DONE, or by closing.
    Confirming,
    Established,
    Lost,
}

pub struct Session {
    pub serial: u64,
    pub handle: ConnectionHandle,
    pub connection: Connection,
    pub phase: Phase,
    pub verify: bool,
    pub channels: HashMap<StreamId, Channel>,
    /// Streams with queued writes.
    pub sending: Vec<StreamId>,
    pub turns: u64,
    pub window: Window,
    pub openers: [VecDeque<Arc<Op>>; 2],
    pub acceptors: [VecDeque<Arc<Op>>; 2],
    pub closers: Vec<Arc<Op>>,
    pub connector: Option<Arc<Op>>,
    /// Held while nobody else can hold it: until an accepted connection is handed out.
    pub hold: Option<Arc<ConnectionGrip>>,
    pub grip: Weak<ConnectionGrip>,
    /// A transmit the kernel had no room for.
    pub blocked: Option<(Transmit, Vec<u8>)>,
    pub farewell: Option<Farewell>,
    closing: bool,
    pub queued_timer: Option<Instant>,
    pub handshake_deadline: Option<Instant>,
    /// In the driver's list of sessions to process.
    pub dirty: bool,
    /// Datagrams were fed in since `heard` was last brought up to date.
    pub fed: bool,
    pub heard: Instant,
    frames_heard: u64,
    drained: bool,
    pub dropped: bool,
    /// The peer has the streams and windows of a verified one.
    lifted: bool,
    /// Of an inbound connection whose peer has not authenticated.
    pub toll: Option<Toll>,
}

/// The unit of the handshake budget that a connection has taken.
pub struct Toll {
    pub source: Source,
    /// It counts as taken by its source, which has proven its address.
    pub blamed: bool,
}

impl Session {
    pub fn new(
        grip: &Arc<ConnectionGrip>,
        handle: ConnectionHandle,
        connection: Connection,
        verify: bool,
        send_window: u64,
        now: Instant,
        handshake_timeout: Duration,
    ) -> Self {
        Session {
            serial: grip.serial,
            handle,
            connection,
            phase: Phase::Handshaking,
            verify,
            channels: HashMap::new(),
            sending: Vec::new(),
            turns: 0,
            window: Window::new(send_window),
            openers: Default::default(),
            acceptors: Default::default(),
            closers: Vec::new(),
            connector: None,
            hold: None,
            grip: Arc::downgrade(grip),
            blocked: None,
            farewell: None,
            closing: false,
            queued_timer: None,
            handshake_deadline: Some(now + handshake_timeout),
            dirty: false,
            fed: false,
            heard: now,
            frames_heard: 0,
            drained: false,
            dropped: false,
            lifted: false,
            toll: None,
        }
    }

    /// Everything due: events to operations, queued bytes to the protocol, packets to the socket.
    /// True if it stopped at the budget and there is more to do.
    pub fn process(&mut self, hub: &mut Hub, mut now: Instant, mut budget: usize) -> bool {
        if std::mem::take(&mut self.fed) {
            self.listen(now);
            self.window.fit(self.connection.rtt());
        }
        self.dispatch(hub);
        if self.phase == Phase::Confirming {
            self.confirm(hub);
        }
        loop {
            let written = self.flush(&mut hub.pool, CHUNK_BYTES.min(budget));
            self.transmit(hub, now);
            if written == 0 {
                return false;
            }
            budget = budget.saturating_sub(written);
            if budget == 0 {
                return true;
            }
            now = Instant::now();
        }
    }

    /// Only packets that passed authentication, and were not heard before, count frames.
    fn listen(&mut self, now: Instant) {
        let f = self.connection.stats().frame_rx;
        let frames = f.acks
            + f.stream
            + f.ping
            + f.crypto
            + f.max_data
            + f.max_stream_data
            + f.max_streams_bidi
            + f.max_streams_uni
            + f.data_blocked
            + f.stream_data_blocked
            + f.streams_blocked_bidi
            + f.streams_blocked_uni
            + f.new_connection_id
            + f.retire_connection_id
            + f.path_challenge
            + f.path_response
            + f.reset_stream
            + f.stop_sending
            + f.new_token
            + f.ack_frequency
            + f.immediate_ack
            + f.connection_close
            + f.datagram
            + u64::from(f.handshake_done);
        if frames != self.frames_heard {
            self.frames_heard = frames;
            self.heard = now;
        }
    }

    fn dispatch(&mut self, hub: &mut Hub) {
        let mut readable: Option<StreamId> = None;
        while let Some(event) = self.connection.poll() {
            match event {
                // Frames of one stream come in runs: read once per run.
                Event::Stream(StreamEvent::Readable { id }) => {
                    if let Some(before) = readable.replace(id).filter(|&before| before != id) {
                        self.read(before);
                    }
                }
                Event::Stream(event) => self.stream_event(event),
                Event::Connected => self.connected(hub),
                Event::ConnectionLost { reason } => {
                    if let Some(id) = readable.take() {
                        self.read(id);
                    }
                    self.lose(hub, &reason);
                }
                Event::HandshakeDataReady | Event::DatagramReceived | Event::DatagramsUnblocked => {
                }
            }
        }
        if let Some(id) = readable {
            self.read(id);
        }
    }

    fn stream_event(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::Opened { dir } => self.serve_acceptors(dir),
            StreamEvent::Available { dir } => self.serve_openers(dir),
            StreamEvent::Finished { id } => {
                if let Some(channel) = self.channels.get_mut(&id) {
                    channel.acknowledge();
                }
                self.tidy(id);
            }
            StreamEvent::Stopped { id, error_code } => {
                if let Some(channel) = self.channels.get_mut(&id) {
                    channel.fail_send(stopped(error_code));
                }
                // The peer waits for the stream's end, which is now this.
                let _ = self.connection.send_stream(id).reset(error_code);
                self.tidy(id);
            }
            StreamEvent::Readable { .. } | StreamEvent::Writable { .. } => {}
        }
    }

    fn connected(&mut self, hub: &mut Hub) {
        if self.connection.side().is_client() {
            self.phase = Phase::Confirming;
            return;
        }
        let Some(grip) = self.hold.take() else { return };
        self.establish(hub, &grip);
        hub.deliver(grip);
    }

    fn confirm(&mut self, hub: &mut Hub) {
        if self.connection.stats().frame_rx.handshake_done == 0 {
            return;
        }
        if let Some(grip) = self.grip.upgrade() {
            self.establish(hub, &grip);
            if let Some(op) = self.connector.take() {
                op.complete(Ok(Value::Connection(grip)));
            }
        }
    }

    fn establish(&mut self, hub: &mut Hub, grip: &Arc<ConnectionGrip>) {
        let chain = self
            .connection
            .crypto_session()
            .peer_identity()
            .and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
        let certificate = chain.and_then(|chain| chain.first().map(|leaf| leaf.to_vec()));
        let verified = self.verify && certificate.is_some();
        let _ = grip.peer.set(PeerIdentity {
            certificate,
            verified,
        });
        self.phase = Phase::Established;
        self.handshake_deadline = None;
        hub.half_open -= 1;
        hub.handshakes.leave(self.serial);
        if verified {
            self.lift_limits(hub);
        } else if let Some(toll) = self.toll.as_mut().filter(|toll| !toll.blamed) {
            toll.blamed = true;
            hub.budget.blame(toll.source, Instant::now());
        }
    }

    /// The peer is trusted: it gets the streams and windows of a verified one. A dialed connection has
    /// them from the start. Idempotent.
    pub fn lift_limits(&mut self, hub: &mut Hub) {
        if self.connection.side().is_server() && !std::mem::replace(&mut self.lifted, true) {
            hub.settings.lift_limits(&mut self.connection);
        }
        if let Some(toll) = self.toll.take() {
            hub.budget
                .give_back(toll.source, toll.blamed, Instant::now());
        }
    }

    /// The protocol says that the connection is gone.
    fn lose(&mut self, hub: &mut Hub, error: &ConnectionError) {
        match self.phase {
            Phase::Lost => return,
            Phase::Established => return self.fail(hub, Failure::lost(error)),
            Phase::Handshaking | Phase::Confirming => {}
        }
        let failure = Failure::handshake(error);
        if !self.connection.side().is_client() {
            hub.refuse(self.connection.remote_address(), failure.describe());
        }
        self.fail(hub, failure);
    }

    /// Everything posted fails; reads first get what has arrived.
    pub fn fail(&mut self, hub: &mut Hub, failure: Failure) {
        if self.phase == Phase::Lost {
            return;
        }
        if self.phase != Phase::Established {
            hub.half_open -= 1;
            hub.handshakes.leave(self.serial);
        }
        self.phase = Phase::Lost;
        self.handshake_deadline = None;
        hub.live -= 1;
        if let Some(grip) = self.grip.upgrade() {
            let _ = grip.lost.set(failure.clone());
        }
        for dir in [Dir::Bi, Dir::Uni] {
            self.serve_acceptors(dir);
        }
        let mut orphans: Vec<Arc<Op>> = self.connector.take().into_iter().collect();
        orphans.append(&mut self.closers);
        for list in self.openers.iter_mut().chain(&mut self.acceptors) {
            orphans.extend(list.drain(..));
        }
        for op in orphans {
            op.complete(Err(failure.clone()));
        }
        for channel in self.channels.values_mut() {
            channel.fill(&mut self.connection);
            if channel.read.is_some() {
                channel.fail_receive(failure.clone());
            }
            channel.fail_send(failure.clone());
        }
        self.sending.clear();
        self.hold = None;
    }

    /// Close from our side, at once.
    pub fn close(&mut self, hub: &mut Hub, now: Instant, code: VarInt, reason: &str) {
        let text = Bytes::copy_from_slice(reason.as_bytes());
        governor::lift(&self.connection);
        self.connection.close(now, code, text);
        self.closing = true;
        self.blocked = None; // data that the peer will not read any more must not keep the word from leaving
        self.fail(
            hub,
            Failure::Lost {
                kind: "closed",
                code: Some(code.into_inner()),
                reason: reason.to_owned(),
            },
        );
    }

    /// Send every packet the protocol has ready, as long as the kernel takes them.
    fn transmit(&mut self, hub: &mut Hub, now: Instant) {
        loop {
            if self.send_packets(hub, now) {
                return;
            }
            let mut again = false;
            while let Some(event) = self.connection.poll_endpoint_events() {
                self.drained |= event.is_drained();
                if let Some(answer) = hub.endpoint.handle_event(self.handle, event) {
                    self.connection.handle_event(answer);
                    again = true;
                }
            }
            if !again {
                return;
            }
        }
    }

    /// True if the kernel's buffer is full; the rest goes when the socket is writable again.
    fn send_packets(&mut self, hub: &mut Hub, now: Instant) -> bool {
        if let Some((transmit, contents)) = self.blocked.take() {
            if self.closing {
                self.farewell = Some(Farewell::of(&transmit, &contents));
            }
            if !hub.send(&transmit, &contents) {
                self.blocked = Some((transmit, contents));
                hub.blocked.push(self.serial);
                return true;
            }
        }
        loop {
            let mut contents = std::mem::take(&mut hub.scratch);
            contents.clear();
            let segments = hub.segments(self.connection.current_mtu());
            let transmit = self.connection.poll_transmit(now, segments, &mut contents);
            let Some(transmit) = transmit else {
                hub.scratch = contents;
                return false;
            };
            if self.closing {
                self.farewell = Some(Farewell::of(&transmit, &contents));
            }
            if !hub.send(&transmit, &contents) {
                self.blocked = Some((transmit, contents));
                hub.blocked.push(self.serial);
                return true;
            }
            hub.scratch = contents;
        }
    }

    /// When it wants to be looked at next.
    pub fn timer(&mut self) -> Option<Instant> {
        let own = self.connection.poll_timeout();
        match (own, self.handshake_deadline) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    pub fn expire(&mut self, hub: &mut Hub, now: Instant) {
        if self.handshake_deadline.is_some_and(|at| at <= now) {
            self.connection
                .close(now, VarInt::from_u32(0), Bytes::new());
            self.lose(hub, &ConnectionError::TimedOut);
        }
        self.connection.handle_timeout(now);
    }

    /// Nobody holds it and the protocol is through with it.
    pub fn over(&self) -> bool {
        self.drained && self.dropped
    }
}
