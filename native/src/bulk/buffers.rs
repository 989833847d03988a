//! The bytes that a connection has read and not yet used, and those that it has not yet written. No I/O.

/// Received bytes. Grows up to a limit, and only as bytes arrive.
pub struct Input {
    data: Vec<u8>,
    start: usize,
    end: usize,
}

/// What is added when the space runs out.
const GROWTH: usize = 16 << 10;

impl Input {
    pub fn new() -> Self {
        Input {
            data: Vec::new(),
            start: 0,
            end: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.end - self.start
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub fn filled(&mut self) -> &mut [u8] {
        &mut self.data[self.start..self.end]
    }

    /// Space for at least `least` bytes, unless the limit is reached.
    pub fn space(&mut self, least: usize, limit: usize) -> &mut [u8] {
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        } else if self.data.len() - self.end < least {
            self.data.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.data.len() - self.end < least && self.data.len() < limit {
            let grown = (self.data.len() + GROWTH).max(self.end + least).min(limit);
            self.data.resize(grown, 0);
        }
        &mut self.data[self.end..]
    }

    /// Allocates all that will be needed, at once.
    pub fn grow(&mut self, size: usize) {
        if self.data.len() < size {
            self.data.resize(size, 0);
        }
    }

    pub fn filled_more(&mut self, count: usize) {
        self.end += count;
        debug_assert!(self.end <= self.data.len());
    }

    pub fn used(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end);
    }
}

/// Bytes to write.
pub struct Output {
    data: Vec<u8>,
    start: usize,
    end: usize,
}

impl Output {
    pub fn new() -> Self {
        Output {
            data: Vec::new(),
            start: 0,
            end: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.end - self.start
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub fn pending(&self) -> &[u8] {
        &self.data[self.start..self.end]
    }

    /// At least `least` bytes, to be filled from the front; then call `filled`.
    pub fn space(&mut self, least: usize) -> &mut [u8] {
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
        if self.data.len() - self.end < least {
            self.data.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            let needed = self.end + least;
            if self.data.len() < needed {
                self.data.resize(needed, 0);
            }
        }
        &mut self.data[self.end..]
    }

    pub fn filled(&mut self, count: usize) {
        self.end += count;
        debug_assert!(self.end <= self.data.len());
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.space(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.filled(bytes.len());
    }

    pub fn written(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bulk::seeded::Random;

    #[test]
    fn input_keeps_the_order_and_its_limit() {
        let mut random = Random::new(3);
        let mut input = Input::new();
        let (mut read, mut used) = (0u64, 0u64);
        for _ in 0..20_000 {
            let space = input.space(1 + random.below(100) as usize, 4096);
            let count = random.below(space.len() as u64 + 1) as usize;
            for byte in &mut space[..count] {
                *byte = read as u8;
                read += 1;
            }
            input.filled_more(count);
            let count = random.below(input.len() as u64 + 1) as usize;
            for byte in &input.filled()[..count] {
                assert_eq!(*byte, used as u8);
                used += 1;
            }
            input.used(count);
            assert!(input.data.len() <= 4096);
        }
    }

    #[test]
    fn output_keeps_the_order() {
        let mut random = Random::new(4);
        let mut output = Output::new();
        let (mut put, mut written) = (0u64, 0u64);
        for _ in 0..20_000 {
            let count = random.below(50);
            let bytes: Vec<u8> = (put..put + count).map(|each| each as u8).collect();
            output.push(&bytes);
            put += count;
            let count = random.below(output.len() as u64 + 1) as usize;
            for byte in &output.pending()[..count] {
                assert_eq!(*byte, written as u8);
                written += 1;
            }
            output.written(count);
        }
    }
}
