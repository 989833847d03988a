//! Which bytes of an expected transfer have arrived. Pure.
//!
//! The peer chooses the order of the chunks, but not their places, so a bit per chunk and the few chunks that arrive at
//! the moment describe everything.

use super::frame::{chunk_at, chunks_of, CHUNK_BYTES};

#[derive(Debug)]
pub struct Progress {
    length: u64,
    /// Chunks whose header has arrived.
    begun: Bits,
    whole: Bits,
    wholes: u64,
    /// Offset and applied bytes of each chunk that is incomplete.
    partial: Vec<(u64, u64)>,
    /// The peer has withdrawn the transfer after so many bytes.
    pub withdrawn: Option<u64>,
}

impl Progress {
    /// Allocates in proportion to a length that this side has memory for: never to one that the peer declares.
    pub fn new(length: u64) -> Self {
        Progress {
            length,
            begun: Bits::new(chunks_of(length)),
            whole: Bits::new(chunks_of(length)),
            wholes: 0,
            partial: Vec::new(),
            withdrawn: None,
        }
    }

    /// Begins the chunk at this offset, a multiple of CHUNK_BYTES. False: it is a repetition, or beyond the end.
    pub fn begin(&mut self, offset: u64) -> bool {
        let fresh = offset / CHUNK_BYTES < chunks_of(self.length)
            && self.begun.insert(offset / CHUNK_BYTES);
        if fresh {
            self.partial.push((offset, 0));
        }
        fresh
    }

    /// So many more bytes of a chunk that has begun have been applied.
    pub fn advance(&mut self, offset: u64, count: u64) {
        let Some(at) = self.partial.iter().position(|each| each.0 == offset) else {
            return;
        };
        self.partial[at].1 += count;
        if self.partial[at].1 == chunk_at(offset, self.length) {
            self.partial.swap_remove(at);
            self.whole.insert(offset / CHUNK_BYTES);
            self.wholes += 1;
        }
    }

    pub fn is_complete(&self) -> bool {
        self.wholes == chunks_of(self.length)
    }

    /// Whether the rest of the transfer will not come, and all that was sent has arrived.
    pub fn is_over(&self) -> bool {
        let whole_chunks = || self.withdrawn.map(|sent| sent.div_ceil(CHUNK_BYTES));
        self.is_complete() || (self.partial.is_empty() && whole_chunks() == Some(self.wholes))
    }

    /// The ranges that have been applied, in order, as long as possible.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let mut partial = self.partial.clone();
        partial.sort_unstable();
        let mut partial = partial.into_iter().peekable();
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut add = |begin: u64, end: u64| match ranges.last_mut() {
            _ if begin == end => {}
            Some(last) if last.1 == begin => last.1 = end,
            _ => ranges.push((begin, end)),
        };
        for chunk in self.whole.iter() {
            let begin = chunk * CHUNK_BYTES;
            while let Some((offset, count)) = partial.next_if(|each| each.0 < begin) {
                add(offset, offset + count);
            }
            add(begin, begin + chunk_at(begin, self.length));
        }
        partial.for_each(|(offset, count)| add(offset, offset + count));
        ranges
    }
}

#[derive(Debug)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: u64) -> Self {
        Bits(vec![0; count.div_ceil(64) as usize])
    }

    /// False: it was there.
    fn insert(&mut self, index: u64) -> bool {
        let word = &mut self.0[(index / 64) as usize];
        let bit = 1 << (index % 64);
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let bits = |(at, &word): (usize, &u64)| {
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| at as u64 * 64 + bit)
        };
        self.0.iter().enumerate().flat_map(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bulk::seeded::Random;

    #[test]
    fn an_empty_transfer_is_complete_after_its_empty_chunk() {
        let mut progress = Progress::new(0);
        assert!(!progress.is_complete());
        assert!(progress.begin(0));
        progress.advance(0, 0);
        assert!(progress.is_complete());
        assert_eq!(progress.ranges(), []);
    }

    #[test]
    fn a_chunk_begins_once_and_inside() {
        let mut progress = Progress::new(CHUNK_BYTES + 1);
        assert!(progress.begin(CHUNK_BYTES));
        assert!(!progress.begin(CHUNK_BYTES));
        assert!(!progress.begin(2 * CHUNK_BYTES));
        assert!(progress.begin(0));
        progress.advance(0, CHUNK_BYTES);
        assert!(!progress.begin(0));
    }

    #[test]
    fn ranges_are_merged_and_in_order() {
        let mut progress = Progress::new(5 * CHUNK_BYTES + 10);
        for (chunk, count) in [(3, CHUNK_BYTES), (5, 10), (1, 100), (0, CHUNK_BYTES)] {
            assert!(progress.begin(chunk * CHUNK_BYTES));
            progress.advance(chunk * CHUNK_BYTES, count);
        }
        let ranges = [
            (0, CHUNK_BYTES + 100),
            (3 * CHUNK_BYTES, 4 * CHUNK_BYTES),
            (5 * CHUNK_BYTES, 5 * CHUNK_BYTES + 10),
        ];
        assert_eq!(progress.ranges(), ranges);
        assert!(!progress.is_complete());
    }

    #[test]
    fn a_withdrawn_transfer_is_over_when_all_that_was_sent_has_arrived() {
        let mut progress = Progress::new(4 * CHUNK_BYTES);
        progress.begin(CHUNK_BYTES);
        progress.withdrawn = Some(2 * CHUNK_BYTES);
        progress.advance(CHUNK_BYTES, CHUNK_BYTES);
        assert!(!progress.is_over());
        progress.begin(0);
        progress.advance(0, CHUNK_BYTES - 1);
        assert!(!progress.is_over());
        progress.advance(0, 1);
        assert!(progress.is_over() && !progress.is_complete());
    }

    #[test]
    fn a_transfer_that_was_withdrawn_before_its_start_is_over() {
        let mut progress = Progress::new(4 * CHUNK_BYTES);
        progress.withdrawn = Some(0);
        assert!(progress.is_over());
    }

    /// Compares with a set of single bytes, scaled to chunks.
    #[test]
    fn random_orders_agree_with_a_model() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let length = random.below(150 * CHUNK_BYTES);
            let mut progress = Progress::new(length);
            let mut order: Vec<u64> = (0..chunks_of(length)).collect();
            for at in (1..order.len()).rev() {
                order.swap(at, random.below(at as u64 + 1) as usize);
            }
            let mut applied = 0;
            for chunk in order {
                let offset = chunk * CHUNK_BYTES;
                assert!(!progress.is_complete());
                assert!(progress.begin(offset));
                let mut left = chunk_at(offset, length);
                loop {
                    let count = random.below(left + 1).max(left.min(1000));
                    progress.advance(offset, count);
                    left -= count;
                    applied += count;
                    let ranges = progress.ranges();
                    assert_eq!(ranges.iter().map(|(b, e)| e - b).sum::<u64>(), applied);
                    assert!(ranges.windows(2).all(|pair| pair[0].1 < pair[1].0));
                    if left == 0 {
                        break;
                    }
                }
            }
            assert!(progress.is_complete());
        }
    }
}
