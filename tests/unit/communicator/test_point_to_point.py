"""The verbs as runs; what they do over each transport is in tests/conformance."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nexar.communicator import point_to_point
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.parts import Run
from nexar.config import Config
from nexar.errors import Cancelled, PeerMisbehaved, UsageError
from nexar.group import Group, deadline_after
from nexar.links.form import OBJECT
from nexar.links.sending import About
from nexar.wire.frame import Space
from tests.ranks import PATIENCE

LARGE = 300_000


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    with local_communicators(2, Config()) as made:
        yield [comm._group for comm in made]


def soon() -> float:
    return deadline_after(PATIENCE)


RUNS: dict[str, Callable[[Group], Run[Any]]] = {
    "send": lambda group: point_to_point.send(group, np.ones(LARGE), 1, 1, soon()),
    "recv": lambda group: point_to_point.recv(group, np.zeros(3), 1, 1, return_source=False),
    "sendrecv": lambda group: point_to_point.sendrecv(
        group, np.ones(LARGE), 1, None, 1, sendtag=1, recvtag=1, deadline=soon(), return_source=False
    ),
    "probe": lambda group: point_to_point.probe(group, 1, 1),
    "send_bytes": lambda group: point_to_point.send_bytes(group, bytes(LARGE), 1, 1, soon()),
    "recv_bytes": lambda group: point_to_point.recv_bytes(group, None, 1, 1, return_source=False),
    "send_iov": lambda group: point_to_point.send_iov(group, [bytes(LARGE)], 1, 1, soon()),
    "recv_iov": lambda group: point_to_point.recv_iov(group, [bytearray(3)], 1, 1, return_source=False),
    "send_object": lambda group: point_to_point.send_object(group, np.ones(LARGE), 1, 1, pickle=False, deadline=soon()),
    "recv_object": lambda group: point_to_point.recv_object(group, 1, 1, pickle=False, return_source=False),
}


@pytest.mark.parametrize("verb", RUNS)
def test_a_run_that_is_closed_has_let_go_of_everything(verb: str) -> None:
    with local_communicators(2, Config(early_bytes=1)) as made:
        run = RUNS[verb](made[0]._group)
        waited = list(next(run))
        assert not all(operation.done for operation in waited)
        run.close()
        ended = [operation for operation in waited if operation.error is not None]
        assert ended
        assert all(operation.done for operation in waited)
        assert all(isinstance(operation.error, Cancelled) for operation in ended)
        assert len(made[0]._group.matching._posted) == 0


@pytest.mark.parametrize("verb", [verb for verb in RUNS if verb.startswith("recv")])
def test_a_closed_communicator_ends_what_a_run_waits_for(verb: str, groups: list[Group]) -> None:
    run = RUNS[verb](groups[0])
    waited = list(next(run))
    groups[0].close()
    assert all(operation.error is not None for operation in waited)
    run.close()


def test_the_receive_of_a_run_whose_send_is_refused_is_taken_back(groups: list[Group]) -> None:
    run = point_to_point.sendrecv(
        groups[0], np.ones(2), 7, None, 1, sendtag=None, recvtag=None, deadline=soon(), return_source=False
    )
    with pytest.raises(UsageError, match="no rank 7"):
        next(run)
    assert len(groups[0].matching._posted) == 0


def test_an_object_that_is_none_names_who_sent_it(groups: list[Group]) -> None:
    left, right = groups
    row = point_to_point.send_parts(
        left, 1, [memoryview(b"\x01\xc1")], About(space=Space.UNTAGGED, dtype=OBJECT), soon()
    )
    point_to_point.run_to_end(left, row, soon())
    run = point_to_point.recv_object(right, 0, None, pickle=True, return_source=False)
    with pytest.raises(PeerMisbehaved, match="not an encoded object") as raised:
        point_to_point.run_to_end(right, run, soon())
    assert raised.value.rank == 0


def test_an_array_that_is_none_names_who_sent_it(groups: list[Group]) -> None:
    left, right = groups
    about = About(space=Space.UNTAGGED, dtype=12)
    left.wait((left.post_send(1, memoryview(bytes(12)), soon(), shape=(3,), about=about),), soon())
    run = point_to_point.recv(right, None, 0, None, return_source=False)
    with pytest.raises(PeerMisbehaved) as raised:
        point_to_point.run_to_end(right, run, soon())
    assert raised.value.rank == 0


def test_every_verb_is_a_method_of_a_communicator() -> None:
    assert all(callable(getattr(Communicator, verb)) for verb in RUNS)
