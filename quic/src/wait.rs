//! Waiting is driving: the thread that waits leads the endpoint, or follows the one that does.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use crate::errors::Failure;
use crate::op::Op;
use crate::poll::{Poll, PollSet};
use crate::queue::Queue;
use crate::shared::Shared;
use crate::state::State;
use crate::waiter::Waiter;

/// Python's signal handlers get a chance at least this often, in case another thread took the signal.
const SLICE: Duration = Duration::from_millis(100);
/// A yield that took longer: others need this core more than we do, so sleep.
const CROWDED: Duration = Duration::from_micros(100);
/// While spinning, foreign descriptors are looked at once in so many rounds: each look is a system call
/// more on the way of a datagram.
const ROUNDS_PER_LOOK: u32 = 8;

/// What a thread waits for. Everything that makes `ready` true happens under the endpoint's lock and
/// wakes the waiters enlisted here.
pub trait Wanted: Sync {
    fn ready(&self) -> bool;
    fn enlist(&self, waiter: &Arc<Waiter>);
    fn dismiss(&self, waiter: &Arc<Waiter>);
    /// Foreign descriptors and the events of interest.
    fn descriptors(&self) -> Vec<(RawFd, i16)>;
    /// Of the time the caller allows for spinning, how much seems worth it.
    fn budget(&self, allowed: Duration) -> Duration {
        allowed
    }
    fn learn(&self, _paid: bool) {}
}

/// Any of some operations.
pub struct AnyOf {
    pub ops: Vec<Arc<Op>>,
    pub descriptors: Vec<(RawFd, i16)>,
}

impl Wanted for AnyOf {
    fn ready(&self) -> bool {
        self.ops.iter().any(|op| op.done())
    }

    fn enlist(&self, waiter: &Arc<Waiter>) {
        for op in &self.ops {
            op.cell().enlist(waiter);
        }
    }

    fn dismiss(&self, waiter: &Arc<Waiter>) {
        for op in &self.ops {
            op.cell().dismiss(waiter);
        }
    }

    fn descriptors(&self) -> Vec<(RawFd, i16)> {
        self.descriptors.clone()
    }
}

impl Wanted for Queue {
    fn ready(&self) -> bool {
        Queue::ready(self)
    }

    fn enlist(&self, waiter: &Arc<Waiter>) {
        Queue::enlist(self, waiter);
    }

    fn dismiss(&self, waiter: &Arc<Waiter>) {
        Queue::dismiss(self, waiter);
    }

    fn descriptors(&self) -> Vec<(RawFd, i16)> {
        self.watched()
    }

    fn budget(&self, allowed: Duration) -> Duration {
        Queue::budget(self, allowed)
    }

    fn learn(&self, paid: bool) {
        Queue::learn(self, paid);
    }
}

#[derive(PartialEq, Debug)]
pub enum Ended {
    /// Something wanted is there, or these descriptors are ready.
    Ready(Vec<RawFd>),
    TimedOut,
    /// Let Python run its signal handlers, then wait on.
    Signals,
}

pub struct Vigil<'a> {
    pub shared: &'a Shared,
    pub wanted: &'a dyn Wanted,
    pub deadline: Option<Instant>,
    pub spin: Duration,
}

/// Where one wait stands.
struct Watch {
    waiter: Arc<Waiter>,
    started: Option<Instant>,
    spin_until: Option<Instant>,
    slept: bool,
    /// Since the last look at foreign descriptors.
    rounds: u32,
}

impl Vigil<'_> {
    /// Without the GIL. Leadership is given up before returning, also to run signal handlers:
    /// these may call anything, even this.
    pub fn keep(&self) -> Result<Ended, Failure> {
        let mut state = self.shared.state.lock();
        state.open()?;
        let waiter = state
            .crew
            .arrive(!self.spin.is_zero())
            .map_err(|e| Failure::Os(e.raw_os_error().unwrap_or(0)))?;
        let mut watch = Watch {
            waiter,
            started: None,
            spin_until: None,
            slept: false,
            rounds: 0,
        };
        self.wanted.enlist(&watch.waiter);
        let ended = self.watch(&mut state, &mut watch);
        self.wanted.dismiss(&watch.waiter);
        state.crew.depart(watch.waiter);
        self.shared.vacate(&state);
        ended
    }

    fn watch(
        &self,
        state: &mut MutexGuard<'_, State>,
        watch: &mut Watch,
    ) -> Result<Ended, Failure> {
        loop {
            let leads = state.crew.lead(&watch.waiter);
            let (busy, now) = if leads {
                let round = self.shared.drive(state)?;
                (round.busy, round.now)
            } else {
                state.open()?;
                (false, Instant::now())
            };
            if let Some(ended) = self.reason(now, watch) {
                return Ok(ended);
            }
            if busy {
                watch.spin_until = None;
                MutexGuard::bump(state);
            } else if leads && now < self.spin_until(now, watch) {
                // Yielding, not burning: the peer may need this very core.
                // SAFETY: no arguments, cannot fail.
                MutexGuard::unlocked(state, || unsafe { libc::sched_yield() });
                if now.elapsed() > CROWDED {
                    watch.spin_until = Some(now);
                }
            } else if let Some(ended) = self.sleep(state, watch, leads, now) {
                return Ok(ended);
            }
        }
    }

    /// A reason to stop waiting, looked for after each round.
    fn reason(&self, now: Instant, watch: &mut Watch) -> Option<Ended> {
        let started = *watch.started.get_or_insert(now);
        let foreign = self.foreign(watch);
        if self.wanted.ready() || !foreign.is_empty() {
            if !self.spin.is_zero() {
                self.wanted
                    .learn(!watch.slept || now - started <= self.spin);
            }
            return Some(Ended::Ready(foreign));
        }
        match self.deadline {
            Some(deadline) if deadline <= now => Some(Ended::TimedOut),
            _ => None,
        }
    }

    /// Those that are ready: looked at in the first round, after each sleep, and now and then between.
    fn foreign(&self, watch: &mut Watch) -> Vec<RawFd> {
        let look = watch.rounds % ROUNDS_PER_LOOK == 0;
        watch.rounds += 1;
        if !look {
            return Vec::new();
        }
        let descriptors = self.wanted.descriptors();
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

    fn spin_until(&self, now: Instant, watch: &mut Watch) -> Instant {
        *watch
            .spin_until
            .get_or_insert_with(|| now + self.wanted.budget(self.spin))
    }

    /// The leader sleeps on the socket, its own event and foreign descriptors; a follower on the
    /// latter two. Between `lie_down` and the system call the lock is free, but whoever then has
    /// news writes to the event, so the call returns at once.
    fn sleep(
        &self,
        state: &mut MutexGuard<'_, State>,
        watch: &mut Watch,
        leads: bool,
        now: Instant,
    ) -> Option<Ended> {
        let waiter = watch.waiter.clone();
        if !waiter.lie_down() {
            return None;
        }
        let slice = now + SLICE;
        let mut until = self.deadline.map_or(slice, |deadline| deadline.min(slice));
        let mut set = PollSet::new();
        if leads {
            until = add_socket(state, &mut set, until);
        } else {
            state.crew.follow(&waiter);
        }
        set.add(waiter.descriptor(), libc::POLLIN);
        let foreign = set.len();
        for (fd, events) in self.wanted.descriptors() {
            set.add(fd, events);
        }
        watch.slept = true;
        watch.rounds = 0;
        let timeout = until.saturating_duration_since(now);
        let poll = MutexGuard::unlocked(state, || set.wait(Some(timeout)));
        waiter.get_up();
        state.crew.awake(&waiter);
        let sliced = poll == Poll::TimedOut && until == slice;
        if poll == Poll::Interrupted || sliced {
            return Some(Ended::Signals);
        }
        debug_assert!(foreign <= set.len());
        None
    }
}

/// The leader's part of a sleep: the socket, and the next timer. Returns when to wake up.
pub fn add_socket(state: &mut State, set: &mut PollSet, latest: Instant) -> Instant {
    let until = state.next_timer().map_or(latest, |next| next.min(latest));
    let blocked = !state.hub.blocked.is_empty();
    if let Some(socket) = &state.hub.socket {
        let writable = if blocked { libc::POLLOUT } else { 0 };
        set.add(socket.raw(), libc::POLLIN | writable);
    }
    state.crew.asleep(Some(until), blocked);
    until
}
