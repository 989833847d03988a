//! The background thread: drives the endpoint while no Python thread does.
//!
//! It never runs Python code, so it works while other code holds the GIL for seconds. Waking it for
//! each call would cost more than the call. So while threads wait only briefly, it checks every two
//! milliseconds and takes over if no thread has driven for that long. While the same thread keeps
//! driving, it parks until that thread leaves.

use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use crate::quic::driver::Waiter;
use crate::quic::endpoint_shared::Shared;
use crate::quic::state::State;
use crate::quic::wait::add_socket;
use crate::runtime::descriptors::PollSet;
use crate::runtime::signals::with_signals_blocked;

const DELAY: Duration = Duration::from_millis(2);
/// It parks after this many checks that found the same driver.
const CHECKS_BEFORE_PARKING: u32 = 8;
const IDLE: Duration = Duration::from_secs(3600);

pub fn start(shared: Arc<Shared>) -> io::Result<JoinHandle<()>> {
    with_signals_blocked(|| {
        Builder::new()
            .name("nexar-quic".to_owned())
            .spawn(move || run(&shared))
    })
}

fn run(shared: &Shared) {
    let mut state = shared.state.lock();
    let Some(waiter) = state.election.background() else {
        return;
    };
    let mut seen = state.election.terms;
    let mut checks = 0;
    while state.closed.is_none() {
        if state.election.has_driver() && !state.election.is_driver(&waiter) {
            checks = if state.election.terms == seen {
                checks + 1
            } else {
                0
            };
            seen = state.election.terms;
            state.election.parked = checks >= CHECKS_BEFORE_PARKING;
            let duration = if state.election.parked { IDLE } else { DELAY };
            sleep(&mut state, &waiter, duration);
            state.election.parked = false;
        } else if let Some(left) = remaining_delay(&state, &waiter) {
            sleep(&mut state, &waiter, left);
        } else if !drive(shared, &mut state, &waiter) {
            return;
        }
    }
}

/// How long to wait for the thread that drove last before driving. None: drive now.
fn remaining_delay(state: &State, waiter: &Arc<Waiter>) -> Option<Duration> {
    if state.election.is_driver(waiter) || state.election.background_requested {
        return None;
    }
    DELAY
        .checked_sub(state.election.last_driven.elapsed())
        .filter(|left| !left.is_zero())
}

fn sleep(state: &mut MutexGuard<'_, State>, waiter: &Arc<Waiter>, duration: Duration) {
    if !waiter.prepare_sleep() {
        return;
    }
    let mut set = PollSet::new();
    set.add(waiter.descriptor(), libc::POLLIN);
    MutexGuard::unlocked(state, || set.wait(Some(duration)));
    waiter.finish_sleep();
}

/// Drives one round, then sleeps on the socket. False: the endpoint is closed.
fn drive(shared: &Shared, state: &mut MutexGuard<'_, State>, waiter: &Arc<Waiter>) -> bool {
    state.election.background_requested = false;
    state.election.try_drive(waiter);
    state.core.counters.background_rounds += 1;
    let Ok(round) = shared.drive(state) else {
        return false;
    };
    if round.busy {
        MutexGuard::bump(state);
        return true;
    }
    if !waiter.prepare_sleep() {
        return true;
    }
    let mut set = PollSet::new();
    let until = add_socket(state, &mut set, round.now + IDLE);
    set.add(waiter.descriptor(), libc::POLLIN);
    let timeout = until.saturating_duration_since(Instant::now());
    MutexGuard::unlocked(state, || set.wait(Some(timeout)));
    waiter.finish_sleep();
    state.election.clear_sleep(waiter);
    true
}
