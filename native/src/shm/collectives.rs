//! Collectives in a region, as rounds.
//!
//! An operation of R rounds has the stages 0 to R. Stage k runs once all ranks have published k of its rounds; then,
//! except after the last stage, this rank publishes the next one. A stage may read all slots of the parity of round k
//! and write those of the parity of round k + 1: nobody reads them any longer, because everybody who has published round
//! k has read all of round k - 1. The number of rounds follows from facts that are equal on all ranks.
//!
//! A long reduction is a pipeline of chunks: in stage k a rank stores its result-free parts of chunk k in its slot and
//! reduces its share of chunk k - 1. It writes the reduced share over the parts that it has read, so each rank finds
//! the results of a chunk in its own slot, in stage k + 1. The share itself never leaves the arrays. Folds are in rank
//! order, so the results are bit-identical on all ranks.
//!
//! `unsafe`: copies between the memory of Python objects, which is exported for as long as a `CollectivePlan` exists, and slots.
//! All ranges are checked when the `CollectivePlan` is made, or follow from the geometry. Other processes may write the slots at
//! any time; that changes numbers only.

use std::ptr::copy_nonoverlapping;

use crate::reduce::{fold_slices, itemsize, Invalid};
use crate::shm::region::Mapping;

/// Bytes of all ranks up to which a reduction takes one round.
const ONE_ROUND_BYTES: usize = 32 << 10;
/// Payloads up to these lengths are in the record instead of a slot.
const SHORT_BYTES: usize = 8;
const WIDE_BYTES: usize = 32;
/// Shares begin at cache lines.
const LINE: usize = 64;
/// Folded at a time, then copied to the others while it is in the first-level cache.
const BLOCK: usize = 8 << 10;

/// What an operation does. The numbers are those of the Python interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    Barrier = 0,
    AllReduce = 1,
    Reduce = 2,
    ReduceScatter = 3,
    AllGather = 4,
    Broadcast = 5,
    AllToAll = 6,
}

impl Kind {
    pub const ALL: [(&'static str, Kind); 7] = [
        ("BARRIER", Kind::Barrier),
        ("ALL_REDUCE", Kind::AllReduce),
        ("REDUCE", Kind::Reduce),
        ("REDUCE_SCATTER", Kind::ReduceScatter),
        ("ALL_GATHER", Kind::AllGather),
        ("BROADCAST", Kind::Broadcast),
        ("ALL_TO_ALL", Kind::AllToAll),
    ];

    pub fn of(number: u8) -> Option<Self> {
        let mut kinds = Kind::ALL.into_iter().map(|(_, kind)| kind);
        kinds.find(|kind| *kind as u8 == number)
    }
}

/// Bytes from `start` to `start + length`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub start: usize,
    pub length: usize,
}

impl Span {
    fn stop(self) -> usize {
        self.start + self.length
    }

    /// The part number `index` if it is cut into parts of `size`; empty behind the end.
    fn part(self, index: u64, size: usize) -> Span {
        let skipped = (index as usize).saturating_mul(size).min(self.length);
        Span {
            start: self.start + skipped,
            length: size.min(self.length - skipped),
        }
    }
}

/// Facts that are equal on all ranks, from which the rounds follow.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub ranks: usize,
    pub chunk_bytes: usize,
}

impl Shape {
    fn takes_one_round(self, bytes: usize) -> bool {
        bytes <= self.chunk_bytes && bytes.saturating_mul(self.ranks) <= ONE_ROUND_BYTES
            || bytes <= WIDE_BYTES
    }

    /// Chunks of nearly equal length, so that the last one does not wait in an empty pipeline.
    fn chunk_of(self, bytes: usize) -> usize {
        let count = bytes.div_ceil(self.chunk_bytes).max(1);
        bytes.div_ceil(count).next_multiple_of(LINE)
    }

    /// The space for each rank in one slot.
    fn piece(self) -> usize {
        self.chunk_bytes / self.ranks / LINE * LINE
    }

    /// Bytes that a round moves of the longest span, or of the array. 0: all in one round.
    fn tile(self, kind: Kind, bytes: usize) -> usize {
        match kind {
            Kind::Barrier => 0,
            Kind::AllReduce | Kind::Reduce if self.takes_one_round(bytes) => 0,
            Kind::AllReduce | Kind::Reduce => self.chunk_of(bytes),
            Kind::AllGather | Kind::Broadcast => self.chunk_bytes,
            Kind::ReduceScatter | Kind::AllToAll => self.piece(),
        }
    }

    /// The number of rounds. `bytes`: of the array, of the longest span, or of one block.
    pub fn rounds(self, kind: Kind, bytes: usize) -> u64 {
        let pipeline = u64::from(matches!(kind, Kind::AllReduce | Kind::Reduce));
        match self.tile(kind, bytes) {
            0 => 1,
            tile => bytes.div_ceil(tile).max(1) as u64 + pipeline,
        }
    }
}

/// The arguments of an operation.
pub struct Arguments {
    pub kind: Kind,
    pub op: u8,
    pub dtype: u8,
    pub divisor: u64,
    pub root: usize,
    /// Null: none.
    pub array: *const [u8],
    /// Null: none.
    pub out: *mut [u8],
    /// Elements of each rank. Empty: equal shares.
    pub counts: Vec<usize>,
}

/// An operation with checked arguments.
pub struct CollectivePlan {
    kind: Kind,
    op: u8,
    dtype: u8,
    divisor: u64,
    me: usize,
    root: usize,
    shape: Shape,
    pub rounds: u64,
    tile: usize,
    /// Null: none.
    array: *const u8,
    /// Null: none.
    out: *mut u8,
    bytes: usize,
    spans: Vec<Span>,
}

// SAFETY: the memory stays exported for as long as the plan exists, and one thread at a time runs it.
unsafe impl Send for CollectivePlan {}

/// Why the arguments of an operation are rejected.
pub type Rejected = &'static str;

const LENGTHS: Rejected = "array, out and counts do not fit one another";

impl CollectivePlan {
    pub fn barrier(shape: Shape, me: usize) -> Self {
        CollectivePlan {
            kind: Kind::Barrier,
            op: 0,
            dtype: 0,
            divisor: 1,
            me,
            root: 0,
            shape,
            rounds: 1,
            tile: 0,
            array: std::ptr::null(),
            out: std::ptr::null_mut(),
            bytes: 0,
            spans: Vec::new(),
        }
    }

    /// An all_reduce in place.
    ///
    /// # Safety
    /// `array` is valid for reads and writes for as long as the plan exists.
    #[inline]
    pub unsafe fn all_reduce(shape: Shape, me: usize, array: *mut [u8], op: u8, dtype: u8) -> Self {
        let bytes = array.len();
        let tile = shape.tile(Kind::AllReduce, bytes);
        CollectivePlan {
            kind: Kind::AllReduce,
            op,
            dtype,
            divisor: divisor_of(op, shape.ranks),
            rounds: shape.rounds(Kind::AllReduce, bytes),
            tile,
            array: array.cast_const().cast(),
            out: array.cast(),
            bytes,
            ..CollectivePlan::barrier(shape, me)
        }
    }

    /// Checks the arguments. `divisor` of 0: of an average, the number of ranks.
    ///
    /// # Safety
    /// `array` is valid for reads and `out` for reads and writes for as long as the plan exists, unless they are null.
    pub unsafe fn new(shape: Shape, me: usize, given: Arguments) -> Result<Self, Rejected> {
        let (kind, op, dtype) = (given.kind, given.op, given.dtype);
        let size = itemsize(dtype).ok_or("this element type is unknown");
        let size = if kind == Kind::Barrier { 1 } else { size? };
        let lengths = Lengths::of(shape, me, &given, size)?;
        let bytes = lengths.bytes;
        let divisor = match given.divisor {
            0 => divisor_of(op, shape.ranks),
            given => given,
        };
        let plan = CollectivePlan {
            kind,
            op,
            dtype,
            divisor,
            me,
            root: given.root,
            shape,
            rounds: shape.rounds(kind, bytes),
            tile: shape.tile(kind, bytes),
            array: given.array.cast(),
            out: given.out.cast(),
            bytes,
            spans: lengths.spans,
        };
        plan.check_reduction()?;
        check_overlap(&given, &plan)?;
        Ok(plan)
    }

    /// The same call with an empty result: what the kernels reject now, they would reject later.
    fn check_reduction(&self) -> Result<(), Rejected> {
        match self.kind {
            Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter => {
                let empty: *mut [u8] = &mut [];
                let inputs = [empty.cast_const()];
                // SAFETY: nothing is read or written.
                unsafe { fold_slices(empty, &inputs, self.op, self.dtype, self.divisor) }
                    .map_err(Invalid::message)
            }
            _ => Ok(()),
        }
    }

    // -- stages --------------------------------------------------------------------------------------------------

    /// Runs a stage of the operation whose first round is `base` + 1.
    ///
    /// # Safety
    /// All ranks have published `stage` rounds of this operation, or are hostile. `mapping` has the geometry of the
    /// plan's shape.
    #[inline]
    pub unsafe fn run(&self, mapping: &Mapping, inputs: &mut Inputs, base: u64, stage: u64) {
        let step = Step {
            plan: self,
            mapping,
            read: base + stage,
            stage,
        };
        // SAFETY: the caller's promise is passed on; see the module for the ranges.
        unsafe {
            match self.kind {
                Kind::Barrier => {}
                Kind::AllReduce | Kind::Reduce if self.tile == 0 => step.reduce_at_once(inputs),
                Kind::AllReduce | Kind::Reduce => step.reduce_chunks(inputs),
                Kind::ReduceScatter => step.reduce_scatter(inputs),
                Kind::AllGather => step.all_gather(),
                Kind::Broadcast => step.broadcast(),
                Kind::AllToAll => step.all_to_all(),
            }
        }
    }
}

fn divisor_of(op: u8, ranks: usize) -> u64 {
    const AVG: u8 = 5;
    if op == AVG {
        ranks as u64
    } else {
        1
    }
}

/// Memory for the list of inputs of a fold.
#[derive(Default)]
pub struct Inputs(Vec<*const [u8]>);

// SAFETY: empty between stages.
unsafe impl Send for Inputs {}

/// Lengths that fit one another.
struct Lengths {
    /// Of the array, of the longest span, or of one block.
    bytes: usize,
    spans: Vec<Span>,
}

impl Lengths {
    fn of(shape: Shape, me: usize, given: &Arguments, size: usize) -> Result<Self, Rejected> {
        let array = (!given.array.is_null()).then_some(given.array.len());
        let out = (!given.out.is_null()).then_some(given.out.len());
        let whole = array.unwrap_or(0).max(out.unwrap_or(0));
        if whole % size != 0 {
            return Err("the length is not a multiple of the element size");
        }
        if given.root >= shape.ranks {
            return Err("there is no such root");
        }
        let is_root = given.root == me;
        match (given.kind, array, out) {
            (Kind::Barrier, None, None) => Ok(Lengths::plain(0)),
            (Kind::AllReduce, Some(array), Some(out)) if array == out => Ok(Lengths::plain(array)),
            (Kind::Reduce, Some(array), None) if !is_root => Ok(Lengths::plain(array)),
            (Kind::Reduce, Some(array), Some(out)) if is_root && array == out => {
                Ok(Lengths::plain(array))
            }
            (Kind::Broadcast, Some(array), None) if is_root => Ok(Lengths::plain(array)),
            (Kind::Broadcast, None, Some(out)) if !is_root => Ok(Lengths::plain(out)),
            (Kind::AllToAll, Some(array), Some(out)) if array == out => {
                let block = array / shape.ranks;
                let fits = block * shape.ranks == array && block % size == 0;
                fits.then(|| Lengths::plain(block)).ok_or(LENGTHS)
            }
            (Kind::ReduceScatter, Some(whole), Some(mine))
            | (Kind::AllGather, Some(mine), Some(whole)) => {
                let spans = spans_of(shape.ranks, &given.counts, whole, size)?;
                let fits = spans[me].length == mine;
                let longest = spans.iter().map(|span| span.length).max().unwrap_or(0);
                let bytes = if fits { Ok(longest) } else { Err(LENGTHS) };
                bytes.map(|bytes| Lengths { bytes, spans })
            }
            _ => Err(LENGTHS),
        }
    }

    fn plain(bytes: usize) -> Self {
        Lengths {
            bytes,
            spans: Vec::new(),
        }
    }
}

/// The spans of all ranks, which fill `whole` bytes. Without counts, the first ranks have one element more.
pub fn spans_of(
    ranks: usize,
    counts: &[usize],
    whole: usize,
    size: usize,
) -> Result<Vec<Span>, Rejected> {
    let (each, more) = (whole / size / ranks, whole / size % ranks);
    let count = |rank| match counts.get(rank) {
        Some(count) => *count,
        None => each + usize::from(rank < more),
    };
    if !counts.is_empty() && counts.len() != ranks {
        return Err("counts must have one entry for each rank");
    }
    let mut start = 0usize;
    let mut spans = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let length = count(rank).checked_mul(size).ok_or(LENGTHS)?;
        spans.push(Span { start, length });
        start = start.checked_add(length).ok_or(LENGTHS)?;
    }
    if start == whole {
        Ok(spans)
    } else {
        Err(LENGTHS)
    }
}

/// The two arrays are separate, or one is the other or its span of this rank.
fn check_overlap(given: &Arguments, plan: &CollectivePlan) -> Result<(), Rejected> {
    if given.array.is_null() || given.out.is_null() {
        return Ok(());
    }
    let array = (given.array.cast::<u8>().addr(), given.array.len());
    let out = (given.out.cast::<u8>().addr(), given.out.len());
    let span = plan.spans.get(plan.me).map_or(0, |span| span.start);
    let expected = match plan.kind {
        Kind::ReduceScatter => array.0 + span == out.0,
        Kind::AllGather => out.0 + span == array.0,
        _ => array.0 == out.0,
    };
    let separate = array.0 + array.1 <= out.0 || out.0 + out.1 <= array.0;
    if expected || separate {
        Ok(())
    } else {
        Err("array and out overlap")
    }
}

/// One stage of an operation.
struct Step<'a> {
    plan: &'a CollectivePlan,
    mapping: &'a Mapping,
    /// The last round that all have published. Its parity is that of the slots to read.
    read: u64,
    stage: u64,
}

/// # Safety
/// Of all methods: as of `CollectivePlan::run`.
impl Step<'_> {
    fn is_last(&self) -> bool {
        self.stage == self.plan.rounds
    }

    /// The number of the chunk or tile that was stored in the last stage; None in the first.
    fn stored(&self) -> Option<u64> {
        self.stage.checked_sub(1)
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        let (me, ranks) = (self.plan.me, self.plan.shape.ranks);
        (1..ranks).map(move |distance| (me + distance) % ranks)
    }

    fn slot_to_read(&self, rank: usize) -> *mut u8 {
        self.mapping.slot(self.read, rank)
    }

    fn slot_to_write(&self) -> *mut u8 {
        self.mapping.slot(self.read + 1, self.plan.me)
    }

    // -- reductions ----------------------------------------------------------------------------------------------

    /// Where a payload that takes one round is.
    #[inline]
    fn cell(&self, round: u64, rank: usize) -> *mut u8 {
        let parity = (round & 1) as usize;
        let bytes = self.plan.bytes;
        if bytes <= SHORT_BYTES {
            return self.mapping.record(rank).short[parity].as_ptr().cast();
        }
        if bytes <= WIDE_BYTES {
            let words = &self.mapping.record(rank).wide[parity];
            return words.as_ptr().cast_mut().cast();
        }
        self.mapping.slot(round, rank)
    }

    #[inline]
    unsafe fn reduce_at_once(&self, inputs: &mut Inputs) {
        let plan = self.plan;
        // SAFETY: `bytes` fit the cell.
        unsafe {
            if self.stage == 0 {
                let mine = self.cell(self.read + 1, plan.me);
                return copy(plan.array, mine, plan.bytes);
            }
            if plan.out.is_null() {
                return;
            }
            inputs.0.clear();
            for rank in 0..plan.shape.ranks {
                let cell = self.cell(self.read, rank).cast_const();
                inputs.0.push(slice(cell, plan.bytes));
            }
            self.fold(plan.out, plan.bytes, inputs);
        }
    }

    unsafe fn reduce_chunks(&self, inputs: &mut Inputs) {
        let whole = Span {
            start: 0,
            length: self.plan.bytes,
        };
        let chunk = |index| whole.part(index, self.plan.tile);
        // SAFETY: chunks are inside the array, and at most a slot long.
        unsafe {
            if let Some(reduced) = self.stage.checked_sub(2) {
                self.collect(chunk(reduced));
            }
            if self.is_last() {
                return;
            }
            if self.stage + 1 < self.plan.rounds {
                self.store(chunk(self.stage));
            }
            if let Some(stored) = self.stored() {
                self.reduce_share(chunk(stored), inputs);
            }
        }
    }

    /// What this rank reduces of a chunk, relative to its start.
    fn share_of(&self, chunk: Span, rank: usize) -> Span {
        let each = chunk
            .length
            .div_ceil(self.plan.shape.ranks)
            .next_multiple_of(LINE);
        Span {
            start: 0,
            length: chunk.length,
        }
        .part(rank as u64, each)
    }

    /// Stores the others' shares of a chunk in the slot.
    unsafe fn store(&self, chunk: Span) {
        let mine = self.share_of(chunk, self.plan.me);
        let slot = self.slot_to_write();
        // SAFETY: both parts are inside the chunk.
        unsafe {
            let array = self.plan.array.add(chunk.start);
            copy(array, slot, mine.start);
            let (rest, length) = (mine.stop(), chunk.length - mine.stop());
            copy(array.add(rest), slot.add(rest), length);
        }
    }

    /// Copies the others' results of a chunk out of the slot. They were written one round after the chunk was stored.
    unsafe fn collect(&self, chunk: Span) {
        if self.plan.out.is_null() {
            return;
        }
        let mine = self.share_of(chunk, self.plan.me);
        // The slot to write next is that of two rounds ago.
        let slot = self.slot_to_write().cast_const();
        // SAFETY: both parts are inside the chunk.
        unsafe {
            let out = self.plan.out.add(chunk.start);
            copy(slot, out, mine.start);
            let (rest, length) = (mine.stop(), chunk.length - mine.stop());
            copy(slot.add(rest), out.add(rest), length);
        }
    }

    unsafe fn reduce_share(&self, chunk: Span, inputs: &mut Inputs) {
        let share = self.share_of(chunk, self.plan.me);
        let mut index = 0;
        loop {
            let block = share.part(index, BLOCK);
            if block.length == 0 {
                return;
            }
            // SAFETY: blocks are inside the share.
            unsafe { self.reduce_block(chunk, block, inputs) };
            index += 1;
        }
    }

    /// Reduces a block of the share and gives the result to those who need it.
    unsafe fn reduce_block(&self, chunk: Span, block: Span, inputs: &mut Inputs) {
        let plan = self.plan;
        let only_root = plan.kind == Kind::Reduce;
        // SAFETY: blocks are inside the chunk and the slots.
        unsafe {
            let of = |rank: usize| self.slot_to_read(rank).add(block.start);
            inputs.0.clear();
            for rank in 0..plan.shape.ranks {
                let input = match rank == plan.me {
                    true => plan.array.add(chunk.start + block.start),
                    false => of(rank).cast_const(),
                };
                inputs.0.push(slice(input, block.length));
            }
            let result = match plan.out.is_null() {
                true => of(plan.root),
                false => plan.out.add(chunk.start + block.start),
            };
            self.fold(result, block.length, inputs);
            for rank in self.others().filter(|_| !only_root) {
                copy(result.cast_const(), of(rank), block.length);
            }
        }
    }

    unsafe fn reduce_scatter(&self, inputs: &mut Inputs) {
        let plan = self.plan;
        // SAFETY: a tile of each rank has its place in a slot, and is inside the span of the rank.
        unsafe {
            if let Some(stored) = self.stored() {
                let mine = plan.spans[plan.me].part(stored, plan.tile);
                inputs.0.clear();
                for rank in 0..plan.shape.ranks {
                    let input = match rank == plan.me {
                        true => plan.array.add(mine.start),
                        false => self
                            .slot_to_read(rank)
                            .add(plan.me * plan.tile)
                            .cast_const(),
                    };
                    inputs.0.push(slice(input, mine.length));
                }
                let start = mine.start - plan.spans[plan.me].start;
                self.fold(plan.out.add(start), mine.length, inputs);
            }
            if !self.is_last() {
                self.store_tiles(|rank| plan.spans[rank]);
            }
        }
    }

    /// Stores the next tile of each other rank's span at its place in the slot.
    unsafe fn store_tiles(&self, span_of: impl Fn(usize) -> Span) {
        let plan = self.plan;
        let slot = self.slot_to_write();
        for rank in self.others() {
            let part = span_of(rank).part(self.stage, plan.tile);
            // SAFETY: the part is inside the array, and its place inside the slot.
            unsafe {
                let array = plan.array.add(part.start);
                copy(array, slot.add(rank * plan.tile), part.length);
            }
        }
    }

    /// Empties the list of inputs.
    #[inline]
    unsafe fn fold(&self, result: *mut u8, bytes: usize, inputs: &mut Inputs) {
        let result = std::ptr::slice_from_raw_parts_mut(result, bytes);
        let plan = self.plan;
        // SAFETY: all ranges are inside arrays and slots.
        let done = unsafe { fold_slices(result, &inputs.0, plan.op, plan.dtype, plan.divisor) };
        debug_assert!(done.is_ok(), "checked when the plan was made");
        inputs.0.clear();
    }

    // -- copies --------------------------------------------------------------------------------------------------

    unsafe fn all_gather(&self) {
        let plan = self.plan;
        let mine = plan.spans[plan.me];
        // SAFETY: tiles are inside the spans, and at most a slot long.
        unsafe {
            if let Some(stored) = self.stored() {
                for rank in self.others() {
                    let part = plan.spans[rank].part(stored, plan.tile);
                    let slot = self.slot_to_read(rank).cast_const();
                    copy(slot, plan.out.add(part.start), part.length);
                }
            } else if plan.out.add(mine.start).cast_const() != plan.array {
                copy(plan.array, plan.out.add(mine.start), mine.length);
            }
            if !self.is_last() {
                let part = mine.part(self.stage, plan.tile);
                let array = plan.array.add(part.start - mine.start);
                copy(array, self.slot_to_write(), part.length);
            }
        }
    }

    unsafe fn broadcast(&self) {
        let plan = self.plan;
        let whole = Span {
            start: 0,
            length: plan.bytes,
        };
        // SAFETY: tiles are inside the array, and at most a slot long.
        unsafe {
            if plan.me == plan.root {
                if !self.is_last() {
                    let part = whole.part(self.stage, plan.tile);
                    copy(
                        plan.array.add(part.start),
                        self.slot_to_write(),
                        part.length,
                    );
                }
            } else if let Some(stored) = self.stored() {
                let part = whole.part(stored, plan.tile);
                let slot = self.slot_to_read(plan.root).cast_const();
                copy(slot, plan.out.add(part.start), part.length);
            }
        }
    }

    /// The array may be the result: a tile is stored before it is overwritten.
    unsafe fn all_to_all(&self) {
        let plan = self.plan;
        let block = |rank: usize| Span {
            start: rank * plan.bytes,
            length: plan.bytes,
        };
        // SAFETY: tiles are inside the blocks, and have their places in the slots.
        unsafe {
            if let Some(stored) = self.stored() {
                for rank in self.others() {
                    let part = block(rank).part(stored, plan.tile);
                    let place = self.slot_to_read(rank).add(plan.me * plan.tile);
                    copy(place.cast_const(), plan.out.add(part.start), part.length);
                }
            } else if plan.out.cast_const() != plan.array {
                let mine = block(plan.me);
                let array = plan.array.add(mine.start);
                copy(array, plan.out.add(mine.start), mine.length);
            }
            if !self.is_last() {
                self.store_tiles(block);
            }
        }
    }
}

fn slice(start: *const u8, length: usize) -> *const [u8] {
    std::ptr::slice_from_raw_parts(start, length)
}

/// # Safety
/// As of `copy_nonoverlapping`, except that null is allowed for no bytes.
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's promise.
        unsafe { copy_nonoverlapping(from, to, bytes) };
    }
}
