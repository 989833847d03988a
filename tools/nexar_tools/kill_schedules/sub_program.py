"""The part of a program that runs on a sub-communicator and its successors."""

from __future__ import annotations

import zlib
from random import Random
from typing import Any, Final

import numpy as np

from nexar.communicator.communicator import Communicator
from nexar.communicator.resilient import Team
from nexar.errors import MembershipChanged, Revoked
from nexar.types import NodeId
from nexar_tools.kill_schedules.reporter import Reporter
from nexar_tools.kill_schedules.schedule import Step
from nexar_tools.kill_schedules.verbs import TEAM_CALLS, TeamCall, WrongResult, call_once, check


class SubProgram:
    """Runs once, and closes the sub-communicator."""

    def __init__(self, reporter: Reporter, sub: Communicator, step: Step, chance: Random) -> None:
        self._reporter = reporter
        self._sub = sub
        self._step = step
        self._first_epoch: Final = sub.epoch
        self._node: Final = sub.membership.member(sub.rank).node
        self._seeds = [chance.getrandbits(32) for _ in range(step.repetitions)]
        self._revoker = chance.randrange(sub.size) if step.kind == "revoke" else None
        self._next = 0  # index of the next call
        self._settled = True  # the first generation begins with equal positions
        self._revoked = False
        reporter.opened(sub)

    def run(self) -> bool:
        """False: it ended early, because another member closed it after a loss."""
        try:
            return self._run_team() if self._step.kind == "team" else self._run_calls()
        finally:
            self._sub.close()

    def _run_calls(self) -> bool:
        while True:
            try:
                self._continue()
            except MembershipChanged as change:
                self._reporter.changed(self._sub, change)
                self._sub, self._settled, self._revoked = change.communicator, False, False
            except Revoked as end:
                if end.closed:
                    return False
                self._revoked = True
            else:
                return True

    def _continue(self) -> None:
        if self._revoked:
            self._shrink()
        if not self._settled:
            self._settle()
        while self._next < len(self._seeds):
            if self._next == len(self._seeds) // 2 and self._is_revoker():
                self._sub.revoke("the schedule wants it")
            self._call(Random(self._seeds[self._next]))
            self._next += 1
        # Not all calls need all members: without this one, some would be done before they hear of a revocation.
        self._reporter.doing = "last barrier of a sub-communicator"
        self._sub.barrier()

    def _is_revoker(self) -> bool:
        return self._sub.epoch == self._first_epoch and self._sub.rank == self._revoker

    def _shrink(self) -> None:
        if self._revoker is None:
            raise WrongResult(f"{self._sub} is revoked, but no rank has revoked it")
        self._reporter.doing = "shrink"
        self._sub = self._sub.shrink()
        self._reporter.opened(self._sub)
        self._reporter.done("revoke, shrink")
        self._settled = self._revoked = False

    def _settle(self) -> None:
        self._reporter.doing = "settle of a sub-communicator"
        rows = self._sub.all_gather_object([self._node, self._next])
        members = [member.node for member in self._sub.membership.members]
        check("the members of a sub-communicator", [row[0] for row in rows], members)
        self._next, self._settled = min(row[1] for row in rows), True

    def _call(self, chance: Random) -> None:
        kind = chance.choice(("collectives", "messages", "batch", "agree"))
        if kind == "agree":
            agree_once(self._reporter, self._sub, self._node, self._next)
        else:
            call_once(self._reporter, self._sub, kind, self._step.form, chance)

    def _run_team(self) -> bool:
        team = self._sub.resilient()
        key = [self._sub.id, self._sub.epoch]
        try:
            for number, seed in enumerate(self._seeds):
                self._call_team(team, [*key, number], Random(seed))
        except Revoked as end:
            if not end.closed:
                raise
            return False
        finally:
            self._sub = team.communicator
        return True

    def _call_team(self, team: Team[Communicator], key: list[int], chance: Random) -> None:
        verb = chance.choice(list(TEAM_CALLS))
        self._reporter.doing = f"team.{verb}"
        call = TeamCall(team, self._node, chance)
        given = TEAM_CALLS[verb](call)
        self._reporter.fact("team", key, [call.nodes, _digest(given)])
        self._reporter.done(f"team.{verb}")


def agree_once(reporter: Reporter, comm: Communicator, node: NodeId, number: int) -> None:
    """All ranks get the value of one of them; `number` identifies the call on this communicator."""
    reporter.doing = "agree"
    given = comm.agree([node, number])
    if given[1] != number or comm.membership.rank_of(given[0]) is None:
        raise WrongResult(f"agree() returned {given}, which no member passed, in {comm}")
    reporter.fact("agree", [comm.id, comm.epoch, number], given)
    reporter.done("agree")


def _digest(given: Any) -> int | str | None:
    return zlib.crc32(np.ascontiguousarray(given).tobytes()) if isinstance(given, np.ndarray) else given
