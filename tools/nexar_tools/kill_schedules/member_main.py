"""One rank of kill schedules: runs programs, checks each result, follows every change, and reports as JSON lines.

The position of a rank is the number of a schedule and a step. A loss hits the ranks at different positions. So the
first call on every communicator compares them, and all continue from the lowest: every step can be repeated on a
successor. A step may leave sub-communicators early; closing them tells the members that still wait there.

Rank 0 reads the number of the next schedule from the file `order`, and broadcasts it. While there is no new one, the
ranks admit joiners.
"""

from __future__ import annotations

import argparse
import faulthandler
import signal
import time
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np

from nexar.communicator.communicator import Communicator
from nexar.errors import MembershipChanged, RpcCancelled
from nexar.launch.init import init
from nexar_tools.kill_schedules.reporter import Reporter
from nexar_tools.kill_schedules.schedule import Schedule, Step, draw_schedule
from nexar_tools.kill_schedules.sub_program import SubProgram, agree_once
from nexar_tools.kill_schedules.verbs import RemoteTarget, WrongResult, call_once, check, perform

STOP: Final = -1
"""The order to stop."""
_STATE_COUNT: Final = 20_000
_IDLE: Final = 0.01  # seconds between two looks for an order


class Position(NamedTuple):
    """Where a rank is. Before the first order: number -2."""

    number: int = -2
    step: int = 0


class Left(Exception):
    """This rank is no member any more."""


class Replaced(Exception):
    """The communicator was replaced at a checkpoint: the ranks must compare positions."""


class Member:
    """The rank of this process."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        self._comm = comm
        self._seed = seed
        self._node: Final = comm.membership.member(comm.rank).node
        self._reporter = Reporter()
        self._position = Position()
        self._roster: list[int] = []  # nodes by rank at the beginning of the schedule
        self._settled = False
        self._reported_end: int | None = None  # the last schedule whose end was reported
        self._serve()
        self._receive_state()
        self._reporter.report("here", node=self._node, joined=comm.state is not None)
        self._reporter.opened(comm)

    def _serve(self) -> None:
        """Successors inherit the functions. A joiner registers them before the ranks compare positions."""
        self._comm.serve(lambda x, y: x + y, name="add")
        self._comm.serve(lambda array: array * 2, name="double")

        async def later(x: int) -> int:
            return x + 1

        self._comm.serve(later)

    def _state(self) -> dict[str, Any]:
        number, step = self._position
        return {"number": number, "step": step, "roster": self._roster, "array": np.arange(number, _STATE_COUNT)}

    def _receive_state(self) -> None:
        state = self._comm.state
        if state is not None:
            check("the state", state["array"], np.arange(state["number"], _STATE_COUNT))
            self._position, self._roster = Position(state["number"], state["step"]), list(state["roster"])

    # -- the program -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the order to stop, or until this rank has left."""
        while self._position.number != STOP:
            try:
                self._advance()
            except MembershipChanged as change:
                self._reporter.changed(self._comm, change)
                self._comm, self._settled = change.communicator, False
            except Replaced:
                self._settled = False
            except Left:
                break
        self._reporter.report("left")
        self._comm.close()

    def _advance(self) -> None:
        if not self._settled:
            self._settle()
        number, step = self._position
        schedule = draw_schedule(self._seed, number, len(self._roster)) if self._roster else None
        if schedule is None or step == len(schedule.steps):
            self._await_order()
            return
        self._reporter.report("step", number=number, step=step)
        self._run_step(schedule, schedule.steps[step])
        self._position = Position(number, step + 1)
        closer = None if schedule.closer is None else self._roster[schedule.closer]
        if closer == self._node and step >= schedule.closes_after:
            raise Left

    def _settle(self) -> None:
        """All continue from the lowest position."""
        self._reporter.doing = "settle"
        comm = self._comm
        rows = comm.all_gather_object([self._node, *self._position, self._roster])
        nodes = [row[0] for row in rows]
        check("the members", nodes, [member.node for member in comm.membership.members])
        number, step, roster = min(row[1:] for row in rows)
        self._position, self._roster, self._settled = Position(number, step), roster, True
        self._reporter.report("settled", nodes=nodes)

    def _await_order(self) -> None:
        """The next schedule begins, or joiners come in."""
        self._reporter.doing = "order"
        number = self._position.number
        if self._reported_end != number:
            self._reported_end = number
            self._reporter.report("end", number=number, verbs=self._reporter.take_verbs())
        ordered = self._comm.broadcast_object(_read_order() if self._comm.rank == 0 else None, 0)
        if ordered != number:
            self._roster = [member.node for member in self._comm.membership.members]
            self._position = Position(ordered, 0)
            self._reporter.report("begin", number=ordered, roster=self._roster)
            return
        time.sleep(_IDLE)
        self._checkpoint()

    def _run_step(self, schedule: Schedule, step: Step) -> None:
        chance = Random(step.seed)
        match step.kind:
            case "collectives" | "messages" | "batch":
                for _ in range(step.repetitions):
                    call_once(self._reporter, self._comm, step.kind, step.form, chance)
            case "remote_calls":
                self._call_remotely(schedule, step, chance)
            case "agree":
                agree_once(self._reporter, self._comm, self._node, step.seed)
            case "checkpoint":
                self._checkpoint()
            case "leave":
                assert schedule.leaver is not None
                self._leave(self._roster[schedule.leaver], asked=step.seed % 2 == 0)
            case _:
                self._use_sub_communicator(step, chance)

    def _call_remotely(self, schedule: Schedule, step: Step, chance: Random) -> None:
        """A call is cancelled if its target closes meanwhile: the next collective raises MembershipChanged."""
        try:
            for _ in range(step.repetitions):
                self._call_remote(step, chance)
        except RpcCancelled:
            if schedule.closer is None:
                raise

    def _call_remote(self, step: Step, chance: Random) -> None:
        self._reporter.doing = "remote call"
        comm, number, shift = self._comm, chance.randrange(1000), chance.randrange(1, 8)
        target = RemoteTarget(comm, (comm.rank + shift) % comm.size)
        doubled = target.start.double(np.arange(number))
        given = [perform(target, step.form, "add", number, comm.rank), perform(target, step.form, "later", number)]
        check("remote call", [*given, doubled.wait()], [number + comm.rank, number + 1, np.arange(number) * 2])
        self._reporter.done(f"remote call ({step.form})")

    # -- members that come and go ----------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        """If there are changes, the step is repeated on the successor, where there are none."""
        self._reporter.doing = "checkpoint"
        change = self._comm.checkpoint(self._state)
        self._reporter.done("checkpoint")
        if change is None:
            return
        if change.communicator is None:
            raise Left
        self._comm = change.communicator
        self._reporter.opened(self._comm)
        raise Replaced

    def _leave(self, leaver: int, *, asked: bool) -> None:
        rank = self._comm.membership.rank_of(leaver)
        if asked and self._comm.rank == 0 and rank is not None:
            self._comm.remove(rank, "the schedule wants it")
        if not asked and self._node == leaver:
            self._comm.leave()
        self._checkpoint()
        self._reporter.done("leave")

    # -- sub-communicators -----------------------------------------------------------------------------------

    def _use_sub_communicator(self, step: Step, chance: Random) -> None:
        """Ends with a call on the world: if a sub-communicator ended early, the loss must show there."""
        self._reporter.doing = "group" if step.kind == "group" else "split"
        world, complete = self._comm, True
        if step.kind == "group":
            sub = world.group(chance.sample(range(world.size), chance.randint(1, world.size)))
        else:
            colours = 2 if step.kind == "split" else 1
            sub = world.split((world.rank + step.seed) % colours, chance.choice((0, -world.rank)))
        self._reporter.done(self._reporter.doing)
        if sub is not None:
            complete = SubProgram(self._reporter, sub, step, Random(step.seed)).run()
        self._reporter.doing = "barrier after a sub-communicator"
        world.barrier()
        if not complete:
            raise WrongResult(f"a sub-communicator of {world} ended early, but nobody was lost")


def _read_order() -> int:
    return int(Path("order").read_text())


def main() -> None:
    """Runs one member. SIGUSR2 dumps all stacks to standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    faulthandler.register(signal.SIGUSR2)
    Member(init(), given.seed).run()


if __name__ == "__main__":
    main()
