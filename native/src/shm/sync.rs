//! Round synchronisation: publishing, waiting, waking, and noticing that a rank has ended.
//!
//! Payload. A rank writes its slot, then stores its round with release; the others load it with acquire, then read the
//! slot. Aborts are marked before the round moves on, so whoever sees the round sees the mark.
//!
//! Sleeping. `sleepers` argues why no wake-up of a publisher is lost; aborts wake all sleepers the same way. Every sleep
//! ends after `SLICE` at the latest: a process that is stopped or hostile delays the others, but nobody depends on its
//! wake-ups.
//!
//! `unsafe`: system calls.

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::runtime::descriptors::{Descriptor, PollSet};
use crate::shm::calls;
use crate::shm::region::{Mapping, Packed, MAX_RANKS};
use crate::shm::sleepers::shared;

/// The longest sleep. Then the ends of processes and Python's signals are looked for. In unit tests a lost wake-up shows
/// as a test that hangs.
pub const SLICE: Duration = Duration::from_millis(if cfg!(test) { 3_600_000 } else { 50 });
/// A yield that takes longer means that others need this core: sleep.
const LONG_YIELD: Duration = Duration::from_micros(100);
/// Looks at a round before the first yield: at most a few microseconds.
const MAX_LOOKS: u32 = 96;
const MIN_LOOKS: u32 = 4;
/// Looks after each yield.
const LOOKS_BETWEEN_YIELDS: u32 = 4;
/// Yields after which a wait has shown that yielding early pays.
const FEW_YIELDS: u32 = 2;
const SYS_FUTEX: libc::c_long = libc::SYS_futex;

/// Why an operation, or the whole group, has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// A rank has aborted the operation, or closed its group.
    Aborted(usize),
    /// A rank has another fingerprint.
    Mismatch(usize, Packed),
    /// A rank has ended, or was declared lost.
    Died(usize),
    /// A rank has written what no rank writes.
    Corrupt(usize),
    Cancelled,
    Closed,
}

/// What ends waits of this process, from any thread. Whoever changes it calls `wake_runner` afterwards.
#[derive(Default)]
pub struct Control {
    pub closed: AtomicBool,
    /// Ranks that are lost, one bit each.
    lost: [AtomicU64; MAX_RANKS / 64],
    /// Counts requests to return to Python.
    pub interrupts: AtomicU64,
    /// Counts all changes: a spinning thread looks at this only.
    pub changes: AtomicU32,
}

impl Control {
    pub fn lose(&self, rank: usize) {
        self.lost[rank / 64].fetch_or(1 << (rank % 64), Ordering::Release);
    }

    fn is_lost(&self, rank: usize) -> bool {
        self.lost[rank / 64].load(Ordering::Acquire) >> (rank % 64) & 1 != 0
    }
}

/// Ends the present sleep of this process, or prevents the next one.
pub fn wake_runner(mapping: &Mapping, rank: usize, control: &Control) {
    control.changes.fetch_add(1, Ordering::Release);
    wake(&mapping.record(rank).wait_word);
}

fn wake(word: &AtomicU32) {
    shared::change(word);
    // SAFETY: a mapped word; the call only looks for waiters.
    unsafe { libc::syscall(SYS_FUTEX, word.as_ptr(), libc::FUTEX_WAKE, 1) };
}

/// Whether a signal has ended the sleep.
fn sleep(word: &AtomicU32, value: u32, limit: Duration) -> bool {
    let limit = libc::timespec {
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos()),
    };
    // SAFETY: a mapped word and a timespec.
    let code = unsafe { libc::syscall(SYS_FUTEX, word.as_ptr(), libc::FUTEX_WAIT, value, &limit) };
    code != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EINTR)
}

/// What an operation waits for: all ranks have published `round`.
#[derive(Clone, Copy, Debug)]
pub struct Goal {
    pub round: u64,
    pub order: u64,
    pub sequence: u64,
    pub fingerprint: Packed,
    /// Whether this round is the one that shows the others' fingerprints.
    pub compare: bool,
    /// Distance from this rank to the next one to look at. Those before have published the round.
    pub position: usize,
}

/// How a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    Reached,
    /// Not yet, and the mode allows no longer wait.
    NotYet,
    /// A signal may have a Python handler, or `Control::interrupts` has changed.
    Interrupted,
    Ended(End),
}

/// What else ends a wait, and where its progress is shown.
pub struct WaitContext<'a> {
    pub control: &'a Control,
    pub cancelled: &'a AtomicBool,
    /// The value of `Control::interrupts` that the waiter knows.
    pub interrupts: u64,
    pub progress: &'a Progress,
}

impl WaitContext<'_> {
    /// What another thread of this process wants.
    pub fn stop(&self) -> Option<Waited> {
        if self.control.closed.load(Ordering::Acquire) {
            return Some(Waited::Ended(End::Closed));
        }
        if self.cancelled.load(Ordering::Acquire) {
            return Some(Waited::Ended(End::Cancelled));
        }
        let changed = self.control.interrupts.load(Ordering::Acquire) != self.interrupts;
        changed.then_some(Waited::Interrupted)
    }
}

/// What other threads may know of a running operation.
#[derive(Default)]
pub struct Progress {
    /// The round that is waited for.
    pub round: AtomicU64,
    /// When the last stage began: nanoseconds of the monotonic clock; 0: not begun.
    pub moved_at: AtomicU64,
}

/// How long to wait for each round.
#[derive(Clone, Copy)]
pub enum WaitMode<'a> {
    /// Some looks only. May be used with the GIL.
    Looks,
    /// As long as yielding may help; a run of several rounds ends then.
    Yields(Instant),
    /// Sleep until then.
    Sleeps(Instant, &'a WaitContext<'a>),
}

/// The rounds of one rank. Used by the one thread that runs the operations.
pub struct Rounds {
    mapping: Arc<Mapping>,
    me: usize,
    ranks: usize,
    /// Published by this rank.
    round: u64,
    /// Looks before the first yield: adapts to whether yields help.
    looks: u32,
    most_looks: u32,
    yielding: Duration,
    /// As stored in the record, by parity.
    fingerprints: [Packed; 2],
    peers: Peers,
}

impl Rounds {
    /// `yielding`: how long to yield before a sleep. `cores`: of this process.
    pub fn new(mapping: Arc<Mapping>, me: usize, yielding: Duration, cores: usize) -> Self {
        let ranks = mapping.geometry.ranks;
        let crowded = ranks > cores;
        let most_looks = if crowded { MIN_LOOKS } else { MAX_LOOKS };
        Rounds {
            me,
            ranks,
            round: 0,
            looks: most_looks,
            most_looks,
            yielding,
            fingerprints: [[0; 2]; 2],
            peers: Peers::new(ranks),
            mapping,
        }
    }

    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    pub fn round(&self) -> u64 {
        self.round
    }

    // -- telling -------------------------------------------------------------------------------------------------

    /// Before the first round of the operation is published, and not while others may still read the fingerprint of two
    /// operations ago.
    pub fn tell_fingerprint(&mut self, order: u64, fingerprint: Packed) {
        let parity = (order & 1) as usize;
        if self.fingerprints[parity] == fingerprint {
            return;
        }
        self.fingerprints[parity] = fingerprint;
        let words = &self.mapping.record(self.me).fingerprints[parity];
        words[0].store(fingerprint[0], Ordering::Relaxed);
        words[1].store(fingerprint[1], Ordering::Relaxed);
    }

    /// Publishes a round and wakes those who sleep until this rank has done so.
    pub fn publish(&mut self, round: u64) {
        self.store_round(round);
        let me = self.me as u32;
        self.wake_sleepers(|waiting_for| waiting_for == me);
    }

    /// Marks the operation, then moves to its last round. Everybody may look at the mark now.
    pub fn abort(&mut self, order: u64, last_round: u64) {
        self.mark_aborted(order, order);
        self.store_round(last_round);
        self.wake_sleepers(|_| true);
    }

    /// This rank takes part in no operation from `order` on.
    pub fn leave(&mut self, order: u64) {
        self.mark_aborted(order, u64::MAX);
        fence(Ordering::SeqCst);
        self.wake_sleepers(|_| true);
    }

    fn mark_aborted(&self, order: u64, last: u64) {
        let record = self.mapping.record(self.me);
        if record.aborted_to.load(Ordering::Relaxed) != order - 1 {
            // First: until the other word follows, the range is empty.
            record.aborted_from.store(order, Ordering::Release);
        }
        record.aborted_to.store(last, Ordering::Release);
    }

    fn store_round(&mut self, round: u64) {
        self.round = round;
        shared::publish(&self.mapping.record(self.me).round, round);
    }

    #[inline]
    fn wake_sleepers(&self, which: impl Fn(u32) -> bool) {
        let words = self.ranks.div_ceil(64);
        for (index, word) in self.mapping.header().sleepers[..words].iter().enumerate() {
            let bits = shared::sleepers(word);
            if bits != 0 {
                self.wake_among(64 * index, bits, &which);
            }
        }
    }

    #[cold]
    fn wake_among(&self, first: usize, mut bits: u64, which: impl Fn(u32) -> bool) {
        while bits != 0 {
            let rank = first + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            if rank >= self.ranks || rank == self.me {
                continue; // no rank has set this bit
            }
            let record = self.mapping.record(rank);
            if which(shared::waits_for(&record.waiting_for)) {
                wake(&record.wait_word);
            }
        }
    }

    // -- waiting -------------------------------------------------------------------------------------------------

    fn rank_at(&self, position: usize) -> usize {
        let rank = self.me + position;
        if rank < self.ranks {
            rank
        } else {
            rank - self.ranks
        }
    }

    /// Waits until all ranks have published the round. Ends early if one of them shows that they never will.
    #[inline]
    pub fn wait(&mut self, goal: &mut Goal, mode: WaitMode<'_>) -> Waited {
        if goal.position == self.ranks {
            return Waited::Reached;
        }
        match self.look(goal, self.looks) {
            Ok(true) => {
                self.looks = (self.looks + 1).min(self.most_looks);
                Waited::Reached
            }
            Ok(false) => self.wait_longer(goal, mode),
            Err(end) => Waited::Ended(end),
        }
    }

    fn wait_longer(&mut self, goal: &mut Goal, mode: WaitMode<'_>) -> Waited {
        let found = match mode {
            WaitMode::Looks => Ok(false),
            WaitMode::Yields(_) => self.look_and_yield(goal, None),
            WaitMode::Sleeps(until, context) => match self.look_and_yield(goal, Some(context)) {
                Ok(false) => return self.look_and_sleep(goal, until, context),
                found => found,
            },
        };
        match found {
            Ok(true) => Waited::Reached,
            Ok(false) => Waited::NotYet,
            Err(end) => Waited::Ended(end),
        }
    }

    /// Looks at most `looks` times in vain. Returns whether all ranks have published the round.
    #[inline]
    fn look(&self, goal: &mut Goal, mut looks: u32) -> Result<bool, End> {
        while goal.position < self.ranks {
            let rank = self.rank_at(goal.position);
            let word = &self.mapping.record(rank).round;
            let mut round = word.load(Ordering::Acquire);
            while round < goal.round {
                if looks == 0 {
                    return Ok(false);
                }
                looks -= 1;
                std::hint::spin_loop();
                round = word.load(Ordering::Acquire);
            }
            self.check(goal, rank, round)?;
            goal.position += 1;
        }
        Ok(true)
    }

    /// Whether what the rank has published belongs to this operation. No rank can be more than one round ahead, unless
    /// it has aborted this operation or a later one.
    #[inline]
    fn check(&self, goal: &Goal, rank: usize, round: u64) -> Result<(), End> {
        let record = self.mapping.record(rank);
        let aborted_to = record.aborted_to.load(Ordering::Acquire);
        if aborted_to >= goal.order {
            if record.aborted_from.load(Ordering::Acquire) <= goal.order {
                return Err(End::Aborted(rank));
            }
        } else if round > goal.round + 1 {
            return Err(End::Corrupt(rank));
        }
        if goal.compare {
            self.compare(goal, rank)?;
        }
        Ok(())
    }

    #[inline]
    fn compare(&self, goal: &Goal, rank: usize) -> Result<(), End> {
        let words = &self.mapping.record(rank).fingerprints[(goal.order & 1) as usize];
        let theirs = [
            words[0].load(Ordering::Relaxed),
            words[1].load(Ordering::Relaxed),
        ];
        match theirs == goal.fingerprint {
            true => Ok(()),
            false => Err(End::Mismatch(rank, theirs)),
        }
    }

    /// Yields between looks, until yielding does not help.
    fn look_and_yield(
        &mut self,
        goal: &mut Goal,
        context: Option<&WaitContext<'_>>,
    ) -> Result<bool, End> {
        let changes =
            || context.map_or(0, |context| context.control.changes.load(Ordering::Acquire));
        let (before, mut last) = (changes(), Instant::now());
        let until = last + self.yielding;
        let mut yields = 0u32;
        loop {
            // SAFETY: plain system call.
            unsafe { libc::sched_yield() };
            yields = yields.saturating_add(1);
            if self.look(goal, LOOKS_BETWEEN_YIELDS)? {
                if yields <= FEW_YIELDS {
                    self.looks = (self.looks / 2).max(MIN_LOOKS);
                }
                return Ok(true);
            }
            let now = Instant::now();
            if now >= until || now - last > LONG_YIELD || changes() != before {
                return Ok(false);
            }
            last = now;
        }
    }

    fn look_and_sleep(
        &mut self,
        goal: &mut Goal,
        until: Instant,
        context: &WaitContext<'_>,
    ) -> Waited {
        loop {
            let rank = self.rank_at(goal.position);
            let value = self.announce_sleep(rank);
            let found = self.look_before_sleep(goal, until, context);
            let sleeps = found.is_none() && self.rank_at(goal.position) == rank;
            let limit = until.saturating_duration_since(Instant::now());
            let word = &self.mapping.record(self.me).wait_word;
            let signal = sleeps && sleep(word, value, SLICE.min(limit));
            self.announce_awake();
            match found {
                Some(waited) => return waited,
                None if signal => return Waited::Interrupted,
                None => {}
            }
        }
    }

    /// Returns the value that the futex word must have for a sleep: what happens from now on changes it.
    fn announce_sleep(&self, rank: usize) -> u32 {
        let mine = self.mapping.record(self.me);
        let (word, waiting_for) = (&mine.wait_word, &mine.waiting_for);
        let (bits, bit) = self.sleeper_bit();
        shared::announce(word, waiting_for, rank as u32, bits, bit)
    }

    fn sleeper_bit(&self) -> (&AtomicU64, u64) {
        let bits = &self.mapping.header().sleepers[self.me / 64];
        (bits, 1 << (self.me % 64))
    }

    fn announce_awake(&self) {
        let (bits, bit) = self.sleeper_bit();
        shared::withdraw(bits, bit);
    }

    /// None: sleep.
    fn look_before_sleep(
        &mut self,
        goal: &mut Goal,
        until: Instant,
        context: &WaitContext<'_>,
    ) -> Option<Waited> {
        let found = match self.look(goal, 0) {
            Ok(true) => return Some(Waited::Reached),
            Ok(false) if context.stop().is_some() => return context.stop(),
            Ok(false) => self.look_for_end(goal, context),
            Err(end) => Err(end),
        };
        match found {
            Err(end) => Some(Waited::Ended(end)),
            Ok(()) => (Instant::now() >= until).then_some(Waited::NotYet),
        }
    }

    /// A rank that has published another fingerprint for this call, because it runs the call elsewhere.
    pub fn find_mismatch(&self, goal: &Goal) -> Option<(usize, Packed)> {
        calls::differing(&self.mapping, self.me, goal.sequence, goal.fingerprint)
    }

    /// Fails if the wait is useless. Looks at all ranks.
    fn look_for_end(&mut self, goal: &Goal, context: &WaitContext<'_>) -> Result<(), End> {
        if let Some((rank, theirs)) = self.find_mismatch(goal) {
            return Err(End::Mismatch(rank, theirs));
        }
        self.peers.look(&self.mapping, self.me);
        for position in goal.position..self.ranks {
            let rank = self.rank_at(position);
            let record = self.mapping.record(rank);
            // Before the mark and the round: what a rank has told before it ended, counts.
            let ended = context.control.is_lost(rank) || self.peers.has_ended(rank);
            if has_aborted(&self.mapping, rank, goal.order) {
                return Err(End::Aborted(rank));
            }
            if ended && record.round.load(Ordering::Acquire) < goal.round {
                return Err(End::Died(rank));
            }
        }
        Ok(())
    }
}

fn has_aborted(mapping: &Mapping, rank: usize, order: u64) -> bool {
    let record = mapping.record(rank);
    record.aborted_to.load(Ordering::Acquire) >= order
        && record.aborted_from.load(Ordering::Acquire) <= order
}

// -- ends of processes ----------------------------------------------------------------------------------------------

enum Process {
    /// Not known yet: the rank is not there.
    Unknown,
    Watched(Descriptor),
    /// This process, or the kernel has no pidfds.
    Ignored,
    Ended,
}

/// The processes of the other ranks.
struct Peers {
    processes: Vec<Process>,
    next_look: Option<Instant>,
}

impl Peers {
    fn new(ranks: usize) -> Self {
        Peers {
            processes: (0..ranks).map(|_| Process::Unknown).collect(),
            next_look: None,
        }
    }

    fn has_ended(&self, rank: usize) -> bool {
        matches!(self.processes[rank], Process::Ended)
    }

    /// At most once per slice: a look costs a system call, the first one costs one for each rank.
    fn look(&mut self, mapping: &Mapping, me: usize) {
        let now = Instant::now();
        match self.next_look {
            Some(next) if now < next => {}
            None => self.next_look = Some(now + SLICE), // most waits end before
            Some(_) => {
                self.next_look = Some(now + SLICE);
                self.open(mapping, me);
                self.poll();
            }
        }
    }

    fn open(&mut self, mapping: &Mapping, me: usize) {
        let own = std::process::id();
        for (rank, process) in self.processes.iter_mut().enumerate() {
            if !matches!(process, Process::Unknown) {
                continue;
            }
            *process = match mapping.record(rank).pid.load(Ordering::Acquire) {
                0 => continue,
                pid if pid == own || rank == me => Process::Ignored,
                pid => open_process(pid),
            };
        }
    }

    fn poll(&mut self) {
        let mut poll = PollSet::new();
        for process in &self.processes {
            if let Process::Watched(descriptor) = process {
                poll.add(descriptor.raw(), libc::POLLIN);
            }
        }
        poll.wait(Some(Duration::ZERO));
        let ended = poll.ready_from(0);
        for process in &mut self.processes {
            if matches!(process, Process::Watched(descriptor) if ended.contains(&descriptor.raw()))
            {
                *process = Process::Ended;
            }
        }
    }
}

fn open_process(pid: u32) -> Process {
    // SAFETY: plain system call; the descriptor is new and checked before it is owned. It is closed on exec.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0);
        if let Ok(fd @ 0..) = i32::try_from(fd) {
            return Process::Watched(Descriptor::new(OwnedFd::from_raw_fd(fd)));
        }
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::ESRCH) => Process::Ended,
        _ => Process::Ignored, // the failure detector notices it
    }
}

#[cfg(test)]
mod tests {
    use std::thread::scope;

    use super::*;
    use crate::shm::region::tests::mapping;

    const NEVER: Duration = Duration::from_secs(100_000);

    fn goal(round: u64) -> Goal {
        Goal {
            round,
            order: 1,
            sequence: 0,
            fingerprint: [0; 2],
            compare: false,
            position: 1,
        }
    }

    /// Ranks that sleep at once, or with looks and yields before.
    fn rounds(mapping: &Arc<Mapping>, me: usize, sleepy: bool) -> Rounds {
        let yielding = Duration::from_micros(if sleepy { 0 } else { 20 });
        let mut rounds = Rounds::new(mapping.clone(), me, yielding, 1);
        rounds.looks = if sleepy { 0 } else { rounds.looks };
        rounds.most_looks = rounds.looks;
        rounds
    }

    struct Other {
        control: Control,
        cancelled: AtomicBool,
        progress: Progress,
    }

    impl Other {
        fn new() -> Self {
            Other {
                control: Control::default(),
                cancelled: AtomicBool::new(false),
                progress: Progress::default(),
            }
        }

        fn context(&self) -> WaitContext<'_> {
            WaitContext {
                control: &self.control,
                cancelled: &self.cancelled,
                interrupts: 0,
                progress: &self.progress,
            }
        }
    }

    fn wait(rounds: &mut Rounds, goal: &mut Goal, other: &Other) -> Waited {
        let context = other.context();
        rounds.wait(goal, WaitMode::Sleeps(Instant::now() + NEVER, &context))
    }

    #[test]
    fn no_wake_up_is_lost() {
        for (ranks, sleepy, count) in [(2, true, 20_000), (2, false, 20_000), (5, true, 2000)] {
            let mapping = mapping(ranks, 0);
            scope(|scope| {
                for me in 0..ranks {
                    let mut rounds = rounds(&mapping, me, sleepy);
                    scope.spawn(move || {
                        let other = Other::new();
                        for round in 1..=count {
                            rounds.publish(round);
                            let waited = wait(&mut rounds, &mut goal(round), &other);
                            assert_eq!(waited, Waited::Reached);
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn a_change_ends_a_sleep() {
        let mapping = mapping(2, 0);
        for _ in 0..200 {
            let other = Other::new();
            let mut rounds = rounds(&mapping, 0, true);
            scope(|scope| {
                scope.spawn(|| {
                    other.cancelled.store(true, Ordering::Release);
                    wake_runner(&mapping, 0, &other.control);
                });
                let waited = wait(&mut rounds, &mut goal(1), &other);
                assert_eq!(waited, Waited::Ended(End::Cancelled));
            });
        }
    }

    #[test]
    fn an_abort_wakes_whoever_sleeps() {
        for _ in 0..200 {
            let mapping = mapping(3, 0);
            let other = Other::new();
            let mut rounds: Vec<Rounds> = (0..3).map(|me| rounds(&mapping, me, true)).collect();
            let mut aborting = rounds.pop().unwrap();
            scope(|scope| {
                scope.spawn(move || aborting.abort(1, 7));
                // It waits for rank 1, which never comes.
                let waited = wait(&mut rounds[0], &mut goal(1), &other);
                assert_eq!(waited, Waited::Ended(End::Aborted(2)));
            });
        }
    }

    fn look(rounds: &mut Rounds, goal: &mut Goal) -> Waited {
        rounds.wait(goal, WaitMode::Looks)
    }

    #[test]
    fn consecutive_aborts_are_one_range() {
        let mapping = mapping(2, 0);
        let (mut first, mut second) = (rounds(&mapping, 0, true), rounds(&mapping, 1, true));
        second.abort(3, 3);
        second.abort(4, 4);
        second.abort(6, 8);
        let mut at = |order| {
            let mut goal = goal(1);
            goal.order = order;
            look(&mut first, &mut goal)
        };
        // 3 and 4 are over for everybody, or rank 1 could not have run 5.
        assert_eq!(at(6), Waited::Ended(End::Aborted(1)));
        assert_eq!(at(5), Waited::Reached);
        assert_eq!(at(7), Waited::Ended(End::Corrupt(1)));
        second.leave(7);
        assert_eq!(at(7), Waited::Ended(End::Aborted(1)));
        assert_eq!(at(u64::MAX), Waited::Ended(End::Aborted(1)));
    }

    #[test]
    fn a_fingerprint_is_compared_where_it_is_asked_for() {
        let mapping = mapping(2, 0);
        let (mut first, mut second) = (rounds(&mapping, 0, true), rounds(&mapping, 1, true));
        second.tell_fingerprint(1, [5, 6]);
        second.publish(1);
        assert_eq!(look(&mut first, &mut goal(1)), Waited::Reached);
        let mut compared = Goal {
            compare: true,
            ..goal(1)
        };
        let mismatch = End::Mismatch(1, [5, 6]);
        assert_eq!(look(&mut first, &mut compared), Waited::Ended(mismatch));
        compared.fingerprint = [5, 6];
        assert_eq!(look(&mut first, &mut compared), Waited::Reached);
    }

    #[test]
    fn a_lost_rank_counts_up_to_what_it_has_published() {
        let mapping = mapping(2, 0);
        let (mut first, mut second) = (rounds(&mapping, 0, true), rounds(&mapping, 1, true));
        let other = Other::new();
        second.publish(1);
        other.control.lose(1);
        let reached = wait(&mut first, &mut goal(1), &other);
        assert_eq!(reached, Waited::Reached);
        let died = wait(&mut first, &mut goal(2), &other);
        assert_eq!(died, Waited::Ended(End::Died(1)));
    }

    #[test]
    fn bits_of_ranks_that_do_not_exist_are_ignored() {
        let mapping = mapping(3, 0);
        let mut first = rounds(&mapping, 0, true);
        for word in &mapping.header().sleepers {
            word.store(u64::MAX, Ordering::Relaxed);
        }
        first.publish(1);
        first.abort(1, 2);
    }
}
