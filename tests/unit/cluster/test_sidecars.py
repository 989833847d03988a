"""Which sidecars are opened and taken."""

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from nexar.cluster.membership import Member
from nexar.cluster.recall import Recall
from nexar.cluster.sidecars import Sidecars
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused
from nexar.wire.messages import Introduce
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier

PEER = Member(9, "there", bytes(32), {"tls": ("10.0.0.1:1",)}, frozenset())
ME = Introduce(rank=0, epoch=2)


class Surroundings:
    """A node, its dialer, a link and its sidecar, as far as they are asked. What is done aside is done at once."""

    peer = PEER.node
    failure: Exception | None = None

    def __init__(self, sidecar: str | None, *schemes: str) -> None:
        self.sidecar: Any = sidecar
        self.schemes = schemes
        self.recall = Recall()
        self.dialer = self
        self.tried = 0
        self.failures = 0
        self.refusal: Exception = ConnectRefused("10.0.0.1:1", "a firewall")

    def aside(self, task: Callable[[], None]) -> None:
        task()

    def connect_sidecar(self, member: Member, deadline: float) -> Carrier:
        assert member is PEER
        self.tried += 1
        raise self.refusal

    def open(self, sidecars: Sidecars, offered: str) -> None:
        link = cast(Any, LinkOf(self))
        sidecars.open(PEER, link, ME, offered, lambda _, __: None)


class LinkOf:
    def __init__(self, where: Surroundings) -> None:
        self.peer, self.schemes, self.failure = where.peer, where.schemes, where.failure
        self.sidecar = self
        self._where = where

    def could_not_be_opened(self) -> None:
        self._where.failures += 1


def sidecars(where: Surroundings) -> Sidecars:
    return Sidecars(cast(Any, where))


@pytest.mark.parametrize(
    ("ours", "theirs", "schemes", "tried"),
    [
        ("tcp", "tcp", ["quic"], 1),
        ("tls", "tls", ["quic"], 1),
        ("tcp", "tls", ["quic"], 0),
        ("tcp", "", ["quic"], 0),
        (None, "", ["quic"], 0),
        (None, "tcp", ["quic"], 0),
        ("tls", "tls", ["tls"], 0),
        ("tcp", "tcp", ["quic", "shm"], 0),
    ],
)
def test_it_is_opened_where_both_want_the_same_and_it_is_of_use(
    ours: str | None, theirs: str, schemes: list[str], tried: int
) -> None:
    where = Surroundings(ours, *schemes)
    where.open(sidecars(where), theirs)
    assert where.tried == tried


def test_failures_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    where = Surroundings("tcp", "quic")
    opening = sidecars(where)
    with caplog.at_level(logging.WARNING, "nexar.cluster.sidecars"):
        for _ in range(3):
            where.open(opening, "tcp")
    assert where.failures == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a firewall" in caplog.text


@pytest.mark.parametrize("end", ["recall", "link"])
def test_what_fails_because_everything_ends_is_no_failure(end: str, caplog: pytest.LogCaptureFixture) -> None:
    where = Surroundings("tcp", "quic")
    if end == "recall":
        where.recall.make()
    else:
        where.failure = CarrierLost("closed", "over")
    with caplog.at_level(logging.DEBUG, "nexar.cluster.sidecars"):
        where.open(sidecars(where), "tcp")
    assert where.failures == 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("ours", "scheme", "sidecar", "words"),
    [
        ("tcp", "tcp", True, None),
        ("tls", "tls", True, None),
        (None, "tls", False, None),
        ("tcp", "quic", False, None),
        (None, "tcp", False, "not encrypted"),
        ("tcp", "tcp", False, "not encrypted"),
        (None, "tls", True, "takes no sidecars, not tls"),
        ("tcp", "tls", True, "takes tcp sidecars, not tls"),
    ],
)
def test_what_is_taken_and_what_is_not(ours: str | None, scheme: str, sidecar: bool, words: str | None) -> None:
    carrier = FakeCarrier(verified=True)
    carrier.scheme = scheme
    verdict = sidecars(Surroundings(ours)).why_not(as_carrier(carrier), Introduce(rank=0, epoch=2, sidecar=sidecar))
    assert (verdict is None) == (words is None)
    assert (words or "") in (verdict or "")
