//! The background thread: drives while no Python thread does.
//!
//! It never touches Python, so it goes on while some code holds the GIL for seconds. Waking it for
//! each call would cost more than the call; so while threads come and go it merely looks every two
//! milliseconds, and takes over when nobody has driven for that long. While one thread leads for
//! long it parks, to be woken when that thread leaves.

use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use crate::poll::PollSet;
use crate::shared::Shared;
use crate::state::State;
use crate::wait::add_socket;
use crate::waiter::Waiter;

const DELAY: Duration = Duration::from_millis(2);
/// So many looks at one and the same leader, and it parks.
const LONG_STINT: u32 = 8;
const IDLE: Duration = Duration::from_secs(3600);

/// Signals are for Python's threads: all are blocked while the thread is made, hence inherited.
pub fn start(shared: Arc<Shared>) -> io::Result<JoinHandle<()>> {
    // SAFETY: plain signal set manipulation on this thread, restored below.
    let before = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    };
    let thread = Builder::new()
        .name("nexar-quic".to_owned())
        .spawn(move || run(&shared));
    // SAFETY: the set read above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    thread
}

fn run(shared: &Shared) {
    let mut state = shared.state.lock();
    let Some(me) = state.crew.background() else {
        return;
    };
    let mut seen = state.crew.stints;
    let mut looks = 0;
    while state.closed.is_none() {
        if state.crew.led() && !state.crew.leads(&me) {
            looks = if state.crew.stints == seen {
                looks + 1
            } else {
                0
            };
            seen = state.crew.stints;
            state.crew.parked = looks >= LONG_STINT;
            let patience = if state.crew.parked { IDLE } else { DELAY };
            rest(&mut state, &me, patience);
            state.crew.parked = false;
        } else if let Some(left) = reprieve(&state, &me) {
            rest(&mut state, &me, left);
        } else if !drive(shared, &mut state, &me) {
            return;
        }
    }
}

/// How long to leave the endpoint to the thread that drove it last.
fn reprieve(state: &State, me: &Arc<Waiter>) -> Option<Duration> {
    if state.crew.leads(me) || state.crew.summoned {
        return None;
    }
    DELAY
        .checked_sub(state.crew.driven.elapsed())
        .filter(|left| !left.is_zero())
}

fn rest(state: &mut MutexGuard<'_, State>, me: &Arc<Waiter>, patience: Duration) {
    if !me.lie_down() {
        return;
    }
    let mut set = PollSet::new();
    set.add(me.descriptor(), libc::POLLIN);
    MutexGuard::unlocked(state, || set.wait(Some(patience)));
    me.get_up();
}

/// One round as the leader, then a sleep on the socket. False: the endpoint is no more.
fn drive(shared: &Shared, state: &mut MutexGuard<'_, State>, me: &Arc<Waiter>) -> bool {
    state.crew.summoned = false;
    state.crew.lead(me);
    state.hub.counters.background_rounds += 1;
    let Ok(round) = shared.drive(state) else {
        return false;
    };
    if round.busy {
        MutexGuard::bump(state);
        return true;
    }
    if !me.lie_down() {
        return true;
    }
    let mut set = PollSet::new();
    let until = add_socket(state, &mut set, round.now + IDLE);
    set.add(me.descriptor(), libc::POLLIN);
    let timeout = until.saturating_duration_since(Instant::now());
    MutexGuard::unlocked(state, || set.wait(Some(timeout)));
    me.get_up();
    state.crew.awake(me);
    true
}
