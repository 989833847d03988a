//! The Python class `Settings`: the settings of the protocol.

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use quinn_proto::congestion::CubicConfig;
use quinn_proto::{Connection, Dir, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt};

use crate::quic::congestion::CongestionConfig;

/// With quinn's default initial window a handshake that starts with large packets never completes.
const INITIAL_WINDOW_BYTES: u64 = 1 << 20;
/// Assumed round-trip time before it is measured: a lost first packet is sent again after three
/// times this. The protocol's default is meant for intercontinental paths.
const INITIAL_RTT: Duration = Duration::from_millis(100);

#[pyclass(module = "nexar_native.quic", frozen)]
#[derive(Clone)]
pub struct Settings {
    pub alpn: Vec<u8>,
    idle_timeout: Duration,
    keep_alive_interval: Duration,
    initial_mtu: u16,
    max_mtu: u16,
    loopback_mtu: u16,
    stream_window_bytes: u64,
    connection_window_bytes: u64,
    pub send_window_bytes: u64,
    pub socket_buffer_bytes: usize,
    max_streams: u32,
    pub max_connections: usize,
    pub handshake_timeout: Duration,
    pub max_handshakes: usize,
    pub retry_handshakes: usize,
    pub handshake_budget: usize,
    unverified_streams: u32,
    unverified_window_bytes: u64,
}

#[pymethods]
impl Settings {
    #[new]
    #[pyo3(signature = (*, alpn=b"nexar".to_vec(), idle_timeout=30.0, keep_alive_interval=5.0,
        initial_mtu=1200, max_mtu=8972, loopback_mtu=65000, stream_window_bytes=64 << 20,
        connection_window_bytes=256 << 20, send_window_bytes=4 << 20, socket_buffer_bytes=4 << 20,
        max_streams=4096, max_connections=65536, handshake_timeout=10.0, max_handshakes=256,
        retry_handshakes=64, handshake_budget=1024, unverified_streams=4, unverified_window_bytes=64 << 10),
        text_signature = "(*, alpn=b'nexar', idle_timeout=30.0, keep_alive_interval=5.0, \
        initial_mtu=1200, max_mtu=8972, loopback_mtu=65000, stream_window_bytes=67108864, \
        connection_window_bytes=268435456, send_window_bytes=4194304, \
        socket_buffer_bytes=4194304, max_streams=4096, max_connections=65536, \
        handshake_timeout=10.0, max_handshakes=256, retry_handshakes=64, handshake_budget=1024, unverified_streams=4, \
        unverified_window_bytes=65536)")]
    #[allow(clippy::too_many_arguments)]
    fn new(
        alpn: Vec<u8>,
        idle_timeout: f64,
        keep_alive_interval: f64,
        initial_mtu: i64,
        max_mtu: i64,
        loopback_mtu: i64,
        stream_window_bytes: i64,
        connection_window_bytes: i64,
        send_window_bytes: i64,
        socket_buffer_bytes: i64,
        max_streams: i64,
        max_connections: i64,
        handshake_timeout: f64,
        max_handshakes: i64,
        retry_handshakes: i64,
        handshake_budget: i64,
        unverified_streams: i64,
        unverified_window_bytes: i64,
    ) -> PyResult<Self> {
        within("alpn (its length)", alpn.len() as i64, 1, 255)?;
        let settings = Settings {
            alpn,
            idle_timeout: seconds("idle_timeout", idle_timeout, 0.01)?,
            keep_alive_interval: seconds("keep_alive_interval", keep_alive_interval, 0.0)?,
            initial_mtu: within("initial_mtu", initial_mtu, 1200, 65000)? as u16,
            max_mtu: within("max_mtu", max_mtu, 1200, 65000)? as u16,
            loopback_mtu: within("loopback_mtu", loopback_mtu, 1200, 65000)? as u16,
            stream_window_bytes: window("stream_window_bytes", stream_window_bytes)?,
            connection_window_bytes: window("connection_window_bytes", connection_window_bytes)?,
            send_window_bytes: window("send_window_bytes", send_window_bytes)?,
            socket_buffer_bytes: within("socket_buffer_bytes", socket_buffer_bytes, 4096, 1 << 30)?
                as usize,
            max_streams: within("max_streams", max_streams, 1, 1 << 20)? as u32,
            max_connections: within("max_connections", max_connections, 1, 1 << 24)? as usize,
            handshake_timeout: seconds("handshake_timeout", handshake_timeout, 0.01)?,
            max_handshakes: within("max_handshakes", max_handshakes, 1, 1 << 24)? as usize,
            retry_handshakes: within("retry_handshakes", retry_handshakes, 0, 1 << 24)? as usize,
            handshake_budget: within("handshake_budget", handshake_budget, 2, 1 << 24)? as usize,
            unverified_streams: within("unverified_streams", unverified_streams, 1, 1 << 20)?
                as u32,
            unverified_window_bytes: window("unverified_window_bytes", unverified_window_bytes)?,
        };
        if settings.initial_mtu > settings.max_mtu.min(settings.loopback_mtu) {
            return Err(PyValueError::new_err(
                "initial_mtu: above max_mtu or loopback_mtu",
            ));
        }
        Ok(settings)
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            alpn: b"nexar".to_vec(),
            idle_timeout: Duration::from_secs(30),
            keep_alive_interval: Duration::from_secs(5),
            initial_mtu: 1200,
            max_mtu: 8972,
            loopback_mtu: 65000,
            stream_window_bytes: 64 << 20,
            connection_window_bytes: 256 << 20,
            send_window_bytes: 4 << 20,
            socket_buffer_bytes: 4 << 20,
            max_streams: 4096,
            max_connections: 65536,
            handshake_timeout: Duration::from_secs(10),
            max_handshakes: 256,
            retry_handshakes: 64,
            handshake_budget: 1024,
            unverified_streams: 4,
            unverified_window_bytes: 64 << 10,
        }
    }
}

impl Settings {
    /// The largest packet that peers may send. They are told, and probe no larger size.
    pub fn largest_mtu(&self) -> u16 {
        self.max_mtu.max(self.loopback_mtu)
    }

    /// The protocol's configuration. Paths over the loopback interface allow far larger packets,
    /// and the packet size dominates throughput.
    pub fn transport(&self, loopback: bool) -> TransportConfig {
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(if loopback {
            self.loopback_mtu
        } else {
            self.max_mtu
        });
        let mut congestion = CubicConfig::default();
        congestion.initial_window(INITIAL_WINDOW_BYTES);
        let idle = self.idle_timeout.as_millis().min(1 << 40) as u64;
        let mut transport = TransportConfig::default();
        transport
            .max_idle_timeout(Some(IdleTimeout::from(varint(idle))))
            .keep_alive_interval(
                (!self.keep_alive_interval.is_zero()).then_some(self.keep_alive_interval),
            )
            .initial_rtt(INITIAL_RTT)
            .initial_mtu(self.initial_mtu)
            .mtu_discovery_config(Some(discovery))
            .congestion_controller_factory(Arc::new(CongestionConfig(Arc::new(congestion))))
            .stream_receive_window(varint(self.stream_window_bytes))
            .receive_window(varint(self.connection_window_bytes))
            .send_window(self.send_window_bytes)
            .max_concurrent_bidi_streams(VarInt::from_u32(self.max_streams))
            .max_concurrent_uni_streams(VarInt::from_u32(self.max_streams))
            .datagram_receive_buffer_size(None);
        transport
    }

    /// The same for a peer whose certificate was not verified, with fewer streams: the protocol
    /// allocates every stream that a peer may open when the connection is made.
    pub fn unverified_transport(&self, loopback: bool) -> TransportConfig {
        let mut transport = self.transport(loopback);
        let streams = VarInt::from_u32(self.unverified_streams.min(self.max_streams));
        let window = self
            .unverified_window_bytes
            .min(self.connection_window_bytes);
        transport
            .receive_window(varint(window))
            .max_concurrent_bidi_streams(streams)
            .max_concurrent_uni_streams(streams);
        transport
    }

    /// Gives the peer of an inbound connection the limits of a verified peer. The windows of its
    /// streams are already those; only the connection's window was smaller.
    pub fn lift_limits(&self, connection: &mut Connection) {
        let streams = VarInt::from_u32(self.max_streams);
        connection.set_receive_window(varint(self.connection_window_bytes));
        connection.set_max_concurrent_streams(Dir::Uni, streams);
        connection.set_max_concurrent_streams(Dir::Bi, streams);
    }
}

fn varint(value: u64) -> VarInt {
    VarInt::from_u64(value).unwrap_or(VarInt::MAX)
}

pub fn within(name: &str, value: i64, least: i64, most: i64) -> PyResult<i64> {
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    Err(PyValueError::new_err(format!(
        "{name}: {value} is not within {least} and {most}"
    )))
}

fn window(name: &str, value: i64) -> PyResult<u64> {
    within(name, value, 1 << 14, 1 << 40).map(|v| v as u64)
}

fn seconds(name: &str, value: f64, least: f64) -> PyResult<Duration> {
    if value.is_finite() && value >= least && value <= 1e9 {
        return Ok(Duration::from_secs_f64(value));
    }
    Err(PyValueError::new_err(format!(
        "{name}: {value} is not a number of seconds of at least {least}"
    )))
}
