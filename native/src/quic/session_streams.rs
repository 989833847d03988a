//! The streams of a session: opening, accepting, reading, writing, abandoning.

use std::cmp::Reverse;
use std::sync::Arc;

use bytes::Bytes;
use quinn_proto::{Dir, Side, StreamId, VarInt, WriteError};

use crate::quic::handles::StreamHandle;
use crate::quic::operation::{OperationState, Outcome, Value};
use crate::quic::session::{Phase, Session};
use crate::quic::socket::BufferPool;
use crate::quic::stream_state::{write_failure, QueuedWrite, ReceiveState, SendState, StreamState};
use crate::runtime::errors::Failure;

/// Part of the protocol's send buffer that bulk data leaves free. So the protocol takes a small or
/// urgent write at once and, because it sends by priority, before the bulk data that is queued
/// already.
const RESERVE_BYTES: u64 = 1 << 20;
const SMALL_BYTES: usize = 64 << 10;

impl Session {
    /// The failure of operations that need a connection, if it is lost.
    pub fn alive(&self) -> Result<(), Failure> {
        if self.phase == Phase::Lost {
            return Err(self.loss());
        }
        Ok(())
    }

    pub fn loss(&self) -> Failure {
        let known = self.handle.upgrade().and_then(|g| g.lost.get().cloned());
        known.unwrap_or(Failure::Lost {
            kind: "closed",
            code: None,
            reason: String::new(),
        })
    }

    pub fn open(&mut self, dir: Dir) -> Option<Arc<StreamHandle>> {
        let id = self.connection.streams().open(dir)?;
        Some(self.add_stream(id))
    }

    pub fn accept(&mut self, dir: Dir) -> Option<Arc<StreamHandle>> {
        let id = self.connection.streams().accept(dir)?;
        Some(self.add_stream(id))
    }

    fn add_stream(&mut self, id: StreamId) -> Arc<StreamHandle> {
        let ours = (id.initiator() == Side::Client) == self.connection.side().is_client();
        let both = id.dir() == Dir::Bi;
        self.streams
            .insert(id, StreamState::new(id, both || ours, both || !ours));
        let connection = self.handle.upgrade().expect("the caller holds a handle");
        Arc::new(StreamHandle { connection, id })
    }

    pub fn complete_opens(&mut self, dir: Dir) {
        while !self.pending_opens[dir as usize].is_empty() {
            let Some(handle) = self.open(dir) else { return };
            if let Some(op) = self.pending_opens[dir as usize].pop_front() {
                op.complete(Ok(Value::Stream(handle)));
            }
        }
    }

    pub fn complete_accepts(&mut self, dir: Dir) {
        while !self.pending_accepts[dir as usize].is_empty() {
            let Some(handle) = self.accept(dir) else {
                return;
            };
            if let Some(op) = self.pending_accepts[dir as usize].pop_front() {
                op.complete(Ok(Value::Stream(handle)));
            }
        }
    }

    pub fn stream(&mut self, id: StreamId) -> Result<&mut StreamState, Failure> {
        self.streams.get_mut(&id).ok_or(Failure::stream_closed())
    }

    /// Handles data, an end or a reset that arrived.
    pub fn read(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        if stream.dropped {
            stream.discard(&mut self.connection);
            self.remove_if_finished(id);
        } else {
            stream.fill(&mut self.connection);
        }
    }

    pub fn post_read(&mut self, id: StreamId, op: &Arc<OperationState>) -> Result<(), Failure> {
        let lost = self.alive().err();
        let stream = self.streams.get_mut(&id).ok_or(Failure::stream_closed())?;
        if stream.read.is_some() {
            return Err(Failure::Value(
                "a read is already posted on this stream".to_owned(),
            ));
        }
        stream.read = Some(op.clone());
        stream.fill(&mut self.connection);
        if let (Some(lost), true) = (lost, stream.read.is_some()) {
            stream.fail_receive(lost);
        }
        Ok(())
    }

    /// Copies `buffers` into the protocol as far as it takes them, and the rest into the queue.
    pub fn write(&mut self, id: StreamId, buffers: &[&[u8]]) -> Result<(), Failure> {
        self.alive()?;
        let stream = self.streams.get_mut(&id).ok_or(Failure::stream_closed())?;
        stream.writable()?;
        let total: usize = buffers.iter().map(|b| b.len()).sum();
        let urgent = stream.priority > 0 || total <= SMALL_BYTES;
        let mut direct = stream.writes.is_empty();
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
                stream.queued += rest.len();
                stream.writes.push_back(QueuedWrite::Copied(rest));
            }
        }
        self.connection.set_send_window(self.window.bytes);
        if !direct {
            self.mark_sending(id);
        }
        outcome
    }

    pub fn post_write(&mut self, id: StreamId, op: &Arc<OperationState>) -> Result<(), Failure> {
        self.alive()?;
        let length = op.cell().buffer.as_ref().map_or(0, |b| b.len());
        let stream = self.stream(id)?;
        stream.writable()?;
        stream.queued += length;
        stream.writes.push_back(QueuedWrite::Borrowed(op.clone()));
        self.mark_sending(id);
        Ok(())
    }

    /// Marks a stream that has queued bytes.
    pub fn mark_sending(&mut self, id: StreamId) {
        if !self.sending.contains(&id) {
            self.sending.push(id);
        }
    }

    pub fn finish(&mut self, id: StreamId) -> Result<(), Failure> {
        self.alive()?;
        let stream = self.stream(id)?;
        stream.writable()?;
        stream.send = SendState::Finishing;
        self.mark_sending(id);
        Ok(())
    }

    pub fn post_finished(&mut self, id: StreamId, op: &Arc<OperationState>) -> Result<(), Failure> {
        let lost = self.alive().err();
        let stream = self.stream(id)?;
        let outcome: Option<Outcome> = match (&stream.send, lost) {
            (SendState::Acknowledged, _) => Some(Ok(Value::Nothing)),
            (SendState::Failed(failure), _) => Some(Err(failure.clone())),
            (SendState::Absent, _) => Some(Err(Failure::stream_closed())),
            (_, Some(lost)) => Some(Err(lost)),
            _ => None,
        };
        match outcome {
            Some(outcome) => op.complete(outcome),
            None => stream.pending_finished.push(op.clone()),
        }
        Ok(())
    }

    pub fn reset(&mut self, id: StreamId, code: VarInt) -> Result<(), Failure> {
        let stream = self.streams.get_mut(&id).ok_or(Failure::stream_closed())?;
        if matches!(stream.send, SendState::Absent) {
            return Err(Failure::stream_closed());
        }
        stream.fail_send(Failure::stream_closed());
        let _ = self.connection.send_stream(id).reset(code);
        Ok(())
    }

    pub fn stop(&mut self, id: StreamId, code: VarInt) -> Result<(), Failure> {
        let stream = self.streams.get_mut(&id).ok_or(Failure::stream_closed())?;
        if matches!(stream.receive, ReceiveState::Absent) {
            return Err(Failure::stream_closed());
        }
        if stream.receive == ReceiveState::Open {
            let _ = self.connection.recv_stream(id).stop(code);
        }
        stream.fail_receive(Failure::stream_closed());
        Ok(())
    }

    pub fn prioritise(&mut self, id: StreamId, priority: i32) -> Result<(), Failure> {
        let stream = self.streams.get_mut(&id).ok_or(Failure::stream_closed())?;
        stream.priority = priority;
        if !matches!(stream.send, SendState::Absent) {
            let _ = self.connection.send_stream(id).set_priority(priority);
        }
        Ok(())
    }

    /// Passes queued bytes to the protocol: the highest priority first, streams of equal priority
    /// in turn. Returns how many; 0 if the protocol takes none now.
    pub fn flush(&mut self, pool: &mut BufferPool, limit: usize) -> usize {
        if self.sending.is_empty() || self.phase == Phase::Lost {
            return 0;
        }
        if self.sending.len() > 1 {
            let streams = &self.streams;
            self.sending.retain(|id| streams.contains_key(id));
            self.sending.sort_by_key(|id| {
                let stream = &streams[id];
                (Reverse(stream.priority), stream.last_flush)
            });
        }
        let mut written = 0;
        let mut next = 0;
        while written == 0 && next < self.sending.len() {
            let id = self.sending[next];
            written = self.flush_one(id, pool, limit);
            match self.streams.get(&id) {
                Some(stream) if !stream.writes.is_empty() => next += 1,
                _ => {
                    self.sending.remove(next);
                    self.remove_if_finished(id);
                }
            }
        }
        written
    }

    fn flush_one(&mut self, id: StreamId, pool: &mut BufferPool, limit: usize) -> usize {
        let Some(stream) = self.streams.get_mut(&id) else {
            return 0;
        };
        self.flushes += 1;
        stream.last_flush = self.flushes;
        let urgent = stream.priority > 0 || stream.queued <= SMALL_BYTES;
        let reserve = if urgent { RESERVE_BYTES } else { 0 };
        self.connection.set_send_window(self.window.bytes + reserve);
        let written = stream.flush(&mut self.connection, pool, limit);
        self.connection.set_send_window(self.window.bytes);
        written
    }

    /// Abandons a stream without a handle: it is reset unless it was finished, and incoming data is
    /// dropped.
    pub fn abandon(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.dropped = true;
        stream.discard(&mut self.connection);
        if stream.send == SendState::Open {
            stream.fail_send(Failure::stream_closed());
            let _ = self.connection.send_stream(id).reset(VarInt::from_u32(0));
        }
        self.remove_if_finished(id);
    }

    pub fn remove_if_finished(&mut self, id: StreamId) {
        if self.streams.get(&id).is_some_and(|c| c.is_finished()) {
            self.streams.remove(&id);
        }
    }
}
