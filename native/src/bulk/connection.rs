//! One TCP connection of a channel, owned by a worker: its handshake, then reading and writing without blocking.
//!
//! `unsafe`: reading into, and writing from, memory of transfers. The gate is held meanwhile.

use std::io::{self, ErrorKind};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use rustls::pki_types::ServerName;
use rustls::ClientConfig;

use super::buffers::{Input, Output};
use super::channel::Core;
use super::frame::{shortened, Frame, Hello, Welcome, CHUNK_BYTES, PREAMBLE};
use super::records::{Flow, Opened, Records, HANDSHAKE_BYTES, RECORD_BYTES};
use super::shared::{Counted, Shared, Unverified};
use super::socket::Socket;
use super::stream::{violation, Stream};
use super::transfers::Target;
use super::worker::Link;
use crate::runtime::descriptors::Ready;
use crate::runtime::errors::Failure;

/// What one read takes at most: with the answer to it, this fits the second-level cache.
const READ_BYTES: usize = 256 << 10;
/// Input of an encrypted connection: a read and the part of a record that was left.
const SEALED_INPUT: usize = READ_BYTES + RECORD_BYTES;
/// Input of a plain connection: headers, and what is reduced or discarded.
const PLAIN_INPUT: usize = READ_BYTES;
/// After a chunk has been read directly into its memory, so much of what follows is read with it.
const READ_AHEAD: usize = 4 << 10;
/// A connection lets the others of its worker run after so many rounds.
const ROUNDS: usize = 16;

pub struct Connection {
    socket: Socket,
    link: Link,
    shared: Arc<Shared>,
    address: String,
    /// The channel that this side dials.
    dialer: Option<Arc<Core>>,
    phase: Phase,
    deadline: Option<Instant>,
    /// None: before the preamble, and after the switch to plain.
    records: Option<Records>,
    input: Input,
    output: Output,
    readable: bool,
    writable: bool,
    hung_up: bool,
    _counted: Counted,
    unverified: Option<Unverified>,
}

enum Phase {
    /// The TCP connection is not established.
    Dialing(Dialed),
    /// The dialer's preamble has not arrived.
    Preamble,
    /// Until the hello, or the welcome, has arrived.
    Handshake(Role),
    Open(Stream),
}

enum Role {
    Dialer(Dialed),
    Acceptor,
}

/// What the dialer knows from the start.
pub struct Dialed {
    pub core: Arc<Core>,
    pub config: Arc<ClientConfig>,
    pub name: ServerName<'static>,
    /// None: it was sent.
    pub hello: Option<Hello>,
    pub index: usize,
    pub wants_plain: bool,
}

/// How far a connection came.
#[derive(PartialEq)]
pub enum Step {
    Waits,
    HasMore,
    /// Both sides have finished.
    Finished,
}

impl Connection {
    pub fn dial(
        shared: &Arc<Shared>,
        socket: Socket,
        link: Link,
        address: String,
        dialed: Dialed,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let mut connection = Connection::new(shared, socket, link, address, deadline)?;
        connection.dialer = Some(dialed.core.clone());
        connection.phase = Phase::Dialing(dialed);
        Ok(connection)
    }

    /// An accepted connection, whose peer is not verified.
    pub fn accept(
        shared: &Arc<Shared>,
        socket: Socket,
        link: Link,
        unverified: Unverified,
    ) -> Result<Self, Failure> {
        let address = socket.peer_address();
        let deadline = Instant::now() + shared.handshake_timeout;
        let mut connection = Connection::new(shared, socket, link, address, deadline)?;
        connection.unverified = Some(unverified);
        Ok(connection)
    }

    fn new(
        shared: &Arc<Shared>,
        socket: Socket,
        link: Link,
        address: String,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let counted = shared
            .count_connection()
            .ok_or_else(|| Failure::connect("too many connections"))?;
        Ok(Connection {
            socket,
            link,
            shared: shared.clone(),
            address,
            dialer: None,
            phase: Phase::Preamble,
            deadline: Some(deadline),
            records: None,
            input: Input::new(),
            output: Output::new(),
            readable: false,
            writable: false,
            hung_up: false,
            _counted: counted,
            unverified: None,
        })
    }

    pub fn descriptor(&self) -> RawFd {
        self.socket.raw()
    }

    /// When the handshake, and the channel, must be complete.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    pub fn is_late(&mut self, now: Instant) -> bool {
        if let Phase::Open(stream) = &self.phase {
            if stream.core.is_formed() {
                self.deadline = None;
            }
        }
        self.deadline.is_some_and(|deadline| deadline <= now)
    }

    pub fn waits_for(&self) -> &'static str {
        match &self.phase {
            Phase::Dialing(_) => "the TCP connection was not established in time",
            Phase::Preamble => "the preamble did not arrive in time",
            Phase::Handshake(_) => "the handshake was not complete in time",
            Phase::Open(_) => "the other connections of the channel were not established in time",
        }
    }

    pub fn became_ready(&mut self, ready: Ready) {
        self.readable |= ready.reading;
        self.writable |= ready.writing;
        self.hung_up |= ready.hung_up;
    }

    /// Reads, uses what was read, and writes, as long as possible.
    pub fn step(&mut self) -> Result<Step, Failure> {
        if let Phase::Dialing(_) = self.phase {
            if !self.writable {
                return Ok(Step::Waits);
            }
            self.begin_tls()?;
        }
        for _ in 0..ROUNDS {
            let read = self.read()?;
            self.use_input()?;
            let wrote = self.write()?;
            if let Phase::Open(stream) = &self.phase {
                if self.deadline.is_some() && stream.core.is_formed() {
                    self.deadline = None;
                }
                let sent = stream.finish_received
                    && self.output.is_empty()
                    && stream.core.finish_was_sent(stream.index);
                if sent {
                    return Ok(Step::Finished);
                }
            }
            if !read && !wrote {
                return Ok(Step::Waits);
            }
        }
        Ok(Step::HasMore)
    }

    // -- handshake ------------------------------------------------------------------------------------

    fn begin_tls(&mut self) -> Result<(), Failure> {
        let Phase::Dialing(dialed) = std::mem::replace(&mut self.phase, Phase::Preamble) else {
            return Ok(());
        };
        self.socket.connected().map_err(Failure::connect)?;
        self.output.push(PREAMBLE);
        let (config, name) = (dialed.config.clone(), dialed.name.clone());
        self.records = Some(Records::client(config, name)?);
        self.phase = Phase::Handshake(Role::Dialer(dialed));
        Ok(())
    }

    fn use_input(&mut self) -> Result<(), Failure> {
        if let Phase::Preamble = self.phase {
            if !self.take_preamble()? {
                return Ok(());
            }
        }
        if let Phase::Handshake(_) = self.phase {
            self.shake_hands().map_err(before_welcome)?;
        }
        if let Phase::Open(_) = self.phase {
            self.use_frames()?;
        }
        Ok(())
    }

    fn take_preamble(&mut self) -> Result<bool, Failure> {
        let filled = self.input.filled();
        let count = filled.len().min(PREAMBLE.len());
        if filled[..count] != PREAMBLE[..count] {
            return Err(Failure::connect("the connection is not a bulk connection"));
        }
        if count < PREAMBLE.len() {
            return Ok(false);
        }
        self.input.used(count);
        let config = self.shared.identity.lock().server.clone();
        self.records = Some(Records::server(config)?);
        self.phase = Phase::Handshake(Role::Acceptor);
        Ok(true)
    }

    fn shake_hands(&mut self) -> Result<(), Failure> {
        loop {
            let Some(records) = &mut self.records else {
                return Ok(());
            };
            let mut first = None;
            let opened = records.open(&mut self.input, &mut self.output, |record| {
                first = Some(record.to_vec());
                Ok(Flow::Stop)
            })?;
            if let Phase::Handshake(Role::Dialer(dialed)) = &mut self.phase {
                if records.established {
                    if let Some(hello) = dialed.hello.take() {
                        records.seal(&hello.encode(), &mut self.input, &mut self.output)?;
                    }
                }
            }
            match (first, opened) {
                (_, Opened::Closed) => {
                    return Err(Failure::connect("the peer closed the TLS connection"))
                }
                (None, _) => return Ok(()),
                (Some(record), _) if record.is_empty() => {}
                (Some(record), _) => return self.first_record(&record),
            }
        }
    }

    fn first_record(&mut self, record: &[u8]) -> Result<(), Failure> {
        let Phase::Handshake(role) = std::mem::replace(&mut self.phase, Phase::Preamble) else {
            return Ok(());
        };
        let certificate = self
            .records
            .as_ref()
            .and_then(|records| records.peer_certificate().map(|each| each.to_vec()))
            .ok_or_else(|| Failure::connect("the peer showed no certificate"))?;
        self.unverified = None;
        match role {
            Role::Dialer(dialed) => self.welcomed(dialed, &certificate, record),
            Role::Acceptor => self.greeted(&certificate, record),
        }
    }

    /// Dialer: the welcome has arrived.
    fn welcomed(
        &mut self,
        dialed: Dialed,
        certificate: &[u8],
        record: &[u8],
    ) -> Result<(), Failure> {
        let plain = match Welcome::parse(record).map_err(violation)? {
            Welcome::Accepted { plain } => plain,
            Welcome::Refused(reason) => {
                return Err(Failure::Connect {
                    kind: "refused",
                    reason,
                })
            }
        };
        if plain && !dialed.wants_plain {
            return Err(violation("the peer stops encrypting unasked"));
        }
        let core = dialed.core.clone();
        self.open(dialed.core, dialed.index, plain);
        core.join(certificate, plain).map_err(Failure::connect)
    }

    /// Acceptor: the hello has arrived. The welcome is the last encrypted record of a plain connection. The dialer is
    /// silent until it has come.
    fn greeted(&mut self, certificate: &[u8], record: &[u8]) -> Result<(), Failure> {
        let early = self.input.len();
        self.input.used(early); // TLS has not seen it, and must not: it is refused
        let attached = Hello::parse(record).and_then(|hello| {
            if early > 0 {
                return Err("data before the welcome");
            }
            let core = self.shared.channel_of(&hello, certificate)?;
            core.attach(usize::from(hello.index), self.link.clone())?;
            Ok((core, hello))
        });
        let plain = |hello: &Hello| hello.plain && self.shared.allow_plain;
        let welcome = match &attached {
            Ok((_, hello)) => Welcome::Accepted {
                plain: plain(hello),
            },
            Err(reason) => Welcome::Refused((*reason).to_owned()),
        };
        if let Some(records) = &mut self.records {
            records.seal(&welcome.encode(), &mut self.input, &mut self.output)?;
        }
        let (core, hello) = attached.map_err(Failure::connect)?;
        let plain = plain(&hello);
        self.open(core.clone(), usize::from(hello.index), plain);
        core.join(certificate, plain).map_err(Failure::connect)
    }

    /// From here on the connection carries frames.
    fn open(&mut self, core: Arc<Core>, index: usize, plain: bool) {
        match plain {
            true => self.records = None,
            false => self.input.grow(SEALED_INPUT),
        }
        self.phase = Phase::Open(Stream::new(core, index));
    }

    // -- reading --------------------------------------------------------------------------------------

    /// False: there is nothing to read now.
    fn read(&mut self) -> Result<bool, Failure> {
        if !self.readable {
            return Ok(false);
        }
        let plain = self.records.is_none();
        match &mut self.phase {
            Phase::Open(_) if plain => self.read_plain(),
            Phase::Open(_) => self.read_into_input(RECORD_BYTES, READ_BYTES, SEALED_INPUT),
            _ => self.read_into_input(4 << 10, HANDSHAKE_BYTES, HANDSHAKE_BYTES),
        }
    }

    /// Reads at most `most` bytes into the input, for which it makes space for at least `least`, up to `limit`.
    fn read_into_input(
        &mut self,
        least: usize,
        most: usize,
        limit: usize,
    ) -> Result<bool, Failure> {
        let space = self.input.space(least, limit);
        let wanted = space.len().min(most);
        if wanted == 0 {
            return Err(violation("a message that is too long"));
        }
        // SAFETY: an empty part and a buffer of ours.
        let result = unsafe { self.socket.read(nothing(), &mut space[..wanted]) };
        let count = self.have_read(result, wanted)?;
        self.input.filled_more(count);
        Ok(count > 0)
    }

    /// Reads the rest of a chunk directly into its memory, with what follows. The input is empty: all of it was used.
    fn read_plain(&mut self) -> Result<bool, Failure> {
        let Phase::Open(stream) = &mut self.phase else {
            return Ok(false);
        };
        let Some(incoming) = stream.incoming() else {
            return self.read_into_input(READ_AHEAD, READ_AHEAD, PLAIN_INPUT);
        };
        let left = incoming.left;
        let inbound = incoming.inbound.clone();
        let gate = inbound.gate.read();
        let Target::Memory(region) = &*gate else {
            drop(gate);
            let least = left.clamp(READ_AHEAD, PLAIN_INPUT);
            return self.read_into_input(least, PLAIN_INPUT, PLAIN_INPUT);
        };
        let part = region.part(incoming.at, left);
        let ahead = &mut self.input.space(READ_AHEAD, PLAIN_INPUT)[..READ_AHEAD];
        // SAFETY: memory of the transfer, and a buffer of ours. The gate is held.
        let result = unsafe { self.socket.read(part, ahead) };
        let placed = result.as_ref().map_or(0, |&count| count.min(left));
        incoming.advance(placed);
        drop(gate);
        stream.received(placed);
        let count = self.have_read(result, left + READ_AHEAD)?;
        self.input.filled_more(count - placed);
        Ok(count > 0)
    }

    /// The number of bytes read. A short read means that nothing more is there, unless the end follows.
    fn have_read(&mut self, result: io::Result<usize>, wanted: usize) -> Result<usize, Failure> {
        match result {
            Ok(0) => Err(self.end_of_input()),
            Ok(count) => {
                self.readable = count == wanted || self.hung_up;
                Ok(count)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(0)
            }
            Err(error) => Err(self.broken(&error)),
        }
    }

    fn end_of_input(&self) -> Failure {
        match &self.phase {
            Phase::Open(_) => Failure::Lost {
                kind: "peer_closed",
                code: None,
                reason: "the peer closed a connection".to_owned(),
            },
            _ => Failure::connect("the peer closed the connection during the handshake"),
        }
    }

    fn broken(&self, error: &io::Error) -> Failure {
        match &self.phase {
            Phase::Open(_) => Failure::Lost {
                kind: match error.kind() {
                    ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "reset",
                    ErrorKind::TimedOut => "timed_out",
                    _ => "fault",
                },
                code: None,
                reason: error.to_string(),
            },
            _ => Failure::connect(error),
        }
    }

    fn use_frames(&mut self) -> Result<(), Failure> {
        let Phase::Open(stream) = &mut self.phase else {
            return Ok(());
        };
        let Some(records) = &mut self.records else {
            let count = self.input.len();
            stream.take(self.input.filled())?;
            self.input.used(count);
            return Ok(());
        };
        let opened = records.open(&mut self.input, &mut self.output, |record| {
            stream.take(record).map(|()| Flow::More)
        })?;
        match opened {
            Opened::Closed => Err(self.end_of_input()),
            _ => Ok(()),
        }
    }

    // -- writing --------------------------------------------------------------------------------------

    /// False: nothing can be written now, or there is nothing.
    fn write(&mut self) -> Result<bool, Failure> {
        if !self.writable {
            return Ok(false);
        }
        if let Phase::Open(stream) = &mut self.phase {
            match &mut self.records {
                Some(records) => {
                    stream.fill_sealed(records, &mut self.input, &mut self.output)?;
                }
                None => stream.fill_plain(&mut self.output),
            }
            if stream.outgoing.is_some() {
                return self.write_chunk();
            }
        }
        if self.output.is_empty() {
            return Ok(false);
        }
        let wanted = self.output.len();
        // SAFETY: a buffer of ours and an empty part.
        let result = unsafe { self.socket.write(self.output.pending(), nothing()) };
        let count = self.have_written(result, wanted)?;
        self.output.written(count);
        Ok(count > 0)
    }

    /// Writes the output, then a chunk directly from its memory, or from a copy if it was withdrawn.
    fn write_chunk(&mut self) -> Result<bool, Failure> {
        let Phase::Open(stream) = &mut self.phase else {
            return Ok(false);
        };
        let Some(outgoing) = &stream.outgoing else {
            return Ok(false);
        };
        let (offset, length, sent) = (outgoing.offset, outgoing.length, outgoing.sent);
        let first = self.output.pending();
        let socket = &self.socket;
        let gate = outgoing.outbound.gate.read();
        let result = match &*gate {
            Some(region) => {
                let part = region.part(offset + sent as u64, length - sent);
                // SAFETY: a buffer of ours, and memory of the transfer. The gate is held.
                Some(unsafe { socket.write(first, part.cast_const()) })
            }
            None => outgoing.outbound.with_copy(offset, |copy| {
                // SAFETY: two buffers of ours.
                unsafe { socket.write(first, &raw const copy[sent..]) }
            }),
        };
        drop(gate);
        let Some(result) = result else {
            return Ok(false); // the channel has ended
        };
        let wanted = first.len() + length - sent;
        let before = first.len();
        let count = self.have_written(result, wanted)?;
        self.output.written(count.min(before));
        if let Phase::Open(stream) = &mut self.phase {
            stream.wrote(count.saturating_sub(before));
        }
        Ok(count > 0)
    }

    fn have_written(&mut self, result: io::Result<usize>, wanted: usize) -> Result<usize, Failure> {
        match result {
            Ok(count) => {
                self.writable = count == wanted;
                Ok(count)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.writable = false;
                Ok(0)
            }
            Err(error) => Err(self.broken(&error)),
        }
    }

    // -- the end --------------------------------------------------------------------------------------

    /// The channel ends for a reason of this side: tells the peer if that costs nothing.
    pub fn part(&mut self, reason: &str) {
        if let Phase::Open(stream) = &mut self.phase {
            let reason = shortened(reason);
            let abort = Frame::Abort {
                length: reason.len() as u32,
            };
            let message = [&abort.encode(), reason.as_bytes()].concat();
            match &mut self.records {
                Some(records) => {
                    let _ = records.seal(&message, &mut self.input, &mut self.output);
                }
                None if stream.outgoing.is_none() => self.output.push(&message),
                None => {}
            }
        }
        self.last_words();
    }

    /// After a failure: tells the peer why.
    pub fn say_why(&mut self, failure: &Failure) {
        match (&self.phase, failure) {
            (Phase::Open(_), Failure::Lost { kind, reason, .. }) if *kind == "protocol" => {
                let reason = format!("protocol violation: {reason}");
                self.part(&reason);
            }
            _ => {
                if let Some(records) = &mut self.records {
                    records.alert(&mut self.input, &mut self.output);
                }
                self.last_words();
            }
        }
    }

    fn last_words(&mut self) {
        if !self.output.is_empty() && self.output.len() <= 2 * CHUNK_BYTES as usize {
            // SAFETY: a buffer of ours and an empty part.
            let _ = unsafe { self.socket.write(self.output.pending(), nothing()) };
        }
        self.socket.shut_down();
    }

    /// The connection failed, and with it its channel.
    pub fn lost(&self, failure: &Failure) {
        if let Some(core) = &self.dialer {
            core.end(failure.clone());
        } else if let Phase::Open(stream) = &self.phase {
            let announced = stream.core.is_announced();
            stream.core.end(failure.clone());
            if !announced {
                self.shared.refuse(&self.address, failure.describe());
            }
        } else {
            self.shared.refuse(&self.address, failure.describe());
        }
    }

    pub fn finished(&mut self) {
        if let Phase::Open(stream) = &self.phase {
            stream.core.connection_finished(stream.index);
        }
        self.socket.shut_down();
    }
}

fn nothing() -> *mut [u8] {
    std::ptr::slice_from_raw_parts_mut(std::ptr::dangling_mut(), 0)
}

/// During the handshake everything that goes wrong is a failed connection.
fn before_welcome(failure: Failure) -> Failure {
    match failure {
        Failure::Lost { reason, .. } => Failure::connect(reason),
        other => other,
    }
}
