//! Fingerprints, and the calls that ranks publish in the region.

use std::sync::atomic::{fence, Ordering};

use pyo3::prelude::*;

use crate::shm::region::{Mapping, Packed, PublishedCall, CALLS};

/// Facts of a call that all ranks must agree on: operation, dtype, count, root, reduce op, algorithm. Their meaning is
/// the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromPyObject)]
pub struct Fingerprint(pub u8, pub u8, pub i64, pub i32, pub u8, pub u8);

/// A fingerprint as Python sees it.
pub type Facts = (u8, u8, i64, i32, u8, u8);

impl Fingerprint {
    pub fn packed(self) -> Packed {
        let Fingerprint(operation, dtype, count, root, reduce_op, algorithm) = self;
        let [r0, r1, r2, r3] = root.to_le_bytes();
        let low = [operation, dtype, reduce_op, algorithm, r0, r1, r2, r3];
        [u64::from_le_bytes(low), count as u64]
    }

    pub fn unpacked(packed: Packed) -> Self {
        let [operation, dtype, reduce_op, algorithm, r0, r1, r2, r3] = packed[0].to_le_bytes();
        let root = i32::from_le_bytes([r0, r1, r2, r3]);
        Fingerprint(
            operation,
            dtype,
            packed[1] as i64,
            root,
            reduce_op,
            algorithm,
        )
    }

    pub fn facts(self) -> Facts {
        let Fingerprint(operation, dtype, count, root, reduce_op, algorithm) = self;
        (operation, dtype, count, root, reduce_op, algorithm)
    }
}

fn place_of(mapping: &Mapping, rank: usize, sequence: u64) -> &PublishedCall {
    &mapping.record(rank).calls[(sequence % CALLS as u64) as usize]
}

/// Numbers in entries start at 1: 0 is an entry that was never written.
fn number_of(sequence: u64) -> u64 {
    sequence.wrapping_add(1)
}

/// Only one thread of this rank at a time. `arrival`: nanoseconds of the monotonic clock.
pub fn publish(mapping: &Mapping, rank: usize, sequence: u64, packed: Packed, arrival: u64) {
    let (place, number) = (place_of(mapping, rank, sequence), number_of(sequence));
    place.front.store(number, Ordering::Relaxed);
    // A reader that finds any of the following stores finds the front too, and so rejects the entry if it began to read
    // before the last store.
    fence(Ordering::Release);
    place.arrival.store(arrival, Ordering::Relaxed);
    place.fingerprint[0].store(packed[0], Ordering::Relaxed);
    place.fingerprint[1].store(packed[1], Ordering::Relaxed);
    place.back.store(number, Ordering::Release);
}

/// Fingerprint and arrival of a call; None: not published, or overwritten by a later one.
pub fn published(mapping: &Mapping, rank: usize, sequence: u64) -> Option<(Packed, u64)> {
    let (place, number) = (place_of(mapping, rank, sequence), number_of(sequence));
    if place.back.load(Ordering::Acquire) != number {
        return None;
    }
    let arrival = place.arrival.load(Ordering::Relaxed);
    let packed = [
        place.fingerprint[0].load(Ordering::Relaxed),
        place.fingerprint[1].load(Ordering::Relaxed),
    ];
    fence(Ordering::Acquire); // see `publish`
    (place.front.load(Ordering::Relaxed) == number).then_some((packed, arrival))
}

/// A rank that has published another fingerprint for this call.
pub fn differing(
    mapping: &Mapping,
    me: usize,
    sequence: u64,
    mine: Packed,
) -> Option<(usize, Packed)> {
    (0..mapping.geometry.ranks)
        .filter(|rank| *rank != me)
        .find_map(|rank| {
            let (theirs, _) = published(mapping, rank, sequence)?;
            (theirs != mine).then_some((rank, theirs))
        })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::shm::region::tests::mapping;

    #[test]
    fn a_fingerprint_survives_packing() {
        for one in [
            Fingerprint(0, 0, 0, 0, 0, 0),
            Fingerprint(255, 17, i64::MIN, i32::MIN, 11, 64),
            Fingerprint(1, 2, -3, -4, 5, 6),
            Fingerprint(2, 11, i64::MAX, i32::MAX, 1, 129),
        ] {
            assert_eq!(Fingerprint::unpacked(one.packed()), one);
        }
    }

    #[test]
    fn the_last_calls_are_found() {
        let mapping = mapping(2, 0);
        for sequence in 0..20 {
            publish(&mapping, 1, sequence, [sequence, 7], 100 + sequence);
        }
        for sequence in 0..12 {
            assert_eq!(published(&mapping, 1, sequence), None);
        }
        for sequence in 12..20 {
            let found = published(&mapping, 1, sequence);
            assert_eq!(found, Some(([sequence, 7], 100 + sequence)));
        }
        assert_eq!(published(&mapping, 0, 0), None);
        assert_eq!(published(&mapping, 1, u64::MAX), None);
    }

    #[test]
    fn only_published_calls_differ() {
        let mapping = mapping(3, 0);
        assert_eq!(differing(&mapping, 0, 5, [1, 1]), None);
        publish(&mapping, 1, 5, [1, 1], 0);
        assert_eq!(differing(&mapping, 0, 5, [1, 1]), None);
        publish(&mapping, 2, 5, [1, 2], 0);
        assert_eq!(differing(&mapping, 0, 5, [1, 1]), Some((2, [1, 2])));
        assert_eq!(differing(&mapping, 0, 6, [1, 1]), None);
    }

    #[test]
    fn a_torn_entry_is_not_found() {
        let mapping = mapping(2, 0);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..100_000u64 {
                    let sequence = round * CALLS as u64; // all in one entry
                    publish(&mapping, 0, sequence, [sequence, !sequence], sequence);
                }
                done.store(true, Ordering::Release);
            });
            let mut sequence = 0;
            while !done.load(Ordering::Acquire) {
                let number = place_of(&mapping, 0, 0).back.load(Ordering::Acquire);
                sequence = number.saturating_sub(1).max(sequence);
                if let Some((packed, arrival)) = published(&mapping, 0, sequence) {
                    let wanted = match sequence {
                        0 => ([0, 0], 0),
                        _ => ([sequence, !sequence], sequence),
                    };
                    assert!((packed, arrival) == wanted || number == 0);
                }
            }
        });
    }
}
