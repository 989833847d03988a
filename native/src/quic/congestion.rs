//! Congestion control: Cubic with a window that can be lifted, and a send window that follows the
//! round-trip time.
//!
//! While the congestion window is full and stream data is queued, the protocol sends nothing, not
//! even CONNECTION_CLOSE. Acknowledgements are not processed any more then, so the window would
//! never open: if a process ended in the middle of a transfer, its peer would notice only at the
//! idle timeout. That packet is small and the last one, so closing lifts the window.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn_proto::congestion::{Controller, ControllerFactory, CubicConfig};
use quinn_proto::{Connection, RttEstimator};

/// More than any path carries; far above the values at which pacing has an effect.
const UNLIMITED: u64 = 1 << 40;

/// Builds a Cubic controller of this configuration for each path.
pub struct CongestionConfig(pub Arc<CubicConfig>);

impl ControllerFactory for CongestionConfig {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(CongestionController {
            inner: self.0.clone().build(now, current_mtu),
            lifted: Arc::default(),
        })
    }
}

struct CongestionController {
    inner: Box<dyn Controller>,
    lifted: Arc<AtomicBool>,
}

/// Lifts the congestion window of a connection that is about to be closed.
pub fn lift_window(connection: &Connection) {
    let copy = connection.congestion_state().clone_box().into_any();
    if let Ok(congestion_controller) = copy.downcast::<CongestionController>() {
        congestion_controller.lifted.store(true, Ordering::Relaxed);
    }
}

impl Controller for CongestionController {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        app_limited: bool,
        largest_packet_num_acked: Option<u64>,
    ) {
        self.inner
            .on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        is_persistent_congestion: bool,
        lost_bytes: u64,
    ) {
        self.inner
            .on_congestion_event(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.inner.on_mtu_update(new_mtu);
    }

    fn window(&self) -> u64 {
        if self.lifted.load(Ordering::Relaxed) {
            UNLIMITED
        } else {
            self.inner.window()
        }
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(CongestionController {
            inner: self.inner.clone_box(),
            lifted: self.lifted.clone(),
        })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Bytes per second that no path is expected to exceed.
const MAX_BYTES_PER_SECOND: f64 = 2e9;
const MIN_BYTES: u64 = 512 << 10;

/// How many bytes may be in flight.
///
/// Bytes above the capacity of the path wait in the peer's socket buffer, and every small message waits
/// behind them. So the window is twice what the path carries at the highest expected speed in one
/// round trip. The shortest round trip counts: longer ones include queues.
pub struct SendWindow {
    pub bytes: u64,
    maximum: u64,
    min_rtt: Duration,
}

impl SendWindow {
    pub fn new(maximum: u64) -> Self {
        SendWindow {
            bytes: maximum,
            maximum,
            min_rtt: Duration::MAX,
        }
    }

    /// Adapts the window to a measured round-trip time.
    pub fn update(&mut self, rtt: Duration) {
        if rtt < self.min_rtt {
            self.min_rtt = rtt;
            let capacity = rtt.as_secs_f64() * MAX_BYTES_PER_SECOND;
            self.bytes = ((2.0 * capacity) as u64).max(MIN_BYTES).min(self.maximum);
        }
    }
}
