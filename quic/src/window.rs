//! How much may be under way at once.
//!
//! What exceeds the capacity of the path only waits in the peer's socket, and every small message
//! waits behind it. So the window follows the distance: twice what the path holds at the highest
//! speed to be expected. The shortest round trip seen is the distance; longer ones are queues.

use std::time::Duration;

/// Bytes per second that no path is expected to exceed.
const TOP_SPEED: f64 = 2e9;
const LEAST_BYTES: u64 = 512 << 10;

pub struct Window {
    pub bytes: u64,
    widest: u64,
    nearest: Duration,
}

impl Window {
    pub fn new(widest: u64) -> Self {
        Window {
            bytes: widest,
            widest,
            nearest: Duration::MAX,
        }
    }

    /// The round trip takes this long now.
    pub fn fit(&mut self, rtt: Duration) {
        if rtt < self.nearest {
            self.nearest = rtt;
            let capacity = rtt.as_secs_f64() * TOP_SPEED;
            self.bytes = ((2.0 * capacity) as u64).max(LEAST_BYTES).min(self.widest);
        }
    }
}
