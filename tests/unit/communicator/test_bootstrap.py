from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nexar.cluster.control_loop import DialCancelled
from nexar.cluster.decisions.completion import NEW_MEMBER, NONE_COMPLETED, CompletedCalls
from nexar.cluster.decisions.membership_events import ChangeRequested
from nexar.cluster.membership import WORLD, Member, Membership
from nexar.communicator.bootstrap import StartBarrier, begin_world, catch_up, start_world
from nexar.config import Config
from nexar.errors import FormationTimeout, LinkClosed, NexarError, PeerLost
from nexar.group import deadline_after
from nexar.wire.join import Connected, JoinMessage, StartFailed
from tests.ranks import EVENT_TIMEOUT

FIRST = Membership(b"c" * 16, 1, (Member(1, "host", bytes(32), {}),))
LATER = replace(FIRST, epoch=4)
OVERTAKEN = LinkClosed(owner="the communicator that was being made")
LOST = PeerLost(rank=2, node=3, cause="it was killed")


class Script:
    """Successors in which making goes as it is written, once for each try."""

    def __init__(self, *tries: NexarError | None, chosen: int = 4) -> None:
        self._tries = list(tries)
        self._world = replace(FIRST, epoch=chosen)
        self.needed: list[tuple[int, int]] = []
        self.begun: list[tuple[int, CompletedCalls | None]] = []

    def begin(
        self, membership: Membership, communicator: int, deadline: float, *, completed: CompletedCalls | None
    ) -> str:
        self.begun.append((membership.epoch, completed))
        outcome = self._tries.pop(0)
        if outcome is not None:
            raise outcome
        return f"the world of epoch {membership.epoch}"

    def need(self, communicator: int, membership: Membership, node: int, cause: str) -> None:
        self.needed.append((membership.epoch, node))

    def wait_for_following(self, communicator: int, membership: Membership, deadline: float) -> Membership | None:
        return self._world if self._world.epoch > membership.epoch else None


def begin(script: Script, membership: Membership = LATER, **settings: object) -> object:
    runtime = SimpleNamespace(successors=script, node=SimpleNamespace(config=Config(**settings)))
    return begin_world(runtime, membership, deadline_after(EVENT_TIMEOUT))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("again", "epoch", "asked"),
    [(True, 3, [ChangeRequested(renewed=(WORLD,))]), (True, 1, []), (False, 3, [])],
    ids=str,
)
def test_a_node_that_came_in_before_it_was_notified_begins_with_a_membership_that_is_new_to_all(
    again: bool, epoch: int, asked: list[object]
) -> None:
    received: list[object] = []
    joined = SimpleNamespace(again=again, membership=replace(FIRST, epoch=epoch))
    catch_up(SimpleNamespace(put=received.append), joined)  # type: ignore[arg-type]
    assert received == asked


def test_who_is_overtaken_by_a_change_begins_with_the_next_membership() -> None:
    script = Script(OVERTAKEN, None, chosen=5)
    assert begin(script) == "the world of epoch 5"
    assert script.begun == [(4, NEW_MEMBER), (5, CompletedCalls(4, NONE_COMPLETED))]


def test_a_joiner_that_loses_a_member_while_its_first_is_made_begins_without_it() -> None:
    script = Script(LOST, None, chosen=5)
    assert begin(script) == "the world of epoch 5"
    assert script.begun == [(4, NEW_MEMBER), (5, CompletedCalls(4, NONE_COMPLETED))]
    assert script.needed == [(4, 3)], "it may have left of its own will: then nobody else asks for the next"


def test_under_the_manual_policy_a_loss_is_reported_and_being_overtaken_is_not() -> None:
    with pytest.raises(PeerLost):
        begin(Script(LOST, chosen=5), recovery_policy="manual")
    assert begin(Script(OVERTAKEN, None, chosen=5), recovery_policy="manual") == "the world of epoch 5"


def test_what_happened_is_raised_when_there_is_no_later_membership() -> None:
    for error in (LOST, OVERTAKEN):
        with pytest.raises(type(error)):
            begin(Script(error))


# -- the first membership: all members, or none ------------------------------------------------------------------------


class Starting:
    """Successors that make the first communicator, or raises; and a seed that receives what the gate says."""

    def __init__(self, outcome: Exception | None = None, answer: Callable[[StartBarrier], None] | None = None) -> None:
        self.said: list[JoinMessage] = []
        self.interrupted: list[NexarError] = []
        self._outcome, self._answer = outcome, answer
        self.start_barrier = StartBarrier(THREE, 1, self.interrupted.append, self.receive)

    def receive(self, message: JoinMessage) -> bool:
        self.said.append(message)
        if self._answer is not None:
            self._answer(self.start_barrier)
        return self._answer is not None

    def begin(self, membership: Membership, communicator: int, deadline: float) -> str:
        if self._outcome is not None:
            raise self._outcome
        return "the first communicator"

    def start(self, patience: float = EVENT_TIMEOUT) -> object:
        return start_world(self, THREE, self.start_barrier, deadline_after(patience))  # type: ignore[arg-type]


THREE = Membership(b"c" * 16, 1, tuple(Member(node, "host", bytes(32), {}) for node in (1, 2, 3)))
VERDICT = FormationTimeout(joined=(), expected=3, refused={}, timeout=1.0, reason="what the seed says")


def test_the_first_communicator_is_returned_when_the_seed_says_that_all_are_connected() -> None:
    scene = Starting(answer=StartBarrier.started)
    assert scene.start() == "the first communicator"
    assert scene.said == [Connected()]
    scene.start_barrier.failed(VERDICT)  # too late: it has started
    assert scene.interrupted == []


def test_who_is_connected_raises_what_the_seed_says_of_the_others() -> None:
    scene = Starting(answer=lambda gate: gate.failed(VERDICT))
    with pytest.raises(FormationTimeout, match="what the seed says"):
        scene.start()
    assert scene.interrupted == [VERDICT]


def test_who_cannot_connect_names_the_pair_to_the_seed_and_raises_what_that_says_to_all() -> None:
    scene = Starting(PeerLost(node=3, address="10.0.0.3:1", cause="refused"), lambda gate: gate.failed(VERDICT))
    with pytest.raises(FormationTimeout, match="what the seed says"):
        scene.start()
    (said,) = scene.said
    assert isinstance(said, StartFailed)
    assert said.reason.startswith("rank 1 cannot connect to rank 2 at 10.0.0.3:1\nrefused\ncheck NEXAR_ADVERTISE")


def test_who_cannot_connect_and_has_lost_the_seed_says_why_itself() -> None:
    with pytest.raises(FormationTimeout, match=r"rank 1 cannot connect to rank 2\nrefused"):
        Starting(PeerLost(node=3, cause="refused")).start()


def test_what_the_seed_says_counts_more_than_the_interrupted_making() -> None:
    scene = Starting(DialCancelled())
    scene.start_barrier.failed(VERDICT)
    with pytest.raises(FormationTimeout, match="what the seed says"):
        scene.start()
    assert scene.said == []


def test_a_seed_that_came_back_is_notified_again_who_is_connected() -> None:
    answers = iter([StartBarrier.seed_back, StartBarrier.started])

    def answer(gate: StartBarrier) -> None:
        next(answers)(gate)

    scene = Starting(answer=answer)
    assert scene.start() == "the first communicator"
    assert scene.said == [Connected(), Connected()]
