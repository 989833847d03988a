//! Detects the end of processes that share memory with this one, before the kernel closes their sockets.
//!
//! After SIGKILL the kernel frees the memory of a process, for milliseconds, before it closes descriptors; sockets and
//! pidfds show the end only then. But before that it walks the robust futex list of each thread
//! (`set_robust_list(2)`): it sets FUTEX_OWNER_DIED in each word that holds the number of the dying thread, and wakes
//! one waiter. So one thread per `ExitWatch` owns a word in memory shared with each peer, and waits for the peers'
//! words. It never returns while it owns one, so a marked word means that the process has ended, or was replaced by
//! `exec`.
//!
//! The kernel walks the list of the thread in its own process only. A peer may write anything into the shared page:
//! the list itself is in private memory, and a word of a peer is only loaded and compared. A peer that keeps changing
//! its word is not watched any longer.
//!
//! `python/nexar_native/exit_watch.pyi` is the contract.

use std::io;
use std::mem::size_of;
use std::os::fd::RawFd;
use std::ptr::{addr_of, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{mpsc, Arc};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::runtime::buffer::Borrowed;
use crate::runtime::descriptors::Event;
use crate::runtime::errors::os_error;
use crate::runtime::process;
use crate::runtime::signals::with_signals_blocked;

const PAGE: usize = 4096;
/// The kernel waits for at most 128 words at a time. One is `Shared::changes`.
const MOST_WATCHED: usize = 127;
/// After so many changes of a peer's word without its end, the word is ignored. Two are usual.
const MOST_CHANGES: u32 = 64;
const PAUSE: Duration = Duration::from_millis(1);
const STACK_BYTES: usize = 128 << 10;

const SYS_FUTEX_WAITV: libc::c_long = 449; // the same on every architecture
const FUTEX_32: u32 = 2;
const FUTEX_PRIVATE: u32 = 128;
const FUTEX_WAITERS: u32 = 0x8000_0000;
const FUTEX_OWNER_DIED: u32 = 0x4000_0000;

/// `struct futex_waitv` of the kernel.
#[repr(C)]
struct Wait {
    value: u64,
    word: u64,
    flags: u32,
    reserved: u32,
}

/// `struct robust_list` of the kernel.
#[repr(C)]
struct Node {
    next: AtomicPtr<Node>,
}

/// `struct robust_list_head` of the kernel. The list is circular, and the head one of its nodes.
#[repr(C)]
struct Head {
    node: Node,
    /// From each node to its word.
    word_offset: libc::c_long,
    pending: *mut Node,
}

// SAFETY: `pending` is always null; the rest is atomic or constant.
unsafe impl Send for Head {}
unsafe impl Sync for Head {}

impl Head {
    fn new() -> Box<Self> {
        let head = Box::new(Head {
            node: Node {
                next: AtomicPtr::new(null_mut()),
            },
            word_offset: PAGE as libc::c_long,
            pending: null_mut(),
        });
        head.clear();
        head
    }

    fn end(&self) -> *mut Node {
        addr_of!(self.node).cast_mut()
    }

    fn clear(&self) {
        self.node.next.store(self.end(), Ordering::Release);
    }
}

/// Two pages: a private one for the list's nodes, then the shared one with the words. A node is at the same offset as
/// its word, so the distance is the same in all `Pages`. A forked child has neither.
struct Pages {
    begin: *mut u8,
    generation: u32,
}

// SAFETY: the memory is mapped until the drop, and accessed as atomics only.
unsafe impl Send for Pages {}

impl Pages {
    /// Maps the first page of `memory`, a shared mapping, once more.
    fn new(memory: &Borrowed) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let begin = unsafe {
            libc::mmap(
                null_mut(),
                2 * PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if begin == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let pages = Pages {
            begin: begin.cast(),
            generation: process::generation(),
        };
        let old = memory.bytes().as_ptr().cast_mut();
        // SAFETY: it replaces the second page of our mapping. An old size of 0 leaves the old mapping as it is and maps
        // the same memory; the kernel refuses that for a private one.
        let mapped = unsafe {
            libc::mremap(
                old.cast(),
                0,
                PAGE,
                libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
                pages.begin.add(PAGE).cast::<libc::c_void>(),
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: both pages are ours.
        match unsafe { libc::madvise(begin, 2 * PAGE, libc::MADV_DONTFORK) } {
            0 => Ok(pages),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn node(&self, at: usize) -> &Node {
        // SAFETY: `at` is a multiple of 8 below PAGE (see `checked`); the page is mapped until the drop, and initially
        // zero, a valid Node.
        unsafe { &*self.begin.add(at).cast() }
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: as in `node`, one page further. Other processes access it as an atomic word too; whatever they store
        // is a valid u32. It stays mapped if they end: the segment is sealed against truncation.
        unsafe { &*self.begin.add(PAGE + at).cast() }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.generation == process::generation() {
            // SAFETY: ours, and no reference into it is left: they do not outlive a method call under the lock.
            unsafe { libc::munmap(self.begin.cast(), 2 * PAGE) };
        }
    }
}

struct Watch {
    key: u64,
    pages: Pages,
    mine: usize,
    theirs: usize,
    /// The last value of the peer's word, and how often it has changed or its waiters were woken.
    value: u32,
    changes: u32,
    /// Ended, or ignored.
    over: bool,
}

impl Watch {
    /// What to wait for: None if the watch is over.
    fn wait(&mut self) -> Option<Wait> {
        let word = self.pages.word(self.theirs);
        let value = word.load(Ordering::Acquire);
        if value != self.value {
            self.value = value;
            self.changes += 1;
        }
        self.over = self.over || self.changes > MOST_CHANGES;
        (!self.over).then(|| Wait::new(word, value, FUTEX_32))
    }

    fn has_ended(&self) -> bool {
        !self.over && self.pages.word(self.theirs).load(Ordering::Acquire) & FUTEX_OWNER_DIED != 0
    }
}

impl Wait {
    fn new(word: &AtomicU32, value: u32, flags: u32) -> Self {
        Wait {
            value: u64::from(value),
            word: addr_of!(*word) as u64,
            flags,
            reserved: 0,
        }
    }
}

/// Guarded by the lock. The nodes of `watches` form the list, the newest first.
struct State {
    watches: Vec<Watch>,
    ended: Vec<u64>,
    next_key: u64,
    closed: bool,
}

struct Shared {
    state: Mutex<State>,
    /// Boxed, because the kernel has its address.
    head: Box<Head>,
    /// The thread waits for this word too. Whoever changes the state adds 1, then wakes it.
    changes: AtomicU32,
    /// Readable when `State::ended` has news.
    event: Event,
    generation: u32,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        wake(&self.changes, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG);
    }

    /// Link before the store: killed in between, this process leaves a word that the kernel does not mark, and its
    /// sockets show its end. Each store leaves a complete list, since the thread may be killed at any time.
    fn own(&self, watch: &Watch, thread: u32) {
        let node = watch.pages.node(watch.mine);
        let first = self.head.node.next.load(Ordering::Relaxed);
        node.next.store(first, Ordering::Release);
        self.head
            .node
            .next
            .store(addr_of!(*node).cast_mut(), Ordering::Release);
        let word = watch.pages.word(watch.mine);
        word.store(thread | FUTEX_WAITERS, Ordering::Release); // the kernel wakes nobody without this bit
        wake(word, libc::FUTEX_WAKE); // the peer waits for another value
    }

    /// Gives up the word, then unlinks the node.
    fn disown(&self, state: &State, index: usize) {
        let watch = &state.watches[index];
        watch.pages.word(watch.mine).store(0, Ordering::Release);
        let node = watch.pages.node(watch.mine);
        let before = state
            .watches
            .get(index + 1)
            .map_or(&self.head.node, |newer| newer.pages.node(newer.mine));
        before
            .next
            .store(node.next.load(Ordering::Relaxed), Ordering::Release);
    }

    /// What the thread waits for next, and the keys of the words after the first; None: closed.
    fn collect(&self) -> Option<(Vec<Wait>, Vec<u64>)> {
        let mut state = self.state.lock();
        if state.closed {
            return None;
        }
        let value = self.changes.load(Ordering::Acquire);
        let mut waits = vec![Wait::new(&self.changes, value, FUTEX_32 | FUTEX_PRIVATE)];
        let mut keys = Vec::new();
        let mut ended = Vec::new();
        for watch in &mut state.watches {
            if watch.has_ended() {
                watch.over = true;
                ended.push(watch.key);
            } else if let Some(wait) = watch.wait() {
                waits.push(wait);
                keys.push(watch.key);
            }
        }
        if !ended.is_empty() {
            state.ended.append(&mut ended);
            self.event.signal();
        }
        Some((waits, keys))
    }

    fn run(&self) {
        while let Some((waits, keys)) = self.collect() {
            // SAFETY: a live array of its length; without a timeout. The words may have been unmapped meanwhile
            // (EFAULT): the kernel only loads them.
            let woken = unsafe {
                libc::syscall(
                    SYS_FUTEX_WAITV,
                    waits.as_ptr(),
                    waits.len() as libc::c_uint,
                    0,
                    std::ptr::null::<libc::timespec>(),
                    libc::CLOCK_MONOTONIC,
                )
            };
            let unchanged = self.changes.load(Ordering::Acquire) == waits[0].value as u32;
            match usize::try_from(woken) {
                Ok(0) => {}
                Ok(index) => self.count(keys[index - 1]),
                // A word has changed since it was read. A peer whose word flips back at once costs little.
                Err(_) if unchanged => std::thread::sleep(PAUSE),
                Err(_) => {}
            }
        }
    }

    fn count(&self, key: u64) {
        let mut state = self.state.lock();
        if let Some(watch) = state.watches.iter_mut().find(|each| each.key == key) {
            watch.changes += 1;
        }
    }

    fn close(&self) {
        let watches = {
            let mut state = self.state.lock();
            state.closed = true;
            state.ended.clear();
            for watch in &state.watches {
                watch.pages.word(watch.mine).store(0, Ordering::Release);
            }
            self.head.clear();
            std::mem::take(&mut state.watches)
        };
        self.changed();
        drop(watches);
    }
}

/// Gives up all words before the thread ends, also after a panic: otherwise the kernel would mark them, though the
/// process lives.
struct OwnerThread(Arc<Shared>);

impl Drop for OwnerThread {
    fn drop(&mut self) {
        self.0.close();
        // SAFETY: this thread's list, which is empty now. The kernel must not read it after it was freed.
        unsafe { libc::syscall(libc::SYS_set_robust_list, 0usize, size_of::<Head>()) };
    }
}

fn wake(word: &AtomicU32, operation: libc::c_int) {
    // SAFETY: a mapped word; the call only looks for waiters.
    unsafe { libc::syscall(libc::SYS_futex, addr_of!(*word), operation, i32::MAX) };
}

/// Starts the thread; returns its number once the kernel knows its list.
fn start(shared: &Arc<Shared>) -> io::Result<u32> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let owner = OwnerThread(shared.clone());
    let run = move || {
        let owner = owner; // the whole of it, so that it is dropped here
        let head: *const Head = &*owner.0.head;
        // SAFETY: `owner` keeps the head, and takes it back when it is dropped.
        let failed =
            unsafe { libc::syscall(libc::SYS_set_robust_list, head, size_of::<Head>()) } != 0;
        let begun = if failed {
            Err(io::Error::last_os_error())
        } else {
            // SAFETY: plain system call.
            Ok(unsafe { libc::syscall(libc::SYS_gettid) } as u32)
        };
        if sender.send(begun).is_ok() && !failed {
            owner.0.run();
        }
    };
    let thread = with_signals_blocked(|| {
        Builder::new()
            .name("nexar-exits".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(run)
    })?;
    *shared.thread.lock() = Some(thread);
    receiver
        .recv()
        .map_err(|_| io::Error::other("the thread ended"))?
}

/// Fails with ENOSYS before Linux 5.16, and with EPERM in a sandbox that does not know the call.
fn check_support() -> io::Result<()> {
    // SAFETY: no words, which a kernel that has the call refuses.
    unsafe { libc::syscall(SYS_FUTEX_WAITV, null_mut::<Wait>(), 0, 0, 0usize, 0) };
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINVAL) => Ok(()),
        _ => Err(error),
    }
}

fn checked(name: &str, at: usize) -> PyResult<usize> {
    if at % 8 == 0 && at < PAGE {
        return Ok(at);
    }
    let text = format!("{name} {at}; allowed: multiples of 8 below {PAGE}");
    Err(PyValueError::new_err(text))
}

#[pyclass(module = "nexar_native.exit_watch", frozen)]
pub struct ExitWatch {
    shared: Arc<Shared>,
    thread: u32,
}

impl ExitWatch {
    fn enter(&self) -> PyResult<&Shared> {
        if self.shared.generation == process::generation() {
            return Ok(&self.shared);
        }
        let text = "made in the parent process; a forked child must make its own";
        Err(PyRuntimeError::new_err(text))
    }
}

#[pymethods]
impl ExitWatch {
    #[new]
    fn new() -> PyResult<Self> {
        check_support().map_err(os_error)?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                watches: Vec::new(),
                ended: Vec::new(),
                next_key: 0,
                closed: false,
            }),
            head: Head::new(),
            changes: AtomicU32::new(0),
            event: Event::new().map_err(os_error)?,
            generation: process::generation(),
            thread: Mutex::new(None),
        });
        let thread = start(&shared).map_err(os_error)?;
        Ok(ExitWatch { shared, thread })
    }

    fn fileno(&self) -> PyResult<RawFd> {
        Ok(self.enter()?.event.raw())
    }

    fn add(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        mine: usize,
        theirs: usize,
    ) -> PyResult<Option<u64>> {
        let shared = self.enter()?;
        let (mine, theirs) = (checked("mine", mine)?, checked("theirs", theirs)?);
        let memory = Borrowed::writable(memory)?;
        let fits = memory.len() >= PAGE && memory.bytes().as_ptr() as usize % PAGE == 0;
        let pages = fits.then(|| Pages::new(&memory));
        memory.release(py);
        let Some(pages) = pages else {
            return Err(PyValueError::new_err("memory is not a mapping of pages"));
        };
        let pages = pages.map_err(os_error)?;
        let mut state = shared.state.lock();
        if state.closed || state.watches.len() == MOST_WATCHED {
            return Ok(None);
        }
        state.next_key += 1;
        let key = state.next_key;
        let watch = Watch {
            key,
            pages,
            mine,
            theirs,
            value: 0,
            changes: 0,
            over: false,
        };
        shared.own(&watch, self.thread);
        state.watches.push(watch);
        drop(state);
        shared.changed();
        Ok(Some(key))
    }

    fn remove(&self, key: u64) -> PyResult<()> {
        let shared = self.enter()?;
        let mut state = shared.state.lock();
        let Some(index) = state.watches.iter().position(|each| each.key == key) else {
            return Ok(());
        };
        shared.disown(&state, index);
        let watch = state.watches.remove(index);
        state.ended.retain(|&each| each != key);
        drop(state);
        shared.changed(); // before the pages are unmapped, so that the thread does not take EFAULT for a change
        drop(watch);
        Ok(())
    }

    fn ended(&self) -> PyResult<Vec<u64>> {
        let shared = self.enter()?;
        let mut state = shared.state.lock();
        shared.event.drain();
        Ok(std::mem::take(&mut state.ended))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let shared = self.enter()?;
        shared.close();
        let thread = shared.thread.lock().take(); // of several callers, one waits for its end
        if let Some(thread) = thread {
            process::detached(py, || thread.join().ok());
        }
        Ok(())
    }
}

impl Drop for ExitWatch {
    /// Without waiting for the thread. A forked child touches nothing.
    fn drop(&mut self) {
        if let Ok(shared) = self.enter() {
            shared.close();
        }
    }
}

/// The Python module `nexar_native.exit_watch`.
pub fn module(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    let module = PyModule::new(py, "nexar_native.exit_watch")?;
    module.setattr(
        "__doc__",
        "Detects the end of processes that share memory with this one.",
    )?;
    module.add_class::<ExitWatch>()?;
    Ok(module)
}
