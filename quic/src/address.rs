//! Addresses as Python gives and gets them: numeric host and port.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use pyo3::exceptions::PyValueError;
use pyo3::PyResult;

pub fn parse(address: &(String, u16)) -> PyResult<SocketAddr> {
    let (host, port) = address;
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, *port));
    }
    // Link-local IPv6 addresses carry their interface: fe80::1%eth0 or fe80::1%2.
    scoped(host, *port).ok_or_else(|| {
        PyValueError::new_err(format!(
            "address: {host:?} is not a numeric IPv4 or IPv6 address"
        ))
    })
}

fn scoped(host: &str, port: u16) -> Option<SocketAddr> {
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

/// An IPv4 peer of a dual-stack socket goes by its IPv4 address.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), address.port()),
        IpAddr::V6(_) => address,
    }
}

pub fn present(address: SocketAddr) -> (String, u16) {
    let address = canonical(address);
    match address {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => {
            (format!("{}%{}", v6.ip(), v6.scope_id()), v6.port())
        }
        _ => (address.ip().to_string(), address.port()),
    }
}
