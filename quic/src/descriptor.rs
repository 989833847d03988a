//! Descriptors we own, in a table that the child of a fork can walk.

use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use parking_lot::Mutex;

use crate::fork;

/// Every descriptor of ours that is open in this process. Leaf lock, held for a few instructions.
pub static TABLE: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// A descriptor that is closed with its owner, but never by a forked child: there the number was
/// closed right after the fork and may since belong to somebody else.
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
            generation: fork::generation(),
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
        if self.generation != fork::generation() {
            return;
        }
        let mut table = TABLE.lock();
        table.retain(|&fd| fd != self.fd);
        // SAFETY: ours and open. Closed under the table's lock, so that a fork never sees a number
        // in the table that another thread has already been given anew.
        unsafe { libc::close(self.fd) };
    }
}
