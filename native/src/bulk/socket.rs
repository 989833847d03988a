//! System calls on a connection's socket, and dialing. Nothing here blocks.
//!
//! `unsafe`: `readv` and `sendmsg` with memory of Python objects, for which Rust's slices would claim too much. The
//! caller holds the gate of the transfer, so the memory stays valid during the call.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use socket2::{Domain, Protocol, SockRef, Socket as OsSocket, Type};

use crate::runtime::descriptors::Descriptor;

pub struct Socket {
    descriptor: Descriptor,
}

impl Socket {
    /// Takes over the descriptor of a connected TCP socket.
    pub fn adopt(fd: RawFd) -> io::Result<Self> {
        let mut kind: libc::c_int = 0;
        let mut size = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: a checked descriptor and writable memory of its size.
        let failed = unsafe {
            libc::getsockopt(
                fd,
                libc::SOL_SOCKET,
                libc::SO_PROTOCOL,
                (&raw mut kind).cast(),
                &mut size,
            )
        } != 0;
        if failed {
            return Err(io::Error::last_os_error()); // not ours: it is not closed
        }
        // SAFETY: open, and the caller gives it away.
        let socket = Socket {
            descriptor: Descriptor::new(unsafe { OwnedFd::from_raw_fd(fd) }),
        };
        if kind != libc::IPPROTO_TCP {
            return Err(ErrorKind::InvalidInput.into());
        }
        socket.prepare()?;
        Ok(socket)
    }

    /// Begins to connect.
    pub fn dial(address: SocketAddr) -> io::Result<Self> {
        let socket = OsSocket::new(
            Domain::for_address(address),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        socket.set_nonblocking(true)?;
        match socket.connect(&address.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        let socket = Socket {
            descriptor: Descriptor::new(socket.into()),
        };
        socket.prepare()?;
        Ok(socket)
    }

    fn prepare(&self) -> io::Result<()> {
        let socket = SockRef::from(&self.descriptor);
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)
    }

    /// Whether connecting has succeeded, once the socket is writable.
    pub fn connected(&self) -> io::Result<()> {
        match SockRef::from(&self.descriptor).take_error()? {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    pub fn raw(&self) -> RawFd {
        self.descriptor.raw()
    }

    pub fn peer_address(&self) -> String {
        let address = SockRef::from(&self.descriptor).peer_addr();
        let address = address.ok().and_then(|address| address.as_socket());
        address.map_or_else(|| "unknown".to_owned(), |address| address.to_string())
    }

    /// Reads into `first`, then into `then`.
    ///
    /// # Safety
    /// `first` is valid for writes.
    pub unsafe fn read(&self, first: *mut [u8], then: &mut [u8]) -> io::Result<usize> {
        let parts = [
            libc::iovec {
                iov_base: first.cast(),
                iov_len: first.len(),
            },
            libc::iovec {
                iov_base: then.as_mut_ptr().cast(),
                iov_len: then.len(),
            },
        ];
        // SAFETY: two parts that are valid for writes.
        counted(unsafe { libc::readv(self.raw(), parts.as_ptr(), 2) })
    }

    /// Writes `first`, then `then`.
    ///
    /// # Safety
    /// `then` is valid for reads.
    pub unsafe fn write(&self, first: &[u8], then: *const [u8]) -> io::Result<usize> {
        let mut parts = [
            libc::iovec {
                iov_base: first.as_ptr().cast_mut().cast(),
                iov_len: first.len(),
            },
            libc::iovec {
                iov_base: then.cast_mut().cast(),
                iov_len: then.len(),
            },
        ];
        // SAFETY: all fields are integers or pointers, for which zero is valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len() as _;
        // SAFETY: two parts that are valid for reads.
        counted(unsafe { libc::sendmsg(self.raw(), &message, libc::MSG_NOSIGNAL) })
    }

    /// Ends the sending half, so that what was written arrives before the end.
    pub fn shut_down(&self) {
        let _ = SockRef::from(&self.descriptor).shutdown(std::net::Shutdown::Write);
    }
}

fn counted(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
