//! An eventfd: the one way in which a thread asleep in `ppoll` is woken.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use crate::descriptor::Descriptor;

pub struct Event(Descriptor);

impl Event {
    pub fn new() -> io::Result<Self> {
        // SAFETY: plain system call; the result is checked before it is owned.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
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
