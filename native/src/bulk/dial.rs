//! Dialing: makes a channel of several connections to one of several addresses. Runs in the thread that calls it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use rustls::pki_types::ServerName;
use rustls::ClientConfig;

use super::channel::{Changed, Core};
use super::connection::{Connection, Dialed};
use super::frame::{Hello, Nonce};
use super::shared::{closed, os_code, Shared};
use super::socket::Socket;
use crate::runtime::errors::Failure;
use crate::runtime::process;

/// The next address is tried if the one before has not answered after this time.
const STAGGER: Duration = Duration::from_millis(250);
/// How often signal handlers run.
const SLICE: Duration = Duration::from_millis(50);

pub struct Plan {
    pub addresses: Vec<SocketAddr>,
    pub name: ServerName<'static>,
    pub config: Arc<ClientConfig>,
    pub hello: Vec<u8>,
    pub count: usize,
    pub plain: bool,
    pub nonce: Nonce,
    pub deadline: Instant,
}

/// Attempts that were not successful are ended, however this returns.
struct Attempts {
    made: Vec<(SocketAddr, Arc<Core>)>,
    changed: Arc<Changed>,
}

impl Drop for Attempts {
    fn drop(&mut self) {
        for (_, core) in &self.made {
            core.end(closed("the dial has ended"));
        }
    }
}

/// Blocks without the GIL; runs signal handlers, whose exceptions end the dial.
pub fn dial(py: Python<'_>, shared: &Arc<Shared>, plan: &Plan) -> PyResult<Arc<Core>> {
    let mut attempts = Attempts {
        made: Vec::new(),
        changed: Arc::default(),
    };
    let mut next = 0;
    let mut next_start = Instant::now();
    loop {
        let seen = attempts.changed.count();
        let failed = |each: &(SocketAddr, Arc<Core>)| each.1.failure().is_some();
        let all_failed = attempts.made.iter().all(failed);
        if next < plan.addresses.len() && (all_failed || Instant::now() >= next_start) {
            start(shared, plan, next, &mut attempts).map_err(|failure| failure.into_py(py))?;
            next += 1;
            next_start = Instant::now() + STAGGER;
            continue;
        }
        if all_failed {
            return Err(failure_of(&attempts).into_py(py));
        }
        if let Some(at) = winner(&attempts) {
            let (address, core) = attempts.made.swap_remove(at);
            let mut rest = Attempts {
                made: vec![(address, core.clone())],
                changed: attempts.changed.clone(),
            };
            drop(attempts);
            complete(py, shared, plan, address, &core, &rest.changed)?;
            rest.made.clear();
            return Ok(core);
        }
        let until = match next < plan.addresses.len() {
            true => plan.deadline.min(next_start),
            false => plan.deadline,
        };
        wait(py, &attempts.changed, seen, until)?;
        if Instant::now() >= plan.deadline {
            return Err(timed_out(shared).into_py(py));
        }
    }
}

/// The attempt whose first connection is established.
fn winner(attempts: &Attempts) -> Option<usize> {
    let established =
        |each: &(SocketAddr, Arc<Core>)| each.1.joined() > 0 && each.1.failure().is_none();
    attempts.made.iter().position(established)
}

/// Dials the other connections of the channel, and waits for them.
fn complete(
    py: Python<'_>,
    shared: &Arc<Shared>,
    plan: &Plan,
    address: SocketAddr,
    core: &Arc<Core>,
    changed: &Changed,
) -> PyResult<()> {
    for index in 1..plan.count {
        connect(shared, plan, address, core, index).map_err(|failure| failure.into_py(py))?;
    }
    loop {
        let seen = changed.count();
        if core.is_formed() {
            return core.announce().map_err(|failure| failure.into_py(py));
        }
        if let Some(failure) = core.failure() {
            return Err(failure.into_py(py));
        }
        if Instant::now() >= plan.deadline {
            return Err(timed_out(shared).into_py(py));
        }
        wait(py, changed, seen, plan.deadline)?;
    }
}

fn start(
    shared: &Arc<Shared>,
    plan: &Plan,
    next: usize,
    attempts: &mut Attempts,
) -> Result<(), Failure> {
    shared.check_open()?;
    let address = plan.addresses[next];
    let core = Core::new(
        shared,
        true,
        plan.hello.clone(),
        plan.count,
        attempts.changed.clone(),
    );
    shared.register(&core);
    attempts.made.push((address, core.clone()));
    if let Err(failure) = connect(shared, plan, address, &core, 0) {
        core.end(failure);
    }
    Ok(())
}

fn connect(
    shared: &Arc<Shared>,
    plan: &Plan,
    address: SocketAddr,
    core: &Arc<Core>,
    index: usize,
) -> Result<(), Failure> {
    let socket = Socket::dial(address).map_err(|error| match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => Failure::Os(os_code(&error)),
        _ => Failure::connect(error),
    })?;
    let dialed = Dialed {
        core: core.clone(),
        config: plan.config.clone(),
        name: plan.name.clone(),
        hello: Some(Hello {
            plain: plan.plain,
            index: index as u8,
            count: plan.count as u8,
            nonce: plan.nonce,
            text: plan.hello.clone(),
        }),
        index,
        wants_plain: plan.plain,
    };
    shared.serve(|link| {
        core.attach(index, link.clone()).map_err(Failure::connect)?;
        let name = address.to_string();
        Connection::dial(shared, socket, link, name, dialed, plan.deadline)
    })
}

fn wait(py: Python<'_>, changed: &Changed, seen: u64, until: Instant) -> PyResult<()> {
    let limit = until.saturating_duration_since(Instant::now()).min(SLICE);
    process::detached(py, || changed.wait(seen, limit));
    py.check_signals()
}

fn timed_out(shared: &Shared) -> Failure {
    match shared.check_open() {
        Err(failure) => failure,
        Ok(()) => Failure::Connect {
            kind: "timed_out",
            reason: "no answer in time".to_owned(),
        },
    }
}

/// The failure of the only attempt, or one that names all. A rejected certificate is the most important.
fn failure_of(attempts: &Attempts) -> Failure {
    let failures: Vec<(SocketAddr, Failure)> = attempts
        .made
        .iter()
        .filter_map(|(address, core)| Some((*address, as_dial(core.failure()?))))
        .collect();
    if let [(_, failure)] = failures.as_slice() {
        return failure.clone();
    }
    let reasons = failures
        .iter()
        .map(|(address, failure)| format!("{address}: {}", failure.describe()));
    let reason = reasons.collect::<Vec<_>>().join("; ");
    for (_, failure) in failures {
        if let Failure::Verification { by, .. } = failure {
            return Failure::Verification { reason, by };
        }
    }
    Failure::connect(reason)
}

/// A channel that is lost before all of it is established is a dial that failed.
fn as_dial(failure: Failure) -> Failure {
    match failure {
        Failure::Lost { reason, .. } => Failure::connect(reason),
        other => other,
    }
}
