//! The monotonic clock, as Python's `time.monotonic`.

/// `unsafe`: a system call that fills a value of ours.
pub fn nanoseconds() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a writable timespec; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

pub fn seconds() -> f64 {
    nanoseconds() as f64 * 1e-9
}
