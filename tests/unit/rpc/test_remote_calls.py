import threading
from collections.abc import Iterator

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.point_to_point import run_to_end
from nexar.config import Config
from nexar.errors import LinkClosed, PeerLost, RpcCancelled, UnknownFunction
from nexar.group import Group, deadline_after
from nexar.rpc.caller import CallTarget
from nexar.rpc.registry import Registry
from nexar.rpc.remote_calls import RemoteCalls
from tests.ranks import EVENT_TIMEOUT
from tests.unit.rpc.scene import Values


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    with local_communicators(2, Config()) as made:
        yield made


def test_a_communicator_that_never_uses_calls_has_no_threads_for_them_and_still_answers(
    pair: list[Communicator],
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(UnknownFunction):
        pair[0].on(1).f()
    assert set(threading.enumerate()) == before


def test_calls_end_with_their_group_whoever_ends_it(pair: list[Communicator]) -> None:
    begun, go = threading.Event(), threading.Event()

    @pair[1].serve
    def wait() -> None:
        begun.set()
        go.wait(EVENT_TIMEOUT)

    request = pair[0].start.on(1).wait()
    assert begun.wait(EVENT_TIMEOUT)
    pair[1]._group.close()
    with pytest.raises(RpcCancelled, match="closed there"):
        request.wait(EVENT_TIMEOUT)
    with pytest.raises(RpcCancelled, match="closed there"):
        pair[0].on(1).wait()
    with pytest.raises(LinkClosed):
        pair[1].on(0).wait()
    go.set()


def test_an_error_that_ends_the_group_is_what_pending_calls_raise(pair: list[Communicator]) -> None:
    begun, go = threading.Event(), threading.Event()
    pair[1].serve("f")(lambda: begun.set() or go.wait(EVENT_TIMEOUT))
    request = pair[0].start.on(1).f()
    assert begun.wait(EVENT_TIMEOUT)
    pair[0]._group.close(PeerLost(rank=1, cause="said so"))
    with pytest.raises(PeerLost, match="said so"):
        request.wait(EVENT_TIMEOUT)
    go.set()


def test_functions_may_be_handed_to_another_communicator(pair: list[Communicator]) -> None:
    registry = Registry()
    registry.add(lambda: "kept", "f")
    groups = [Group(each._group.node, each._group.mesh, each.membership, 99) for each in pair]
    ends = [RemoteCalls(group, Values(), Config(), registry) for group in groups]
    whom = CallTarget(1, groups[1].node.id, "f", EVENT_TIMEOUT, pickle=False)
    run = ends[0].caller.call(whom, (), {}, deadline_after(EVENT_TIMEOUT))
    assert run_to_end(groups[0], run, deadline_after(EVENT_TIMEOUT)) == "kept"
    for group, end in zip(groups, ends, strict=True):
        group.close()
        end.close()
        end.close()
