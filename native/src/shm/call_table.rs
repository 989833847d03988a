//! Numbers and statistics of the calls of one group. Private to the process.

use std::collections::BTreeMap;

use crate::shm::calls::{Facts, Fingerprint};
use crate::shm::region::Packed;

/// A finished call: sequence number, fingerprint, begin, end, bytes, outcome.
pub type RecentFacts = (u64, Facts, f64, f64, u64, u32);
/// Calls, bytes, seconds, seconds waiting, errors.
pub type TotalFacts = (u64, u64, f64, f64, u64);
/// The highest successful sequence number; of the last success: operation, sequence number and end.
pub type SuccessFacts = (u64, u8, u64, f64);

#[derive(Clone, Copy)]
pub struct Finished {
    pub sequence: u64,
    pub fingerprint: Packed,
    pub began: f64,
    pub ended: f64,
    pub bytes: u64,
    /// 0: success. Other numbers are the caller's.
    pub outcome: u32,
}

impl Finished {
    fn facts(&self) -> RecentFacts {
        let fingerprint = Fingerprint::unpacked(self.fingerprint).facts();
        let Finished { began, ended, .. } = *self;
        (
            self.sequence,
            fingerprint,
            began,
            ended,
            self.bytes,
            self.outcome,
        )
    }

    fn operation(&self) -> u8 {
        Fingerprint::unpacked(self.fingerprint).0
    }
}

#[derive(Clone, Copy, Default)]
struct Totals {
    calls: u64,
    bytes: u64,
    seconds: f64,
    waiting: f64,
    errors: u64,
}

/// The owner's lock guards it.
pub struct CallTable {
    next_sequence: u64,
    next_order: u64,
    /// One bit for each reason why a call must not take the fast path.
    blocked: u32,
    recent: Vec<Finished>,
    kept: usize,
    ended: u64,
    totals: BTreeMap<u8, Totals>,
    highest: Option<u64>,
    last: Option<Finished>,
}

impl CallTable {
    /// `kept`: how many finished calls are kept.
    pub fn new(kept: usize) -> Self {
        CallTable {
            next_sequence: 0,
            next_order: 1,
            blocked: 0,
            recent: Vec::new(),
            kept: kept.max(1),
            ended: 0,
            totals: BTreeMap::new(),
            highest: None,
            last: None,
        }
    }

    /// The next sequence number, and the first of `orders` order numbers.
    pub fn take(&mut self, orders: u64) -> (u64, u64) {
        let taken = (self.next_sequence, self.next_order);
        self.next_sequence += 1;
        self.next_order += orders;
        taken
    }

    /// The same for a call that takes the fast path: its order number must be `head`, and nothing block it.
    #[inline]
    pub fn take_unblocked(&mut self, head: u64) -> Option<u64> {
        (self.blocked == 0 && self.next_order == head).then(|| self.take(1).0)
    }

    pub fn block(&mut self, reasons: u32) {
        self.blocked |= reasons;
    }

    pub fn unblock(&mut self, reasons: u32) {
        self.blocked &= !reasons;
    }

    pub fn blocked(&self) -> u32 {
        self.blocked
    }

    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// `waiting`: seconds for which the call waited for others.
    #[inline]
    pub fn note(&mut self, finished: Finished, waiting: f64) {
        self.keep(finished);
        let totals = self.totals.entry(finished.operation()).or_default();
        totals.calls += 1;
        totals.bytes += finished.bytes;
        totals.seconds += finished.ended - finished.began;
        totals.waiting += waiting;
        if finished.outcome != 0 {
            totals.errors += 1;
            return;
        }
        self.last = Some(finished);
        self.highest = self.highest.max(Some(finished.sequence));
    }

    fn keep(&mut self, finished: Finished) {
        let at = (self.ended % self.kept as u64) as usize;
        self.ended += 1;
        match self.recent.get_mut(at) {
            Some(place) => *place = finished,
            None => self.recent.push(finished),
        }
    }

    /// The recent calls in the order in which they were noted, and how many earlier ones were dropped.
    pub fn recent(&self) -> (Vec<RecentFacts>, u64) {
        let dropped = self.ended - self.recent.len() as u64;
        let first = if dropped == 0 {
            0
        } else {
            (self.ended % self.kept as u64) as usize
        };
        let (late, early) = self.recent.split_at(first);
        let all = early.iter().chain(late).map(Finished::facts).collect();
        (all, dropped)
    }

    pub fn totals(&self) -> BTreeMap<u8, TotalFacts> {
        let facts = |all: &Totals| (all.calls, all.bytes, all.seconds, all.waiting, all.errors);
        let each = self.totals.iter();
        each.map(|(operation, all)| (*operation, facts(all)))
            .collect()
    }

    pub fn success(&self) -> Option<SuccessFacts> {
        let last = self.last?;
        Some((self.highest?, last.operation(), last.sequence, last.ended))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(sequence: u64, operation: u8, outcome: u32) -> Finished {
        Finished {
            sequence,
            fingerprint: Fingerprint(operation, 11, 2, 0, 1, 3).packed(),
            began: 1.0,
            ended: 1.5,
            bytes: 8,
            outcome,
        }
    }

    #[test]
    fn numbers_are_taken_in_order() {
        let mut table = CallTable::new(4);
        assert_eq!(table.take(0), (0, 1));
        assert_eq!(table.take(2), (1, 1));
        assert_eq!(table.take(1), (2, 3));
        assert_eq!(table.next_sequence(), 3);
    }

    #[test]
    fn the_fast_path_needs_the_head_and_no_reason_against_it() {
        let mut table = CallTable::new(4);
        assert_eq!(table.take_unblocked(1), Some(0));
        assert_eq!(table.take_unblocked(1), None);
        table.block(5);
        table.unblock(1);
        assert_eq!((table.blocked(), table.take_unblocked(2)), (4, None));
        table.unblock(4);
        assert_eq!(table.take_unblocked(2), Some(1));
        assert_eq!(table.take(0), (2, 3));
    }

    #[test]
    fn recent_calls_are_kept_up_to_a_limit() {
        let mut table = CallTable::new(3);
        assert_eq!(table.recent(), (vec![], 0));
        for sequence in 0..5 {
            table.note(finished(sequence, 1, 0), 0.0);
        }
        let (kept, dropped) = table.recent();
        let sequences: Vec<u64> = kept.iter().map(|one| one.0).collect();
        assert_eq!((sequences, dropped), (vec![2, 3, 4], 2));
        assert_eq!(kept[0], (2, (1, 11, 2, 0, 1, 3), 1.0, 1.5, 8, 0));
    }

    #[test]
    fn totals_are_by_operation() {
        let mut table = CallTable::new(3);
        assert_eq!(table.success(), None);
        table.note(finished(0, 1, 0), 0.25);
        table.note(finished(2, 1, 0), 0.0);
        table.note(finished(1, 2, 0), 0.0);
        table.note(finished(3, 1, 9), 0.0);
        assert_eq!(table.totals()[&1], (3, 24, 1.5, 0.25, 1));
        assert_eq!(table.totals()[&2], (1, 8, 0.5, 0.0, 0));
        assert_eq!(table.success(), Some((2, 2, 1, 1.5)));
    }
}
