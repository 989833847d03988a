//! Operations on the state outside of rounds: cancelling, closing, poisoning.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use quinn_proto::VarInt;

use crate::quic::operation::{OperationState, Target};
use crate::quic::session::Session;
use crate::quic::state::State;
use crate::quic::stream_state::{QueuedWrite, StreamState};
use crate::runtime::errors::Failure;

impl State {
    pub fn open(&self) -> Result<(), Failure> {
        match &self.closed {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    /// The session with this serial, marked for processing. None: the connection was removed.
    pub fn touch(&mut self, serial: u64) -> Option<&mut Session> {
        self.mark_dirty(serial);
        self.sessions.get_mut(&serial)
    }

    /// Removes `op` from where it is posted. When this returns, nothing of ours refers to its
    /// buffer. False if it was done already.
    pub fn cancel(&mut self, op: &Arc<OperationState>) -> bool {
        if op.done() {
            return false;
        }
        self.withdraw(op);
        op.complete(Err(Failure::Cancelled));
        true
    }

    fn withdraw(&mut self, op: &Arc<OperationState>) {
        let other = |o: &Arc<OperationState>| !Arc::ptr_eq(o, op);
        let Some(target) = op.cell().take_target() else {
            return;
        };
        match target {
            Target::Accept => self.core.pending_accepts.retain(other),
            Target::Connect(handle) => {
                let now = Instant::now();
                let serial = handle.map_or(0, |handle| handle.serial);
                self.mark_dirty(serial);
                if let Some(session) = self.sessions.get_mut(&serial) {
                    session.pending_connect = None;
                    session.close(&mut self.core, now, VarInt::from_u32(0), "cancelled");
                }
            }
            Target::Open(handle, dir) => {
                if let Some(session) = self.sessions.get_mut(&handle.serial) {
                    session.pending_opens[dir as usize].retain(other);
                }
            }
            Target::AcceptStream(handle, dir) => {
                if let Some(session) = self.sessions.get_mut(&handle.serial) {
                    session.pending_accepts[dir as usize].retain(other);
                }
            }
            Target::Closed(handle) => {
                if let Some(session) = self.sessions.get_mut(&handle.serial) {
                    session.pending_closed.retain(other);
                }
            }
            Target::Read(handle) | Target::Finished(handle) => {
                if let Some(session) = self.sessions.get_mut(&handle.connection.serial) {
                    if let Ok(stream) = session.stream(handle.id) {
                        stream.read.take_if(|read| Arc::ptr_eq(read, op));
                        stream.pending_finished.retain(other);
                    }
                }
            }
            Target::Write(handle) => {
                if let Some(session) = self.touch(handle.connection.serial) {
                    let half_sent = op.cell().moved > 0;
                    if let Ok(stream) = session.stream(handle.id) {
                        withdraw_write(stream, op);
                    }
                    if half_sent {
                        let _ = session.reset(handle.id, VarInt::from_u32(0));
                    }
                }
            }
        }
    }

    /// Tells every peer, fails all posted operations, wakes all threads. The first reason stays.
    pub fn shut_down(&mut self, failure: Failure, code: VarInt, reason: &str) {
        if self.closed.is_some() {
            return;
        }
        let now = Instant::now();
        self.fail_all(&failure);
        for session in self.sessions.values_mut() {
            session.close(&mut self.core, now, code, reason);
            session.process(&mut self.core, now, 0);
        }
        self.core.accept_queue.clear();
        self.closed = Some(failure);
        self.election.wake_all();
    }

    /// Sends the close packets again: any datagram may be lost. False: there is none to send.
    pub fn repeat_close_packets(&mut self) -> bool {
        let mut any = false;
        for close_packet in self
            .sessions
            .values()
            .filter_map(|s| s.close_packet.as_ref())
        {
            close_packet.send(&mut self.core);
            any = true;
        }
        any
    }

    /// Fails all posted operations with `failure`.
    fn fail_all(&mut self, failure: &Failure) {
        let mut ops: Vec<Arc<OperationState>> = self.core.pending_accepts.drain(..).collect();
        for session in self.sessions.values_mut() {
            ops.extend(session.pending_connect.take());
            ops.append(&mut session.pending_closed);
            for list in session
                .pending_opens
                .iter_mut()
                .chain(&mut session.pending_accepts)
            {
                ops.extend(list.drain(..));
            }
            for stream in session.streams.values_mut() {
                stream.fail_send(failure.clone());
                stream.fail_receive(failure.clone());
            }
        }
        for op in ops {
            op.complete(Err(failure.clone()));
        }
    }

    /// Handles a panic in a round: the protocol's state is not reliable any more. Peers are not
    /// told, because that would run the same code again.
    pub fn poison(&mut self, panic: &(dyn Any + std::marker::Send)) {
        let text = panic
            .downcast_ref::<&str>()
            .map(|s| (*s).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "unknown panic".to_owned());
        let failure = Failure::Closed {
            reason: format!("internal failure: {text}"),
        };
        self.fail_all(&failure);
        self.closed = Some(failure);
        self.election.wake_all();
    }
}

fn withdraw_write(stream: &mut StreamState, op: &Arc<OperationState>) {
    let cell = op.cell();
    let rest = cell.buffer.as_ref().map_or(0, |b| b.len()) - cell.moved;
    drop(cell);
    let before = stream.writes.len();
    stream
        .writes
        .retain(|write| !matches!(write, QueuedWrite::Borrowed(other) if Arc::ptr_eq(other, op)));
    if stream.writes.len() < before {
        stream.queued -= rest;
    }
}
