//! Operations on the state that are not part of a round: cancelling, closing, poisoning.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use quinn_proto::VarInt;

use crate::channel::{Channel, Write};
use crate::errors::Failure;
use crate::op::{Op, Target};
use crate::session::Session;
use crate::state::State;

impl State {
    pub fn open(&self) -> Result<(), Failure> {
        match &self.closed {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    /// The session of a serial, marked for processing. None: the connection was forgotten.
    pub fn touch(&mut self, serial: u64) -> Option<&mut Session> {
        self.soil(serial);
        self.sessions.get_mut(&serial)
    }

    /// Take `op` out of wherever it is posted. When this returns nothing of ours refers to its
    /// buffer. False if it was done already.
    pub fn cancel(&mut self, op: &Arc<Op>) -> bool {
        if op.done() {
            return false;
        }
        self.withdraw(op);
        op.complete(Err(Failure::Cancelled));
        true
    }

    fn withdraw(&mut self, op: &Arc<Op>) {
        let other = |o: &Arc<Op>| !Arc::ptr_eq(o, op);
        let Some(target) = op.cell().take_target() else {
            return;
        };
        match target {
            Target::Accept => self.hub.acceptors.retain(other),
            Target::Connect(grip) => {
                let now = Instant::now();
                let serial = grip.map_or(0, |grip| grip.serial);
                self.soil(serial);
                if let Some(session) = self.sessions.get_mut(&serial) {
                    session.connector = None;
                    session.close(&mut self.hub, now, VarInt::from_u32(0), "cancelled");
                }
            }
            Target::Open(grip, dir) => {
                if let Some(session) = self.sessions.get_mut(&grip.serial) {
                    session.openers[dir as usize].retain(other);
                }
            }
            Target::AcceptStream(grip, dir) => {
                if let Some(session) = self.sessions.get_mut(&grip.serial) {
                    session.acceptors[dir as usize].retain(other);
                }
            }
            Target::Closed(grip) => {
                if let Some(session) = self.sessions.get_mut(&grip.serial) {
                    session.closers.retain(other);
                }
            }
            Target::Read(grip) | Target::Finished(grip) => {
                if let Some(session) = self.sessions.get_mut(&grip.connection.serial) {
                    if let Ok(channel) = session.channel(grip.id) {
                        channel.read.take_if(|read| Arc::ptr_eq(read, op));
                        channel.finishers.retain(other);
                    }
                }
            }
            Target::Write(grip) => {
                if let Some(session) = self.touch(grip.connection.serial) {
                    let half_sent = op.cell().moved > 0;
                    if let Ok(channel) = session.channel(grip.id) {
                        withdraw_write(channel, op);
                    }
                    if half_sent {
                        let _ = session.reset(grip.id, VarInt::from_u32(0));
                    }
                }
            }
        }
    }

    /// Tell every peer, fail everything posted, wake everybody. The first reason stays.
    pub fn shut(&mut self, failure: Failure, code: VarInt, reason: &str) {
        if self.closed.is_some() {
            return;
        }
        let now = Instant::now();
        self.fail_all(&failure);
        for session in self.sessions.values_mut() {
            session.close(&mut self.hub, now, code, reason);
            session.process(&mut self.hub, now, 0);
        }
        self.hub.arrivals.clear();
        self.closed = Some(failure);
        self.crew.wake_all();
    }

    /// The peers of closed connections may not have heard it: any datagram may be lost. False: nobody
    /// is left to tell.
    pub fn repeat_farewells(&mut self) -> bool {
        let mut any = false;
        for farewell in self.sessions.values().filter_map(|s| s.farewell.as_ref()) {
            farewell.send(&mut self.hub);
            any = true;
        }
        any
    }

    /// Everything posted anywhere fails with `failure`.
    fn fail_all(&mut self, failure: &Failure) {
        let mut ops: Vec<Arc<Op>> = self.hub.acceptors.drain(..).collect();
        for session in self.sessions.values_mut() {
            ops.extend(session.connector.take());
            ops.append(&mut session.closers);
            for list in session.openers.iter_mut().chain(&mut session.acceptors) {
                ops.extend(list.drain(..));
            }
            for channel in session.channels.values_mut() {
                channel.fail_send(failure.clone());
                channel.fail_receive(failure.clone());
            }
        }
        for op in ops {
            op.complete(Err(failure.clone()));
        }
    }

    /// A panic inside a round: nothing of the protocol's state can be relied upon any more. Peers
    /// are not told, for that would run the same code again.
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
        self.crew.wake_all();
    }
}

fn withdraw_write(channel: &mut Channel, op: &Arc<Op>) {
    let cell = op.cell();
    let rest = cell.buffer.as_ref().map_or(0, |b| b.len()) - cell.moved;
    drop(cell);
    let before = channel.writes.len();
    channel
        .writes
        .retain(|write| !matches!(write, Write::Borrowed(other) if Arc::ptr_eq(other, op)));
    if channel.writes.len() < before {
        channel.queued -= rest;
    }
}
