//! The UDP socket: batches in, segmented batches out.

use std::io::{self, ErrorKind, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::RawFd;

use bytes::BytesMut;
use quinn_proto::{EcnCodepoint, Transmit};
use quinn_udp::{RecvMeta, UdpSocketState};
use socket2::{Domain, Protocol, Socket as Plain, Type};

use crate::descriptor::Descriptor;
use crate::pool::Pool;

/// Datagrams (or coalesced runs of them) taken in by one system call.
pub const BATCH: usize = 16;
const SLOT_BYTES: usize = 65536;
/// Buffers of received data remembered for use again (4 MiB).
const SLOTS_LENT: usize = 64;
/// Up to here a copy is cheaper than giving the 64 KiB slot away and allocating a new one.
const COPY_BYTES: usize = 4096;
/// A segmented send above the largest UDP payload is refused by the kernel as a whole.
const SEND_BYTES: usize = 65000;

pub struct Socket {
    descriptor: Descriptor,
    state: UdpSocketState,
    slots: Vec<BytesMut>,
    pool: Pool,
    ipv6: bool,
}

/// What one slot held: datagrams of `stride` bytes each, the last one possibly shorter.
pub struct Arrival {
    pub data: BytesMut,
    pub stride: usize,
    pub meta: RecvMeta,
}

impl Socket {
    pub fn bind(address: SocketAddr, buffer_bytes: usize) -> io::Result<(Self, SocketAddr)> {
        let socket = Plain::new(
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
            pool: Pool::new(SLOT_BYTES, SLOTS_LENT),
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

    /// The form in which this socket's family writes `address`, if it can reach it at all.
    pub fn reach(&self, address: SocketAddr) -> Option<SocketAddr> {
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

    /// Take in one batch without blocking; `take` gets each arrival. Returns how many.
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
        // Errors are either "nothing there" or the echo of an earlier send (ICMP): both are no data.
        self.state
            .recv((&self.descriptor).into(), &mut views, metas)
            .unwrap_or(0)
    }

    /// False: the kernel's buffer is full, try again when the socket is writable. Every other error
    /// counts as sent: to the protocol it is a lost packet.
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
