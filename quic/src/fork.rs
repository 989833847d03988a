//! Forking. A child shares our sockets' open file descriptions with its parent: it must let go of
//! them and never use them. Objects remember the generation they were made in; the child's is one
//! higher, so each of their methods refuses.
//!
//! The handlers are the C library's (`pthread_atfork`), not Python's (`os.register_at_fork`): between
//! Python's, other Python code runs, in which the collector may free objects of ours. That would wait
//! for a lock that the forking thread holds itself, or, in the child, that a thread holds which does
//! not exist there.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;

use crate::{descriptor, exit, trash};

static GENERATION: AtomicU32 = AtomicU32::new(0);

pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Another thread may hold one of these three leaf locks, and in the child nobody would ever
/// release it. So the forking thread takes them first.
extern "C" fn before_fork() {
    std::mem::forget(exit::LIVE.lock());
    std::mem::forget(descriptor::TABLE.lock());
    std::mem::forget(trash::BIN.lock());
}

extern "C" fn after_fork_in_parent() {
    // SAFETY: locked by `before_fork` on this thread.
    unsafe {
        trash::BIN.force_unlock();
        descriptor::TABLE.force_unlock();
        exit::LIVE.force_unlock();
    }
}

/// Closes our descriptors here. The parent's stay open: nothing is shut down, and the endpoint
/// locks, which may be held by threads that do not exist here, are not touched.
extern "C" fn after_fork_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    after_fork_in_parent();
    for fd in descriptor::TABLE.lock().drain(..) {
        // SAFETY: it was open at the time of the fork, and nothing ran in between.
        unsafe { libc::close(fd) };
    }
    exit::forget();
}

pub fn register() -> PyResult<()> {
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
