//! How a publisher and a sleeper find each other, without a lock and without a system call if nobody sleeps.
//!
//! A sleeper names the rank that it waits for and sets its bit, and then looks at the round; a publisher stores the
//! round, and then looks at the bits. Between the two steps of each is a `SeqCst` fence, so at least one of the two sees
//! the other: either the sleeper finds the round and stays awake, or the publisher finds the bit and the name (or newer
//! ones, of a sleeper that has woken up since) and wakes it. This needs no total store order. A wake-up between the look
//! and the system call is not lost: the futex word has changed, so the kernel refuses to sleep.
//!
//! The same source is compiled twice: for the atomics of the standard library, and in tests for those of `loom`, which
//! tries all executions that the memory model allows.

macro_rules! protocol {
    ($name:ident, $($atomics:tt)+) => {
        pub mod $name {
            use $($atomics)+::{fence, AtomicU32, AtomicU64, Ordering};

            /// What this thread has written before is visible to whoever loads the round with acquire.
            #[inline]
            pub fn publish(round: &AtomicU64, value: u64) {
                round.store(value, Ordering::Release);
                fence(Ordering::SeqCst);
            }

            /// After `publish`: one bit for each rank that may sleep.
            #[inline]
            pub fn sleepers(bits: &AtomicU64) -> u64 {
                bits.load(Ordering::Relaxed)
            }

            /// Of a rank whose bit is set.
            #[inline]
            pub fn waits_for(waiting_for: &AtomicU32) -> u32 {
                waiting_for.load(Ordering::Relaxed)
            }

            /// Before the system call that wakes whoever sleeps with another value.
            pub fn change(word: &AtomicU32) {
                word.fetch_add(1, Ordering::Release);
            }

            /// Before the sleeper's looks. Returns the value of the word to sleep with.
            pub fn announce(
                word: &AtomicU32,
                waiting_for: &AtomicU32,
                rank: u32,
                bits: &AtomicU64,
                bit: u64,
            ) -> u32 {
                let value = word.load(Ordering::Acquire);
                waiting_for.store(rank, Ordering::Relaxed);
                bits.fetch_or(bit, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                value
            }

            pub fn withdraw(bits: &AtomicU64, bit: u64) {
                bits.fetch_and(!bit, Ordering::Relaxed);
            }
        }
    };
}

protocol!(shared, std::sync::atomic);

#[cfg(test)]
mod tests {
    use loom::cell::UnsafeCell;
    use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    protocol!(modelled, loom::sync::atomic);

    /// As the kernel's: the comparison and the sleep are one step.
    struct Futex {
        word: AtomicU32,
        lock: Mutex<()>,
        changed: Condvar,
    }

    impl Futex {
        fn wait(&self, value: u32) {
            let guard = self.lock.lock().unwrap();
            if self.word.load(Ordering::Relaxed) == value {
                drop(self.changed.wait(guard).unwrap());
            }
        }

        fn wake(&self) {
            drop(self.lock.lock().unwrap());
            self.changed.notify_one();
        }
    }

    struct Region {
        rounds: [AtomicU64; 2],
        slots: [UnsafeCell<u64>; 2],
        sleepers: AtomicU64,
        waiting_for: AtomicU32,
        futex: Futex,
    }

    impl Region {
        fn new() -> Arc<Self> {
            Arc::new(Region {
                rounds: [AtomicU64::new(0), AtomicU64::new(0)],
                slots: [UnsafeCell::new(0), UnsafeCell::new(0)],
                sleepers: AtomicU64::new(0),
                waiting_for: AtomicU32::new(9),
                futex: Futex {
                    word: AtomicU32::new(0),
                    lock: Mutex::new(()),
                    changed: Condvar::new(),
                },
            })
        }

        /// Rank `rank` fills its slot and publishes its round; wakes rank 2 if that sleeps until then.
        fn publish(&self, rank: u32) {
            let at = rank as usize;
            // SAFETY: of the model: loom reports an access that races with this one.
            self.slots[at].with_mut(|slot| unsafe { *slot = 7 });
            modelled::publish(&self.rounds[at], 1);
            let sleeps = modelled::sleepers(&self.sleepers) & 4 != 0;
            if sleeps && modelled::waits_for(&self.waiting_for) == rank {
                modelled::change(&self.futex.word);
                self.futex.wake();
            }
        }

        /// Rank 2 sleeps until the rank has published. A lost wake-up is a deadlock, which loom reports.
        fn wait(&self, rank: u32) {
            let at = rank as usize;
            loop {
                let (word, bits) = (&self.futex.word, &self.sleepers);
                let value = modelled::announce(word, &self.waiting_for, rank, bits, 4);
                let there = self.rounds[at].load(Ordering::Acquire) == 1;
                if !there {
                    self.futex.wait(value);
                }
                modelled::withdraw(bits, 4);
                if there {
                    break;
                }
            }
            // SAFETY: as above.
            self.slots[at].with(|slot| assert_eq!(unsafe { *slot }, 7));
        }
    }

    #[test]
    fn no_wake_up_is_lost_in_any_execution() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let region = Region::new();
            let publishers: Vec<_> = (0..2)
                .map(|rank| {
                    let region = region.clone();
                    thread::spawn(move || region.publish(rank))
                })
                .collect();
            region.wait(0);
            region.wait(1);
            for publisher in publishers {
                publisher.join().unwrap();
            }
        });
    }
}
