//! The state of one stream: the posted operations, and its sending and receiving half.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Buf, Bytes};
use quinn_proto::{Connection, FinishError, ReadError, StreamId, VarInt, WriteError};

use crate::quic::operation::{OperationState, Outcome, Value};
use crate::quic::socket::BufferPool;
use crate::runtime::errors::Failure;

/// Borrowed buffers are copied in pieces of this size.
pub const STAGE_BYTES: usize = 64 << 10;

/// Bytes not yet passed to the protocol.
pub enum QueuedWrite {
    Copied(Bytes),
    Borrowed(Arc<OperationState>),
}

/// The sending half.
#[derive(PartialEq)]
pub enum SendState {
    /// The peer's unidirectional stream has no sending half.
    Absent,
    Open,
    /// `finish()` was called. The end is passed to the protocol after all queued bytes.
    Finishing,
    /// The protocol has the end; the peer has not acknowledged all bytes.
    Finished,
    Acknowledged,
    Failed(Failure),
}

/// The receiving half.
#[derive(PartialEq)]
pub enum ReceiveState {
    Absent,
    Open,
    Ended,
    Failed(Failure),
}

pub struct StreamState {
    pub id: StreamId,
    pub priority: i32,
    /// Number of its last flush: streams of the same priority take turns.
    pub last_flush: u64,
    pub writes: VecDeque<QueuedWrite>,
    pub queued: usize,
    pub send: SendState,
    pub receive: ReceiveState,
    pub read: Option<Arc<OperationState>>,
    pub pending_finished: Vec<Arc<OperationState>>,
    /// No handle is left.
    pub dropped: bool,
}

impl StreamState {
    pub fn new(id: StreamId, sends: bool, receives: bool) -> Self {
        StreamState {
            id,
            priority: 0,
            last_flush: 0,
            writes: VecDeque::new(),
            queued: 0,
            send: if sends {
                SendState::Open
            } else {
                SendState::Absent
            },
            receive: if receives {
                ReceiveState::Open
            } else {
                ReceiveState::Absent
            },
            read: None,
            pending_finished: Vec::new(),
            dropped: false,
        }
    }

    /// Whether bytes may still be written; else the failure.
    pub fn writable(&self) -> Result<(), Failure> {
        match &self.send {
            SendState::Open => Ok(()),
            SendState::Failed(failure) => Err(failure.clone()),
            _ => Err(Failure::stream_closed()),
        }
    }

    /// Passes up to `limit` queued bytes to the protocol. Returns how many; 0 if none.
    pub fn flush(
        &mut self,
        connection: &mut Connection,
        pool: &mut BufferPool,
        limit: usize,
    ) -> usize {
        let mut total = 0;
        while total < limit {
            self.stage(pool);
            let Some(QueuedWrite::Copied(bytes)) = self.writes.front_mut() else {
                break;
            };
            let part = bytes.slice(..bytes.len().min(limit - total));
            match connection.send_stream(self.id).write_chunks(&mut [part]) {
                Ok(written) => {
                    total += written.bytes;
                    self.queued -= written.bytes;
                    bytes.advance(written.bytes);
                    if bytes.is_empty() {
                        self.writes.pop_front();
                    }
                }
                Err(WriteError::Blocked) => break,
                Err(error) => {
                    self.fail_send(write_failure(error));
                    break;
                }
            }
        }
        self.end(connection);
        total
    }

    /// Copies the next piece of a borrowed buffer if it is first in the queue. The piece stays
    /// first until the protocol has taken it, so a blocked stream copies nothing twice.
    fn stage(&mut self, pool: &mut BufferPool) {
        while let Some(QueuedWrite::Borrowed(op)) = self.writes.front() {
            let op = op.clone();
            let mut cell = op.cell();
            let Some(buffer) = &cell.buffer else { return };
            let all = buffer.len();
            let to = all.min(cell.moved + STAGE_BYTES);
            let mut piece = pool.take();
            piece.extend_from_slice(&buffer.bytes()[cell.moved..to]);
            cell.moved = to;
            drop(cell);
            if to == all {
                self.writes.pop_front();
                op.complete(Ok(Value::Nothing));
            }
            if !piece.is_empty() {
                let piece = pool.lend(piece).freeze();
                return self.writes.push_front(QueuedWrite::Copied(piece));
            }
        }
    }

    /// Passes the end to the protocol when nothing is queued before it.
    fn end(&mut self, connection: &mut Connection) {
        if self.send != SendState::Finishing || !self.writes.is_empty() {
            return;
        }
        match connection.send_stream(self.id).finish() {
            Ok(()) => self.send = SendState::Finished,
            Err(FinishError::Stopped(code)) => self.fail_send(stopped(code)),
            Err(FinishError::ClosedStream) => self.fail_send(Failure::stream_closed()),
        }
    }

    /// Fails all operations that send: nothing more can be sent.
    pub fn fail_send(&mut self, failure: Failure) {
        self.queued = 0;
        for write in std::mem::take(&mut self.writes) {
            if let QueuedWrite::Borrowed(op) = write {
                op.complete(Err(failure.clone()));
            }
        }
        for op in std::mem::take(&mut self.pending_finished) {
            op.complete(Err(failure.clone()));
        }
        if !matches!(
            self.send,
            SendState::Absent | SendState::Acknowledged | SendState::Failed(_)
        ) {
            self.send = SendState::Failed(failure);
        }
    }

    pub fn acknowledge(&mut self) {
        self.send = SendState::Acknowledged;
        for op in std::mem::take(&mut self.pending_finished) {
            op.complete(Ok(Value::Nothing));
        }
    }

    pub fn fail_receive(&mut self, failure: Failure) {
        if let Some(op) = self.read.take() {
            op.complete(Err(failure.clone()));
        }
        if self.receive == ReceiveState::Open {
            self.receive = ReceiveState::Failed(failure);
        }
    }

    /// Copies what has arrived into the buffer of the posted read, directly from the protocol's
    /// chunks.
    pub fn fill(&mut self, connection: &mut Connection) {
        let Some(op) = self.read.clone() else { return };
        if let Some(outcome) = self.fill_from(connection, &op) {
            self.read = None;
            op.complete(outcome);
        }
    }

    fn fill_from(
        &mut self,
        connection: &mut Connection,
        op: &Arc<OperationState>,
    ) -> Option<Outcome> {
        let mut cell = op.cell();
        if self.receive == ReceiveState::Open {
            let mut stream = connection.recv_stream(self.id);
            self.receive = match stream.read(true) {
                Ok(mut chunks) => copy(&mut chunks, &mut cell),
                Err(_) => ReceiveState::Failed(Failure::stream_closed()),
            };
        }
        match &self.receive {
            ReceiveState::Failed(failure) if cell.moved < cell.minimum || cell.moved == 0 => {
                Some(Err(failure.clone()))
            }
            ReceiveState::Absent => Some(Err(Failure::stream_closed())),
            ReceiveState::Open if cell.moved < cell.minimum => None,
            _ => Some(Ok(Value::Count(cell.moved))),
        }
    }

    /// Discards what arrives on a stream without a reader. The end may still arrive, and asking the
    /// peer to stop would turn its success into a failure. So the peer is asked only if more data
    /// than the end arrives.
    pub fn discard(&mut self, connection: &mut Connection) {
        if self.receive != ReceiveState::Open {
            return;
        }
        let mut stream = connection.recv_stream(self.id);
        let more = match stream.read(true) {
            Ok(mut chunks) => match chunks.next(0) {
                Ok(Some(_)) => true,
                Err(ReadError::Blocked) => false,
                Ok(None) | Err(ReadError::Reset(_)) => {
                    self.receive = ReceiveState::Ended;
                    false
                }
            },
            Err(_) => {
                self.receive = ReceiveState::Ended;
                false
            }
        };
        if more {
            let _ = stream.stop(VarInt::from_u32(0));
            self.receive = ReceiveState::Ended;
        }
    }

    /// Whether the stream has no handle and nothing is left to do for it.
    pub fn is_finished(&self) -> bool {
        self.dropped
            && !matches!(self.send, SendState::Open | SendState::Finishing)
            && self.receive != ReceiveState::Open
    }
}

/// Copies until the buffer is full or no data is left, and checks for the end right behind it: a
/// reader that knows the length posts no further read, and only reading the end frees the stream.
fn copy(
    chunks: &mut quinn_proto::Chunks<'_>,
    cell: &mut crate::quic::operation::Cell,
) -> ReceiveState {
    loop {
        let room = cell.buffer.as_ref().map_or(0, |b| b.len()) - cell.moved;
        match chunks.next(room) {
            Ok(Some(_)) if room == 0 => return ReceiveState::Open,
            Ok(Some(chunk)) => {
                if let Some(buffer) = &cell.buffer {
                    buffer.fill(cell.moved, &chunk.bytes);
                }
                cell.moved += chunk.bytes.len();
            }
            Ok(None) => return ReceiveState::Ended,
            Err(ReadError::Blocked) => return ReceiveState::Open,
            Err(ReadError::Reset(code)) => {
                return ReceiveState::Failed(Failure::Stream {
                    kind: "reset",
                    code: Some(code.into_inner()),
                })
            }
        }
    }
}

pub fn stopped(code: VarInt) -> Failure {
    Failure::Stream {
        kind: "stopped",
        code: Some(code.into_inner()),
    }
}

pub fn write_failure(error: WriteError) -> Failure {
    match error {
        WriteError::Stopped(code) => stopped(code),
        _ => Failure::stream_closed(),
    }
}
