//! The transfers of one channel: those it expects, those it sends, and which chunk a connection sends next.
//!
//! Memory is used by workers and given back to Python under one rule, the *gate* of a transfer: a worker touches the
//! memory only while it holds the gate for reading, and never waits while it does. Whoever takes the gate for writing
//! and replaces the memory knows that no worker uses it any longer. A gate is taken after the channel's lock or without
//! it, never before.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::frame::{chunk_at, chunks_of, Frame, Violation, CHUNK_BYTES, HEADER_BYTES};
use super::memory::{Reduction, Region};
use super::progress::Progress;

/// Transfers that have landed are remembered for late redirects.
const REMEMBERED: usize = 4096;
/// A discarded transfer that the peer never starts is forgotten after so many newer ones.
const MAX_DISCARDED: usize = 1 << 16;

/// Where a transfer goes.
pub enum Target {
    Memory(Region),
    Reduce(Region, Reduction),
    Discard,
    /// It has landed, or the channel has ended.
    Gone,
}

/// An expected transfer.
pub struct Inbound {
    pub transfer: u64,
    pub length: u64,
    pub gate: RwLock<Target>,
    /// Taken last, for a few instructions.
    pub progress: Mutex<Progress>,
}

/// A transfer that this side sends.
pub struct Outbound {
    pub transfer: u64,
    pub length: u64,
    /// None: withdrawn, sent, or the channel has ended.
    pub gate: RwLock<Option<Region>>,
    pub rest: Mutex<Rest>,
}

/// The chunks that connections have taken.
#[derive(Default)]
pub struct Rest {
    /// Chunks that are handed over.
    done: u64,
    /// Offsets of chunks that a connection has taken and not yet handed over.
    in_progress: Vec<u64>,
    /// Those of them that were copied when the transfer was withdrawn.
    copies: HashMap<u64, Box<[u8]>>,
}

impl Outbound {
    pub fn chunks(&self) -> u64 {
        chunks_of(self.length)
    }

    /// One chunk is handed over. True: it was the last one.
    pub fn chunk_done(&self, offset: u64) -> bool {
        let mut rest = self.rest.lock();
        rest.in_progress.retain(|&each| each != offset);
        rest.copies.remove(&offset);
        rest.done += 1;
        rest.done == chunks_of(self.length)
    }

    /// Under the channel's lock: a withdrawal finds the chunk either in the queue or in progress.
    fn chunk_begins(&self, offset: u64) {
        self.rest.lock().in_progress.push(offset);
    }

    /// What was copied of a chunk when its transfer was withdrawn. None: the channel has ended.
    pub fn with_copy<R>(&self, offset: u64, use_it: impl FnOnce(&[u8]) -> R) -> Option<R> {
        self.rest
            .lock()
            .copies
            .get(&offset)
            .map(|copy| use_it(copy))
    }

    /// Copies the chunks in progress, of which the peer is promised all bytes, and takes the memory. The transfer is no
    /// longer in the queue.
    pub fn take_memory(&self) -> Option<Region> {
        let region = self.gate.write().take()?;
        let mut rest = self.rest.lock();
        for offset in std::mem::take(&mut rest.in_progress) {
            let length = chunk_at(offset, self.length) as usize;
            rest.copies
                .insert(offset, region.bytes(offset, length).into());
        }
        Some(region)
    }
}

/// What a connection sends next.
pub enum Next {
    Header([u8; HEADER_BYTES]),
    Chunk {
        outbound: Arc<Outbound>,
        offset: u64,
        length: usize,
    },
}

/// Guarded by the channel's lock.
#[derive(Default)]
pub struct Table {
    inbound: HashMap<u64, Arc<Inbound>>,
    /// Numbers of discarded transfers, the oldest first. Some are over already.
    discarded: VecDeque<u64>,
    landed: HashMap<u64, u64>,
    landed_order: VecDeque<u64>,
    outbound: HashMap<u64, Arc<Outbound>>,
    /// Transfers with chunks left, and the offset of the next one. Served in turn.
    queue: VecDeque<(Arc<Outbound>, u64)>,
    /// Headers without chunks. They go first.
    headers: VecDeque<[u8; HEADER_BYTES]>,
}

/// What a redirect found.
pub enum Found {
    Expected(Arc<Inbound>),
    Landed,
    Unknown,
}

impl Table {
    /// False: the number is in use.
    pub fn expect(&mut self, inbound: Arc<Inbound>) -> bool {
        if self.inbound.contains_key(&inbound.transfer) {
            return false;
        }
        self.landed.remove(&inbound.transfer);
        self.inbound.insert(inbound.transfer, inbound);
        true
    }

    pub fn find(&self, transfer: u64) -> Found {
        match self.inbound.get(&transfer) {
            Some(inbound) => Found::Expected(inbound.clone()),
            None if self.landed.contains_key(&transfer) => Found::Landed,
            None => Found::Unknown,
        }
    }

    pub fn landed_length(&self, transfer: u64) -> Option<u64> {
        self.landed.get(&transfer).copied()
    }

    /// A chunk arrives. Its place was checked by `Frame::parse`.
    pub fn chunk_arrives(
        &self,
        transfer: u64,
        offset: u64,
        total: u64,
    ) -> Result<Arc<Inbound>, Violation> {
        let inbound = self
            .inbound
            .get(&transfer)
            .ok_or("a chunk of a transfer that is not expected")?;
        if inbound.length != total {
            return Err("a transfer of another length than expected");
        }
        if !inbound.progress.lock().begin(offset) {
            return Err("a chunk that has arrived already");
        }
        Ok(inbound.clone())
    }

    pub fn peer_withdraws(&mut self, transfer: u64, sent: u64) -> Result<(), Violation> {
        let Some(inbound) = self.inbound.get(&transfer).cloned() else {
            return Ok(()); // discarded long ago
        };
        let mut progress = inbound.progress.lock();
        if sent > inbound.length || progress.withdrawn.is_some() {
            return Err("an impossible withdrawal");
        }
        progress.withdrawn = Some(sent);
        drop(progress);
        self.forget_if_over(&inbound);
        Ok(())
    }

    /// All bytes of a transfer have arrived.
    pub fn landed(&mut self, inbound: &Inbound) {
        self.forget(inbound);
        self.landed.insert(inbound.transfer, inbound.length);
        self.landed_order.push_back(inbound.transfer);
        if self.landed_order.len() > REMEMBERED {
            let oldest = self.landed_order.pop_front();
            oldest.and_then(|transfer| self.landed.remove(&transfer));
        }
    }

    /// The transfer's gate says Discard.
    pub fn discard(&mut self, inbound: &Arc<Inbound>) {
        self.discarded.push_back(inbound.transfer);
        self.forget_if_over(inbound);
        if self.discarded.len() > MAX_DISCARDED {
            let oldest = self.discarded.pop_front();
            if let Some(inbound) = oldest.and_then(|transfer| self.inbound.get(&transfer)) {
                let transfer = inbound.transfer;
                if matches!(*inbound.gate.read(), Target::Discard) {
                    self.inbound.remove(&transfer);
                }
            }
        }
    }

    /// Removes a discarded transfer of which nothing more will come.
    pub fn forget_if_over(&mut self, inbound: &Inbound) {
        let is_over = inbound.progress.lock().is_over();
        if is_over && matches!(*inbound.gate.read(), Target::Discard) {
            self.forget(inbound);
        }
    }

    /// False: the number is in use.
    pub fn send(&mut self, outbound: Arc<Outbound>) -> bool {
        if self.outbound.contains_key(&outbound.transfer) {
            return false;
        }
        self.outbound.insert(outbound.transfer, outbound.clone());
        self.queue.push_back((outbound, 0));
        true
    }

    /// The chunk or header for a connection that has room. The chunks of all transfers take turns.
    pub fn next(&mut self) -> Option<Next> {
        if let Some(header) = self.headers.pop_front() {
            return Some(Next::Header(header));
        }
        let (outbound, offset) = self.queue.pop_front()?;
        outbound.chunk_begins(offset);
        let length = chunk_at(offset, outbound.length);
        if length < outbound.length - offset {
            self.queue
                .push_back((outbound.clone(), offset + CHUNK_BYTES));
        }
        Some(Next::Chunk {
            outbound,
            offset,
            length: length as usize,
        })
    }

    /// All chunks are handed over. The number may be in use again, if the transfer was withdrawn.
    pub fn sent(&mut self, outbound: &Outbound) {
        let current = self.outbound.get(&outbound.transfer);
        if current.is_some_and(|each| std::ptr::eq(Arc::as_ptr(each), outbound)) {
            self.outbound.remove(&outbound.transfer);
        }
    }

    /// Its number may be in use again.
    pub fn forget(&mut self, inbound: &Inbound) {
        let current = self.inbound.get(&inbound.transfer);
        if current.is_some_and(|each| std::ptr::eq(Arc::as_ptr(each), inbound)) {
            self.inbound.remove(&inbound.transfer);
        }
    }

    /// No chunk is taken any more. The peer is told how much was. None: the transfer is unknown.
    pub fn withdraw(&mut self, transfer: u64) -> Option<Arc<Outbound>> {
        let outbound = self.outbound.remove(&transfer)?;
        let queued = self
            .queue
            .iter()
            .position(|each| each.0.transfer == transfer);
        if let Some((_, sent)) = queued.and_then(|at| self.queue.remove(at)) {
            self.headers
                .push_back(Frame::Withdrawn { transfer, sent }.encode());
        }
        Some(outbound)
    }

    /// Nothing is left that a connection could take.
    #[cfg(test)]
    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.headers.is_empty()
    }

    /// The channel has ended: what is expected stays known, but nothing is sent.
    pub fn end(&mut self) -> (Vec<Arc<Inbound>>, Vec<Arc<Outbound>>) {
        self.queue.clear();
        self.headers.clear();
        self.discarded.clear();
        let outbound = self.outbound.drain().map(|each| each.1).collect();
        (self.inbound.values().cloned().collect(), outbound)
    }

    pub fn counts(&self) -> (usize, usize) {
        (self.inbound.len(), self.outbound.len())
    }
}

impl Inbound {
    pub fn new(transfer: u64, length: u64, target: Target) -> Arc<Self> {
        Arc::new(Inbound {
            transfer,
            length,
            gate: RwLock::new(target),
            progress: Mutex::new(Progress::new(length)),
        })
    }
}

impl Outbound {
    pub fn new(transfer: u64, length: u64, region: Option<Region>) -> Arc<Self> {
        Arc::new(Outbound {
            transfer,
            length,
            gate: RwLock::new(region),
            rest: Mutex::default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sending(table: &mut Table, transfer: u64, length: u64) {
        assert!(table.send(Outbound::new(transfer, length, None)));
    }

    fn expected(table: &mut Table, transfer: u64, length: u64) -> Arc<Inbound> {
        let inbound = Inbound::new(transfer, length, Target::Discard);
        assert!(table.expect(inbound.clone()));
        inbound
    }

    fn taken(table: &mut Table) -> Option<(u64, u64, usize)> {
        match table.next()? {
            Next::Header(header) => panic!("{:?}", Frame::parse(&header)),
            Next::Chunk {
                outbound,
                offset,
                length,
            } => Some((outbound.transfer, offset, length)),
        }
    }

    #[test]
    fn transfers_take_turns() {
        let mut table = Table::default();
        let chunk = CHUNK_BYTES as usize;
        sending(&mut table, 1, 2 * CHUNK_BYTES + 5);
        sending(&mut table, 2, 0);
        sending(&mut table, 3, CHUNK_BYTES);
        let order: Vec<_> = std::iter::from_fn(|| taken(&mut table)).collect();
        let expected = [
            (1, 0, chunk),
            (2, 0, 0),
            (3, 0, chunk),
            (1, CHUNK_BYTES, chunk),
            (1, 2 * CHUNK_BYTES, 5),
        ];
        assert_eq!(order, expected);
        assert!(table.is_idle());
    }

    #[test]
    fn every_chunk_of_a_huge_transfer_has_its_place() {
        let mut table = Table::default();
        sending(&mut table, 1, u64::MAX);
        assert_eq!(taken(&mut table), Some((1, 0, CHUNK_BYTES as usize)));
        assert_eq!(
            taken(&mut table),
            Some((1, CHUNK_BYTES, CHUNK_BYTES as usize))
        );
    }

    #[test]
    fn the_last_chunk_completes_a_send() {
        let outbound = Outbound::new(1, CHUNK_BYTES + 1, None);
        assert!(!outbound.chunk_done(CHUNK_BYTES));
        assert!(outbound.chunk_done(0));
        assert!(Outbound::new(1, 0, None).chunk_done(0));
    }

    #[test]
    fn a_withdrawal_tells_the_peer_how_much_was_taken() {
        let mut table = Table::default();
        sending(&mut table, 1, 9 * CHUNK_BYTES);
        taken(&mut table);
        taken(&mut table);
        assert!(table.withdraw(1).is_some());
        assert!(table.withdraw(1).is_none());
        let Some(Next::Header(header)) = table.next() else {
            panic!("no header");
        };
        let withdrawn = Frame::Withdrawn {
            transfer: 1,
            sent: 2 * CHUNK_BYTES,
        };
        assert_eq!(Frame::parse(&header), Ok(withdrawn));
        assert!(table.is_idle());
    }

    #[test]
    fn a_transfer_whose_chunks_are_all_taken_is_not_announced_as_withdrawn() {
        let mut table = Table::default();
        sending(&mut table, 1, 1);
        taken(&mut table);
        assert!(table.withdraw(1).is_some());
        assert!(table.is_idle());
    }

    #[test]
    fn only_expected_chunks_arrive() {
        let mut table = Table::default();
        expected(&mut table, 7, CHUNK_BYTES);
        assert!(table.chunk_arrives(8, 0, CHUNK_BYTES).is_err());
        assert!(table.chunk_arrives(7, 0, CHUNK_BYTES + 1).is_err());
        assert!(table.chunk_arrives(7, 0, CHUNK_BYTES).is_ok());
        assert!(table.chunk_arrives(7, 0, CHUNK_BYTES).is_err());
    }

    #[test]
    fn a_number_is_expected_once_at_a_time() {
        let mut table = Table::default();
        let inbound = expected(&mut table, 7, 1);
        assert!(!table.expect(Inbound::new(7, 1, Target::Discard)));
        table.landed(&inbound);
        assert!(matches!(table.find(7), Found::Landed));
        expected(&mut table, 7, 1);
        assert!(matches!(table.find(7), Found::Expected(_)));
    }

    #[test]
    fn old_landings_are_forgotten() {
        let mut table = Table::default();
        for transfer in 0..=REMEMBERED as u64 {
            let inbound = expected(&mut table, transfer, 1);
            table.landed(&inbound);
        }
        assert!(matches!(table.find(0), Found::Unknown));
        assert!(matches!(table.find(1), Found::Landed));
        assert_eq!(table.landed.len(), REMEMBERED);
    }

    #[test]
    fn a_discarded_transfer_is_forgotten_once_all_that_was_sent_is_here() {
        let mut table = Table::default();
        let inbound = expected(&mut table, 7, 3 * CHUNK_BYTES);
        table.discard(&inbound);
        assert!(table.chunk_arrives(7, 0, 3 * CHUNK_BYTES).is_ok());
        assert_eq!(table.peer_withdraws(7, CHUNK_BYTES), Ok(()));
        assert_eq!(table.counts(), (1, 0));
        inbound.progress.lock().advance(0, CHUNK_BYTES);
        table.forget_if_over(&inbound);
        assert_eq!(table.counts(), (0, 0));
        assert_eq!(table.peer_withdraws(7, 5), Ok(()));
    }

    #[test]
    fn discarded_transfers_that_never_start_are_bounded() {
        let mut table = Table::default();
        for transfer in 0..MAX_DISCARDED as u64 + 100 {
            let inbound = expected(&mut table, transfer, 1);
            table.discard(&inbound);
        }
        assert_eq!(table.counts(), (MAX_DISCARDED, 0));
    }

    #[test]
    fn impossible_withdrawals_are_violations() {
        let mut table = Table::default();
        assert!(table.expect(Inbound::new(7, 5, Target::Gone)));
        assert!(table.peer_withdraws(7, 6).is_err());
        assert_eq!(table.peer_withdraws(7, 0), Ok(()));
        assert!(table.peer_withdraws(7, 0).is_err());
    }
}
