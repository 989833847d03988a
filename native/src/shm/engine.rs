//! Runs the operations of one rank in a region, one at a time, by order number.

use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::shm::collectives::{CollectivePlan, Inputs};
use crate::shm::region::{Mapping, Packed};
use crate::shm::sync::{End, Goal, Progress, Rounds, WaitMode, Waited};

/// An operation that runs, or waits for its turn.
pub struct Run {
    plan: CollectivePlan,
    /// The round before its first.
    base: u64,
    /// The stage that runs once the goal is reached. None: not begun.
    stage: Option<u64>,
    goal: Goal,
}

impl Run {
    #[inline]
    pub fn new(plan: CollectivePlan, order: u64, sequence: u64, fingerprint: Packed) -> Self {
        Run {
            plan,
            base: 0,
            stage: None,
            goal: Goal {
                round: 0,
                order,
                sequence,
                fingerprint,
                compare: false,
                position: 1,
            },
        }
    }

    pub fn begun(&self) -> bool {
        self.stage.is_some()
    }

    pub fn rounds(&self) -> u64 {
        self.plan.rounds
    }

    pub fn round(&self) -> u64 {
        self.goal.round
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Done,
    /// Not yet, and the mode allows no longer wait.
    NotYet,
    Interrupted,
    Ended(End),
}

/// The order number whose turn it is, and the rounds. One thread at a time uses it.
pub struct Engine {
    rounds: Rounds,
    pub head: u64,
    /// Nobody can still read what this rank wrote before: all have reached the end of the last operation.
    settled: bool,
    inputs: Inputs,
    /// Why no further operation can run.
    pub ended: Option<End>,
}

impl Engine {
    pub fn new(rounds: Rounds) -> Self {
        Engine {
            rounds,
            head: 1,
            settled: true,
            inputs: Inputs::default(),
            ended: None,
        }
    }

    pub fn mapping(&self) -> &Mapping {
        self.rounds.mapping()
    }

    /// Runs the operation, whose turn it is, as far as the mode allows. A result other than `Done` leaves it as it
    /// is: run it again, or pass its end to `end`.
    #[inline]
    pub fn run(&mut self, run: &mut Run, mode: WaitMode<'_>) -> Step {
        debug_assert_eq!(run.goal.order, self.head);
        let mut stage = match run.stage {
            Some(stage) => stage,
            None => self.begin(run),
        };
        loop {
            if let Some(step) = stop(stage, mode) {
                return step;
            }
            show(run, mode);
            match self.rounds.wait(&mut run.goal, mode) {
                Waited::Reached => {}
                Waited::NotYet => return Step::NotYet,
                Waited::Interrupted => return Step::Interrupted,
                Waited::Ended(end) => return Step::Ended(end),
            }
            if stage == 0 {
                self.settled = true;
                self.rounds
                    .tell_fingerprint(run.goal.order, run.goal.fingerprint);
            }
            let mapping = self.rounds.mapping();
            // SAFETY: all ranks have published the round before this stage; the plan was made for this region.
            unsafe { run.plan.run(mapping, &mut self.inputs, run.base, stage) };
            if stage == run.plan.rounds {
                self.head += 1;
                return Step::Done;
            }
            stage += 1;
            run.stage = Some(stage);
            run.goal.round = run.base + stage;
            run.goal.position = 1;
            run.goal.compare = stage == 1;
            self.rounds.publish(run.goal.round);
        }
    }

    /// Waits before the first stage if others may still read what this rank wrote.
    #[inline]
    fn begin(&mut self, run: &mut Run) -> u64 {
        run.base = self.rounds.round();
        run.stage = Some(0);
        run.goal.round = run.base;
        run.goal.position = match self.settled {
            true => self.mapping().geometry.ranks,
            false => 1,
        };
        0
    }

    /// Ends the operation, whose turn it is. Returns the end to report: a mismatch, if that explains it.
    pub fn end(&mut self, run: &Run, end: End) -> End {
        let end = match end {
            End::Aborted(_) => match self.rounds.find_mismatch(&run.goal) {
                Some((rank, theirs)) => End::Mismatch(rank, theirs),
                None => end,
            },
            end => end,
        };
        match end {
            End::Aborted(_) | End::Cancelled => {
                let base = run.stage.map_or(self.rounds.round(), |_| run.base);
                self.abort(base, run.plan.rounds);
            }
            // No mark: the others must see the mismatch, or the death.
            _ => self.ended = Some(end),
        }
        end
    }

    /// Aborts the operation whose turn it is and which has not begun.
    pub fn skip(&mut self, rounds: u64) {
        self.abort(self.rounds.round(), rounds);
    }

    fn abort(&mut self, base: u64, rounds: u64) {
        self.settled = false;
        self.rounds.abort(self.head, base + rounds);
        self.head += 1;
    }

    /// This rank runs no further operation.
    pub fn leave(&mut self) {
        self.ended.get_or_insert(End::Closed);
        self.rounds.leave(self.head);
    }
}

/// What ends a run although the others keep pace: a long operation may take seconds.
#[inline]
fn stop(stage: u64, mode: WaitMode<'_>) -> Option<Step> {
    let is_late = |until| stage > 1 && Instant::now() >= until;
    match mode {
        WaitMode::Looks => None,
        WaitMode::Yields(until) => is_late(until).then_some(Step::NotYet),
        WaitMode::Sleeps(until, context) => match context.stop() {
            Some(Waited::Ended(end)) => Some(Step::Ended(end)),
            Some(_) => Some(Step::Interrupted),
            None => is_late(until).then_some(Step::NotYet),
        },
    }
}

/// Shows other threads what the operation waits for.
fn show(run: &Run, mode: WaitMode<'_>) {
    if let WaitMode::Sleeps(_, context) = mode {
        let Progress { round, moved_at } = context.progress;
        round.store(run.goal.round, Ordering::Relaxed);
        moved_at.store(crate::shm::clock::nanoseconds(), Ordering::Relaxed);
    }
}
