//! One waiting thread, as the others see it.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::event::Event;

/// The flags are only touched under the endpoint's lock, which orders them; they are atomic because
/// the waiter is shared, not because they race.
pub struct Waiter {
    event: Event,
    asleep: AtomicBool,
    signalled: AtomicBool,
    eager: AtomicBool,
}

impl Waiter {
    pub fn new() -> io::Result<Self> {
        Ok(Waiter {
            event: Event::new()?,
            asleep: AtomicBool::new(false),
            signalled: AtomicBool::new(false),
            eager: AtomicBool::new(false),
        })
    }

    /// Make its thread look again. Costs a system call only if it sleeps, and only the first time.
    pub fn wake(&self) {
        if !self.signalled.swap(true, Relaxed) && self.asleep.load(Relaxed) {
            self.event.signal();
        }
    }

    /// Announce the sleep. False: it was woken since it last looked, and must look again instead.
    /// Announcing and looking happen under one hold of the lock, so no wake-up falls in between.
    pub fn lie_down(&self) -> bool {
        if self.signalled.swap(false, Relaxed) {
            return false;
        }
        self.asleep.store(true, Relaxed);
        true
    }

    pub fn get_up(&self) {
        self.asleep.store(false, Relaxed);
        if self.signalled.swap(false, Relaxed) {
            self.event.drain();
        }
    }

    pub fn descriptor(&self) -> i32 {
        self.event.raw()
    }

    /// Eager threads spin: they come back within microseconds and want to drive themselves.
    pub fn eager(&self) -> bool {
        self.eager.load(Relaxed)
    }

    pub fn set_eager(&self, eager: bool) {
        self.eager.store(eager, Relaxed);
    }
}
