//! File descriptors that we own, eventfds, `ppoll` and `epoll`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::time::Duration;

use parking_lot::Mutex;

use crate::runtime::process;

/// Every descriptor of ours that is open in this process, for the child of a fork to close. Leaf
/// lock, held for a few instructions.
pub static TABLE: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// A descriptor that is closed with its owner, but never by a forked child: the child closed the
/// number right after the fork, and it may belong to another file now.
pub struct Descriptor {
    fd: RawFd,
    generation: u32,
}

impl Descriptor {
    pub fn new(fd: OwnedFd) -> Self {
        let fd = fd.into_raw_fd();
        TABLE.lock().push(fd);
        Descriptor {
            fd,
            generation: process::generation(),
        }
    }

    pub fn raw(&self) -> RawFd {
        self.fd
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open until `self` is dropped.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if self.generation != process::generation() {
            return;
        }
        let mut table = TABLE.lock();
        table.retain(|&fd| fd != self.fd);
        // SAFETY: ours and open. Closed under the table's lock, so that a fork never finds a number
        // in the table that the kernel has already given to another file.
        unsafe { libc::close(self.fd) };
    }
}

/// An eventfd, which wakes a thread that sleeps in `ppoll`.
pub struct Event(Descriptor);

impl Event {
    pub fn new() -> io::Result<Self> {
        // SAFETY: plain system call; the result is checked before it is owned.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor without another owner.
        Ok(Event(Descriptor::new(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    pub fn raw(&self) -> RawFd {
        self.0.raw()
    }

    /// Make it readable.
    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: eight readable bytes. A full counter (EAGAIN) is readable already.
        unsafe { libc::write(self.raw(), (&raw const one).cast(), 8) };
    }

    /// Make it unreadable.
    pub fn drain(&self) {
        let mut count = 0u64;
        // SAFETY: eight writable bytes. An empty counter (EAGAIN) is unreadable already.
        unsafe { libc::read(self.raw(), (&raw mut count).cast(), 8) };
    }
}

/// Descriptors to sleep on.
pub struct PollSet {
    entries: Vec<libc::pollfd>,
}

#[derive(PartialEq, Clone, Copy, Debug)]
pub enum Poll {
    Ready,
    TimedOut,
    /// A signal arrived. Its Python handler may have to run.
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

    /// None: no limit.
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
}

/// Descriptors of many connections, each with a number; edge-triggered.
pub struct Readiness {
    epoll: Descriptor,
}

/// What became possible since the last report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ready {
    pub reading: bool,
    pub writing: bool,
    /// The peer has closed its sending half, or the connection is in error.
    pub hung_up: bool,
}

const READY_AT_ONCE: usize = 64;

impl Readiness {
    pub fn new() -> io::Result<Self> {
        // SAFETY: plain system call; the result is checked before it is owned.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor without another owner.
        let epoll = Descriptor::new(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(Readiness { epoll })
    }

    /// The descriptor is forgotten when it is closed.
    pub fn add(&self, fd: RawFd, number: u64) -> io::Result<()> {
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: number,
        };
        // SAFETY: open descriptors and a live structure.
        match unsafe { libc::epoll_ctl(self.epoll.raw(), libc::EPOLL_CTL_ADD, fd, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Replaces `ready` by what became ready; nothing after the timeout or a signal.
    pub fn wait(&self, timeout: Duration, ready: &mut Vec<(u64, Ready)>) {
        ready.clear();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; READY_AT_ONCE];
        // Rounded up, so that a deadline has passed when this returns.
        let milliseconds = timeout.as_nanos().div_ceil(1_000_000).min(1 << 30) as libc::c_int;
        // SAFETY: a live array of its length.
        let count = unsafe {
            libc::epoll_wait(
                self.epoll.raw(),
                events.as_mut_ptr(),
                READY_AT_ONCE as libc::c_int,
                milliseconds,
            )
        };
        for event in &events[..usize::try_from(count).unwrap_or(0)] {
            let (flags, number) = (event.events as i32, event.u64);
            let hung_up = flags & (libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) != 0;
            let report = Ready {
                reading: hung_up || flags & libc::EPOLLIN != 0,
                writing: hung_up || flags & libc::EPOLLOUT != 0,
                hung_up,
            };
            ready.push((number, report));
        }
    }
}
