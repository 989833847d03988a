//! Driver election: which of the threads that wait on an endpoint drives it. The background thread
//! takes part.
//!
//! Invariants, all under the endpoint's lock:
//! * At most one thread is the driver. Only the driver receives datagrams and runs timers. Every
//!   thread that holds the lock may pass data to the protocol and transmit.
//! * A driver that released the lock (to yield or to sleep) may find another driver when it takes
//!   the lock again; it is a follower then. So a thread can be replaced as driver at any time,
//!   without its cooperation.
//! * While the driver sleeps, `sleep` says until when, and whether a writable socket wakes it. A
//!   thread that needs it earlier wakes it.
//! * When no thread drives, the background thread takes over within about two milliseconds. Unless
//!   it is parked, it checks at least that often. It parks only while another thread drives, which
//!   wakes it when it leaves.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Instant;

use crate::runtime::descriptors::Event;

/// How the driver sleeps.
pub struct Sleep {
    until: Option<Instant>,
    writable: bool,
}

pub struct DriverElection {
    driver: Option<Arc<Waiter>>,
    sleep: Option<Sleep>,
    followers: Vec<Arc<Waiter>>,
    /// Unused waiters, kept for threads that wait later.
    spare: Vec<Arc<Waiter>>,
    /// None once the endpoint is closed and the background thread has ended.
    background: Option<Arc<Waiter>>,
    pub parked: bool,
    /// The background thread must drive now, without its usual delay.
    pub background_requested: bool,
    /// Threads inside a wait.
    pub waiting: usize,
    /// Counts the times that a driver stepped down: an unchanged count tells the background thread
    /// that the same thread still drives.
    pub terms: u64,
    /// Approximately when a thread last drove.
    pub last_driven: Instant,
}

impl DriverElection {
    pub fn new() -> io::Result<Self> {
        Ok(DriverElection {
            driver: None,
            sleep: None,
            followers: Vec::new(),
            spare: Vec::new(),
            background: Some(Arc::new(Waiter::new()?)),
            parked: false,
            background_requested: false,
            waiting: 0,
            terms: 0,
            last_driven: Instant::now(),
        })
    }

    /// The waiter of the background thread.
    pub fn background(&self) -> Option<Arc<Waiter>> {
        self.background.clone()
    }

    fn is_background(&self, waiter: &Arc<Waiter>) -> bool {
        let background = self.background.as_ref();
        background.is_some_and(|b| Arc::ptr_eq(b, waiter))
    }

    fn wake_background(&self) {
        if let Some(background) = &self.background {
            background.wake();
        }
    }

    pub fn enter(&mut self, spins: bool) -> io::Result<Arc<Waiter>> {
        let waiter = match self.spare.pop() {
            Some(waiter) => waiter,
            None => Arc::new(Waiter::new()?),
        };
        waiter.set_spins(spins);
        self.waiting += 1;
        Ok(waiter)
    }

    /// A follower may have been woken to drive and leave for another reason (a signal, the end of
    /// its time slice). If no thread drives, it wakes the next one.
    pub fn leave(&mut self, waiter: Arc<Waiter>) {
        self.remove_follower(&waiter);
        if self.is_driver(&waiter) {
            self.step_down(&waiter);
        } else if self.driver.is_none() {
            self.wake_successor(&waiter);
        }
        self.waiting -= 1;
        // Clear a wake-up that came too late.
        waiter.finish_sleep();
        self.spare.push(waiter);
    }

    pub fn has_driver(&self) -> bool {
        self.driver.is_some()
    }

    pub fn is_driver(&self, waiter: &Arc<Waiter>) -> bool {
        self.driver.as_ref().is_some_and(|l| Arc::ptr_eq(l, waiter))
    }

    /// Makes `waiter` the driver and returns true, unless another thread drives that may not be
    /// replaced. The background thread may always be replaced. A thread that does not spin is
    /// replaced by one that spins: otherwise each message would cost the spinning thread a switch
    /// to the other.
    pub fn try_drive(&mut self, waiter: &Arc<Waiter>) -> bool {
        match &self.driver {
            Some(driver) if Arc::ptr_eq(driver, waiter) => return true,
            Some(driver) if !self.is_background(driver) && (driver.spins() || !waiter.spins()) => {
                return false
            }
            _ => {}
        }
        self.remove_follower(waiter);
        let former = self.driver.replace(waiter.clone());
        self.sleep = None;
        // It still sleeps and does not know. It is listed, so that closing the endpoint wakes it.
        if let Some(former) = former.filter(|f| !self.is_background(f)) {
            self.add_follower(&former);
        }
        true
    }

    pub fn add_follower(&mut self, waiter: &Arc<Waiter>) {
        if !self.followers.iter().any(|f| Arc::ptr_eq(f, waiter)) {
            self.followers.push(waiter.clone());
        }
    }

    fn remove_follower(&mut self, waiter: &Arc<Waiter>) {
        self.followers.retain(|f| !Arc::ptr_eq(f, waiter));
    }

    fn step_down(&mut self, waiter: &Arc<Waiter>) {
        self.driver = None;
        self.sleep = None;
        self.terms += 1;
        self.wake_successor(waiter);
    }

    /// Wakes a thread that drives next, after `leaving` has left and no thread drives. A spinning
    /// thread returns within microseconds: waking a follower that does not spin each time would
    /// cost both more than it gains. The background thread takes care of that follower at its next
    /// check.
    fn wake_successor(&self, leaving: &Arc<Waiter>) {
        let next = self.followers.iter().find(|f| f.spins());
        let next = next.or_else(|| self.followers.first().filter(|_| !leaving.spins()));
        match next {
            Some(follower) => follower.wake(),
            None if self.parked => self.wake_background(),
            None => {}
        }
    }

    /// Makes the background thread drive now instead of at its next check.
    pub fn request_background(&mut self) {
        if self.driver.is_none() {
            self.background_requested = true;
            self.wake_background();
        }
    }

    pub fn set_sleep(&mut self, until: Option<Instant>, writable: bool) {
        self.sleep = Some(Sleep { until, writable });
    }

    pub fn clear_sleep(&mut self, waiter: &Arc<Waiter>) {
        if self.is_driver(waiter) {
            self.sleep = None;
        }
    }

    /// Wakes the sleeping driver if it would sleep past the timer `next`, if it does not wait for a
    /// writable socket although a transmit is `blocked`, or if work is `unfinished`.
    pub fn wake_driver_if_needed(
        &mut self,
        next: Option<Instant>,
        blocked: bool,
        unfinished: bool,
    ) {
        let (Some(sleep), Some(driver)) = (&self.sleep, &self.driver) else {
            return;
        };
        let late = match (next, sleep.until) {
            (Some(next), Some(until)) => next < until,
            (Some(_), None) => true,
            (None, _) => false,
        };
        if late || unfinished || (blocked && !sleep.writable) {
            driver.wake();
        }
    }

    /// Wakes all threads: the endpoint is closed.
    pub fn wake_all(&self) {
        for waiter in self.followers.iter().chain(&self.driver) {
            waiter.wake();
        }
        self.wake_background();
    }

    /// Frees the descriptors. No thread waits any longer and the background thread has ended.
    pub fn close(&mut self) {
        self.driver = None;
        self.background = None;
        self.spare.clear();
    }
}

/// One waiting thread. The flags change only under the endpoint's lock, which orders them; they are
/// atomic because the waiter is shared.
pub struct Waiter {
    event: Event,
    asleep: AtomicBool,
    woken: AtomicBool,
    spins: AtomicBool,
}

impl Waiter {
    pub fn new() -> io::Result<Self> {
        Ok(Waiter {
            event: Event::new()?,
            asleep: AtomicBool::new(false),
            woken: AtomicBool::new(false),
            spins: AtomicBool::new(false),
        })
    }

    /// Makes the thread check its condition again. A system call only if the thread sleeps, and
    /// only the first time.
    pub fn wake(&self) {
        if !self.woken.swap(true, Relaxed) && self.asleep.load(Relaxed) {
            self.event.signal();
        }
    }

    /// Announces a sleep. False: the waiter was woken since its last check and must check again.
    /// The thread checks and announces without releasing the lock in between, so no wake-up is
    /// lost.
    pub fn prepare_sleep(&self) -> bool {
        if self.woken.swap(false, Relaxed) {
            return false;
        }
        self.asleep.store(true, Relaxed);
        true
    }

    pub fn finish_sleep(&self) {
        self.asleep.store(false, Relaxed);
        if self.woken.swap(false, Relaxed) {
            self.event.drain();
        }
    }

    pub fn descriptor(&self) -> i32 {
        self.event.raw()
    }

    /// Whether the thread spins: such a thread waits again within microseconds and should drive
    /// itself.
    pub fn spins(&self) -> bool {
        self.spins.load(Relaxed)
    }

    pub fn set_spins(&self, spins: bool) {
        self.spins.store(spins, Relaxed);
    }
}

/// Timers of sessions: a heap with lazy deletion. Each session remembers its one valid entry. A
/// timer that moves later, as with every packet, costs nothing: its entry turns out to be early
/// when it is first, and is then inserted again.
#[derive(Default)]
pub struct Timers {
    heap: BinaryHeap<Reverse<(Instant, u64)>>,
}

impl Timers {
    /// Sets the session's timer to `at`. `queued` is the session's valid entry.
    pub fn arm(&mut self, serial: u64, queued: &mut Option<Instant>, at: Option<Instant>) {
        let Some(at) = at else { return };
        if queued.is_none_or(|known| at < known) {
            *queued = Some(at);
            self.heap.push(Reverse((at, serial)));
        }
    }

    pub fn first(&self) -> Option<(Instant, u64)> {
        self.heap.peek().map(|Reverse(entry)| *entry)
    }

    pub fn pop(&mut self) {
        self.heap.pop();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// An election whose driver sleeps for ten seconds.
    fn sleeping_driver(spins: bool) -> (DriverElection, Arc<Waiter>, Instant) {
        let mut election = DriverElection::new().unwrap();
        let driver = election.enter(spins).unwrap();
        assert!(election.try_drive(&driver));
        assert!(driver.prepare_sleep());
        let until = Instant::now() + Duration::from_secs(10);
        election.set_sleep(Some(until), false);
        (election, driver, until)
    }

    /// `prepare_sleep` returns false exactly if the waiter was woken since.
    fn woken(waiter: &Waiter) -> bool {
        !waiter.prepare_sleep()
    }

    #[test]
    fn an_earlier_timer_wakes_the_driver() {
        let (mut election, driver, until) = sleeping_driver(false);
        election.wake_driver_if_needed(Some(until), false, false);
        assert!(!woken(&driver));
        election.wake_driver_if_needed(Some(until - Duration::from_secs(1)), false, false);
        assert!(woken(&driver));
    }

    #[test]
    fn a_blocked_transmit_wakes_a_driver_that_does_not_wait_for_a_writable_socket() {
        let (mut election, driver, until) = sleeping_driver(false);
        election.wake_driver_if_needed(Some(until), true, false);
        assert!(woken(&driver));
        election.set_sleep(Some(until), true);
        election.wake_driver_if_needed(Some(until), true, false);
        assert!(!woken(&driver));
    }

    #[test]
    fn unfinished_work_wakes_the_driver() {
        let (mut election, driver, until) = sleeping_driver(false);
        election.wake_driver_if_needed(Some(until), false, true);
        assert!(woken(&driver));
    }

    #[test]
    fn a_spinning_thread_replaces_only_a_driver_that_does_not_spin() {
        let (mut election, waiter, _) = sleeping_driver(false);
        let other = election.enter(false).unwrap();
        assert!(!election.try_drive(&other));
        let spins = election.enter(true).unwrap();
        assert!(election.try_drive(&spins));
        assert!(!election.is_driver(&waiter));
        assert!(!election.try_drive(&waiter));
        let another = election.enter(true).unwrap();
        assert!(!election.try_drive(&another));
    }

    #[test]
    fn every_thread_replaces_the_background_thread() {
        let mut election = DriverElection::new().unwrap();
        let background = election.background().unwrap();
        assert!(election.try_drive(&background));
        let waiter = election.enter(false).unwrap();
        assert!(election.try_drive(&waiter));
        assert!(!election.try_drive(&background));
    }

    #[test]
    fn a_leaving_driver_wakes_a_follower_but_a_spinning_one_only_spinning_followers() {
        let (mut election, driver, _) = sleeping_driver(false);
        let follower = election.enter(false).unwrap();
        election.add_follower(&follower);
        election.leave(driver);
        assert!(woken(&follower));
        let spins = election.enter(true).unwrap();
        assert!(election.try_drive(&spins));
        election.parked = true;
        election.leave(spins);
        assert!(!woken(&follower));
        assert!(
            woken(&election.background().unwrap()),
            "no thread would drive"
        );
    }

    #[test]
    fn a_woken_follower_that_leaves_wakes_the_next_one() {
        let (mut election, driver, _) = sleeping_driver(false);
        let (first, second) = (
            election.enter(false).unwrap(),
            election.enter(false).unwrap(),
        );
        election.add_follower(&first);
        election.add_follower(&second);
        election.parked = true;
        election.leave(driver);
        assert!(woken(&first));
        assert!(!woken(&second));
        second.finish_sleep();
        election.leave(first);
        assert!(woken(&second));
        assert!(!woken(&election.background().unwrap()));
        election.background().unwrap().finish_sleep();
        election.leave(second);
        assert!(
            woken(&election.background().unwrap()),
            "no thread would drive"
        );
    }

    #[test]
    fn a_follower_that_leaves_while_another_thread_drives_wakes_no_thread() {
        let (mut election, driver, _) = sleeping_driver(false);
        let (first, second) = (
            election.enter(false).unwrap(),
            election.enter(false).unwrap(),
        );
        election.add_follower(&first);
        election.add_follower(&second);
        election.parked = true;
        election.leave(first);
        assert!(!woken(&second));
        assert!(election.is_driver(&driver));
        assert!(!woken(&election.background().unwrap()));
    }
}
