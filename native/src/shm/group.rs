//! The Python classes `Group` and `Pending`. `python/nexar_native/shm.pyi` is the contract.
//!
//! `unsafe`: plans for exported memory. A plan is dropped before the buffers that it needs are released.

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString, PyType};

use crate::reduce::{is_supported, op_named};
use crate::runtime::buffer::Borrowed;
use crate::runtime::decref::release_deferred;
use crate::runtime::errors::os_error;
use crate::runtime::process;
use crate::shm::array::ArrayView;
use crate::shm::call_table::{CallTable, Finished, RecentFacts, SuccessFacts, TotalFacts};
use crate::shm::calls::{self, Facts, Fingerprint};
use crate::shm::clock;
use crate::shm::collectives::{spans_of, Arguments, CollectivePlan, Kind, Shape};
use crate::shm::engine::{Engine, Run, Step};
use crate::shm::queue::{CallFacts, Driven, OperationQueue, Outcome, Posted};
use crate::shm::region::{check_generation, Mapping, Region};
use crate::shm::sync::{End, Rounds, WaitMode, SLICE};

/// Longer arrays are reduced without the GIL from the beginning.
const KEEP_GIL_BYTES: usize = 16 << 10;
const MOST_SECONDS: f64 = 1e9;

/// The numbers of `Pending.status`, with their names.
pub const STATUSES: [(&str, u8); 8] = [
    ("DONE", 0),
    ("WAITING", 1),
    ("INTERRUPTED", 2),
    ("ABORTED", 3),
    ("MISMATCH", 4),
    ("DIED", 5),
    ("FAILED", 6),
    ("CLOSED", 7),
];
const WAITING: u8 = 1;
const INTERRUPTED: u8 = 2;

/// Status, the rank that it concerns or -1, and that rank's fingerprint.
fn report(outcome: Outcome) -> (u8, i32, Option<Facts>) {
    match outcome {
        None => (0, -1, None),
        Some(End::Aborted(rank)) => (3, rank as i32, None),
        Some(End::Cancelled) => (3, -1, None),
        Some(End::Mismatch(rank, theirs)) => {
            (4, rank as i32, Some(Fingerprint::unpacked(theirs).facts()))
        }
        Some(End::Died(rank)) => (5, rank as i32, None),
        Some(End::Corrupt(rank)) => (6, rank as i32, None),
        Some(End::Closed) => (7, -1, None),
    }
}

/// What the fast path needs to know.
struct Fast {
    /// Exact instances of this type qualify.
    array_type: Py<PyType>,
    operation: u8,
    algorithm: u8,
    barrier: Fingerprint,
}

#[pyclass(module = "nexar_native.shm", frozen)]
pub struct Group {
    table: Mutex<CallTable>,
    /// None: numbers and statistics only.
    queue: Option<Arc<OperationQueue>>,
    fast: Option<Fast>,
    generation: u32,
}

/// How an attempt of the fast path has ended.
enum Attempt {
    Done,
    NotEligible,
    /// It took numbers, and is not done.
    Pending(Arc<Posted>),
}

impl Group {
    fn enter(&self) -> PyResult<&Self> {
        check_generation(self.generation)?;
        Ok(self)
    }

    /// The region's side of the group.
    fn queue(&self) -> PyResult<&Arc<OperationQueue>> {
        let queue = self.enter()?.queue.as_ref();
        queue.ok_or_else(|| PyValueError::new_err("this group has no region"))
    }

    fn check_rank(&self, index: usize) -> PyResult<&Arc<OperationQueue>> {
        let queue = self.queue()?;
        match index < queue.shape.ranks {
            true => Ok(queue),
            false => Err(PyValueError::new_err("there is no such rank")),
        }
    }

    // -- the fast path -------------------------------------------------------------------------------------------

    /// Runs a call at once if it is its turn and nothing blocks it. `held` is called if the call must go on later.
    #[inline]
    fn attempt(
        &self,
        py: Python<'_>,
        fingerprint: Fingerprint,
        plan: impl FnOnce(&OperationQueue) -> CollectivePlan,
        bytes: usize,
        held: impl FnOnce() -> Vec<Borrowed>,
    ) -> PyResult<Attempt> {
        let Some(queue) = &self.queue else {
            return Ok(Attempt::NotEligible);
        };
        let Some(mut place) = queue.engine.try_lock() else {
            return Ok(Attempt::NotEligible);
        };
        let Some(engine) = place.as_mut().filter(|engine| engine.ended.is_none()) else {
            return Ok(Attempt::NotEligible);
        };
        let order = engine.head;
        let Some(sequence) = self.table.lock().take_unblocked(order) else {
            return Ok(Attempt::NotEligible);
        };
        let (began, packed) = (clock::seconds(), fingerprint.packed());
        let mut run = Run::new(plan(queue), order, sequence, packed);
        let step = run_spinning(py, engine, &mut run, bytes);
        let outcome = match step {
            Step::Done => None,
            Step::Ended(end) => Some(engine.end(&run, end)),
            _ => None,
        };
        queue.show_head(&place);
        drop(place);
        queue.engine_is_free();
        if step == Step::Done {
            self.note_success(sequence, packed, began, bytes);
            return Ok(Attempt::Done);
        }
        let facts = CallFacts {
            order,
            sequence,
            fingerprint: packed,
            began,
        };
        let posted = Posted::new(run, facts, held(), false);
        match outcome {
            Some(end) => queue.post_ended(&posted, end),
            None => queue.post(&posted).map_err(os_error)?,
        }
        Ok(Attempt::Pending(posted))
    }

    #[inline]
    fn note_success(&self, sequence: u64, fingerprint: [u64; 2], began: f64, bytes: usize) {
        let finished = Finished {
            sequence,
            fingerprint,
            began,
            ended: clock::seconds(),
            bytes: bytes as u64,
            outcome: 0,
        };
        self.table.lock().note(finished, 0.0);
    }

    fn answer(&self, py: Python<'_>, attempt: Attempt) -> PyResult<Py<PyAny>> {
        let found = match attempt {
            Attempt::Done => true,
            Attempt::NotEligible => false,
            Attempt::Pending(posted) => {
                let queue = self.queue()?.clone();
                return Ok(Py::new(py, Pending::new(queue, posted, self.generation))?.into_any());
            }
        };
        Ok(PyBool::new(py, found).to_owned().into_any().unbind())
    }

    /// The element type and the operation of an all_reduce that qualifies.
    #[inline]
    fn qualify(&self, array: &Bound<'_, PyAny>, op: &Bound<'_, PyAny>) -> Option<(ArrayView, u8)> {
        let fast = self.fast.as_ref()?;
        if array.get_type_ptr().cast() != fast.array_type.as_ptr() {
            return None;
        }
        let op = op_named(op.cast_exact::<PyString>().ok()?.to_str().ok()?)?;
        let view = ArrayView::of(array)?;
        is_supported(op, view.dtype).then_some((view, op))
    }
}

/// Without sleeping. A short call begins with the GIL: giving it up and taking it again may cost more than the call.
#[inline]
fn run_spinning(py: Python<'_>, engine: &mut Engine, run: &mut Run, bytes: usize) -> Step {
    if bytes <= KEEP_GIL_BYTES {
        match engine.run(run, WaitMode::Looks) {
            Step::NotYet => {}
            step => return step,
        }
    }
    let until = Instant::now() + SLICE;
    process::detached(py, || engine.run(run, WaitMode::Yields(until)))
}

#[pymethods]
impl Group {
    #[new]
    #[pyo3(signature = (region, rank, *, spin_us = 50.0, cores = 0, kept = 4096, fast = None))]
    fn new(
        region: Option<&Region>,
        rank: usize,
        spin_us: f64,
        cores: usize,
        kept: usize,
        fast: Option<(Py<PyType>, u8, u8, Fingerprint)>,
    ) -> PyResult<Self> {
        if !(0.0..=1e6).contains(&spin_us) {
            return Err(PyValueError::new_err("spin_us must be from 0 to 1e6"));
        }
        let cores = match cores {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            given => given,
        };
        let spin = Duration::from_nanos((spin_us * 1e3) as u64);
        let mapping = region.map(Region::mapping).transpose()?;
        let queue = mapping
            .map(|mapping| join(mapping, rank, spin, cores))
            .transpose()?;
        let fast = fast.map(|(array_type, operation, algorithm, barrier)| Fast {
            array_type,
            operation,
            algorithm,
            barrier,
        });
        Ok(Group {
            table: Mutex::new(CallTable::new(kept)),
            queue,
            fast,
            generation: process::generation(),
        })
    }

    // -- numbers and statistics ----------------------------------------------------------------------------------

    #[pyo3(signature = (orders = 0))]
    fn take(&self, orders: u32) -> PyResult<(u64, u64)> {
        Ok(self.enter()?.table.lock().take(u64::from(orders)))
    }

    fn block(&self, reasons: u32) -> PyResult<()> {
        self.enter()?.table.lock().block(reasons);
        Ok(())
    }

    fn unblock(&self, reasons: u32) -> PyResult<()> {
        self.enter()?.table.lock().unblock(reasons);
        Ok(())
    }

    fn blocked(&self) -> PyResult<u32> {
        Ok(self.enter()?.table.lock().blocked())
    }

    fn next_sequence(&self) -> PyResult<u64> {
        Ok(self.enter()?.table.lock().next_sequence())
    }

    #[pyo3(signature = (sequence, fingerprint, began, ended, size_bytes, outcome = 0, waiting = 0.0))]
    #[allow(clippy::too_many_arguments)] // they are the facts of a call
    fn note(
        &self,
        sequence: u64,
        fingerprint: Fingerprint,
        began: f64,
        ended: f64,
        size_bytes: u64,
        outcome: u32,
        waiting: f64,
    ) -> PyResult<()> {
        let finished = Finished {
            sequence,
            fingerprint: fingerprint.packed(),
            began,
            ended,
            bytes: size_bytes,
            outcome,
        };
        self.enter()?.table.lock().note(finished, waiting);
        Ok(())
    }

    fn recent(&self) -> PyResult<(Vec<RecentFacts>, u64)> {
        Ok(self.enter()?.table.lock().recent())
    }

    fn totals(&self) -> PyResult<BTreeMap<u8, TotalFacts>> {
        Ok(self.enter()?.table.lock().totals())
    }

    fn last_success(&self) -> PyResult<Option<SuccessFacts>> {
        Ok(self.enter()?.table.lock().success())
    }

    // -- the fast path -------------------------------------------------------------------------------------------

    #[pyo3(signature = (array, op, /))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        op: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        let Some((view, op)) = self.enter()?.qualify(array, op) else {
            return self.answer(py, Attempt::NotEligible);
        };
        let fast = self.fast.as_ref().expect("it qualified");
        let (count, dtype, memory) = (view.count(), view.dtype, view.memory());
        let fingerprint = Fingerprint(fast.operation, dtype, count, 0, op, fast.algorithm);
        let bytes = view.bytes();
        // SAFETY: the view is released after the plan is dropped, or kept by the pending operation.
        let plan = |queue: &OperationQueue| unsafe {
            CollectivePlan::all_reduce(queue.shape, queue.me, memory, op, dtype)
        };
        let held = || vec![view.into_borrowed()];
        let attempt = self.attempt(py, fingerprint, plan, bytes, held)?;
        self.answer(py, attempt)
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let Some(fast) = &self.enter()?.fast else {
            return self.answer(py, Attempt::NotEligible);
        };
        let plan = |queue: &OperationQueue| CollectivePlan::barrier(queue.shape, queue.me);
        let attempt = self.attempt(py, fast.barrier, plan, 0, Vec::new)?;
        self.answer(py, attempt)
    }

    // -- the general path ----------------------------------------------------------------------------------------

    #[pyo3(signature = (
        order, sequence, fingerprint, kind, op = 0, dtype = 0, *,
        array = None, out = None, root = 0, counts = Vec::new(), divisor = 0, background = false
    ))]
    #[allow(clippy::too_many_arguments)] // they are the facts of an operation
    fn post(
        &self,
        py: Python<'_>,
        order: u64,
        sequence: u64,
        fingerprint: Fingerprint,
        kind: u8,
        op: u8,
        dtype: u8,
        array: Option<&Bound<'_, PyAny>>,
        out: Option<&Bound<'_, PyAny>>,
        root: usize,
        counts: Vec<usize>,
        divisor: u64,
        background: bool,
    ) -> PyResult<Pending> {
        release_deferred(py);
        let queue = self.queue()?;
        let facts = CallFacts {
            order: queue.check_order(order).map_err(PyValueError::new_err)?,
            sequence,
            fingerprint: fingerprint.packed(),
            began: clock::seconds(),
        };
        let kind = Kind::of(kind).ok_or_else(|| PyValueError::new_err("unknown kind"))?;
        let array = array.map(Borrowed::readable).transpose()?;
        let out = out.map(Borrowed::writable).transpose()?;
        let arguments = Arguments {
            kind,
            op,
            dtype,
            divisor,
            root,
            array: array
                .as_ref()
                .map_or(null(), |one| one.memory().cast_const()),
            out: out.as_ref().map_or(null_mut(), Borrowed::memory),
            counts,
        };
        // SAFETY: `posted` keeps the buffers until the plan is dropped.
        let plan = unsafe { CollectivePlan::new(queue.shape, queue.me, arguments) };
        let run = plan.map(|plan| Run::new(plan, order, sequence, facts.fingerprint));
        let run = run.map_err(PyValueError::new_err)?;
        let held = array.into_iter().chain(out).collect();
        let posted = Posted::new(run, facts, held, background);
        queue.post(&posted).map_err(os_error)?;
        Ok(Pending::new(queue.clone(), posted, self.generation))
    }

    #[pyo3(signature = (kind, size_bytes, itemsize = 1, counts = Vec::new()))]
    fn rounds(
        &self,
        kind: u8,
        size_bytes: usize,
        itemsize: usize,
        counts: Vec<usize>,
    ) -> PyResult<u64> {
        let shape = self.queue()?.shape;
        let kind = Kind::of(kind).ok_or_else(|| PyValueError::new_err("unknown kind"))?;
        rounds_of(shape, kind, size_bytes, itemsize, &counts).map_err(PyValueError::new_err)
    }

    fn skip(&self, py: Python<'_>, order: u64, rounds: u64) -> PyResult<()> {
        let queue = self.queue()?;
        let order = queue.check_order(order).map_err(PyValueError::new_err)?;
        process::detached(py, || queue.skip(order, rounds));
        Ok(())
    }

    fn publish_call(&self, sequence: u64, fingerprint: Fingerprint) -> PyResult<()> {
        let queue = self.queue()?;
        queue.publish_call(sequence, fingerprint.packed());
        Ok(())
    }

    fn differing(&self, sequence: u64) -> PyResult<Option<(usize, Facts)>> {
        let queue = self.queue()?;
        let found = queue.mapping().and_then(|mapping| {
            let (mine, _) = calls::published(&mapping, queue.me, sequence)?;
            calls::differing(&mapping, queue.me, sequence, mine)
        });
        Ok(found.map(|(rank, theirs)| (rank, Fingerprint::unpacked(theirs).facts())))
    }

    fn arrivals(&self, sequence: u64) -> PyResult<Vec<Option<u64>>> {
        let queue = self.queue()?;
        let mapping = queue.mapping();
        let of = |rank| {
            let (_, arrival) = calls::published(mapping.as_ref()?, rank, sequence)?;
            Some(arrival)
        };
        Ok((0..queue.shape.ranks).map(of).collect())
    }

    // -- from any thread -----------------------------------------------------------------------------------------

    fn interrupt(&self) -> PyResult<()> {
        self.queue()?.interrupt();
        Ok(())
    }

    fn fail(&self, index: usize) -> PyResult<()> {
        self.check_rank(index)?.lose(index);
        Ok(())
    }

    fn fileno(&self) -> PyResult<RawFd> {
        Ok(self.queue()?.event.raw())
    }

    fn finished(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        release_deferred(py);
        Ok(self.queue()?.finished())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(queue) = &self.enter()?.queue {
            process::detached(py, || queue.close());
        }
        release_deferred(py);
        Ok(())
    }
}

impl Drop for Group {
    /// Without waiting. A forked child touches nothing.
    fn drop(&mut self) {
        if let (Ok(_), Some(queue)) = (self.enter(), &self.queue) {
            queue.begin_close();
        }
    }
}

const fn null() -> *const [u8] {
    std::ptr::slice_from_raw_parts(std::ptr::null(), 0)
}

const fn null_mut() -> *mut [u8] {
    std::ptr::slice_from_raw_parts_mut(std::ptr::null_mut(), 0)
}

/// Makes this process the rank: allocates its slots, then tells the others its number.
fn join(
    mapping: Arc<Mapping>,
    rank: usize,
    spin: Duration,
    cores: usize,
) -> PyResult<Arc<OperationQueue>> {
    if rank >= mapping.geometry.ranks {
        return Err(PyValueError::new_err("there is no such rank"));
    }
    mapping.populate_slots(rank).map_err(os_error)?;
    let (own, word) = (std::process::id(), &mapping.record(rank).pid);
    if word
        .compare_exchange(0, own, Ordering::Release, Ordering::Relaxed)
        .is_err()
    {
        let text = format!("rank {rank} has joined this region already");
        return Err(PyOSError::new_err(text));
    }
    let rounds = Rounds::new(mapping.clone(), rank, spin, cores);
    OperationQueue::new(mapping, rank, Engine::new(rounds)).map_err(os_error)
}

/// `size_bytes`: of the longer of the two arrays.
fn rounds_of(
    shape: Shape,
    kind: Kind,
    size_bytes: usize,
    itemsize: usize,
    counts: &[usize],
) -> Result<u64, &'static str> {
    let bytes = match kind {
        Kind::ReduceScatter | Kind::AllGather => {
            let spans = spans_of(shape.ranks, counts, size_bytes, itemsize.max(1))?;
            spans.iter().map(|span| span.length).max().unwrap_or(0)
        }
        Kind::AllToAll => size_bytes / shape.ranks,
        _ => size_bytes,
    };
    Ok(shape.rounds(kind, bytes))
}

/// An operation that was not done at once.
#[pyclass(module = "nexar_native.shm", frozen)]
pub struct Pending {
    queue: Arc<OperationQueue>,
    posted: Arc<Posted>,
    /// The interrupts that were reported.
    interrupts: AtomicU64,
    generation: u32,
}

impl Pending {
    fn new(queue: Arc<OperationQueue>, posted: Arc<Posted>, generation: u32) -> Self {
        let known = queue.control.interrupts.load(Ordering::Acquire);
        Pending {
            queue,
            posted,
            interrupts: AtomicU64::new(known),
            generation,
        }
    }

    fn enter(&self) -> PyResult<&Self> {
        check_generation(self.generation)?;
        Ok(self)
    }

    fn reported(&self) -> (u8, i32, Option<Facts>) {
        match self.posted.outcome() {
            Some(outcome) if self.posted.has_ended() => report(outcome),
            _ => (WAITING, -1, None),
        }
    }
}

#[pymethods]
impl Pending {
    #[getter]
    fn order(&self) -> u64 {
        self.posted.order
    }

    #[getter]
    fn sequence(&self) -> u64 {
        self.posted.sequence
    }

    #[getter]
    fn fingerprint(&self) -> Facts {
        Fingerprint::unpacked(self.posted.fingerprint).facts()
    }

    #[getter]
    fn began(&self) -> f64 {
        self.posted.began
    }

    #[getter]
    fn status(&self) -> u8 {
        self.reported().0
    }

    #[getter]
    fn rank(&self) -> i32 {
        self.reported().1
    }

    #[getter]
    fn theirs(&self) -> Option<Facts> {
        self.reported().2
    }

    fn wait(&self, py: Python<'_>, seconds: f64) -> PyResult<u8> {
        self.enter()?;
        let seconds = if seconds > 0.0 {
            seconds.min(MOST_SECONDS)
        } else {
            0.0
        };
        let until = Instant::now() + Duration::from_secs_f64(seconds);
        loop {
            let known = self.interrupts.load(Ordering::Acquire);
            let driven = process::detached(py, || {
                let slice = until.min(Instant::now() + SLICE);
                self.queue.drive(&self.posted, slice, known)
            });
            release_deferred(py);
            if driven == Driven::Ended {
                return Ok(self.status());
            }
            py.check_signals()?;
            let now = self.queue.control.interrupts.load(Ordering::Acquire);
            if now != known {
                self.interrupts.store(now, Ordering::Release);
                return Ok(INTERRUPTED);
            }
            if Instant::now() >= until {
                return Ok(self.status());
            }
        }
    }

    fn missing(&self) -> PyResult<Vec<usize>> {
        Ok(self.enter()?.queue.missing(&self.posted))
    }

    fn moved_at(&self) -> f64 {
        self.posted.moved_at()
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.enter()?;
        process::detached(py, || self.queue.cancel(&self.posted));
        release_deferred(py);
        Ok(())
    }
}

impl Drop for Pending {
    /// Nobody waits for the operation any longer: if it is not done by then, the others must not wait for this rank.
    fn drop(&mut self) {
        if self.enter().is_ok() {
            self.queue.abandon(&self.posted);
        }
    }
}
