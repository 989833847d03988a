//! Congestion control that lets a closing connection go.
//!
//! The protocol holds everything back while the congestion window is full and stream data waits, also
//! the packet that tells the peer of the end. Acknowledgements are no longer read then, so the window
//! would never open again: a process that ends in mid-transfer would be missed only at the peer's idle
//! timeout. That packet is small, and nothing follows it.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Instant;

use quinn_proto::congestion::{Controller, ControllerFactory, CubicConfig};
use quinn_proto::{Connection, RttEstimator};

/// More than any path holds; pacing ends far below it.
const OPEN: u64 = 1 << 40;

/// Makes a Cubic of this configuration for each path.
pub struct GovernorConfig(pub Arc<CubicConfig>);

impl ControllerFactory for GovernorConfig {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(Governor {
            inner: self.0.clone().build(now, current_mtu),
            lifted: Arc::default(),
        })
    }
}

struct Governor {
    inner: Box<dyn Controller>,
    lifted: Arc<AtomicBool>,
}

/// The connection is about to be closed: whatever it has to say may leave.
pub fn lift(connection: &Connection) {
    let twin = connection.congestion_state().clone_box().into_any();
    if let Ok(governor) = twin.downcast::<Governor>() {
        governor.lifted.store(true, Ordering::Relaxed);
    }
}

impl Controller for Governor {
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
            OPEN
        } else {
            self.inner.window()
        }
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Governor {
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
