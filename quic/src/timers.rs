//! When which session wants to be looked at next.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

/// A heap with lazy deletion. Each session remembers the one entry that counts for it; timers that
/// move later (they do with every packet) cost nothing, because the entry is only found to be early
/// when it comes up, and is then pushed back.
#[derive(Default)]
pub struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u64)>>,
}

impl Timers {
    /// The session's timer is `at`; `queued` is its memory of the entry that counts.
    pub fn arm(&mut self, serial: u64, queued: &mut Option<Instant>, at: Option<Instant>) {
        let Some(at) = at else { return };
        if queued.is_none_or(|known| at < known) {
            *queued = Some(at);
            self.heap.push(Reverse((at, serial)));
        }
    }

    pub fn first(&self) -> Option<(Instant, u64)> {
        self.heap.peek().map(|Reverse(entry)| *entry)
    }

    pub fn pop(&mut self) {
        self.heap.pop();
    }
}
