from dataclasses import replace
from types import SimpleNamespace

import pytest

from nexar.cluster.change import WORLD
from nexar.cluster.membership import Member, Membership
from nexar.communicator.bootstrap import begin_world, catch_up
from nexar.communicator.settling import NEWCOMER, NOTHING, Completed
from nexar.config import Config
from nexar.errors import LinkClosed, NexarError, PeerLost
from nexar.group import deadline_after
from tests.ranks import PATIENCE

FIRST = Membership(b"c" * 16, 1, (Member(1, "host", bytes(32), {}),))
OVERTAKEN = LinkClosed(owner="the communicator that was being made")
LOST = PeerLost(rank=2, node=3, cause="it was killed")


class Script:
    """A lineage in which making goes as it is written, once for each try."""

    def __init__(self, *tries: NexarError | None, chosen: int = 1) -> None:
        self._tries = list(tries)
        self._world = replace(FIRST, epoch=chosen)
        self.needed: list[tuple[int, int]] = []
        self.begun: list[tuple[int, Completed | None]] = []

    def begin(self, membership: Membership, communicator: int, deadline: float, *, completed: Completed | None) -> str:
        self.begun.append((membership.epoch, completed))
        outcome = self._tries.pop(0)
        if outcome is not None:
            raise outcome
        return f"the world of epoch {membership.epoch}"

    def need(self, communicator: int, membership: Membership, node: int, cause: str) -> None:
        self.needed.append((membership.epoch, node))

    def wait_for_following(self, communicator: int, membership: Membership, deadline: float) -> Membership | None:
        return self._world if self._world.epoch > membership.epoch else None


def begin(script: Script, membership: Membership = FIRST, **settings: object) -> object:
    presence = SimpleNamespace(lineage=script, node=SimpleNamespace(config=Config(**settings)))
    return begin_world(presence, membership, deadline_after(PATIENCE))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("again", "epoch", "asked"), [(True, 3, [((WORLD,), 0)]), (True, 1, []), (False, 3, [])], ids=str
)
def test_who_came_in_before_it_heard_so_begins_with_a_membership_that_is_new_to_all(
    again: bool, epoch: int, asked: list[object]
) -> None:
    heard: list[object] = []
    lineage = SimpleNamespace(renew=lambda *facts: heard.append(facts))
    joined = SimpleNamespace(again=again, membership=replace(FIRST, epoch=epoch))
    catch_up(SimpleNamespace(lineage=lineage), joined)  # type: ignore[arg-type]
    assert heard == asked


def test_who_is_overtaken_by_a_change_begins_with_the_next_membership() -> None:
    script = Script(OVERTAKEN, None, chosen=5)
    assert begin(script, replace(FIRST, epoch=4)) == "the world of epoch 5"
    assert script.begun == [(4, NEWCOMER), (5, Completed(4, NOTHING))]


def test_who_loses_a_member_while_the_first_is_made_begins_without_it() -> None:
    script = Script(LOST, None, chosen=2)
    assert begin(script) == "the world of epoch 2"
    assert script.begun == [(1, None), (2, Completed(1, NOTHING))]
    assert script.needed == [(1, 3)], "it may have left of its own will: then nobody else asks for the next"


def test_under_the_manual_policy_a_loss_is_told_and_being_overtaken_is_not() -> None:
    with pytest.raises(PeerLost):
        begin(Script(LOST, chosen=2), recovery_policy="manual")
    assert begin(Script(OVERTAKEN, None, chosen=2), recovery_policy="manual") == "the world of epoch 2"


def test_what_happened_is_raised_when_there_is_no_later_membership() -> None:
    for error in (LOST, OVERTAKEN):
        with pytest.raises(type(error)):
            begin(Script(error))
