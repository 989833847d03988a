//! The frames of one open connection, in both directions. No I/O of its own.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use super::buffers::{Input, Output};
use super::channel::Core;
use super::frame::{Frame, Violation, CHUNK_BYTES, HEADER_BYTES, MAX_REASON_BYTES};
use super::memory::{Reduction, Region};
use super::records::Records;
use super::transfers::{Inbound, Next, Outbound, Target};
use crate::runtime::errors::Failure;

const LARGEST_ITEM: usize = 16;

pub struct Stream {
    pub core: Arc<Core>,
    pub index: usize,
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that have arrived.
    have: usize,
    body: Body,
    pub finish_received: bool,
    /// The chunk that is sent directly from memory.
    pub outgoing: Option<Outgoing>,
}

/// What follows the last header.
enum Body {
    None,
    Chunk(Incoming),
    /// The text of an abort, and how many bytes of it are missing.
    Reason(Vec<u8>, usize),
}

/// A chunk that arrives.
pub struct Incoming {
    pub inbound: Arc<Inbound>,
    /// Where the chunk begins.
    chunk: u64,
    /// Where the next byte belongs.
    pub at: u64,
    pub left: usize,
    /// The beginning of an element that is not complete.
    carry: [u8; LARGEST_ITEM],
    carried: usize,
}

pub struct Outgoing {
    pub outbound: Arc<Outbound>,
    pub offset: u64,
    pub length: usize,
    pub sent: usize,
}

impl Stream {
    pub fn new(core: Arc<Core>, index: usize) -> Self {
        Stream {
            core,
            index,
            header: [0; HEADER_BYTES],
            have: 0,
            body: Body::None,
            finish_received: false,
            outgoing: None,
        }
    }

    // -- receiving ------------------------------------------------------------------------------------

    /// Uses bytes that have arrived.
    pub fn take(&mut self, mut data: &[u8]) -> Result<(), Failure> {
        while !data.is_empty() {
            let used = match &mut self.body {
                Body::None => self.take_header(data)?,
                Body::Chunk(incoming) => {
                    let count = data.len().min(incoming.left);
                    incoming.apply(&data[..count]);
                    self.received(count);
                    count
                }
                Body::Reason(text, left) => {
                    let count = data.len().min(*left);
                    text.extend_from_slice(&data[..count]);
                    *left -= count;
                    count
                }
            };
            data = &data[used..];
            self.check_reason()?;
        }
        Ok(())
    }

    fn take_header(&mut self, data: &[u8]) -> Result<usize, Failure> {
        if self.finish_received {
            return Err(violation("data after the end"));
        }
        let count = data.len().min(HEADER_BYTES - self.have);
        self.header[self.have..self.have + count].copy_from_slice(&data[..count]);
        self.have += count;
        if self.have == HEADER_BYTES {
            self.have = 0;
            let frame = Frame::parse(&self.header).map_err(violation)?;
            self.begin(frame).map_err(violation)?;
        }
        Ok(count)
    }

    fn begin(&mut self, frame: Frame) -> Result<(), Violation> {
        match frame {
            Frame::Chunk {
                transfer,
                offset,
                length,
                total,
            } => {
                let inbound = self.core.chunk_arrives(transfer, offset, total)?;
                self.body = Body::Chunk(Incoming {
                    inbound,
                    chunk: offset,
                    at: offset,
                    left: length as usize,
                    carry: [0; LARGEST_ITEM],
                    carried: 0,
                });
                if length == 0 {
                    if let Body::Chunk(incoming) = &mut self.body {
                        incoming.apply(&[]);
                    }
                    self.received(0);
                }
            }
            Frame::Withdrawn { transfer, sent } => self.core.peer_withdraws(transfer, sent)?,
            Frame::Finish => {
                self.finish_received = true;
                self.core.finish_arrives();
            }
            Frame::Abort { length } => {
                let length = (length as usize).min(MAX_REASON_BYTES);
                self.body = Body::Reason(Vec::with_capacity(length), length);
            }
        }
        Ok(())
    }

    fn check_reason(&self) -> Result<(), Failure> {
        match &self.body {
            Body::Reason(text, 0) => Err(Failure::Lost {
                kind: "peer_closed",
                code: None,
                reason: String::from_utf8_lossy(text).into_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// The chunk that arrives, to be read directly into its memory.
    pub fn incoming(&mut self) -> Option<&mut Incoming> {
        match &mut self.body {
            Body::Chunk(incoming) => Some(incoming),
            _ => None,
        }
    }

    /// So many bytes of the chunk were applied.
    pub fn received(&mut self, count: usize) {
        let Body::Chunk(incoming) = &mut self.body else {
            return;
        };
        let counters = &self.core.counters;
        counters
            .bytes_received
            .fetch_add(count as u64, Ordering::Relaxed);
        let total = &self.core.shared.counters.bytes_received;
        total.fetch_add(count as u64, Ordering::Relaxed);
        incoming.at += count as u64;
        incoming.left -= count;
        if incoming.left > 0 {
            return;
        }
        let is_over = incoming.inbound.progress.lock().is_over();
        let Body::Chunk(incoming) = std::mem::replace(&mut self.body, Body::None) else {
            return;
        };
        if is_over {
            self.core.transfer_over(&incoming.inbound);
        }
    }

    // -- sending --------------------------------------------------------------------------------------

    /// Appends whole frames to `output`, encrypted, until it holds a chunk.
    pub fn fill_sealed(
        &mut self,
        records: &mut Records,
        input: &mut Input,
        output: &mut Output,
    ) -> Result<(), Failure> {
        while output.len() < CHUNK_BYTES as usize {
            match self.core.next(self.index) {
                None => return Ok(()),
                Some(Next::Header(header)) => records.seal(&header, input, output)?,
                Some(Next::Chunk {
                    outbound,
                    offset,
                    length,
                }) => {
                    let header = chunk_header(&outbound, offset, length);
                    let gate = outbound.gate.read();
                    let mut seal = |bytes: &[u8]| {
                        records.seal(&header, input, output)?;
                        match bytes.is_empty() {
                            true => Ok(()),
                            false => records.seal(bytes, input, output),
                        }
                    };
                    match &*gate {
                        Some(region) => seal(region.bytes(offset, length))?,
                        None => outbound.with_copy(offset, seal).unwrap_or(Ok(()))?,
                    }
                    drop(gate);
                    self.handed_over(&outbound, offset, length);
                }
            }
        }
        Ok(())
    }

    /// Appends headers to `output` up to the next chunk, which becomes `outgoing`.
    pub fn fill_plain(&mut self, output: &mut Output) {
        while self.outgoing.is_none() && output.len() < CHUNK_BYTES as usize {
            match self.core.next(self.index) {
                None => return,
                Some(Next::Header(header)) => output.push(&header),
                Some(Next::Chunk {
                    outbound,
                    offset,
                    length,
                }) => {
                    output.push(&chunk_header(&outbound, offset, length));
                    self.outgoing = Some(Outgoing {
                        outbound,
                        offset,
                        length,
                        sent: 0,
                    });
                    self.wrote(0); // an empty chunk is sent already
                }
            }
        }
    }

    /// So many bytes of the outgoing chunk were written.
    pub fn wrote(&mut self, count: usize) {
        let Some(outgoing) = &mut self.outgoing else {
            return;
        };
        outgoing.sent += count;
        if outgoing.sent == outgoing.length {
            if let Some(done) = self.outgoing.take() {
                self.handed_over(&done.outbound, done.offset, done.length);
            }
        }
    }

    fn handed_over(&mut self, outbound: &Outbound, offset: u64, length: usize) {
        let counters = &self.core.counters;
        counters
            .bytes_sent
            .fetch_add(length as u64, Ordering::Relaxed);
        let total = &self.core.shared.counters.bytes_sent;
        total.fetch_add(length as u64, Ordering::Relaxed);
        if outbound.chunk_done(offset) {
            self.core.sent(outbound);
        }
    }
}

fn chunk_header(outbound: &Outbound, offset: u64, length: usize) -> [u8; HEADER_BYTES] {
    let frame = Frame::Chunk {
        transfer: outbound.transfer,
        offset,
        length: length as u32,
        total: outbound.length,
    };
    frame.encode()
}

impl Incoming {
    /// Copies or combines the next bytes of the chunk. The caller then calls `received`.
    pub fn apply(&mut self, data: &[u8]) {
        let inbound = self.inbound.clone();
        let gate = inbound.gate.read();
        let applied = match &*gate {
            Target::Memory(region) => {
                region.fill(self.at, data);
                data.len()
            }
            Target::Reduce(region, reduction) => self.combine(region, *reduction, data),
            Target::Discard => data.len() + std::mem::take(&mut self.carried),
            Target::Gone => return,
        };
        self.advance(applied);
    }

    /// So many more bytes are in the destination. The caller holds the gate, so that whoever takes it for writing sees
    /// the memory and the progress agree.
    pub fn advance(&mut self, count: usize) {
        let mut progress = self.inbound.progress.lock();
        progress.advance(self.chunk, count as u64);
    }

    /// Combines all elements that are complete and keeps the rest. Returns the number of bytes combined.
    fn combine(&mut self, region: &Region, reduction: Reduction, mut data: &[u8]) -> usize {
        let size = reduction.itemsize;
        let mut at = self.at - self.carried as u64;
        let first = at;
        if self.carried > 0 {
            let count = data.len().min(size - self.carried);
            self.carry[self.carried..self.carried + count].copy_from_slice(&data[..count]);
            self.carried += count;
            data = &data[count..];
            if self.carried == size {
                region.combine(at, &self.carry[..size], reduction);
                at += size as u64;
                self.carried = 0;
            }
        }
        let (whole, rest) = data.split_at(data.len() / size * size);
        region.combine(at, whole, reduction);
        at += whole.len() as u64;
        if !rest.is_empty() {
            self.carry[..rest.len()].copy_from_slice(rest);
            self.carried = rest.len();
        }
        (at - first) as usize
    }
}

pub fn violation(violation: Violation) -> Failure {
    Failure::Lost {
        kind: "protocol",
        code: None,
        reason: violation.to_owned(),
    }
}
