//! Buffers that come back.
//!
//! Bulk data passes through one buffer per batch of packets. Allocated anew each time they would
//! make the allocator give memory back to the kernel and fault it in again, page by page.

use std::collections::VecDeque;

use bytes::BytesMut;

/// Buffers of one size. Each that is lent out leaves an empty twin here; when everybody else has let
/// go of the memory, the twin can claim it back. Oldest first: data is mostly let go in order.
pub struct Pool {
    size: usize,
    most: usize,
    twins: VecDeque<BytesMut>,
}

/// So many of the oldest twins are asked before a new buffer is made.
const ASKED: usize = 3;

impl Pool {
    pub fn new(size: usize, most: usize) -> Self {
        Pool {
            size,
            most,
            twins: VecDeque::new(),
        }
    }

    /// An empty buffer of the pool's size.
    pub fn take(&mut self) -> BytesMut {
        for _ in 0..ASKED.min(self.twins.len()) {
            let Some(mut twin) = self.twins.pop_front() else {
                break;
            };
            if twin.try_reclaim(self.size) {
                return twin;
            }
            self.twins.push_back(twin);
        }
        BytesMut::with_capacity(self.size)
    }

    /// Lend out what `buffer` holds, and remember where it came from.
    pub fn lend(&mut self, mut buffer: BytesMut) -> BytesMut {
        let data = buffer.split();
        if self.twins.len() < self.most {
            self.twins.push_back(buffer);
        }
        data
    }
}
