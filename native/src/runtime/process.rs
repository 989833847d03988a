//! Interpreter exit, and forking.
//!
//! Exit: CPython ends a thread that returns from native code while the interpreter is being finalized. Our
//! frames are on its stack, so that aborts the process (3.11 to 3.13). Therefore an `atexit` hook closes every
//! endpoint, which tells each peer, and waits until no thread is without the GIL in this module.
//!
//! Fork: a child shares the open file descriptions of our sockets with its parent. It must close its
//! descriptors and never use them. Objects remember the generation they were made in; the child's is one
//! higher, so each of their methods refuses.
//!
//! The fork handlers are the C library's (`pthread_atfork`), not Python's (`os.register_at_fork`): between
//! Python's handlers other Python code runs, in which the garbage collector may free objects of ours. That
//! would wait for a lock that the forking thread holds itself, or, in the child, for a lock held by a thread
//! that does not exist there.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::runtime::{decref, descriptors};

/// Something with threads or peers that is closed before the interpreter is finalized.
pub trait CloseAtExit: Send + Sync {
    /// Called without the GIL.
    fn close_at_exit(&self);
}

/// Objects to close at exit. Leaf lock, held for a few instructions.
pub static OPEN: Mutex<Vec<Weak<dyn CloseAtExit>>> = Mutex::new(Vec::new());
static EXITING: AtomicBool = AtomicBool::new(false);
/// Threads that released the GIL in this module and have not taken it again.
static DETACHED: AtomicUsize = AtomicUsize::new(0);
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

pub fn exiting() -> bool {
    EXITING.load(Ordering::Relaxed)
}

pub fn register_for_exit<T: CloseAtExit + 'static>(shared: &Arc<T>) {
    let mut open = OPEN.lock();
    open.retain(|weak| weak.strong_count() > 0);
    let weak: Weak<T> = Arc::downgrade(shared);
    open.push(weak);
}

/// In a forked child: the registered objects are the parent's.
fn reset_in_child() {
    OPEN.lock().clear();
    DETACHED.store(0, Ordering::Relaxed);
}

/// Runs `work` without the GIL and counts the thread while it has no GIL.
pub fn detached<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> R {
    DETACHED.fetch_add(1, Ordering::Relaxed);
    let result = py.detach(work);
    DETACHED.fetch_sub(1, Ordering::Relaxed);
    result
}

#[pyfunction]
fn close_all(py: Python<'_>) {
    EXITING.store(true, Ordering::Relaxed);
    let open: Vec<_> = OPEN.lock().drain(..).filter_map(|w| w.upgrade()).collect();
    py.detach(|| {
        for shared in &open {
            shared.close_at_exit();
        }
    });
    let deadline = Instant::now() + EXIT_TIMEOUT;
    while DETACHED.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
        py.detach(|| std::thread::sleep(Duration::from_micros(200)));
    }
}

pub fn register_atexit(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let hook = wrap_pyfunction!(close_all, module)?;
    module
        .py()
        .import("atexit")?
        .call_method1("register", (hook,))?;
    Ok(())
}

static GENERATION: AtomicU32 = AtomicU32::new(0);

pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Takes the three leaf locks before the fork. Otherwise another thread could hold one of them, and
/// no thread of the child would release it.
extern "C" fn before_fork() {
    std::mem::forget(OPEN.lock());
    std::mem::forget(descriptors::TABLE.lock());
    std::mem::forget(decref::DEFERRED.lock());
}

extern "C" fn after_fork_in_parent() {
    // SAFETY: locked by `before_fork` on this thread.
    unsafe {
        decref::DEFERRED.force_unlock();
        descriptors::TABLE.force_unlock();
        OPEN.force_unlock();
    }
}

/// Closes our descriptors in the child. The parent's stay open: nothing is shut down. The locks of
/// endpoints are not touched, because threads that do not exist here may hold them.
extern "C" fn after_fork_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    after_fork_in_parent();
    for fd in descriptors::TABLE.lock().drain(..) {
        // SAFETY: it was open at the time of the fork, and nothing ran in between.
        unsafe { libc::close(fd) };
    }
    reset_in_child();
}

pub fn register_fork_handlers() -> PyResult<()> {
    // SAFETY: the handlers stay where they are, since a Python module is never unloaded.
    let failed = unsafe {
        libc::pthread_atfork(
            Some(before_fork),
            Some(after_fork_in_parent),
            Some(after_fork_in_child),
        )
    };
    match failed {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code).into()),
    }
}
