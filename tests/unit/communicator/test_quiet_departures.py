"""Who leaves by closing disturbs nobody who does not need it."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from nexar.cluster import peer_table
from nexar.cluster.decisions import proposal
from nexar.cluster.node import Node
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import MembershipChanged, NexarError, PeerLost
from nexar.links.link import Link
from tests.ranks import on_every
from tests.unit.cluster.memory_mesh import eventually


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to wait here for others to close as well."""
    assert proposal.WILLING_DELAY <= 1.0
    monkeypatch.setattr(proposal, "WILLING_DELAY", 0.02)


@pytest.fixture
def four() -> Iterator[list[Communicator]]:
    with local_communicators(4, Config()) as made:
        yield made


def leave(comm: Communicator, others: list[Communicator]) -> None:
    """Returns when the world has moved on without it."""
    node = comm._runtime.node.id
    comm.close()
    for other in others:
        eventually(lambda other=other: other._runtime.is_gone(node), "the world has moved on")


def raised(call: Callable[[], Any]) -> NexarError:
    with pytest.raises(NexarError) as caught:
        call()
    return caught.value


def changed(comm: Communicator, call: Callable[[Communicator], Any]) -> MembershipChanged:
    error = raised(lambda: call(comm))
    assert isinstance(error, MembershipChanged), repr(error)
    return error


def test_the_others_go_on_until_they_need_who_has_left(four: list[Communicator]) -> None:
    three = four[:3]
    pairs = on_every(four, lambda comm: comm.split(comm.rank // 2))
    leave(four[3], three)
    assert [comm.epoch for comm in three] == [1, 1, 1], "no communicator has changed"
    four[0].send(np.arange(3), 1)
    assert four[1].recv(source=0).tolist() == [0, 1, 2]
    assert on_every(pairs[:2], lambda pair: pair.all_reduce(1)) == [2, 2]
    assert on_every(four[:2], lambda comm: comm.group([0, 1]).all_reduce(1)) == [2, 2]
    changes = on_every(three, lambda comm: changed(comm, lambda each: each.all_reduce(1)))
    assert [dict(change.lost) for change in changes] == [{3: "it left"}] * 3
    assert on_every([change.communicator for change in changes], lambda comm: comm.all_reduce(comm.rank)) == [3] * 3
    assert on_every(pairs[:2], lambda pair: pair.all_reduce(1)) == [2, 2], "nothing has happened to it"


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.send(np.arange(3), 3),
        lambda comm: comm.recv(source=3),
        lambda comm: comm.on(3).anything(),
        lambda comm: comm.barrier(),
        lambda comm: comm.start.send(np.arange(3), 3).wait(),
        lambda comm: comm.start.recv(source=3).wait(),
        lambda comm: comm.split(0),
        lambda comm: comm.group([0, 3]),
    ],
    ids=["send", "recv", "rpc", "barrier", "started send", "started recv", "split", "group"],
)
def test_one_call_that_needs_it_gives_all_a_successor(
    four: list[Communicator], call: Callable[[Communicator], Any]
) -> None:
    leave(four[3], four[:3])
    began = time.monotonic()
    change = changed(four[0], call)
    assert dict(change.lost) == {3: "it left"}
    assert time.monotonic() - began < 10.0
    others = on_every(four[1:3], lambda comm: changed(comm, lambda each: each.barrier()))
    ranks = [change.communicator, *(each.communicator for each in others)]
    assert on_every(ranks, lambda comm: comm.all_reduce(1)) == [3, 3, 3]
    assert change.communicator.epoch == 3


def test_what_it_sent_before_it_left_can_still_be_used(four: list[Communicator]) -> None:
    leaf, root = four[3], four[0]
    on_every(four[1:], lambda comm: comm.reduce(np.full(4, comm.rank), root=0))
    leave(leaf, four[:3])
    assert root.start.reduce(np.zeros(4, np.int64), root=0).wait().tolist() == [6] * 4


class SlowWay:
    """What comes from a peer arrives when it is let through."""

    EVENTS = ("frame_arrived", "payload_arrived", "carrier_finished", "carrier_lost")

    def __init__(self, link: Link, node: Node) -> None:
        self._link = link
        self._node = node
        self._held: list[Callable[[], None]] = []
        (carrier,) = link._state.carriers.values()
        carrier.attach(cast(Any, self))

    def __getattr__(self, name: str) -> Any:
        arrived = getattr(self._link, name)
        return partial(self._hold, arrived) if name in self.EVENTS else arrived

    def _hold(self, arrived: Callable[..., None], carrier: Any, *facts: Any) -> None:
        kept = [bytes(fact) if isinstance(fact, memoryview) else fact for fact in facts]

        def arrive() -> None:
            arrived(carrier, *(memoryview(fact) if isinstance(fact, bytes) else fact for fact in kept))
            self._link._deferred_io.flush()

        self._held.append(arrive)

    def let_through(self) -> None:
        held, self._held = self._held, []
        for arrive in held:
            self._node.progress.run_soon(arrive)
        self._node.progress.wake()


def test_what_it_sent_arrives_also_where_the_others_have_long_gone_on_without_it(four: list[Communicator]) -> None:
    leaver, slow = four[3], four[2]
    on_every(four, lambda comm: comm.barrier())
    runtime, gone = slow._runtime, leaver._runtime.node.id
    link = runtime.mesh.find(gone)
    assert link is not None
    way = SlowWay(link, runtime.node)
    leaver.send(np.arange(8), 2, tag=5)
    closing = threading.Thread(target=leaver.close)
    closing.start()
    received = slow.start.recv(source=3, tag=5)
    eventually(lambda: runtime.is_gone(gone), "the world has moved on")
    eventually(lambda: runtime.mesh.quiet_leavers.has(gone), "its link is kept")
    assert not received.done()
    way.let_through()
    assert received.wait(20.0).tolist() == list(range(8))
    closing.join()
    eventually(lambda: not runtime.mesh.quiet_leavers.has(gone), "the end of its link")
    assert dict(changed(slow, lambda comm: comm.recv(source=3, tag=6)).lost) == {3: "it left"}


def test_nobody_waits_for_ever_for_what_who_has_closed_may_still_send(
    four: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_table, "LONGEST_CLOSE", 0.2)
    leaver, slow = four[3], four[2]
    on_every(four, lambda comm: comm.barrier())
    runtime, gone = slow._runtime, leaver._runtime.node.id
    link = runtime.mesh.find(gone)
    assert link is not None
    SlowWay(link, runtime.node)
    closing = threading.Thread(target=leaver.close)
    closing.start()
    assert dict(changed(slow, lambda comm: comm.recv(source=3)).lost) == {3: "it left"}
    closing.join()


def test_a_part_that_needs_it_gets_a_successor_and_the_world_does_not(four: list[Communicator]) -> None:
    parts = on_every(four, lambda comm: comm.split(0, key=-comm.rank))
    leave(four[3], four[:3])
    changes = on_every(parts[:3], lambda part: changed(part, lambda each: each.barrier()))
    assert [dict(change.lost) for change in changes] == [{0: "it left"}] * 3, "by its rank there"
    four[0].send(np.arange(3), 1)
    assert four[1].recv(source=0).tolist() == [0, 1, 2]
    assert [comm.epoch for comm in four[:3]] == [1, 1, 1]


def test_a_checkpoint_goes_on_without_it(four: list[Communicator]) -> None:
    leave(four[3], four[:3])
    results = on_every(four[:2], lambda comm: comm.checkpoint())
    eventually(lambda: four[2]._generation.outcome.done, "the others were quicker")
    results.append(four[2].checkpoint())
    for result in results:
        assert result is not None
        assert (dict(result.left), result.joined) == ({3: "it left"}, ())
    again = [result.communicator for result in results if result is not None and result.communicator is not None]
    assert on_every(again, lambda comm: comm.checkpoint()) == [None, None, None]


def test_several_leave_one_after_another_and_the_last_goes_on(four: list[Communicator]) -> None:
    left = list(four)
    for rank in (3, 1, 0):
        left.remove(four[rank])
        leave(four[rank], left)
    change = changed(four[2], lambda comm: comm.barrier())
    assert dict(change.lost) == dict.fromkeys((0, 1, 3), "it left")
    assert change.communicator.all_reduce(5) == 5


def test_under_the_manual_policy_a_call_that_needs_it_raises_and_the_user_shrinks() -> None:
    with local_communicators(4, Config(recovery_policy="manual")) as four:
        leave(four[3], four[:3])
        errors = [raised(lambda comm=comm: comm.send(np.arange(3), 3)) for comm in four[:3]]
        for error in errors:
            assert isinstance(error, PeerLost)
            assert (error.rank, "shrink()" in str(error)) == (3, True)
        successors = on_every(four[:3], lambda comm: comm.shrink())
        assert on_every(successors, lambda comm: comm.all_reduce(1)) == [3, 3, 3]


def test_health_reports_who_has_left(four: list[Communicator]) -> None:
    leave(four[3], four[:3])
    found = four[0].health()[3]
    assert (found.state, found.cause) == ("lost", "it left")


class Interrupting:
    """Shared memory that is closed in the moment a call has looked whether the communicator is open."""

    def __init__(self, die: Callable[[], object]) -> None:
        self._die = die
        self._failure: BaseException = PeerLost(rank=3, cause="its process has ended")

    def announce(self, sequence: int, fingerprint: object) -> None:
        self._die()
        raise self._failure

    def fail(self, error: BaseException) -> None:
        self._failure = error


@pytest.mark.parametrize("way", ["waited for", "started"])
def test_a_death_between_the_check_of_a_verb_and_its_beginning_is_reported_with_the_successor(
    four: list[Communicator], way: str
) -> None:
    dying = four[3]
    arena = Interrupting(lambda: dying.__exit__(ValueError, ValueError("no"), None))
    four[0]._context.region = arena  # type: ignore[assignment]
    change = changed(four[0], lambda comm: comm.barrier() if way == "waited for" else comm.start.barrier().wait())
    four[0]._context.region = None
    assert list(change.lost) == [3]
