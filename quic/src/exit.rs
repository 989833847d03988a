//! Interpreter exit.
//!
//! A thread that comes back from native code while the interpreter is being torn down is ended by
//! CPython in the middle of our frames, which aborts the process (3.11 to 3.13). So before that, the
//! `atexit` hook closes every endpoint (each peer is told) and waits until every thread is out.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::shared::Shared;

/// Endpoints not yet closed. Leaf lock, held for a few instructions.
pub static LIVE: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
static EXITING: AtomicBool = AtomicBool::new(false);
/// Threads that gave up the GIL inside this module and have not got it back.
static OUTSIDE: AtomicUsize = AtomicUsize::new(0);
const PATIENCE: Duration = Duration::from_secs(5);

pub fn exiting() -> bool {
    EXITING.load(Ordering::Relaxed)
}

pub fn enlist(shared: &Arc<Shared>) {
    let mut live = LIVE.lock();
    live.retain(|weak| weak.strong_count() > 0);
    live.push(Arc::downgrade(shared));
}

/// In a forked child: the endpoints are the parent's.
pub fn forget() {
    LIVE.lock().clear();
    OUTSIDE.store(0, Ordering::Relaxed);
}

/// Run `work` without the GIL, counted.
pub fn detached<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> R {
    OUTSIDE.fetch_add(1, Ordering::Relaxed);
    let result = py.detach(work);
    OUTSIDE.fetch_sub(1, Ordering::Relaxed);
    result
}

#[pyfunction]
fn close_all(py: Python<'_>) {
    EXITING.store(true, Ordering::Relaxed);
    let live: Vec<_> = LIVE.lock().drain(..).filter_map(|w| w.upgrade()).collect();
    py.detach(|| {
        for shared in &live {
            shared.close(0, "the process exits");
        }
    });
    let deadline = Instant::now() + PATIENCE;
    while OUTSIDE.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
        py.detach(|| std::thread::sleep(Duration::from_micros(200)));
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let hook = wrap_pyfunction!(close_all, module)?;
    module
        .py()
        .import("atexit")?
        .call_method1("register", (hook,))?;
    Ok(())
}
