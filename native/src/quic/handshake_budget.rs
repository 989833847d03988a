//! How many inbound handshakes may begin in a given time, and from which sources. Pure: time is an
//! argument.
//!
//! A handshake costs about a thousand times as much as its first packet, so the budget is checked
//! before any of it is computed. Rule: a handshake takes one unit of the budget, which refills at a
//! constant rate. It begins only if the budget holds more than its source has taken lately. A peer
//! that authenticates gets its unit refunded.
//!
//! Hence the more a source takes, the fuller the budget must be for it. While few handshakes begin,
//! one source may take half of the budget at once: a host with many ranks starts quickly. Under an
//! attack, the attacking sources share the refill rate among themselves, and a source that takes
//! less than each of them is admitted at once.
//!
//! What a source has taken is the mean of what its network and its address have taken. The owner of
//! an IPv6 network gains nothing by using many of its addresses, and a node in the network of an
//! attacker is still admitted before the attacker.
//!
//! A source that has not proven that it receives at its address is not charged: the address may be
//! forged. Such handshakes begin only while at least half of the budget is left.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::quic::handshakes::Source;

/// Units refilled each second: handshakes of unauthenticated peers that a node can always afford.
const REFILL_PER_SECOND: f64 = 64.0;
/// Time constant with which the amount that a source has taken decays.
const DECAY_TIME: Duration = Duration::from_secs(10);
/// A source that has taken less than this counts as one that has taken nothing.
const NEGLIGIBLE: f64 = 0.05;
/// Negligible sources are removed when there are twice as many as after the last removal, and more
/// than this.
const FEW_SOURCES: usize = 256;

/// An amount that decays.
#[derive(Clone, Copy)]
struct Taken {
    amount: f64,
    at: Instant,
}

impl Taken {
    fn now(&self, now: Instant) -> f64 {
        let age = now.saturating_duration_since(self.at);
        self.amount * (-age.as_secs_f64() / DECAY_TIME.as_secs_f64()).exp()
    }
}

pub struct HandshakeBudget {
    least: usize,
    capacity: f64,
    level: f64,
    at: Instant,
    taken: HashMap<Party, Taken>,
    tidy_above: usize,
}

/// What is charged for a handshake.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Party {
    Network(IpAddr),
    Address(IpAddr),
}

/// The network, and the address if it differs from the network.
fn parties(source: Source) -> impl Iterator<Item = Party> {
    let (network, address) = (source.network(), source.address());
    let one = (address != network).then_some(Party::Address(address));
    [Party::Network(network)].into_iter().chain(one)
}

impl HandshakeBudget {
    /// A full budget. As many handshakes may begin at once as may be in progress (`handshakes`),
    /// but at least `least`: a busy host may need several attempts for each of its ranks.
    pub fn new(handshakes: usize, least: usize, now: Instant) -> Self {
        let capacity = handshakes.max(least) as f64;
        HandshakeBudget {
            least,
            capacity,
            level: capacity,
            at: now,
            taken: HashMap::new(),
            tidy_above: FEW_SOURCES,
        }
    }

    /// Changes how many handshakes may begin at once.
    pub fn resize(&mut self, handshakes: usize) {
        let capacity = handshakes.max(self.least) as f64;
        self.level = (self.level + capacity - self.capacity).max(0.0);
        self.capacity = capacity;
    }

    /// Whether less than half is left: handshakes may begin only from proven addresses.
    pub fn is_scarce(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.level < self.capacity / 2.0
    }

    /// Whether a handshake from `source` may begin; if so, it takes its unit. `proven`: the source
    /// receives at its address.
    pub fn take(&mut self, source: Source, proven: bool, now: Instant) -> bool {
        self.refill(now);
        if self.level < 1.0 + self.taken_by(source, now) {
            return false;
        }
        self.level -= 1.0;
        if proven {
            self.charge(source, now);
        }
        true
    }

    /// Charges a `source` that has proven its address after its handshake began.
    pub fn charge(&mut self, source: Source, now: Instant) {
        for party in parties(source) {
            let amount = self.taken_by_party(party, now) + 1.0;
            self.taken.insert(party, Taken { amount, at: now });
        }
        if self.taken.len() > self.tidy_above {
            self.taken.retain(|_, taken| taken.now(now) >= NEGLIGIBLE);
            self.tidy_above = (2 * self.taken.len()).max(FEW_SOURCES);
            self.taken.shrink_to(self.tidy_above);
        }
    }

    /// Refunds the unit of a peer that has authenticated. `charged`: `source` was charged for it.
    pub fn refund(&mut self, source: Source, charged: bool, now: Instant) {
        self.refill(now);
        self.level = (self.level + 1.0).min(self.capacity);
        if !charged {
            return;
        }
        for party in parties(source) {
            let amount = self.taken_by_party(party, now) - 1.0;
            if amount < NEGLIGIBLE {
                self.taken.remove(&party);
            } else {
                self.taken.insert(party, Taken { amount, at: now });
            }
        }
    }

    fn refill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + REFILL_PER_SECOND * elapsed).min(self.capacity);
        self.at = self.at.max(now);
    }

    fn taken_by(&self, source: Source, now: Instant) -> f64 {
        let amounts = parties(source).map(|party| self.taken_by_party(party, now));
        let (sum, count) = amounts.fold((0.0, 0.0), |(sum, count), each| (sum + each, count + 1.0));
        sum / count
    }

    fn taken_by_party(&self, party: Party, now: Instant) -> f64 {
        self.taken.get(&party).map_or(0.0, |taken| taken.now(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::of(text.parse().unwrap())
    }

    fn sources(count: u8) -> Vec<Source> {
        (1..=count)
            .map(|number| source(&format!("10.0.0.{number}")))
            .collect()
    }

    /// How many handshakes each source began, if each tries once per millisecond.
    fn attack(
        budget: &mut HandshakeBudget,
        sources: &[Source],
        start: Instant,
        seconds: u64,
    ) -> Vec<usize> {
        let mut begun = vec![0; sources.len()];
        for millisecond in 0..seconds * 1000 {
            let now = start + Duration::from_millis(millisecond);
            for (number, source) in sources.iter().enumerate() {
                begun[number] += usize::from(budget.take(*source, true, now));
            }
        }
        begun
    }

    #[test]
    fn one_source_may_take_half_of_the_budget_at_once() {
        let now = Instant::now();
        let mut budget = HandshakeBudget::new(2048, 512, now);
        let host = source("10.0.0.1");
        let begun = (0..2048).filter(|_| budget.take(host, true, now)).count();
        assert_eq!(begun, 1024);
    }

    #[test]
    fn another_source_is_admitted_at_once_however_much_others_take() {
        let now = Instant::now();
        for count in [1, 64] {
            let mut budget = HandshakeBudget::new(256, 512, now);
            attack(&mut budget, &sources(count), now, 40);
            let later = now + Duration::from_secs(40);
            for _ in 0..4 {
                assert!(budget.take(source("10.0.1.1"), true, later), "{count}");
            }
        }
    }

    #[test]
    fn attackers_get_the_refill_rate_among_themselves_in_equal_shares() {
        let now = Instant::now();
        let mut budget = HandshakeBudget::new(256, 512, now);
        let attackers = sources(64);
        attack(&mut budget, &attackers, now, 40);
        let begun = attack(&mut budget, &attackers, now + Duration::from_secs(40), 10);
        let total: usize = begun.iter().sum();
        assert!((600..=680).contains(&total), "{total}");
        assert!(begun.iter().all(|&each| (9..=11).contains(&each)));
    }

    #[test]
    fn peers_that_authenticate_cost_nothing() {
        let now = Instant::now();
        let mut budget = HandshakeBudget::new(256, 512, now);
        let host = source("10.0.0.1");
        for _ in 0..10_000 {
            assert!(budget.take(host, true, now));
            budget.refund(host, true, now);
        }
        assert!(budget.taken.is_empty());
    }

    #[test]
    fn a_forged_address_is_not_charged_and_takes_at_most_half() {
        let now = Instant::now();
        let mut budget = HandshakeBudget::new(256, 512, now);
        let forged = source("10.0.0.1");
        let begun = (0..1000)
            .take_while(|_| !budget.is_scarce(now) && budget.take(forged, false, now))
            .count();
        assert_eq!(begun, 257);
        assert!(budget.take(forged, true, now));
    }

    #[test]
    fn an_ipv6_network_cannot_take_all_however_many_addresses_it_uses() {
        let now = Instant::now();
        let mut budget = HandshakeBudget::new(256, 512, now);
        let begun = (0..512)
            .filter(|number| budget.take(source(&format!("2001:db8::{number:x}")), true, now))
            .count();
        assert!((300..=350).contains(&begun), "{begun}"); // two thirds, less the addresses' own
        for number in 0..16 {
            let other = source(&format!("2001:db8:1::{number:x}"));
            assert!(budget.take(other, true, now));
        }
    }

    #[test]
    fn a_node_is_admitted_beside_attackers_of_its_own_ipv6_network() {
        let now = Instant::now();
        for count in [1, 64] {
            let mut budget = HandshakeBudget::new(256, 512, now);
            let attackers: Vec<Source> = (1..=count)
                .map(|number| source(&format!("2001:db8::1:{number:x}")))
                .collect();
            attack(&mut budget, &attackers, now, 40);
            let later = now + Duration::from_secs(40);
            for _ in 0..2 {
                assert!(budget.take(source("2001:db8::1"), true, later), "{count}");
            }
        }
    }

    #[test]
    fn a_larger_limit_is_there_at_once() {
        let now = Instant::now();
        let mut budget = HandshakeBudget::new(256, 512, now);
        let host = source("10.0.0.1");
        while budget.take(host, true, now) {}
        budget.resize(2048);
        let more = (0..2048).filter(|_| budget.take(host, true, now)).count();
        assert_eq!(more, 768);
    }

    #[test]
    fn sources_that_are_quiet_for_long_are_forgotten() {
        let start = Instant::now();
        let mut budget = HandshakeBudget::new(256, 512, start);
        for number in 0..100_000u32 {
            let now = start + Duration::from_millis(20) * number;
            let address = IpAddr::from((0x0a00_0000 + number).to_be_bytes());
            assert!(budget.take(Source::of(address), true, now));
        }
        assert!(budget.taken.len() < 4000, "{}", budget.taken.len());
    }
}
