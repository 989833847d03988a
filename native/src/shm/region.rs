//! The shared memory of a region: its layout, and how it is made, checked and mapped.
//!
//! `unsafe`: the mapping. Every reference into it is to atomic words inside the length that was checked when it was
//! mapped; the file is sealed against truncation, so the pages stay. Slots are handed out as raw pointers only, because
//! other processes write them. Whatever a process writes into the region is a valid value of every word.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::runtime::descriptors::Descriptor;
use crate::runtime::errors::os_error;
use crate::runtime::process;

pub const MAX_RANKS: usize = 256;
/// Calls that each rank keeps published.
pub const CALLS: usize = 8;

const PAGE: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"nexarshm");
/// Raised when the layout changes, or the number of rounds of an operation.
const LAYOUT: u32 = 1;
const NONCE_BYTES: usize = 16;
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
const MADV_POPULATE_WRITE: libc::c_int = 23; // since Linux 5.14

/// Total size of the slots that `chunk_of` aims at.
const SLOTS_BYTES: usize = 32 << 20;
const MIN_CHUNK: usize = 32 << 10;
const MAX_CHUNK: usize = 256 << 10;
const LARGEST_CHUNK: usize = 64 << 20;

/// A fingerprint as it is stored: facts of a call that all ranks must agree on.
pub type Packed = [u64; 2];

/// The first page. The creator writes all but `sleepers`.
#[repr(C)]
pub struct Header {
    magic: AtomicU64,
    layout: AtomicU32,
    ranks: AtomicU32,
    chunk_bytes: AtomicU64,
    nonce: [AtomicU64; 2],
    unused: [AtomicU64; 11],
    /// One bit per rank that sleeps. Alone on its pair of cache lines: every publisher reads it, and only who goes to
    /// sleep, or wakes up, writes it.
    pub sleepers: [AtomicU64; MAX_RANKS / 64],
}

/// What one rank tells the others. Only that rank writes it, except `wait_word`.
#[repr(C, align(1024))]
pub struct Record {
    /// The last published round. A rank has published round r when its part is in its slot of the parity of r, and it
    /// has read all that it needs of round r - 1.
    pub round: AtomicU64,
    /// The last operation of the latest aborted ones.
    pub aborted_to: AtomicU64,
    /// By the parity of the order number.
    pub fingerprints: [[AtomicU64; 2]; 2],
    /// Payloads of 8 bytes by the parity of the round: what a short operation reads is in one cache line.
    pub short: [AtomicU64; 2],
    /// Payloads of up to 32 bytes, by the parity of the round.
    pub wide: [[AtomicU64; 4]; 2],
    /// The futex of the rank. Whoever wakes it adds 1 first.
    pub wait_word: AtomicU32,
    /// The rank that the sleeper waits for.
    pub waiting_for: AtomicU32,
    /// The process of the rank; 0: not there yet.
    pub pid: AtomicU32,
    unused: AtomicU32,
    /// The first operation of the latest aborted ones.
    pub aborted_from: AtomicU64,
    spare: [AtomicU64; 13],
    pub calls: [PublishedCall; CALLS],
}

/// A call that a rank has begun: the number at both ends shows a torn entry.
#[repr(C, align(64))]
pub struct PublishedCall {
    pub front: AtomicU64,
    pub arrival: AtomicU64,
    pub fingerprint: [AtomicU64; 2],
    pub back: AtomicU64,
}

const _: () = {
    assert!(offset_of!(Header, sleepers) == 128);
    assert!(size_of::<Header>() <= PAGE);
    assert!(offset_of!(Record, wide) == 64);
    assert!(offset_of!(Record, wait_word) == 128);
    assert!(offset_of!(Record, calls) == 256);
    assert!(size_of::<Record>() == 1024);
};

/// Sizes of a region. Equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub ranks: usize,
    pub chunk_bytes: usize,
}

impl Geometry {
    /// `chunk_bytes` of 0: by the number of ranks. Returns the reason if the sizes are not allowed.
    pub fn new(ranks: usize, chunk_bytes: usize) -> Result<Self, String> {
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(format!("{ranks} ranks; allowed: 1 to {MAX_RANKS}"));
        }
        let chunk_bytes = match chunk_bytes {
            0 => chunk_of(ranks),
            given => given,
        };
        if !chunk_bytes.is_power_of_two() || !(MIN_CHUNK..=LARGEST_CHUNK).contains(&chunk_bytes) {
            let text = "allowed: 0, and powers of two from 32 KiB to 64 MiB";
            return Err(format!("chunk_bytes = {chunk_bytes}; {text}"));
        }
        Ok(Geometry { ranks, chunk_bytes })
    }

    fn slots_at(self) -> usize {
        PAGE + (self.ranks * size_of::<Record>()).next_multiple_of(PAGE)
    }

    fn slots_of(self, rank: usize) -> usize {
        self.slots_at() + rank * 2 * self.chunk_bytes
    }

    fn total_bytes(self) -> usize {
        self.slots_of(self.ranks)
    }
}

/// Small chunks keep a slot and a share of it in the second-level cache.
fn chunk_of(ranks: usize) -> usize {
    let room = SLOTS_BYTES / (2 * ranks);
    let power = 1 << room.ilog2();
    power.clamp(MIN_CHUNK, MAX_CHUNK)
}

/// The mapped memory. A forked child has no access to it.
pub struct Mapping {
    begin: *mut u8,
    pub geometry: Geometry,
    generation: u32,
}

// SAFETY: the memory is mapped until the drop; words are atomic, and slots are accessed by the one thread that runs the
// operations of a group.
unsafe impl Send for Mapping {}
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the file, which has been checked to have the size of `geometry`.
    fn new(file: &OwnedFd, geometry: Geometry) -> io::Result<Self> {
        let length = geometry.total_bytes();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let begin = unsafe {
            libc::mmap(
                null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if begin == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = Mapping {
            begin: begin.cast(),
            geometry,
            generation: process::generation(),
        };
        mapping.advise(0, length, libc::MADV_DONTFORK)?;
        Ok(mapping)
    }

    fn advise(&self, start: usize, length: usize, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: inside our mapping.
        match unsafe { libc::madvise(self.begin.add(start).cast(), length, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Allocates the pages, so that no later access can fail. Kernels before 5.14 allocate them in `allocated`.
    fn populate(&self, start: usize, length: usize) -> io::Result<()> {
        match self.advise(start, length, MADV_POPULATE_WRITE) {
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Err(error),
            _ => Ok(()),
        }
    }

    /// Allocates the slots of a rank: its first touch places them near its processor.
    pub fn populate_slots(&self, rank: usize) -> io::Result<()> {
        let length = 2 * self.geometry.chunk_bytes;
        self.populate(self.geometry.slots_of(rank), length)
    }

    pub fn header(&self) -> &Header {
        // SAFETY: the first page; any bytes are a valid header.
        unsafe { &*self.begin.cast() }
    }

    /// Panics if there is no such rank.
    pub fn record(&self, rank: usize) -> &Record {
        assert!(rank < self.geometry.ranks);
        // SAFETY: inside the mapping by the geometry; aligned, because a page precedes the records; any bytes are valid.
        unsafe { &*self.begin.add(PAGE).cast::<Record>().add(rank) }
    }

    /// The start of a slot, which has `chunk_bytes` bytes. Panics if there is no such rank.
    pub fn slot(&self, parity: u64, rank: usize) -> *mut u8 {
        assert!(rank < self.geometry.ranks);
        let at = self.geometry.slots_of(rank) + (parity & 1) as usize * self.geometry.chunk_bytes;
        // SAFETY: inside the mapping by the geometry.
        unsafe { self.begin.add(at) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.generation == process::generation() {
            // SAFETY: ours, and the last user has gone. In a forked child the addresses may belong to something else.
            unsafe { libc::munmap(self.begin.cast(), self.geometry.total_bytes()) };
        }
    }
}

// -- making and opening ------------------------------------------------------------------------------------------

/// A memory file of the size, sealed.
fn make_file(geometry: Geometry) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: plain system calls; the descriptor is new and checked before it is owned.
    unsafe {
        let fd = libc::memfd_create(c"nexar-region".as_ptr(), flags);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let file = OwnedFd::from_raw_fd(fd);
        let length = geometry.total_bytes() as libc::off_t;
        if libc::ftruncate(fd, length) != 0 || libc::fcntl(fd, libc::F_ADD_SEALS, SEALS) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(file)
    }
}

/// Allocates the records, and without `MADV_POPULATE_WRITE` everything.
fn allocated(mapping: &Mapping, file: &OwnedFd) -> io::Result<()> {
    let records = mapping.geometry.slots_at();
    match mapping.advise(0, records, MADV_POPULATE_WRITE) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        other => return other,
    }
    let length = mapping.geometry.total_bytes() as libc::off_t;
    // SAFETY: plain system call.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

fn random_nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    // SAFETY: a writable buffer of that length. So few bytes are never interrupted.
    let got = unsafe { libc::getrandom(nonce.as_mut_ptr().cast(), NONCE_BYTES, 0) };
    match usize::try_from(got) {
        Ok(NONCE_BYTES) => Ok(nonce),
        _ => Err(io::Error::last_os_error()),
    }
}

fn words_of(nonce: [u8; NONCE_BYTES]) -> [u64; 2] {
    let number = u128::from_le_bytes(nonce);
    [number as u64, (number >> 64) as u64]
}

fn write_header(mapping: &Mapping, nonce: [u8; NONCE_BYTES]) {
    let (header, geometry) = (mapping.header(), mapping.geometry);
    let ranks = geometry.ranks as u32;
    let [low, high] = words_of(nonce);
    header.layout.store(LAYOUT, Ordering::Relaxed);
    header.ranks.store(ranks, Ordering::Relaxed);
    let chunk = geometry.chunk_bytes as u64;
    header.chunk_bytes.store(chunk, Ordering::Relaxed);
    header.nonce[0].store(low, Ordering::Relaxed);
    header.nonce[1].store(high, Ordering::Relaxed);
    header.magic.store(MAGIC, Ordering::Release); // the offer, which is sent after this, orders it for the others
}

/// What the others need to open a region.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Offer {
    pid: u32,
    fd: RawFd,
    geometry: Geometry,
    nonce: [u8; NONCE_BYTES],
}

impl Offer {
    fn text(&self) -> String {
        let Offer { pid, fd, .. } = self;
        let Geometry { ranks, chunk_bytes } = self.geometry;
        let nonce = self.nonce.map(|byte| format!("{byte:02x}")).concat();
        format!("{pid} {fd} {ranks} {chunk_bytes} {nonce}")
    }

    /// None unless the text has exactly the form of `text`.
    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text.split(' ').collect();
        let [pid, fd, ranks, chunk_bytes, nonce] = fields.as_slice() else {
            return None;
        };
        let valid = nonce.len() == 2 * NONCE_BYTES && nonce.bytes().all(|b| b.is_ascii_hexdigit());
        let number = u128::from_str_radix(nonce, 16).ok().filter(|_| valid)?;
        let fd: RawFd = fd.parse().ok().filter(|fd| *fd >= 0)?;
        Some(Offer {
            pid: pid.parse().ok()?,
            fd,
            geometry: Geometry::new(ranks.parse().ok()?, chunk_bytes.parse().ok()?).ok()?,
            nonce: number.to_be_bytes(),
        })
    }
}

fn open_file(offer: &Offer) -> io::Result<OwnedFd> {
    let path = format!("/proc/{}/fd/{}", offer.pid, offer.fd);
    let options = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)?;
    Ok(options.into())
}

/// A wrong file could end this process by SIGBUS. Returns the reason.
fn check_file(file: &OwnedFd, geometry: Geometry) -> Result<(), String> {
    let expected = geometry.total_bytes();
    // SAFETY: plain system calls on an open descriptor; fstat fills a zeroed buffer.
    let (seals, size) = unsafe {
        let mut facts: libc::stat = std::mem::zeroed();
        let seals = libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS);
        let failed = libc::fstat(file.as_raw_fd(), &mut facts) != 0;
        (seals, if failed { -1 } else { facts.st_size })
    };
    if seals < 0 {
        return Err("the descriptor is not a memory file".to_owned());
    }
    if seals & SEALS != SEALS || usize::try_from(size) != Ok(expected) {
        let text = format!("the memory file has {size} bytes and seals {seals:#x}");
        return Err(format!("{text}; expected: {expected} bytes, sealed"));
    }
    Ok(())
}

fn check_header(mapping: &Mapping, nonce: [u8; NONCE_BYTES]) -> Result<(), &'static str> {
    let (header, geometry) = (mapping.header(), mapping.geometry);
    let [low, high] = words_of(nonce);
    let chunk = header.chunk_bytes.load(Ordering::Relaxed);
    match () {
        _ if header.magic.load(Ordering::Acquire) != MAGIC => Err("the file is no region"),
        _ if header.layout.load(Ordering::Relaxed) != LAYOUT => {
            Err("the region has another layout; install the same nexar-native on all ranks")
        }
        _ if header.nonce[0].load(Ordering::Relaxed) != low
            || header.nonce[1].load(Ordering::Relaxed) != high =>
        {
            Err("the descriptor is another region than the one that was offered")
        }
        _ if header.ranks.load(Ordering::Relaxed) as usize != geometry.ranks
            || chunk != geometry.chunk_bytes as u64 =>
        {
            Err("the region has other sizes than those that were offered")
        }
        _ => Ok(()),
    }
}

// -- the Python class ----------------------------------------------------------------------------------------------

struct Held {
    mapping: Option<Arc<Mapping>>,
    file: Option<Descriptor>,
}

/// The memory of one region in this process.
#[pyclass(module = "nexar_native.shm", frozen)]
pub struct Region {
    #[pyo3(get)]
    offer: String,
    #[pyo3(get)]
    ranks: usize,
    #[pyo3(get)]
    chunk_bytes: usize,
    held: Mutex<Held>,
    generation: u32,
}

impl Region {
    fn new(offer: &Offer, mapping: Mapping, file: Option<Descriptor>) -> Self {
        Region {
            offer: offer.text(),
            ranks: offer.geometry.ranks,
            chunk_bytes: offer.geometry.chunk_bytes,
            generation: mapping.generation,
            held: Mutex::new(Held {
                mapping: Some(Arc::new(mapping)),
                file,
            }),
        }
    }

    fn enter(&self) -> PyResult<&Mutex<Held>> {
        check_generation(self.generation)?;
        Ok(&self.held)
    }

    pub fn mapping(&self) -> PyResult<Arc<Mapping>> {
        let mapping = self.enter()?.lock().mapping.clone();
        mapping.ok_or_else(|| PyValueError::new_err("the region is closed"))
    }
}

/// Raises RuntimeError in a forked child.
pub fn check_generation(generation: u32) -> PyResult<()> {
    if generation == process::generation() {
        return Ok(());
    }
    let text = "made in the parent process; a forked child must make its own";
    Err(PyRuntimeError::new_err(text))
}

#[pymethods]
impl Region {
    #[staticmethod]
    #[pyo3(signature = (ranks, chunk_bytes = 0))]
    fn create(ranks: usize, chunk_bytes: usize) -> PyResult<Self> {
        let geometry = Geometry::new(ranks, chunk_bytes).map_err(PyValueError::new_err)?;
        let made = || -> io::Result<Self> {
            let file = make_file(geometry)?;
            let mapping = Mapping::new(&file, geometry)?;
            allocated(&mapping, &file)?;
            let nonce = random_nonce()?;
            write_header(&mapping, nonce);
            let offer = Offer {
                pid: std::process::id(),
                fd: file.as_raw_fd(),
                geometry,
                nonce,
            };
            Ok(Region::new(&offer, mapping, Some(Descriptor::new(file))))
        };
        made().map_err(os_error)
    }

    #[staticmethod]
    fn open(offer: &str, ranks: usize) -> PyResult<Self> {
        let offer = Offer::parse(offer).filter(|offer| offer.geometry.ranks == ranks);
        let Some(offer) = offer else {
            let text = format!("the offer is not that of a region of {ranks} ranks");
            return Err(PyValueError::new_err(text));
        };
        let file = open_file(&offer).map_err(os_error)?;
        check_file(&file, offer.geometry).map_err(PyOSError::new_err)?;
        let mapping = Mapping::new(&file, offer.geometry).map_err(os_error)?;
        check_header(&mapping, offer.nonce).map_err(PyOSError::new_err)?;
        Ok(Region::new(&offer, mapping, None))
    }

    /// Afterwards no further process can open the region.
    fn close_descriptor(&self) -> PyResult<()> {
        self.enter()?.lock().file = None;
        Ok(())
    }

    /// Groups that were made keep the memory.
    fn close(&self) -> PyResult<()> {
        let mut held = self.enter()?.lock();
        held.file = None;
        held.mapping = None;
        Ok(())
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A region of this process, without a descriptor that is left open.
    pub fn mapping(ranks: usize, chunk_bytes: usize) -> Arc<Mapping> {
        let geometry = Geometry::new(ranks, chunk_bytes).unwrap();
        let file = make_file(geometry).unwrap();
        Arc::new(Mapping::new(&file, geometry).unwrap())
    }

    #[test]
    fn chunks_shrink_with_the_number_of_ranks() {
        let chunks = [1, 2, 40, 64, 128, 256].map(|ranks| chunk_of(ranks) >> 10);
        assert_eq!(chunks, [256, 256, 256, 256, 128, 64]);
    }

    #[test]
    fn sizes_that_are_not_allowed_are_refused() {
        for (ranks, chunk) in [
            (0, 0),
            (257, 0),
            (2, 1),
            (2, 16 << 10),
            (2, 96 << 10),
            (2, 1 << 30),
        ] {
            assert!(Geometry::new(ranks, chunk).is_err(), "{ranks} {chunk}");
        }
        assert_eq!(Geometry::new(256, 0).unwrap().chunk_bytes, 64 << 10);
    }

    #[test]
    fn records_and_slots_do_not_overlap() {
        let geometry = Geometry::new(5, 32 << 10).unwrap();
        assert_eq!(geometry.slots_at(), 2 * PAGE + PAGE);
        assert_eq!(geometry.slots_of(1) - geometry.slots_of(0), 64 << 10);
        assert_eq!(geometry.total_bytes(), geometry.slots_of(4) + (64 << 10));
    }

    #[test]
    fn an_offer_survives_its_text() {
        let offer = Offer {
            pid: 12,
            fd: 3,
            geometry: Geometry::new(4, 0).unwrap(),
            nonce: *b"0123456789abcdef",
        };
        assert_eq!(Offer::parse(&offer.text()), Some(offer));
    }

    #[test]
    fn other_texts_are_no_offers() {
        let nonce = "0".repeat(32);
        for text in [
            String::new(),
            format!("1 2 3 {nonce}"),
            format!("1 2 4 262144 {nonce} 5"),
            format!("-1 2 4 262144 {nonce}"),
            format!("1 -2 4 262144 {nonce}"),
            format!("1 2 257 262144 {nonce}"),
            format!("1 2 4 262143 {nonce}"),
            format!("1 2 4 262144 +{}", &nonce[1..]),
            "1 2 4 262144 00".to_owned(),
        ] {
            assert_eq!(Offer::parse(&text), None, "{text}");
        }
    }
}
