//! Sleeping until a descriptor is ready.

use std::os::fd::RawFd;
use std::time::Duration;

pub struct PollSet {
    entries: Vec<libc::pollfd>,
}

#[derive(PartialEq, Clone, Copy, Debug)]
pub enum Poll {
    Ready,
    TimedOut,
    /// A signal arrived; its Python handler may want to run.
    Interrupted,
}

impl PollSet {
    pub fn new() -> Self {
        PollSet {
            entries: Vec::new(),
        }
    }

    pub fn add(&mut self, fd: RawFd, events: i16) {
        self.entries.push(libc::pollfd {
            fd,
            events,
            revents: 0,
        });
    }

    /// None waits for ever.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Poll {
        let limit = timeout.map(|t| libc::timespec {
            tv_sec: t.as_secs().min(1 << 30) as libc::time_t,
            tv_nsec: t.subsec_nanos() as libc::c_long,
        });
        let limit = limit
            .as_ref()
            .map_or(std::ptr::null(), |l| l as *const libc::timespec);
        // SAFETY: a live array of its length, and a timespec or null.
        let count = unsafe {
            libc::ppoll(
                self.entries.as_mut_ptr(),
                self.entries.len() as libc::nfds_t,
                limit,
                std::ptr::null(),
            )
        };
        match count {
            0 => Poll::TimedOut,
            count if count > 0 => Poll::Ready,
            _ => Poll::Interrupted,
        }
    }

    /// The descriptors from entry `first` on that are ready, hung up, in error or not open at all.
    pub fn ready_from(&self, first: usize) -> Vec<RawFd> {
        self.entries[first..]
            .iter()
            .filter(|entry| entry.revents != 0)
            .map(|entry| entry.fd)
            .collect()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }
}
