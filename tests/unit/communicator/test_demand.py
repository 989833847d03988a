"""Asking for what comes after a communicator."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nexar.cluster.decisions.succession_events import Event, Recover, Wanted
from nexar.communicator.demand import Demand
from nexar.errors import RecoveryTimeout
from nexar.group import deadline_after
from tests.unit.communicator.scripted import membership

PART, EPOCH, TIMEOUT = 7, 4, 3.0
RENEWED = Wanted(renewed=(PART,), epoch=EPOCH)


class Cluster:
    """Lineage, recovery and lookout of node 1: a successor comes after so many looks for it."""

    def __init__(self, *, looks: int = 0, suspects: tuple[int, ...] = (), concerned: bool = False) -> None:
        self.looks = looks
        self._suspects = suspects
        self.concerned = concerned
        self.membership = SimpleNamespace(epoch=EPOCH)
        self.asked: list[Event] = []
        group = SimpleNamespace(size=3, rank=0)
        self.branch: Any = SimpleNamespace(
            communicator=PART,
            successor=None,
            nodes=frozenset({1, 2, 3}),
            group=group,
            membership=membership([1, 2, 3], 1),
            is_stalled=False,
        )
        self.demand = Demand(cast(Any, self), cast(Any, self), cast(Any, self))

    # -- lineage

    def is_barred(self, branch: object) -> bool:
        return False

    def is_concerned(self, branch: object) -> bool:
        return self.concerned

    def wait_for_successor(self, branch: object, deadline: float) -> str | None:
        return "the next" if self.asked or self.concerned else None

    # -- recovery and lineage

    def missing(self, branch: object = None) -> tuple[int, ...]:
        return () if branch is not None else (3,)

    def suspects(self) -> dict[int, str]:
        return dict.fromkeys(self._suspects, "silence")

    def put(self, event: Event) -> None:
        self.asked.append(event)

    # -- lookout

    def looks_into(self, nodes: frozenset[int]) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def succeed(self, timeout: float = TIMEOUT) -> object:
        return self.demand.succeed(self.branch, deadline_after(timeout), timeout)


@pytest.mark.parametrize(
    ("cluster", "asked"),
    [
        (Cluster(), [RENEWED]),
        (Cluster(suspects=(3,)), [Recover()]),
        (Cluster(suspects=(9,)), [RENEWED]),
        (Cluster(concerned=True), []),
        (Cluster(concerned=True, suspects=(3,)), [Recover()]),
        (Cluster(looks=3, suspects=(3,)), [Recover()]),
    ],
    ids=[
        "nobody is lost",
        "a member is lost",
        "a stranger is lost",
        "the next is being made",
        "the next is being made with who is lost",
        "a member is being looked into",
    ],
)
def test_what_is_asked_for_depends_on_who_is_lost(cluster: Cluster, asked: list[Event]) -> None:
    assert cluster.succeed() == "the next"
    assert cluster.asked == asked


def test_who_comes_to_nothing_in_time_is_told_who_is_missing() -> None:
    cluster = Cluster(looks=1_000_000)
    with pytest.raises(RecoveryTimeout) as late:
        cluster.succeed(0.05)
    assert late.value.missing_votes == (2,)
    assert cluster.asked == []
