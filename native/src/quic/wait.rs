//! Waiting: a thread that waits drives the endpoint, or follows the thread that does.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use crate::quic::completions::CompletionQueue;
use crate::quic::driver::Waiter;
use crate::quic::endpoint_shared::Shared;
use crate::quic::operation::OperationState;
use crate::quic::state::State;
use crate::runtime::descriptors::{Poll, PollSet};
use crate::runtime::errors::Failure;

/// Python's signal handlers run at least this often, in case another thread received the signal.
const SLICE: Duration = Duration::from_millis(100);
/// A yield that takes longer than this means that other threads need the core: sleep.
const SLOW_YIELD: Duration = Duration::from_micros(100);
/// While spinning, watched descriptors are polled once in this many rounds: each poll is a system
/// call that delays datagrams.
const ROUNDS_PER_POLL: u32 = 8;

/// What a thread waits for. Everything that makes `ready` true happens under the endpoint's lock
/// and wakes the waiters that were added.
pub trait WaitCondition: Sync {
    fn ready(&self) -> bool;
    fn add_waiter(&self, waiter: &Arc<Waiter>);
    fn remove_waiter(&self, waiter: &Arc<Waiter>);
    /// Watched descriptors and their events.
    fn descriptors(&self) -> Vec<(RawFd, i16)>;
    /// How much of the allowed time to spin.
    fn spin_budget(&self, allowed: Duration) -> Duration {
        allowed
    }
    fn record_spin(&self, _paid: bool) {}
}

/// Done when any of these operations is, or one of the descriptors is readable.
pub struct AnyOperation {
    pub ops: Vec<Arc<OperationState>>,
    pub descriptors: Vec<(RawFd, i16)>,
}

impl WaitCondition for AnyOperation {
    fn ready(&self) -> bool {
        self.ops.iter().any(|op| op.done())
    }

    fn add_waiter(&self, waiter: &Arc<Waiter>) {
        for op in &self.ops {
            op.cell().add_waiter(waiter);
        }
    }

    fn remove_waiter(&self, waiter: &Arc<Waiter>) {
        for op in &self.ops {
            op.cell().remove_waiter(waiter);
        }
    }

    fn descriptors(&self) -> Vec<(RawFd, i16)> {
        self.descriptors.clone()
    }
}

impl WaitCondition for CompletionQueue {
    fn ready(&self) -> bool {
        CompletionQueue::ready(self)
    }

    fn add_waiter(&self, waiter: &Arc<Waiter>) {
        CompletionQueue::add_waiter(self, waiter);
    }

    fn remove_waiter(&self, waiter: &Arc<Waiter>) {
        CompletionQueue::remove_waiter(self, waiter);
    }

    fn descriptors(&self) -> Vec<(RawFd, i16)> {
        self.watched()
    }

    fn spin_budget(&self, allowed: Duration) -> Duration {
        CompletionQueue::spin_budget(self, allowed)
    }

    fn record_spin(&self, paid: bool) {
        CompletionQueue::record_spin(self, paid);
    }
}

#[derive(PartialEq, Debug)]
pub enum WaitResult {
    /// The condition is true, or these descriptors are ready.
    Ready(Vec<RawFd>),
    TimedOut,
    /// Python must run its signal handlers, then wait again.
    Signals,
}

pub struct Wait<'a> {
    pub shared: &'a Shared,
    pub condition: &'a dyn WaitCondition,
    pub deadline: Option<Instant>,
    pub spin: Duration,
}

/// The state of one wait.
struct Progress {
    waiter: Arc<Waiter>,
    started: Option<Instant>,
    spin_until: Option<Instant>,
    slept: bool,
    /// Rounds since the watched descriptors were last polled.
    rounds: u32,
}

impl Wait<'_> {
    /// Waits, without the GIL. The thread is not the driver any more when this returns, also for
    /// signal handlers: they may call anything, even this.
    pub fn run(&self) -> Result<WaitResult, Failure> {
        let mut state = self.shared.state.lock();
        state.open()?;
        let waiter = state
            .election
            .enter(!self.spin.is_zero())
            .map_err(|e| Failure::Os(e.raw_os_error().unwrap_or(0)))?;
        let mut progress = Progress {
            waiter,
            started: None,
            spin_until: None,
            slept: false,
            rounds: 0,
        };
        self.condition.add_waiter(&progress.waiter);
        let result = self.run_rounds(&mut state, &mut progress);
        self.condition.remove_waiter(&progress.waiter);
        state.election.leave(progress.waiter);
        self.shared.notify_if_empty(&state);
        result
    }

    fn run_rounds(
        &self,
        state: &mut MutexGuard<'_, State>,
        progress: &mut Progress,
    ) -> Result<WaitResult, Failure> {
        loop {
            let drives = state.election.try_drive(&progress.waiter);
            let (busy, now) = if drives {
                let round = self.shared.drive(state)?;
                (round.busy, round.now)
            } else {
                state.open()?;
                (false, Instant::now())
            };
            if let Some(result) = self.result(now, progress) {
                return Ok(result);
            }
            if busy {
                progress.spin_until = None;
                MutexGuard::bump(state);
            } else if drives && now < self.spin_until(now, progress) {
                // Yield instead of a busy loop: the peer may need this core.
                // SAFETY: no arguments, cannot fail.
                MutexGuard::unlocked(state, || unsafe { libc::sched_yield() });
                if now.elapsed() > SLOW_YIELD {
                    progress.spin_until = Some(now);
                }
            } else if let Some(result) = self.sleep(state, progress, drives, now) {
                return Ok(result);
            }
        }
    }

    /// The result of the wait, if it has one. Checked after each round.
    fn result(&self, now: Instant, progress: &mut Progress) -> Option<WaitResult> {
        let started = *progress.started.get_or_insert(now);
        let ready = self.ready_descriptors(progress);
        if self.condition.ready() || !ready.is_empty() {
            if !self.spin.is_zero() {
                self.condition
                    .record_spin(!progress.slept || now - started <= self.spin);
            }
            return Some(WaitResult::Ready(ready));
        }
        match self.deadline {
            Some(deadline) if deadline <= now => Some(WaitResult::TimedOut),
            _ => None,
        }
    }

    /// Watched descriptors that are ready. Polled in the first round, after each sleep, and in
    /// every `ROUNDS_PER_POLL`th round.
    fn ready_descriptors(&self, progress: &mut Progress) -> Vec<RawFd> {
        let look = progress.rounds % ROUNDS_PER_POLL == 0;
        progress.rounds += 1;
        if !look {
            return Vec::new();
        }
        let descriptors = self.condition.descriptors();
        if descriptors.is_empty() {
            return Vec::new();
        }
        let mut set = PollSet::new();
        for (fd, events) in descriptors {
            set.add(fd, events);
        }
        match set.wait(Some(Duration::ZERO)) {
            Poll::Ready => set.ready_from(0),
            _ => Vec::new(),
        }
    }

    fn spin_until(&self, now: Instant, progress: &mut Progress) -> Instant {
        *progress
            .spin_until
            .get_or_insert_with(|| now + self.condition.spin_budget(self.spin))
    }

    /// Sleeps. The driver sleeps on the socket, its own event and the watched descriptors, a
    /// follower on the latter two. The lock is free between `prepare_sleep` and the system call,
    /// but a thread that wakes this one then writes to the event, so the call returns at once.
    fn sleep(
        &self,
        state: &mut MutexGuard<'_, State>,
        progress: &mut Progress,
        drives: bool,
        now: Instant,
    ) -> Option<WaitResult> {
        let waiter = progress.waiter.clone();
        if !waiter.prepare_sleep() {
            return None;
        }
        let slice = now + SLICE;
        let mut until = self.deadline.map_or(slice, |deadline| deadline.min(slice));
        let mut set = PollSet::new();
        if drives {
            until = add_socket(state, &mut set, until);
        } else {
            state.election.add_follower(&waiter);
        }
        set.add(waiter.descriptor(), libc::POLLIN);
        for (fd, events) in self.condition.descriptors() {
            set.add(fd, events);
        }
        progress.slept = true;
        progress.rounds = 0;
        let timeout = until.saturating_duration_since(now);
        let poll = MutexGuard::unlocked(state, || set.wait(Some(timeout)));
        waiter.finish_sleep();
        state.election.clear_sleep(&waiter);
        let sliced = poll == Poll::TimedOut && until == slice;
        if poll == Poll::Interrupted || sliced {
            return Some(WaitResult::Signals);
        }
        None
    }
}

/// Adds the socket and the next timer to a driver's sleep. Returns when to wake up.
pub fn add_socket(state: &mut State, set: &mut PollSet, latest: Instant) -> Instant {
    let until = state.next_timer().map_or(latest, |next| next.min(latest));
    let blocked = !state.core.blocked.is_empty();
    if let Some(socket) = &state.core.socket {
        let writable = if blocked { libc::POLLOUT } else { 0 };
        set.add(socket.raw(), libc::POLLIN | writable);
    }
    state.election.set_sleep(Some(until), blocked);
    until
}
