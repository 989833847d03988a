//! A channel: several connections to one peer, and the transfers that all of them carry.
//!
//! Order of locks: the channel's `state`, then the gate of one transfer, then its `progress` or `rest`; the endpoint's
//! queue of events and a worker's inbox are leaves. The GIL comes before all of them: a thread with the GIL may take a
//! lock, a thread with a lock never takes the GIL, and workers never take it at all. No thread makes a system call, or
//! waits for anything but a gate, while it holds `state`; who holds a gate makes at most one that does not block.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::frame::{Frame, Violation};
use super::memory::Region;
use super::shared::{Event, Shared};
use super::transfers::{Found, Inbound, Next, Outbound, Table, Target};
use super::worker::Link;
use crate::runtime::errors::Failure;

pub struct Core {
    pub id: u64,
    pub count: usize,
    pub dialed: bool,
    /// What the dialer said.
    pub hello: Vec<u8>,
    pub shared: Arc<Shared>,
    state: Mutex<State>,
    /// Notified when a connection joins, and at the end.
    changed: Arc<Changed>,
    pub counters: Counters,
}

/// Payload bytes and transfers.
#[derive(Default)]
pub struct Counters {
    pub bytes_sent: AtomicU64,
    pub bytes_received: AtomicU64,
    pub transfers_sent: AtomicU64,
    pub transfers_received: AtomicU64,
}

/// Wakes a thread that dials. Several channels may share one.
#[derive(Default)]
pub struct Changed {
    count: Mutex<u64>,
    condition: Condvar,
}

impl Changed {
    fn notify(&self) {
        *self.count.lock() += 1;
        self.condition.notify_all();
    }

    pub fn count(&self) -> u64 {
        *self.count.lock()
    }

    /// Waits until the count differs, or for this long.
    pub fn wait(&self, seen: u64, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut count = self.count.lock();
        while *count == seen && !self.condition.wait_until(&mut count, deadline).timed_out() {}
    }
}

struct State {
    table: Table,
    links: Vec<Option<Link>>,
    joined: usize,
    plain: bool,
    peer_certificate: Vec<u8>,
    /// The layer above knows the channel.
    announced: bool,
    ended: Option<Failure>,
    finishing: bool,
    /// Bits of the connections that have sent FINISH.
    finish_sent: u64,
    finish_received: usize,
    /// Which connection is woken first for the next transfer.
    turn: usize,
}

/// What became of a redirect.
#[derive(PartialEq, Debug)]
pub enum Redirected {
    Moved,
    Landed,
    Unknown,
}

impl Core {
    pub fn new(
        shared: &Arc<Shared>,
        dialed: bool,
        hello: Vec<u8>,
        count: usize,
        changed: Arc<Changed>,
    ) -> Arc<Core> {
        Arc::new(Core {
            id: shared.next_id(),
            count,
            dialed,
            hello,
            shared: shared.clone(),
            state: Mutex::new(State {
                table: Table::default(),
                links: (0..count).map(|_| None).collect(),
                joined: 0,
                plain: false,
                peer_certificate: Vec::new(),
                announced: false,
                ended: None,
                finishing: false,
                finish_sent: 0,
                finish_received: 0,
                turn: 0,
            }),
            changed,
            counters: Counters::default(),
        })
    }

    // -- forming: workers and the thread that dials --------------------------------------------------

    /// A connection belongs to the channel from here on: it ends with it.
    pub fn attach(&self, index: usize, link: Link) -> Result<(), &'static str> {
        let mut state = self.state.lock();
        if state.ended.is_some() {
            return Err("the channel has ended");
        }
        match state.links.get_mut(index) {
            Some(place @ None) => {
                *place = Some(link);
                Ok(())
            }
            _ => Err("a hello that was seen before"),
        }
    }

    /// Both sides have verified each other on this connection. `certificate` and `plain` must be the same on all.
    pub fn join(&self, certificate: &[u8], plain: bool) -> Result<(), &'static str> {
        let mut state = self.state.lock();
        if state.ended.is_some() {
            return Err("the channel has ended");
        }
        if state.joined == 0 {
            state.peer_certificate = certificate.to_vec();
            state.plain = plain;
        } else if state.peer_certificate != certificate || state.plain != plain {
            return Err("connections of one channel to different peers");
        }
        state.joined += 1;
        if state.joined == self.count && !self.dialed {
            state.announced = true;
            self.shared.accepted(self.id);
        }
        drop(state);
        self.changed.notify();
        Ok(())
    }

    pub fn joined(&self) -> usize {
        self.state.lock().joined
    }

    pub fn is_formed(&self) -> bool {
        self.joined() == self.count
    }

    pub fn failure(&self) -> Option<Failure> {
        self.state.lock().ended.clone()
    }

    /// From here on the end of the channel is an event.
    pub fn announce(&self) -> Result<(), Failure> {
        let mut state = self.state.lock();
        match &state.ended {
            Some(failure) => Err(failure.clone()),
            None => {
                state.announced = true;
                Ok(())
            }
        }
    }

    pub fn plain(&self) -> bool {
        self.state.lock().plain
    }

    pub fn peer_certificate(&self) -> Vec<u8> {
        self.state.lock().peer_certificate.clone()
    }

    pub fn is_announced(&self) -> bool {
        self.state.lock().announced
    }

    // -- calls from Python ---------------------------------------------------------------------------

    pub fn expect(&self, inbound: Arc<Inbound>) -> Result<(), Failure> {
        let mut state = self.usable()?;
        let transfer = inbound.transfer;
        match state.table.expect(inbound) {
            true => Ok(()),
            false => Err(Failure::Value(format!(
                "transfer {transfer} is expected already"
            ))),
        }
    }

    /// Moves what has arrived to `target`, where the rest follows. On return no worker touches the old memory, which
    /// is returned too. May wait for a worker that copies one piece.
    pub fn redirect(&self, transfer: u64, target: Target) -> Result<(Redirected, Target), Failure> {
        let inbound = match self.usable()?.table.find(transfer) {
            Found::Expected(inbound) => inbound,
            Found::Landed => return Ok((Redirected::Landed, target)),
            Found::Unknown => return Ok((Redirected::Unknown, target)),
        };
        let mut gate = inbound.gate.write();
        let progress = inbound.progress.lock();
        match (&*gate, &target) {
            // Complete: the event is on its way.
            (Target::Memory(_) | Target::Reduce(..), _) if progress.is_complete() => {
                return Ok((Redirected::Landed, target));
            }
            (Target::Discard, _) => return Ok((Redirected::Unknown, target)),
            (Target::Gone, _) => return Ok((Redirected::Landed, target)),
            (Target::Reduce(..), Target::Memory(_)) => {
                return Err(Failure::Value(format!(
                    "transfer {transfer} is reduced: it can be discarded, not moved"
                )));
            }
            (Target::Memory(old), Target::Memory(new)) => {
                if old.length() != new.length() {
                    return Err(Failure::Value(format!(
                        "transfer {transfer} has {} bytes, the other memory {}",
                        old.length(),
                        new.length()
                    )));
                }
                for (begin, end) in progress.ranges() {
                    old.copy_to(new, begin, end);
                }
            }
            _ => {}
        }
        drop(progress);
        let discarded = matches!(target, Target::Discard);
        let old = std::mem::replace(&mut *gate, target);
        drop(gate);
        if discarded {
            self.state.lock().table.discard(&inbound);
        }
        Ok((Redirected::Moved, old))
    }

    /// What has been applied of a transfer that is expected or has landed; also after the end of the channel.
    pub fn applied(&self, transfer: u64) -> Vec<(u64, u64)> {
        let state = self.state.lock();
        match state.table.find(transfer) {
            Found::Expected(inbound) => inbound.progress.lock().ranges(),
            Found::Landed => match state.table.landed_length(transfer) {
                Some(length) if length > 0 => vec![(0, length)],
                _ => Vec::new(),
            },
            Found::Unknown => Vec::new(),
        }
    }

    pub fn send(&self, outbound: Arc<Outbound>) -> Result<(), Failure> {
        let (transfer, chunks) = (outbound.transfer, outbound.chunks());
        let mut state = self.usable()?;
        if state.finishing {
            return Err(Failure::Value("the channel is finished".to_owned()));
        }
        if !state.table.send(outbound) {
            return Err(Failure::Value(format!(
                "transfer {transfer} is sent already"
            )));
        }
        let first = state.turn;
        state.turn = (first + chunks.min(self.count as u64) as usize) % self.count;
        let links = self.links(&state, first, chunks);
        drop(state);
        wake(&links);
        Ok(())
    }

    /// On return no worker touches the memory, which is returned. May wait for a worker that sends one chunk.
    pub fn withdraw(&self, transfer: u64) -> Option<Region> {
        let mut state = self.state.lock();
        let outbound = state.table.withdraw(transfer)?;
        let links = self.links(&state, 0, 1);
        drop(state);
        wake(&links);
        outbound.take_memory()
    }

    pub fn finish(&self) {
        let mut state = self.state.lock();
        state.finishing = true;
        let links = self.links(&state, 0, self.count as u64);
        drop(state);
        wake(&links);
    }

    pub fn counts(&self) -> (usize, usize) {
        self.state.lock().table.counts()
    }

    fn usable(&self) -> Result<parking_lot::MutexGuard<'_, State>, Failure> {
        let state = self.state.lock();
        match &state.ended {
            Some(failure) => Err(failure.clone()),
            None => Ok(state),
        }
    }

    fn links(&self, state: &State, first: usize, most: u64) -> Vec<Link> {
        let most = most.min(self.count as u64) as usize;
        (0..most)
            .filter_map(|each| state.links[(first + each) % self.count].clone())
            .collect()
    }

    // -- connections: workers ------------------------------------------------------------------------

    /// What connection `index` sends next.
    pub fn next(&self, index: usize) -> Option<Next> {
        let mut state = self.state.lock();
        if let Some(next) = state.table.next() {
            return Some(next);
        }
        let bit = 1 << index;
        if state.finishing && state.finish_sent & bit == 0 && state.ended.is_none() {
            state.finish_sent |= bit;
            return Some(Next::Header(Frame::Finish.encode()));
        }
        None
    }

    pub fn finish_was_sent(&self, index: usize) -> bool {
        self.state.lock().finish_sent & (1 << index) != 0
    }

    /// All chunks of a transfer are handed over.
    pub fn sent(&self, outbound: &Outbound) {
        let mut state = self.state.lock();
        state.table.sent(outbound);
        let region = outbound.gate.write().take();
        let was_wanted = region.is_some();
        drop(region); // under the lock: a withdrawal that finds no transfer finds its memory given back
        drop(state);
        if was_wanted {
            self.counters.transfers_sent.fetch_add(1, Ordering::Relaxed);
            self.shared.push(Event::Sent(self.id, outbound.transfer));
        }
    }

    pub fn chunk_arrives(
        &self,
        transfer: u64,
        offset: u64,
        total: u64,
    ) -> Result<Arc<Inbound>, Violation> {
        let state = self.state.lock();
        state.table.chunk_arrives(transfer, offset, total)
    }

    pub fn peer_withdraws(&self, transfer: u64, sent: u64) -> Result<(), Violation> {
        self.state.lock().table.peer_withdraws(transfer, sent)
    }

    /// Nothing more will come of a transfer.
    pub fn transfer_over(&self, inbound: &Inbound) {
        let mut state = self.state.lock();
        if !inbound.progress.lock().is_complete() {
            state.table.forget_if_over(inbound);
            return;
        }
        let mut gate = inbound.gate.write();
        match std::mem::replace(&mut *gate, Target::Gone) {
            Target::Memory(region) | Target::Reduce(region, _) => {
                drop(gate);
                state.table.landed(inbound);
                drop(region); // before the event, and before a redirect finds that it has landed
                drop(state);
                self.counters
                    .transfers_received
                    .fetch_add(1, Ordering::Relaxed);
                self.shared.push(Event::Landed(self.id, inbound.transfer));
            }
            Target::Discard => {
                drop(gate);
                state.table.forget(inbound);
            }
            Target::Gone => {}
        }
    }

    /// The peer sends nothing more on one connection.
    pub fn finish_arrives(&self) {
        let mut state = self.state.lock();
        state.finish_received += 1;
        if state.finish_received == self.count && state.ended.is_none() {
            self.shared.push(Event::Finished(self.id));
        }
    }

    /// A connection has finished in both directions.
    pub fn connection_finished(&self, index: usize) {
        let mut state = self.state.lock();
        state.links[index] = None;
        if state.links.iter().any(Option::is_some) {
            return;
        }
        drop(state);
        self.end(Failure::Lost {
            kind: "closed",
            code: None,
            reason: "both sides have finished".to_owned(),
        });
    }

    /// Ends the channel. On return no worker touches memory of its transfers. The first call counts. Its event, if
    /// there is one, follows all others of the channel.
    pub fn end(&self, failure: Failure) {
        let mut state = self.state.lock();
        if state.ended.is_some() {
            return;
        }
        state.ended = Some(failure.clone());
        let (inbound, outbound) = state.table.end();
        let links = std::mem::take(&mut state.links);
        let announced = state.announced;
        state.links.resize_with(self.count, || None);
        drop(state);
        for each in inbound {
            drop(std::mem::replace(&mut *each.gate.write(), Target::Gone));
        }
        for each in outbound {
            drop(each.gate.write().take());
        }
        let (kind, reason) = match failure {
            Failure::Lost { kind, reason, .. } => (kind, reason),
            other => ("protocol", other.describe()),
        };
        for link in links.into_iter().flatten() {
            link.drop_connection(&reason);
        }
        self.shared.forget(self.id);
        if announced && kind != "closed" {
            self.shared.push(Event::Lost(self.id, kind, reason));
        }
        self.changed.notify();
    }
}

fn wake(links: &[Link]) {
    links.iter().for_each(Link::kick);
}
