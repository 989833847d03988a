//! The posted operations of a group: who runs them, how they end, and how they are cancelled.
//!
//! Whoever holds the engine's lock runs the operation at the head, also if another thread waits for it. Threads that
//! want it only try: if it is taken they sleep until something changes. So no thread waits for a lock that another one
//! holds in a wait, except `close`, which ends that wait first.
//!
//! Lock order: engine, an operation's `run`, `state`, `mapping`. No lock is held while Python code may run.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::runtime::buffer::Borrowed;
use crate::runtime::descriptors::Event;
use crate::runtime::process::{self, CloseAtExit};
use crate::runtime::signals::with_signals_blocked;
use crate::shm::calls;
use crate::shm::clock;
use crate::shm::collectives::Shape;
use crate::shm::engine::{Engine, Run, Step};
use crate::shm::region::{Mapping, Packed};
use crate::shm::sync::{wake_runner, Control, End, Progress, WaitContext, WaitMode, SLICE};

const STACK_BYTES: usize = 256 << 10;

/// How an operation has ended. None: success.
pub type Outcome = Option<End>;

/// An operation by order number.
pub struct Posted {
    pub order: u64,
    pub sequence: u64,
    pub fingerprint: Packed,
    /// When the call began: seconds of the monotonic clock.
    pub began: f64,
    rounds: u64,
    background: bool,
    /// None: it has ended, or is aborted when its turn comes.
    run: Mutex<Option<Run>>,
    /// Keeps the memory of `run` alive.
    held: Mutex<Vec<Borrowed>>,
    cancelled: AtomicBool,
    outcome: Mutex<Option<Outcome>>,
    /// `outcome` is there.
    ended: AtomicBool,
    progress: Progress,
}

impl Posted {
    /// `began`: seconds of the monotonic clock.
    pub fn new(run: Run, call: CallFacts, held: Vec<Borrowed>, background: bool) -> Arc<Self> {
        let progress = Progress::default();
        progress.round.store(run.round(), Ordering::Relaxed);
        Arc::new(Posted {
            order: call.order,
            sequence: call.sequence,
            fingerprint: call.fingerprint,
            began: call.began,
            rounds: run.rounds(),
            background,
            progress,
            run: Mutex::new(Some(run)),
            held: Mutex::new(held),
            cancelled: AtomicBool::new(false),
            outcome: Mutex::new(None),
            ended: AtomicBool::new(false),
        })
    }

    /// Takes no part in the operation: it is aborted when its turn comes.
    fn skipped(order: u64, rounds: u64) -> Arc<Self> {
        Arc::new(Posted {
            order,
            sequence: 0,
            fingerprint: [0; 2],
            began: 0.0,
            rounds,
            background: false,
            progress: Progress::default(),
            run: Mutex::new(None),
            held: Mutex::new(Vec::new()),
            cancelled: AtomicBool::new(true),
            outcome: Mutex::new(Some(Some(End::Cancelled))),
            ended: AtomicBool::new(true),
        })
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// None: it has not ended.
    pub fn outcome(&self) -> Option<Outcome> {
        *self.outcome.lock()
    }

    /// When its last stage began; 0: it has not begun.
    pub fn moved_at(&self) -> f64 {
        self.progress.moved_at.load(Ordering::Relaxed) as f64 * 1e-9
    }
}

/// What identifies an operation.
#[derive(Clone, Copy)]
pub struct CallFacts {
    pub order: u64,
    pub sequence: u64,
    pub fingerprint: Packed,
    pub began: f64,
}

#[derive(Default)]
struct QueueState {
    posted: BTreeMap<u64, Arc<Posted>>,
    /// Why later operations end at once.
    ended: Option<End>,
    /// Background operations that have ended, by order number, in that order.
    finished: Vec<u64>,
    /// Background operations that have not ended.
    background: usize,
    /// Changes whenever a waiting thread may have something to do.
    version: u64,
}

/// How a thread's wait for an operation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driven {
    Ended,
    NotYet,
    Interrupted,
}

/// What a thread that runs operations has found.
enum Found {
    Driven(Driven),
    /// The next operation was not posted yet.
    Idle,
}

/// One rank's side of a region.
pub struct OperationQueue {
    pub me: usize,
    pub shape: Shape,
    /// None: closed.
    mapping: Mutex<Option<Arc<Mapping>>>,
    /// None: closed.
    pub engine: Mutex<Option<Engine>>,
    state: Mutex<QueueState>,
    changed: Condvar,
    /// Threads that wait for `changed`, or are about to.
    waiting: AtomicU32,
    /// Operations in the queue that are to be aborted when their turn comes.
    skips: AtomicU32,
    /// The engine's, as of when its lock was last released.
    head: AtomicU64,
    pub control: Control,
    pub event: Event,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl OperationQueue {
    pub fn new(mapping: Arc<Mapping>, me: usize, engine: Engine) -> io::Result<Arc<Self>> {
        let geometry = mapping.geometry;
        let queue = Arc::new(OperationQueue {
            me,
            shape: Shape {
                ranks: geometry.ranks,
                chunk_bytes: geometry.chunk_bytes,
            },
            mapping: Mutex::new(Some(mapping)),
            engine: Mutex::new(Some(engine)),
            state: Mutex::default(),
            changed: Condvar::new(),
            waiting: AtomicU32::new(0),
            skips: AtomicU32::new(0),
            head: AtomicU64::new(1),
            control: Control::default(),
            event: Event::new()?,
            worker: Mutex::new(None),
        });
        process::register_for_exit(&queue);
        Ok(queue)
    }

    /// None: closed.
    pub fn mapping(&self) -> Option<Arc<Mapping>> {
        self.mapping.lock().clone()
    }

    // -- posting -----------------------------------------------------------------------------------------------

    /// Each order number is used once: the others count on it.
    pub fn check_order(&self, order: u64) -> Result<u64, &'static str> {
        let used = order < self.head.load(Ordering::Relaxed).max(1)
            || self.state.lock().posted.contains_key(&order);
        match order {
            u64::MAX => Err("there are not so many order numbers"),
            _ if used => Err("the order number was used; they begin at 1"),
            _ => Ok(order),
        }
    }

    /// Adds an operation whose call is published too, unless it was. Fails it at once if no operation can run.
    pub fn post(self: &Arc<Self>, posted: &Arc<Posted>) -> io::Result<()> {
        self.publish_call(posted.sequence, posted.fingerprint);
        if posted.background {
            self.start_worker()?;
        }
        let ended = {
            let mut state = self.state.lock();
            state.background += usize::from(posted.background);
            if state.ended.is_none() {
                state.posted.insert(posted.order, posted.clone());
            }
            state.ended
        };
        match ended {
            Some(end) => self.finish(posted, Some(later(end))),
            None => self.touch(),
        }
        Ok(())
    }

    /// Adds nothing: the operation has ended in the caller's hands.
    pub fn post_ended(&self, posted: &Posted, end: End) {
        self.publish_call(posted.sequence, posted.fingerprint);
        *posted.run.lock() = None;
        self.finish(posted, Some(end));
    }

    pub fn skip(&self, order: u64, rounds: u64) {
        {
            let mut state = self.state.lock();
            if state.ended.is_none() {
                let skipped = Posted::skipped(order, rounds);
                state.posted.insert(order, skipped);
                self.skips.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.touch();
        self.run_skipped();
    }

    /// The first publication of a call counts.
    pub fn publish_call(&self, sequence: u64, fingerprint: Packed) {
        let Some(mapping) = self.mapping() else {
            return;
        };
        if calls::published(&mapping, self.me, sequence).is_none() {
            let now = clock::nanoseconds();
            calls::publish(&mapping, self.me, sequence, fingerprint, now);
        }
    }

    // -- running -----------------------------------------------------------------------------------------------

    /// Waits until the operation has ended. Runs it, and those before it, if no other thread does. Without the GIL.
    pub fn drive(&self, posted: &Posted, until: Instant, interrupts: u64) -> Driven {
        loop {
            let version = self.state.lock().version;
            if posted.has_ended() {
                return Driven::Ended;
            }
            if self.control.interrupts.load(Ordering::Acquire) != interrupts {
                return Driven::Interrupted;
            }
            let idle = match self.try_run(Some(posted), until, interrupts) {
                Some(Found::Driven(driven)) => return driven,
                Some(Found::Idle) => true,
                None => false,
            };
            let limit = SLICE.min(until.saturating_duration_since(Instant::now()));
            if limit.is_zero() && !posted.has_ended() {
                return Driven::NotYet;
            }
            let wanted = || !posted.has_ended() && (idle || self.engine.is_locked());
            self.wait_for_change(version, Some(limit), wanted);
        }
    }

    /// None: another thread runs operations.
    fn try_run(&self, posted: Option<&Posted>, until: Instant, interrupts: u64) -> Option<Found> {
        let found = {
            let mut engine = self.engine.try_lock()?;
            let found = match engine.as_mut() {
                Some(engine) => self.run_heads(engine, posted, until, interrupts),
                None => Found::Idle,
            };
            if self.control.closed.load(Ordering::Acquire) {
                self.leave(&mut engine);
            }
            self.show_head(&engine);
            found
        };
        self.engine_is_free();
        Some(found)
    }

    /// Before the engine's lock is released.
    #[inline]
    pub fn show_head(&self, engine: &Option<Engine>) {
        let head = engine.as_ref().map_or(0, |engine| engine.head);
        self.head.store(head, Ordering::Relaxed);
    }

    /// Runs operations in order, until `posted` has ended or, if None, until there is none.
    fn run_heads(
        &self,
        engine: &mut Engine,
        posted: Option<&Posted>,
        until: Instant,
        interrupts: u64,
    ) -> Found {
        loop {
            if let Some(end) = engine.ended {
                self.fail_all(end);
            }
            if posted.is_some_and(Posted::has_ended) {
                return Found::Driven(Driven::Ended);
            }
            let head = self.state.lock().posted.get(&engine.head).cloned();
            let Some(head) = head else {
                return Found::Idle;
            };
            match self.run_head(engine, &head, until, interrupts) {
                Driven::Ended => {}
                other => return Found::Driven(other),
            }
        }
    }

    fn run_head(
        &self,
        engine: &mut Engine,
        head: &Arc<Posted>,
        until: Instant,
        interrupts: u64,
    ) -> Driven {
        let mut place = head.run.lock();
        let context = WaitContext {
            control: &self.control,
            cancelled: &head.cancelled,
            interrupts,
            progress: &head.progress,
        };
        let step = match place.as_mut() {
            None => {
                self.skips.fetch_sub(1, Ordering::Relaxed);
                engine.skip(head.rounds);
                Step::Ended(End::Cancelled)
            }
            Some(run) if !run.begun() && head.cancelled.load(Ordering::Acquire) => {
                Step::Ended(engine.end(run, End::Cancelled))
            }
            Some(run) => match engine.run(run, WaitMode::Sleeps(until, &context)) {
                Step::Ended(end) => Step::Ended(engine.end(run, end)),
                step => step,
            },
        };
        let outcome = match step {
            Step::Done => None,
            Step::Ended(end) => Some(end),
            Step::NotYet => return Driven::NotYet,
            Step::Interrupted => return Driven::Interrupted,
        };
        *place = None;
        drop(place);
        self.state.lock().posted.remove(&head.order);
        self.finish(head, outcome);
        Driven::Ended
    }

    /// Aborts skipped operations whose turn has come. If another thread runs operations, it does so when it leaves.
    fn run_skipped(&self) {
        let interrupts = self.control.interrupts.load(Ordering::Acquire);
        fence(Ordering::SeqCst); // with the one in `engine_is_free`: the count, then the try
        while self.is_skip_next() {
            if self.try_run(None, Instant::now(), interrupts).is_none() {
                return;
            }
        }
    }

    fn is_skip_next(&self) -> bool {
        let head = self.head.load(Ordering::Relaxed);
        let next = self.state.lock().posted.get(&head).cloned();
        self.skips.load(Ordering::Relaxed) > 0
            && next.is_some_and(|next| next.cancelled.load(Ordering::Acquire))
    }

    // -- ends --------------------------------------------------------------------------------------------------

    /// The operation is not in the queue any longer, and nothing accesses its memory.
    fn finish(&self, posted: &Posted, outcome: Outcome) {
        {
            let mut place = posted.outcome.lock();
            if place.is_some() {
                return;
            }
            *place = Some(outcome);
        }
        posted.held.lock().clear();
        posted.ended.store(true, Ordering::Release);
        if posted.background {
            let mut state = self.state.lock();
            state.background -= 1;
            state.finished.push(posted.order);
            self.event.signal();
        }
        self.touch();
    }

    /// No operation can run any longer. The caller holds the engine's lock.
    fn fail_all(&self, end: End) {
        let failed = {
            let mut state = self.state.lock();
            state.ended.get_or_insert(end);
            self.skips.store(0, Ordering::Relaxed);
            std::mem::take(&mut state.posted)
        };
        for posted in failed.values() {
            *posted.run.lock() = None;
            self.finish(posted, Some(later(end)));
        }
    }

    /// On return nothing accesses the operation's memory. Without the GIL.
    pub fn cancel(&self, posted: &Posted) {
        posted.cancelled.store(true, Ordering::Release);
        self.wake_runner();
        while !posted.has_ended() {
            let version = self.state.lock().version;
            self.cancel_before_its_turn(posted);
            if !posted.has_ended() && self.cancel_at_its_turn(posted).is_none() {
                let wanted = || !posted.has_ended() && self.engine.is_locked();
                self.wait_for_change(version, Some(SLICE), wanted);
            }
        }
        self.run_skipped();
    }

    /// As `cancel`, but if another thread runs the operation, that thread may still access its memory.
    pub fn abandon(&self, posted: &Posted) {
        if posted.has_ended() {
            return;
        }
        posted.cancelled.store(true, Ordering::Release);
        self.wake_runner();
        self.cancel_before_its_turn(posted);
        self.cancel_at_its_turn(posted);
        self.run_skipped();
    }

    /// It keeps its place in the queue, and is aborted there.
    fn cancel_before_its_turn(&self, posted: &Posted) {
        let Some(mut run) = posted.run.try_lock() else {
            return;
        };
        if run.as_ref().is_some_and(|run| !run.begun()) {
            *run = None;
            self.skips.fetch_add(1, Ordering::Relaxed);
            drop(run);
            self.finish(posted, Some(End::Cancelled));
        }
    }

    /// None: another thread runs it, and notices.
    fn cancel_at_its_turn(&self, posted: &Posted) -> Option<()> {
        let mut engine = self.engine.try_lock()?;
        if let Some(engine) = engine.as_mut() {
            let begun = posted.run.lock().take_if(|run| run.begun());
            if let Some(run) = begun {
                let end = engine.end(&run, End::Cancelled);
                self.state.lock().posted.remove(&posted.order);
                self.finish(posted, Some(end));
            }
        }
        self.show_head(&engine);
        drop(engine);
        self.engine_is_free();
        Some(())
    }

    pub fn lose(&self, rank: usize) {
        self.control.lose(rank);
        self.wake_runner();
    }

    pub fn interrupt(&self) {
        self.control.interrupts.fetch_add(1, Ordering::Release);
        self.wake_runner();
    }

    /// Background operations that have ended since the last call.
    pub fn finished(&self) -> Vec<u64> {
        let mut state = self.state.lock();
        self.event.drain();
        std::mem::take(&mut state.finished)
    }

    /// Ranks that the operation at the head waits for.
    pub fn missing(&self, posted: &Posted) -> Vec<usize> {
        let Some(mapping) = self.mapping() else {
            return Vec::new();
        };
        let head = {
            let state = self.state.lock();
            state
                .posted
                .values()
                .next()
                .map(|head| head.progress.round.load(Ordering::Relaxed))
        };
        let round = head.unwrap_or_else(|| posted.progress.round.load(Ordering::Relaxed));
        let behind = |rank: &usize| {
            *rank != self.me && mapping.record(*rank).round.load(Ordering::Acquire) < round
        };
        (0..mapping.geometry.ranks).filter(behind).collect()
    }

    // -- closing -----------------------------------------------------------------------------------------------

    /// Ends all operations and gives back the memory. On return no thread of this group accesses memory. Without the
    /// GIL.
    pub fn close(&self) {
        self.begin_close();
        self.leave(&mut self.engine.lock());
        self.engine_is_free();
        let worker = self.worker.lock().take(); // of several callers, one waits for its end
        if let Some(worker) = worker {
            worker.join().ok();
        }
    }

    /// Without waiting: whoever runs operations leaves.
    pub fn begin_close(&self) {
        self.control.closed.store(true, Ordering::Release);
        self.wake_runner();
        if let Some(mut engine) = self.engine.try_lock() {
            self.leave(&mut engine);
        }
        self.engine_is_free();
    }

    fn leave(&self, place: &mut Option<Engine>) {
        if let Some(mut engine) = place.take() {
            engine.leave();
            self.fail_all(End::Closed);
            *self.mapping.lock() = None;
        }
    }

    // -- waiting and waking ------------------------------------------------------------------------------------

    /// Makes the thread that runs operations look at `control`.
    fn wake_runner(&self) {
        if let Some(mapping) = self.mapping() {
            wake_runner(&mapping, self.me, &self.control);
        }
        self.touch();
    }

    /// Wakes threads that wait for a change.
    fn touch(&self) {
        let mut state = self.state.lock();
        state.version += 1;
        self.changed.notify_all();
    }

    /// After the engine's lock was released. Costs nothing while no thread waits for it.
    #[inline]
    pub fn engine_is_free(&self) {
        fence(Ordering::SeqCst); // with the one in `wait_for_change`: the release, then the look
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.touch();
        }
        if self.skips.load(Ordering::Relaxed) > 0 {
            self.run_skipped();
        }
    }

    /// Sleeps unless something has changed since `version` was read, or `wanted` is false.
    fn wait_for_change(&self, version: u64, limit: Option<Duration>, wanted: impl Fn() -> bool) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst); // before the look at the engine's lock
        let mut state = self.state.lock();
        if state.version == version && wanted() {
            match limit {
                Some(limit) => {
                    self.changed.wait_for(&mut state, limit);
                }
                None => self.changed.wait(&mut state),
            }
        }
        drop(state);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }

    // -- the worker --------------------------------------------------------------------------------------------

    fn start_worker(self: &Arc<Self>) -> io::Result<()> {
        let mut worker = self.worker.lock();
        if worker.is_some() || self.control.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        let queue = self.clone();
        let thread = with_signals_blocked(|| {
            Builder::new()
                .name("nexar-region".to_owned())
                .stack_size(STACK_BYTES)
                .spawn(move || queue.run_in_background())
        })?;
        *worker = Some(thread);
        Ok(())
    }

    /// Runs operations while there are some in the background.
    fn run_in_background(&self) {
        while !self.control.closed.load(Ordering::Acquire) {
            let (version, needed) = {
                let state = self.state.lock();
                (state.version, state.background > 0)
            };
            let interrupts = self.control.interrupts.load(Ordering::Acquire);
            let until = Instant::now() + SLICE;
            let found = needed
                .then(|| self.try_run(None, until, interrupts))
                .flatten();
            let idle = match found {
                Some(Found::Driven(_)) => continue,
                Some(Found::Idle) => true,
                None => !needed,
            };
            let closed = || self.control.closed.load(Ordering::Acquire);
            let wanted = || !closed() && (idle || self.engine.is_locked());
            self.wait_for_change(version, None, wanted);
        }
    }
}

/// How later operations end.
fn later(end: End) -> End {
    match end {
        End::Mismatch(rank, _) | End::Corrupt(rank) => End::Corrupt(rank),
        other => other,
    }
}

impl CloseAtExit for OperationQueue {
    fn close_at_exit(&self) {
        self.close();
    }
}
