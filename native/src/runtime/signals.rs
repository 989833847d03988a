//! Signals are for Python's threads.

/// Runs `start`, which starts a thread, with all signals blocked: the new thread inherits the mask.
pub fn with_signals_blocked<R>(start: impl FnOnce() -> R) -> R {
    // SAFETY: plain signal set manipulation on this thread, restored below.
    let before = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    };
    let started = start();
    // SAFETY: the set read above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    started
}
