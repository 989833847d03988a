//! Inbound handshakes in progress: the limit, and which one is ended in favour of a new one.
//!
//! Pure: time and chance are arguments. Rule when the limit is reached: the source with the most
//! handshakes loses one, at random among those past their grace period if there are any. A source
//! that has more than the source of the new handshake gets no grace period. So a source cannot
//! displace a smaller one, and an honest peer with an address of its own keeps its handshake
//! however many others begin. `nexar.transport.pending_connections` has the same rule for TCP
//! connections.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// A handshake is not ended for this long, unless its source has more than the source of the new
/// one.
const GRACE: Duration = Duration::from_secs(1);
/// Sources with fewer handshakes than this count as equal: two dials that cross are common.
const LEAST_SHARE: usize = 2;

/// The source of packets: the network that one party owns (an IPv4 address, or an IPv6 /64) and the
/// address.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source {
    network: IpAddr,
    address: IpAddr,
}

impl Source {
    pub fn of(address: IpAddr) -> Self {
        let address = address.to_canonical();
        let network = match address {
            IpAddr::V4(_) => address,
            IpAddr::V6(v6) => {
                let [a, b, c, d, ..] = v6.segments();
                [a, b, c, d, 0, 0, 0, 0].into()
            }
        };
        Source { network, address }
    }

    pub fn network(&self) -> IpAddr {
        self.network
    }

    pub fn address(&self) -> IpAddr {
        self.address
    }
}

/// The decision on a new handshake.
#[derive(Debug, PartialEq, Eq)]
pub enum Place {
    Free,
    /// The handshake with this serial is ended for it.
    InsteadOf(u64),
    Refused,
}

/// Handshakes of the network, then of the address. The largest source loses one first.
type Weight = (usize, usize);

pub struct Handshakes {
    pub limit: usize,
    begun: HashMap<u64, (Source, Instant)>,
}

impl Handshakes {
    pub fn new(limit: usize) -> Self {
        Handshakes {
            limit,
            begun: HashMap::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.begun.len()
    }

    pub fn enter(&mut self, serial: u64, source: Source, now: Instant) {
        self.begun.insert(serial, (source, now));
    }

    /// Removes a handshake that succeeded, failed or was ended. No effect if the serial is not
    /// listed.
    pub fn leave(&mut self, serial: u64) {
        self.begun.remove(&serial);
        if self.begun.is_empty() {
            self.begun.shrink_to_fit();
        }
    }

    /// Decides on a handshake from `source`. `chance` returns a number below its argument. Changes
    /// nothing.
    pub fn place(
        &self,
        source: Source,
        now: Instant,
        chance: impl FnOnce(usize) -> usize,
    ) -> Place {
        if self.begun.len() < self.limit {
            return Place::Free;
        }
        let weights = self.weights(source);
        let new = weights[&source];
        let largest_weight = *weights.values().max().unwrap_or(&new);
        let largest = self
            .begun
            .iter()
            .filter(|(_, (source, _))| weights[source] == largest_weight);
        let (past, fresh): (Vec<_>, Vec<_>) =
            largest.partition(|(_, (_, begun))| now.saturating_duration_since(*begun) >= GRACE);
        let mut chosen = past;
        if chosen.is_empty() && new < largest_weight {
            chosen = fresh;
        }
        if chosen.is_empty() {
            return Place::Refused;
        }
        Place::InsteadOf(*chosen[chance(chosen.len())].0)
    }

    /// The weight of every source, with the new handshake included.
    fn weights(&self, new: Source) -> HashMap<Source, Weight> {
        let mut networks: HashMap<IpAddr, usize> = HashMap::new();
        let mut addresses: HashMap<Source, usize> = HashMap::new();
        let sources = self.begun.values().map(|(source, _)| *source);
        for source in sources.chain([new]) {
            *networks.entry(source.network).or_default() += 1;
            *addresses.entry(source).or_default() += 1;
        }
        let share = |count: usize| count.max(LEAST_SHARE);
        addresses
            .into_iter()
            .map(|(source, count)| (source, (share(networks[&source.network]), share(count))))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::of(text.parse().unwrap())
    }

    fn full(sources: &[&str], now: Instant) -> Handshakes {
        let mut handshakes = Handshakes::new(sources.len());
        for (serial, text) in sources.iter().enumerate() {
            handshakes.enter(serial as u64, source(text), now);
        }
        handshakes
    }

    #[test]
    fn below_the_limit_no_handshake_is_ended() {
        let now = Instant::now();
        let mut handshakes = full(&["10.0.0.1", "10.0.0.1"], now);
        handshakes.limit = 3;
        assert_eq!(
            handshakes.place(source("10.0.0.1"), now, |_| 0),
            Place::Free
        );
    }

    #[test]
    fn the_largest_source_gives_way_even_within_its_grace_period() {
        let now = Instant::now();
        let sources = ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2"];
        let handshakes = full(&sources, now);
        for choice in 0..3 {
            let place = handshakes.place(source("10.0.0.3"), now, |_| choice);
            assert!(matches!(place, Place::InsteadOf(serial) if serial > 0));
        }
    }

    #[test]
    fn a_source_displaces_only_its_own_and_only_past_their_grace_period() {
        let now = Instant::now();
        let handshakes = full(&["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2"], now);
        assert_eq!(
            handshakes.place(source("10.0.0.2"), now, |_| 0),
            Place::Refused
        );
        let place = handshakes.place(source("10.0.0.2"), now + GRACE, |_| 0);
        assert!(matches!(place, Place::InsteadOf(serial) if serial > 0));
    }

    #[test]
    fn an_ipv6_network_is_one_source() {
        let now = Instant::now();
        let sources = ["2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8:1::1"];
        let handshakes = full(&sources, now);
        for choice in 0..3 {
            let place = handshakes.place(source("2001:db8:2::1"), now, |_| choice);
            assert!(matches!(place, Place::InsteadOf(serial) if serial < 3));
        }
    }
}
