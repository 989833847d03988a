//! One stream, as the driver sees it: what is posted on it and what became of its two halves.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Buf, Bytes};
use quinn_proto::{Connection, FinishError, ReadError, StreamId, VarInt, WriteError};

use crate::errors::Failure;
use crate::op::{Op, Outcome, Value};
use crate::pool::Pool;

/// Size of the pieces in which borrowed buffers are copied.
pub const STAGE_BYTES: usize = 64 << 10;

/// Bytes not yet handed to the protocol.
pub enum Write {
    Copied(Bytes),
    Borrowed(Arc<Op>),
}

/// The sending half.
#[derive(PartialEq)]
pub enum Send {
    /// There is none: the peer's one-way stream.
    Absent,
    Open,
    /// `finish()` was called; the end goes to the protocol once everything queued has.
    Finishing,
    /// The protocol knows the end; the peer has not acknowledged everything.
    Finished,
    Acknowledged,
    Dead(Failure),
}

/// The receiving half.
#[derive(PartialEq)]
pub enum Receive {
    Absent,
    Open,
    Ended,
    Dead(Failure),
}

pub struct Channel {
    pub id: StreamId,
    pub priority: i32,
    /// When it last had its turn among streams of the same priority.
    pub turn: u64,
    pub writes: VecDeque<Write>,
    pub queued: usize,
    pub send: Send,
    pub receive: Receive,
    pub read: Option<Arc<Op>>,
    pub finishers: Vec<Arc<Op>>,
    /// Nobody holds it any more.
    pub dropped: bool,
}

impl Channel {
    pub fn new(id: StreamId, sends: bool, receives: bool) -> Self {
        Channel {
            id,
            priority: 0,
            turn: 0,
            writes: VecDeque::new(),
            queued: 0,
            send: if sends { Send::Open } else { Send::Absent },
            receive: if receives {
                Receive::Open
            } else {
                Receive::Absent
            },
            read: None,
            finishers: Vec::new(),
            dropped: false,
        }
    }

    /// May bytes still be written?
    pub fn writable(&self) -> Result<(), Failure> {
        match &self.send {
            Send::Open => Ok(()),
            Send::Dead(failure) => Err(failure.clone()),
            _ => Err(Failure::stream_closed()),
        }
    }

    /// Hand over up to `limit` queued bytes. Returns how many; 0 if none could be.
    pub fn flush(&mut self, connection: &mut Connection, pool: &mut Pool, limit: usize) -> usize {
        let mut total = 0;
        while total < limit {
            self.stage(pool);
            let Some(Write::Copied(bytes)) = self.writes.front_mut() else {
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

    /// Copy the next piece of a borrowed buffer, if that is what comes next. It stays in front until
    /// the protocol has taken it, so a blocked stream copies nothing twice.
    fn stage(&mut self, pool: &mut Pool) {
        while let Some(Write::Borrowed(op)) = self.writes.front() {
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
                return self.writes.push_front(Write::Copied(piece));
            }
        }
    }

    /// Pass the end on once nothing is queued before it.
    fn end(&mut self, connection: &mut Connection) {
        if self.send != Send::Finishing || !self.writes.is_empty() {
            return;
        }
        match connection.send_stream(self.id).finish() {
            Ok(()) => self.send = Send::Finished,
            Err(FinishError::Stopped(code)) => self.fail_send(stopped(code)),
            Err(FinishError::ClosedStream) => self.fail_send(Failure::stream_closed()),
        }
    }

    /// Nothing more can be sent: every operation that wants to, fails.
    pub fn fail_send(&mut self, failure: Failure) {
        self.queued = 0;
        for write in std::mem::take(&mut self.writes) {
            if let Write::Borrowed(op) = write {
                op.complete(Err(failure.clone()));
            }
        }
        for op in std::mem::take(&mut self.finishers) {
            op.complete(Err(failure.clone()));
        }
        if !matches!(self.send, Send::Absent | Send::Acknowledged | Send::Dead(_)) {
            self.send = Send::Dead(failure);
        }
    }

    pub fn acknowledge(&mut self) {
        self.send = Send::Acknowledged;
        for op in std::mem::take(&mut self.finishers) {
            op.complete(Ok(Value::Nothing));
        }
    }

    pub fn fail_receive(&mut self, failure: Failure) {
        if let Some(op) = self.read.take() {
            op.complete(Err(failure.clone()));
        }
        if self.receive == Receive::Open {
            self.receive = Receive::Dead(failure);
        }
    }

    /// Move what has arrived into the posted read's buffer, straight from the protocol's chunks.
    pub fn fill(&mut self, connection: &mut Connection) {
        let Some(op) = self.read.clone() else { return };
        if let Some(outcome) = self.fill_from(connection, &op) {
            self.read = None;
            op.complete(outcome);
        }
    }

    fn fill_from(&mut self, connection: &mut Connection, op: &Arc<Op>) -> Option<Outcome> {
        let mut cell = op.cell();
        if self.receive == Receive::Open {
            let mut stream = connection.recv_stream(self.id);
            self.receive = match stream.read(true) {
                Ok(mut chunks) => copy(&mut chunks, &mut cell),
                Err(_) => Receive::Dead(Failure::stream_closed()),
            };
        }
        match &self.receive {
            Receive::Dead(failure) if cell.moved < cell.minimum || cell.moved == 0 => {
                Some(Err(failure.clone()))
            }
            Receive::Absent => Some(Err(Failure::stream_closed())),
            Receive::Open if cell.moved < cell.minimum => None,
            _ => Some(Ok(Value::Count(cell.moved))),
        }
    }

    /// Nobody reads any more. The end may still be on its way, and asking the peer to stop would
    /// turn its success into a failure; so it is only asked when more data than an end arrives.
    pub fn discard(&mut self, connection: &mut Connection) {
        if self.receive != Receive::Open {
            return;
        }
        let mut stream = connection.recv_stream(self.id);
        let more = match stream.read(true) {
            Ok(mut chunks) => match chunks.next(0) {
                Ok(Some(_)) => true,
                Err(ReadError::Blocked) => false,
                Ok(None) | Err(ReadError::Reset(_)) => {
                    self.receive = Receive::Ended;
                    false
                }
            },
            Err(_) => {
                self.receive = Receive::Ended;
                false
            }
        };
        if more {
            let _ = stream.stop(VarInt::from_u32(0));
            self.receive = Receive::Ended;
        }
    }

    /// Dropped, and nothing is left to do for it.
    pub fn over(&self) -> bool {
        self.dropped
            && !matches!(self.send, Send::Open | Send::Finishing)
            && self.receive != Receive::Open
    }
}

/// Copy until the buffer is full or nothing is left, and look for the end right behind it: a reader
/// that knows the length asks for no more, and only having seen the end frees the stream.
fn copy(chunks: &mut quinn_proto::Chunks<'_>, cell: &mut crate::op::Cell) -> Receive {
    loop {
        let room = cell.buffer.as_ref().map_or(0, |b| b.len()) - cell.moved;
        match chunks.next(room) {
            Ok(Some(_)) if room == 0 => return Receive::Open,
            Ok(Some(chunk)) => {
                if let Some(buffer) = &cell.buffer {
                    buffer.fill(cell.moved, &chunk.bytes);
                }
                cell.moved += chunk.bytes.len();
            }
            Ok(None) => return Receive::Ended,
            Err(ReadError::Blocked) => return Receive::Open,
            Err(ReadError::Reset(code)) => {
                return Receive::Dead(Failure::Stream {
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
