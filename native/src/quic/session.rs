//! One connection: the protocol's state machine and the operations posted on it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn_proto::{
    Connection, ConnectionError, ConnectionHandle as ProtocolHandle, Dir, Event, StreamEvent,
    StreamId, Transmit, VarInt,
};
use rustls::pki_types::CertificateDer;

use crate::quic::congestion::{self, SendWindow};
use crate::quic::endpoint_shared::{ClosePacket, EndpointCore};
use crate::quic::handles::{ConnectionHandle, PeerIdentity};
use crate::quic::handshakes::Source;
use crate::quic::operation::{OperationState, Value};
use crate::quic::stream_state::{stopped, StreamState};
use crate::runtime::errors::Failure;

/// Bytes passed to the protocol between two transmits: few enough to be in the cache still when
/// they are encrypted.
const CHUNK_BYTES: usize = 128 << 10;

#[derive(PartialEq, Clone, Copy)]
pub enum Phase {
    Handshaking,
    /// Dialed, and we have finished; the peer has yet to verify our certificate. It answers with
    /// HANDSHAKE_DONE, or closes.
    Confirming,
    Established,
    Lost,
}

pub struct Session {
    pub serial: u64,
    pub protocol_handle: ProtocolHandle,
    pub connection: Connection,
    pub phase: Phase,
    pub verify: bool,
    pub streams: HashMap<StreamId, StreamState>,
    /// Streams with queued writes.
    pub sending: Vec<StreamId>,
    pub flushes: u64,
    pub window: SendWindow,
    pub pending_opens: [VecDeque<Arc<OperationState>>; 2],
    pub pending_accepts: [VecDeque<Arc<OperationState>>; 2],
    pub pending_closed: Vec<Arc<OperationState>>,
    pub pending_connect: Option<Arc<OperationState>>,
    /// Held until the accepted connection is delivered: there is no other handle before.
    pub unaccepted: Option<Arc<ConnectionHandle>>,
    pub handle: Weak<ConnectionHandle>,
    /// A transmit for which the kernel's buffer was full.
    pub blocked: Option<(Transmit, Vec<u8>)>,
    pub close_packet: Option<ClosePacket>,
    closing: bool,
    pub queued_timer: Option<Instant>,
    pub handshake_deadline: Option<Instant>,
    /// In the list of sessions to process.
    pub dirty: bool,
    /// Packets arrived since `last_received` was updated.
    pub packets_arrived: bool,
    pub last_received: Instant,
    frames_received: u64,
    drained: bool,
    pub dropped: bool,
    /// The peer has the streams and windows of a verified peer.
    lifted: bool,
    /// Of an inbound connection whose peer has not authenticated.
    pub budget_unit: Option<BudgetUnit>,
}

/// The unit of the handshake budget that a connection has taken.
pub struct BudgetUnit {
    pub source: Source,
    /// Its source has proven its address and was charged.
    pub charged: bool,
}

impl Session {
    pub fn new(
        handle: &Arc<ConnectionHandle>,
        protocol_handle: ProtocolHandle,
        connection: Connection,
        verify: bool,
        send_window: u64,
        now: Instant,
        handshake_timeout: Duration,
    ) -> Self {
        Session {
            serial: handle.serial,
            protocol_handle,
            connection,
            phase: Phase::Handshaking,
            verify,
            streams: HashMap::new(),
            sending: Vec::new(),
            flushes: 0,
            window: SendWindow::new(send_window),
            pending_opens: Default::default(),
            pending_accepts: Default::default(),
            pending_closed: Vec::new(),
            pending_connect: None,
            unaccepted: None,
            handle: Arc::downgrade(handle),
            blocked: None,
            close_packet: None,
            closing: false,
            queued_timer: None,
            handshake_deadline: Some(now + handshake_timeout),
            dirty: false,
            packets_arrived: false,
            last_received: now,
            frames_received: 0,
            drained: false,
            dropped: false,
            lifted: false,
            budget_unit: None,
        }
    }

    /// Does what is due: completes operations, passes queued bytes to the protocol and packets to
    /// the socket. True if it stopped at the budget and more is to be done.
    pub fn process(
        &mut self,
        core: &mut EndpointCore,
        mut now: Instant,
        mut budget: usize,
    ) -> bool {
        if std::mem::take(&mut self.packets_arrived) {
            self.update_last_received(now);
            self.window.update(self.connection.rtt());
        }
        self.dispatch(core);
        if self.phase == Phase::Confirming {
            self.confirm(core);
        }
        loop {
            let written = self.flush(&mut core.pool, CHUNK_BYTES.min(budget));
            self.transmit(core, now);
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

    /// Updates `last_received`. The protocol counts frames only of packets that are authentic and
    /// new.
    fn update_last_received(&mut self, now: Instant) {
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
        if frames != self.frames_received {
            self.frames_received = frames;
            self.last_received = now;
        }
    }

    fn dispatch(&mut self, core: &mut EndpointCore) {
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
                Event::Connected => self.connected(core),
                Event::ConnectionLost { reason } => {
                    if let Some(id) = readable.take() {
                        self.read(id);
                    }
                    self.handle_loss(core, &reason);
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
            StreamEvent::Opened { dir } => self.complete_accepts(dir),
            StreamEvent::Available { dir } => self.complete_opens(dir),
            StreamEvent::Finished { id } => {
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.acknowledge();
                }
                self.remove_if_finished(id);
            }
            StreamEvent::Stopped { id, error_code } => {
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.fail_send(stopped(error_code));
                }
                // The peer waits for the end of the stream, which is now this reset.
                let _ = self.connection.send_stream(id).reset(error_code);
                self.remove_if_finished(id);
            }
            StreamEvent::Readable { .. } | StreamEvent::Writable { .. } => {}
        }
    }

    fn connected(&mut self, core: &mut EndpointCore) {
        if self.connection.side().is_client() {
            self.phase = Phase::Confirming;
            return;
        }
        let Some(handle) = self.unaccepted.take() else {
            return;
        };
        self.establish(core, &handle);
        core.deliver(handle);
    }

    fn confirm(&mut self, core: &mut EndpointCore) {
        if self.connection.stats().frame_rx.handshake_done == 0 {
            return;
        }
        if let Some(handle) = self.handle.upgrade() {
            self.establish(core, &handle);
            if let Some(op) = self.pending_connect.take() {
                op.complete(Ok(Value::Connection(handle)));
            }
        }
    }

    fn establish(&mut self, core: &mut EndpointCore, handle: &Arc<ConnectionHandle>) {
        let chain = self
            .connection
            .crypto_session()
            .peer_identity()
            .and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok());
        let certificate = chain.and_then(|chain| chain.first().map(|leaf| leaf.to_vec()));
        let verified = self.verify && certificate.is_some();
        let _ = handle.peer.set(PeerIdentity {
            certificate,
            verified,
        });
        self.phase = Phase::Established;
        self.handshake_deadline = None;
        core.half_open -= 1;
        core.handshakes.leave(self.serial);
        if verified {
            self.lift_limits(core);
        } else if let Some(budget_unit) = self
            .budget_unit
            .as_mut()
            .filter(|budget_unit| !budget_unit.charged)
        {
            budget_unit.charged = true;
            core.budget.charge(budget_unit.source, Instant::now());
        }
    }

    /// Gives the peer the streams and windows of a verified peer. A dialed connection has them from
    /// the start. Idempotent.
    pub fn lift_limits(&mut self, core: &mut EndpointCore) {
        if self.connection.side().is_server() && !std::mem::replace(&mut self.lifted, true) {
            core.settings.lift_limits(&mut self.connection);
        }
        if let Some(budget_unit) = self.budget_unit.take() {
            core.budget
                .refund(budget_unit.source, budget_unit.charged, Instant::now());
        }
    }

    /// Handles the loss of the connection.
    fn handle_loss(&mut self, core: &mut EndpointCore, error: &ConnectionError) {
        match self.phase {
            Phase::Lost => return,
            Phase::Established => return self.fail(core, Failure::lost(error)),
            Phase::Handshaking | Phase::Confirming => {}
        }
        let failure = Failure::handshake(error);
        if !self.connection.side().is_client() {
            core.refuse(self.connection.remote_address(), failure.describe());
        }
        self.fail(core, failure);
    }

    /// Fails all posted operations; reads get what has arrived first.
    pub fn fail(&mut self, core: &mut EndpointCore, failure: Failure) {
        if self.phase == Phase::Lost {
            return;
        }
        if self.phase != Phase::Established {
            core.half_open -= 1;
            core.handshakes.leave(self.serial);
        }
        self.phase = Phase::Lost;
        self.handshake_deadline = None;
        core.live -= 1;
        if let Some(handle) = self.handle.upgrade() {
            let _ = handle.lost.set(failure.clone());
        }
        for dir in [Dir::Bi, Dir::Uni] {
            self.complete_accepts(dir);
        }
        let mut ops: Vec<Arc<OperationState>> = self.pending_connect.take().into_iter().collect();
        ops.append(&mut self.pending_closed);
        for list in self
            .pending_opens
            .iter_mut()
            .chain(&mut self.pending_accepts)
        {
            ops.extend(list.drain(..));
        }
        for op in ops {
            op.complete(Err(failure.clone()));
        }
        for stream in self.streams.values_mut() {
            stream.fill(&mut self.connection);
            if stream.read.is_some() {
                stream.fail_receive(failure.clone());
            }
            stream.fail_send(failure.clone());
        }
        self.sending.clear();
        self.unaccepted = None;
    }

    /// Closes the connection from our side, at once.
    pub fn close(&mut self, core: &mut EndpointCore, now: Instant, code: VarInt, reason: &str) {
        let text = Bytes::copy_from_slice(reason.as_bytes());
        congestion::lift_window(&self.connection);
        self.connection.close(now, code, text);
        self.closing = true;
        self.blocked = None; // data that the peer will not read must not delay the close packet
        self.fail(
            core,
            Failure::Lost {
                kind: "closed",
                code: Some(code.into_inner()),
                reason: reason.to_owned(),
            },
        );
    }

    /// Sends the packets that the protocol has ready, until the kernel's buffer is full.
    fn transmit(&mut self, core: &mut EndpointCore, now: Instant) {
        loop {
            if self.send_packets(core, now) {
                return;
            }
            let mut again = false;
            while let Some(event) = self.connection.poll_endpoint_events() {
                self.drained |= event.is_drained();
                if let Some(answer) = core.endpoint.handle_event(self.protocol_handle, event) {
                    self.connection.handle_event(answer);
                    again = true;
                }
            }
            if !again {
                return;
            }
        }
    }

    /// True if the kernel's buffer is full; the rest is sent when the socket is writable.
    fn send_packets(&mut self, core: &mut EndpointCore, now: Instant) -> bool {
        if let Some((transmit, contents)) = self.blocked.take() {
            if self.closing {
                self.close_packet = Some(ClosePacket::of(&transmit, &contents));
            }
            if !core.send(&transmit, &contents) {
                self.blocked = Some((transmit, contents));
                core.blocked.push(self.serial);
                return true;
            }
        }
        loop {
            let mut contents = std::mem::take(&mut core.scratch);
            contents.clear();
            let segments = core.segments(self.connection.current_mtu());
            let transmit = self.connection.poll_transmit(now, segments, &mut contents);
            let Some(transmit) = transmit else {
                core.scratch = contents;
                return false;
            };
            if self.closing {
                self.close_packet = Some(ClosePacket::of(&transmit, &contents));
            }
            if !core.send(&transmit, &contents) {
                self.blocked = Some((transmit, contents));
                core.blocked.push(self.serial);
                return true;
            }
            core.scratch = contents;
        }
    }

    /// When the session is due next.
    pub fn timer(&mut self) -> Option<Instant> {
        let own = self.connection.poll_timeout();
        match (own, self.handshake_deadline) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    pub fn expire(&mut self, core: &mut EndpointCore, now: Instant) {
        if self.handshake_deadline.is_some_and(|at| at <= now) {
            self.connection
                .close(now, VarInt::from_u32(0), Bytes::new());
            self.handle_loss(core, &ConnectionError::TimedOut);
        }
        self.connection.handle_timeout(now);
    }

    /// Whether no handle is left and the protocol has finished with the connection.
    pub fn is_finished(&self) -> bool {
        self.drained && self.dropped
    }
}
