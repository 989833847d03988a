//! The streams of a session: opening, accepting, moving bytes, letting go.

use std::cmp::Reverse;
use std::sync::Arc;

use bytes::Bytes;
use quinn_proto::{Dir, Side, StreamId, VarInt, WriteError};

use crate::channel::{write_failure, Channel, Receive, Send, Write};
use crate::errors::Failure;
use crate::grip::StreamGrip;
use crate::op::{Op, Outcome, Value};
use crate::pool::Pool;
use crate::session::{Phase, Session};

/// Room in the protocol's send buffer that bulk leaves free, so that a small or urgent write is
/// taken at once and, the protocol sending by priority, leaves before the bulk queued ahead of it.
const RESERVE_BYTES: u64 = 1 << 20;
const SMALL_BYTES: usize = 64 << 10;

impl Session {
    /// The failure of everything that needs a living connection.
    pub fn alive(&self) -> Result<(), Failure> {
        if self.phase == Phase::Lost {
            return Err(self.loss());
        }
        Ok(())
    }

    pub fn loss(&self) -> Failure {
        let known = self.grip.upgrade().and_then(|g| g.lost.get().cloned());
        known.unwrap_or(Failure::Lost {
            kind: "closed",
            code: None,
            reason: String::new(),
        })
    }

    pub fn open(&mut self, dir: Dir) -> Option<Arc<StreamGrip>> {
        let id = self.connection.streams().open(dir)?;
        Some(self.adopt(id))
    }

    pub fn accept(&mut self, dir: Dir) -> Option<Arc<StreamGrip>> {
        let id = self.connection.streams().accept(dir)?;
        Some(self.adopt(id))
    }

    fn adopt(&mut self, id: StreamId) -> Arc<StreamGrip> {
        let ours = (id.initiator() == Side::Client) == self.connection.side().is_client();
        let both = id.dir() == Dir::Bi;
        self.channels
            .insert(id, Channel::new(id, both || ours, both || !ours));
        let connection = self.grip.upgrade().expect("held by whoever called");
        Arc::new(StreamGrip { connection, id })
    }

    pub fn serve_openers(&mut self, dir: Dir) {
        while !self.openers[dir as usize].is_empty() {
            let Some(grip) = self.open(dir) else { return };
            if let Some(op) = self.openers[dir as usize].pop_front() {
                op.complete(Ok(Value::Stream(grip)));
            }
        }
    }

    pub fn serve_acceptors(&mut self, dir: Dir) {
        while !self.acceptors[dir as usize].is_empty() {
            let Some(grip) = self.accept(dir) else { return };
            if let Some(op) = self.acceptors[dir as usize].pop_front() {
                op.complete(Ok(Value::Stream(grip)));
            }
        }
    }

    pub fn channel(&mut self, id: StreamId) -> Result<&mut Channel, Failure> {
        self.channels.get_mut(&id).ok_or(Failure::stream_closed())
    }

    /// Data, an end or a reset arrived.
    pub fn read(&mut self, id: StreamId) {
        let Some(channel) = self.channels.get_mut(&id) else {
            return;
        };
        if channel.dropped {
            channel.discard(&mut self.connection);
            self.tidy(id);
        } else {
            channel.fill(&mut self.connection);
        }
    }

    pub fn post_read(&mut self, id: StreamId, op: &Arc<Op>) -> Result<(), Failure> {
        let lost = self.alive().err();
        let channel = self.channels.get_mut(&id).ok_or(Failure::stream_closed())?;
        if channel.read.is_some() {
            return Err(Failure::Value(
                "a read is already posted on this stream".to_owned(),
            ));
        }
        channel.read = Some(op.clone());
        channel.fill(&mut self.connection);
        if let (Some(lost), true) = (lost, channel.read.is_some()) {
            channel.fail_receive(lost);
        }
        Ok(())
    }

    /// Copy `buffers`: into the protocol as far as it takes them, the rest into the queue.
    pub fn write(&mut self, id: StreamId, buffers: &[&[u8]]) -> Result<(), Failure> {
        self.alive()?;
        let channel = self.channels.get_mut(&id).ok_or(Failure::stream_closed())?;
        channel.writable()?;
        let total: usize = buffers.iter().map(|b| b.len()).sum();
        let urgent = channel.priority > 0 || total <= SMALL_BYTES;
        let mut direct = channel.writes.is_empty();
        if direct && urgent {
            let window = self.window.bytes + RESERVE_BYTES;
            self.connection.set_send_window(window);
        }
        let mut outcome = Ok(());
        for buffer in buffers {
            let mut taken = 0;
            while direct && taken < buffer.len() {
                match self.connection.send_stream(id).write(&buffer[taken..]) {
                    Ok(count) => taken += count,
                    Err(WriteError::Blocked) => direct = false,
                    Err(error) => {
                        outcome = Err(write_failure(error));
                        break;
                    }
                }
            }
            if taken < buffer.len() && outcome.is_ok() {
                let rest = Bytes::copy_from_slice(&buffer[taken..]);
                channel.queued += rest.len();
                channel.writes.push_back(Write::Copied(rest));
            }
        }
        self.connection.set_send_window(self.window.bytes);
        if !direct {
            self.sends(id);
        }
        outcome
    }

    pub fn post_write(&mut self, id: StreamId, op: &Arc<Op>) -> Result<(), Failure> {
        self.alive()?;
        let length = op.cell().buffer.as_ref().map_or(0, |b| b.len());
        let channel = self.channel(id)?;
        channel.writable()?;
        channel.queued += length;
        channel.writes.push_back(Write::Borrowed(op.clone()));
        self.sends(id);
        Ok(())
    }

    /// The stream has something queued.
    pub fn sends(&mut self, id: StreamId) {
        if !self.sending.contains(&id) {
            self.sending.push(id);
        }
    }

    pub fn finish(&mut self, id: StreamId) -> Result<(), Failure> {
        self.alive()?;
        let channel = self.channel(id)?;
        channel.writable()?;
        channel.send = Send::Finishing;
        self.sends(id);
        Ok(())
    }

    pub fn post_finished(&mut self, id: StreamId, op: &Arc<Op>) -> Result<(), Failure> {
        let lost = self.alive().err();
        let channel = self.channel(id)?;
        let outcome: Option<Outcome> = match (&channel.send, lost) {
            (Send::Acknowledged, _) => Some(Ok(Value::Nothing)),
            (Send::Dead(failure), _) => Some(Err(failure.clone())),
            (Send::Absent, _) => Some(Err(Failure::stream_closed())),
            (_, Some(lost)) => Some(Err(lost)),
            _ => None,
        };
        match outcome {
            Some(outcome) => op.complete(outcome),
            None => channel.finishers.push(op.clone()),
        }
        Ok(())
    }

    pub fn reset(&mut self, id: StreamId, code: VarInt) -> Result<(), Failure> {
        let channel = self.channels.get_mut(&id).ok_or(Failure::stream_closed())?;
        if matches!(channel.send, Send::Absent) {
            return Err(Failure::stream_closed());
        }
        channel.fail_send(Failure::stream_closed());
        let _ = self.connection.send_stream(id).reset(code);
        Ok(())
    }

    pub fn stop(&mut self, id: StreamId, code: VarInt) -> Result<(), Failure> {
        let channel = self.channels.get_mut(&id).ok_or(Failure::stream_closed())?;
        if matches!(channel.receive, Receive::Absent) {
            return Err(Failure::stream_closed());
        }
        if channel.receive == Receive::Open {
            let _ = self.connection.recv_stream(id).stop(code);
        }
        channel.fail_receive(Failure::stream_closed());
        Ok(())
    }

    pub fn prioritise(&mut self, id: StreamId, priority: i32) -> Result<(), Failure> {
        let channel = self.channels.get_mut(&id).ok_or(Failure::stream_closed())?;
        channel.priority = priority;
        if !matches!(channel.send, Send::Absent) {
            let _ = self.connection.send_stream(id).set_priority(priority);
        }
        Ok(())
    }

    /// Hand queued bytes to the protocol: the highest priority first, equals in turn. Returns how
    /// many, 0 if it takes none now.
    pub fn flush(&mut self, pool: &mut Pool, limit: usize) -> usize {
        if self.sending.is_empty() || self.phase == Phase::Lost {
            return 0;
        }
        if self.sending.len() > 1 {
            let channels = &self.channels;
            self.sending.retain(|id| channels.contains_key(id));
            self.sending.sort_by_key(|id| {
                let channel = &channels[id];
                (Reverse(channel.priority), channel.turn)
            });
        }
        let mut written = 0;
        let mut next = 0;
        while written == 0 && next < self.sending.len() {
            let id = self.sending[next];
            written = self.flush_one(id, pool, limit);
            match self.channels.get(&id) {
                Some(channel) if !channel.writes.is_empty() => next += 1,
                _ => {
                    self.sending.remove(next);
                    self.tidy(id);
                }
            }
        }
        written
    }

    fn flush_one(&mut self, id: StreamId, pool: &mut Pool, limit: usize) -> usize {
        let Some(channel) = self.channels.get_mut(&id) else {
            return 0;
        };
        self.turns += 1;
        channel.turn = self.turns;
        let urgent = channel.priority > 0 || channel.queued <= SMALL_BYTES;
        let reserve = if urgent { RESERVE_BYTES } else { 0 };
        self.connection.set_send_window(self.window.bytes + reserve);
        let written = channel.flush(&mut self.connection, pool, limit);
        self.connection.set_send_window(self.window.bytes);
        written
    }

    /// Nobody holds the stream: what was not finished is reset, what comes in is dropped.
    pub fn abandon(&mut self, id: StreamId) {
        let Some(channel) = self.channels.get_mut(&id) else {
            return;
        };
        channel.dropped = true;
        channel.discard(&mut self.connection);
        if channel.send == Send::Open {
            channel.fail_send(Failure::stream_closed());
            let _ = self.connection.send_stream(id).reset(VarInt::from_u32(0));
        }
        self.tidy(id);
    }

    pub fn tidy(&mut self, id: StreamId) {
        if self.channels.get(&id).is_some_and(|c| c.over()) {
            self.channels.remove(&id);
        }
    }
}
