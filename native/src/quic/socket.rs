//! The UDP socket, its addresses, and a pool of buffers. Datagrams are received in batches and sent
//! in segmented batches.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::RawFd;

use bytes::BytesMut;
use pyo3::exceptions::PyValueError;
use pyo3::PyResult;
use quinn_proto::{EcnCodepoint, Transmit};
use quinn_udp::{RecvMeta, UdpSocketState};
use socket2::{Domain, Protocol, Socket as OsSocket, Type};

use crate::runtime::descriptors::Descriptor;

/// Datagrams, or coalesced runs of them, received by one system call.
pub const BATCH: usize = 16;
const SLOT_BYTES: usize = 65536;
/// Receive buffers that are kept for reuse (4 MiB).
const RECEIVE_BUFFERS: usize = 64;
/// Up to this size, copying is cheaper than giving the 64 KiB slot away and allocating a new one.
const COPY_BYTES: usize = 4096;
/// The kernel rejects a segmented send above the largest UDP payload as a whole.
const SEND_BYTES: usize = 65000;

pub struct Socket {
    descriptor: Descriptor,
    state: UdpSocketState,
    slots: Vec<BytesMut>,
    pool: BufferPool,
    ipv6: bool,
}

/// The contents of one slot: datagrams of `stride` bytes each; the last one may be shorter.
pub struct Arrival {
    pub data: BytesMut,
    pub stride: usize,
    pub meta: RecvMeta,
}

impl Socket {
    pub fn bind(address: SocketAddr, buffer_bytes: usize) -> io::Result<(Self, SocketAddr)> {
        let socket = OsSocket::new(
            Domain::for_address(address),
            Type::DGRAM,
            Some(Protocol::UDP),
        )?;
        if address.is_ipv6() {
            socket.set_only_v6(!address.ip().is_unspecified())?;
        }
        // Best effort: the kernel caps both at its own limits.
        let _ = socket.set_recv_buffer_size(buffer_bytes);
        let _ = socket.set_send_buffer_size(buffer_bytes);
        socket.bind(&address.into())?;
        let bound = socket.local_addr()?.as_socket().ok_or(ErrorKind::Other)?;
        let descriptor = Descriptor::new(socket.into());
        let state = UdpSocketState::new((&descriptor).into())?;
        let slots = (0..BATCH)
            .map(|_| BytesMut::with_capacity(SLOT_BYTES))
            .collect();
        let socket = Socket {
            descriptor,
            state,
            slots,
            pool: BufferPool::new(SLOT_BYTES, RECEIVE_BUFFERS),
            ipv6: address.is_ipv6(),
        };
        Ok((socket, bound))
    }

    pub fn raw(&self) -> RawFd {
        self.descriptor.raw()
    }

    pub fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }

    /// `address` in the family of this socket; None if the socket cannot send to it.
    pub fn to_family(&self, address: SocketAddr) -> Option<SocketAddr> {
        match address {
            SocketAddr::V4(v4) if self.ipv6 => {
                Some(SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()))
            }
            SocketAddr::V6(_) if !self.ipv6 => None,
            _ => Some(address),
        }
    }

    /// How many packets of `mtu` bytes one send may carry.
    pub fn segments(&self, mtu: u16) -> usize {
        let fitting = SEND_BYTES / usize::from(mtu).max(1);
        self.state.max_gso_segments().min(fitting).max(1)
    }

    /// Receives one batch without blocking and passes each arrival to `take`. Returns how many.
    pub fn receive(&mut self, mut take: impl FnMut(Arrival)) -> usize {
        let mut metas = [RecvMeta::default(); BATCH];
        let count = self.fill(&mut metas);
        for (slot, meta) in self.slots.iter_mut().zip(&metas[..count]) {
            // SAFETY: the kernel wrote `len` bytes, and the slot has SLOT_BYTES of room.
            unsafe { slot.set_len(meta.len) };
            let data = if meta.len <= COPY_BYTES {
                let copy = BytesMut::from(&slot[..]);
                slot.clear();
                copy
            } else {
                let full = std::mem::replace(slot, self.pool.take());
                self.pool.lend(full)
            };
            take(Arrival {
                data,
                stride: meta.stride.max(1),
                meta: *meta,
            });
        }
        count
    }

    fn fill(&mut self, metas: &mut [RecvMeta; BATCH]) -> usize {
        let mut slots = self.slots.iter_mut();
        let mut views: [IoSliceMut; BATCH] = std::array::from_fn(|_| {
            let room = slots.next().expect("BATCH slots").spare_capacity_mut();
            // SAFETY: SLOT_BYTES of allocated room, which the kernel only writes to.
            IoSliceMut::new(unsafe {
                std::slice::from_raw_parts_mut(room.as_mut_ptr().cast(), SLOT_BYTES)
            })
        });
        // An error means that there is no datagram, or reports an earlier send (ICMP).
        self.state
            .recv((&self.descriptor).into(), &mut views, metas)
            .unwrap_or(0)
    }

    /// False: the kernel's buffer is full; send again when the socket is writable. Every other
    /// error counts as sent: to the protocol it is a lost packet.
    pub fn send(&self, transmit: &Transmit, contents: &[u8]) -> bool {
        let ecn = transmit
            .ecn
            .and_then(|e| quinn_udp::EcnCodepoint::from_bits(e as u8));
        let sent = self.state.send(
            (&self.descriptor).into(),
            &quinn_udp::Transmit {
                destination: transmit.destination,
                ecn,
                contents: &contents[..transmit.size],
                segment_size: transmit.segment_size,
                src_ip: transmit.src_ip,
            },
        );
        !matches!(sent, Err(error) if error.kind() == ErrorKind::WouldBlock)
    }
}

pub fn ecn(meta: &RecvMeta) -> Option<EcnCodepoint> {
    meta.ecn.and_then(|e| EcnCodepoint::from_bits(e as u8))
}

pub fn parse_address(address: &(String, u16)) -> PyResult<SocketAddr> {
    let (host, port) = address;
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, *port));
    }
    // Link-local IPv6 addresses name their interface: fe80::1%eth0 or fe80::1%2.
    parse_scoped(host, *port).ok_or_else(|| {
        PyValueError::new_err(format!(
            "address: {host:?} is not a numeric IPv4 or IPv6 address"
        ))
    })
}

fn parse_scoped(host: &str, port: u16) -> Option<SocketAddr> {
    let (ip, zone) = host.split_once('%')?;
    let index = match zone.parse::<u32>() {
        Ok(index) => index,
        Err(_) => {
            let name = std::ffi::CString::new(zone).ok()?;
            // SAFETY: a NUL-terminated string; 0 means that there is no such interface.
            match unsafe { libc::if_nametoindex(name.as_ptr()) } {
                0 => return None,
                index => index,
            }
        }
    };
    Some(SocketAddrV6::new(ip.parse().ok()?, port, 0, index).into())
}

/// The IPv4 address of an IPv4 peer of a dual-stack socket.
pub fn canonical_address(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), address.port()),
        IpAddr::V6(_) => address,
    }
}

pub fn address_to_python(address: SocketAddr) -> (String, u16) {
    let address = canonical_address(address);
    match address {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => {
            (format!("{}%{}", v6.ip(), v6.scope_id()), v6.port())
        }
        _ => (address.ip().to_string(), address.port()),
    }
}

/// Reuses buffers of one size. Allocating one for each batch of packets would make the allocator
/// return memory to the kernel and fault it in again, page by page.
///
/// For each buffer that is lent, an empty one that shares its memory stays here, and reclaims the
/// memory when all other references to it are dropped. The oldest is tried first, because data is
/// mostly dropped in order.
pub struct BufferPool {
    size: usize,
    capacity: usize,
    lent: VecDeque<BytesMut>,
}

/// How many of the oldest lent buffers are tried before a new one is allocated.
const RECLAIM_ATTEMPTS: usize = 3;

impl BufferPool {
    pub fn new(size: usize, capacity: usize) -> Self {
        BufferPool {
            size,
            capacity,
            lent: VecDeque::new(),
        }
    }

    /// An empty buffer of the pool's size.
    pub fn take(&mut self) -> BytesMut {
        for _ in 0..RECLAIM_ATTEMPTS.min(self.lent.len()) {
            let Some(mut buffer) = self.lent.pop_front() else {
                break;
            };
            if buffer.try_reclaim(self.size) {
                return buffer;
            }
            self.lent.push_back(buffer);
        }
        BytesMut::with_capacity(self.size)
    }

    /// Splits off the contents of `buffer` and keeps the rest, to reclaim the memory later.
    pub fn lend(&mut self, mut buffer: BytesMut) -> BytesMut {
        let data = buffer.split();
        if self.lent.len() < self.capacity {
            self.lent.push_back(buffer);
        }
        data
    }
}
