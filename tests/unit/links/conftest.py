"""Two linked nodes of one process on the memory transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from nexar.config import Config
from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.transport.memory import MemoryNetwork
from nexar.wire.control import Message
from nexar_tools.bare_nodes import LinkedNode


@dataclass
class Pair:
    left: LinkedNode
    right: LinkedNode
    to_right: Link
    to_left: Link
    losses: list[NexarError] = field(default_factory=list)
    control: list[Message] = field(default_factory=list)


MakePair = Callable[..., Pair]


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority.create("test")


@pytest.fixture
def make_pair(authority: Authority) -> Iterator[MakePair]:
    made: list[LinkedNode] = []

    def make(*, left: dict[str, object] | None = None, right: dict[str, object] | None = None, **both: object) -> Pair:
        network, trust = MemoryNetwork(), Trust(authority.certificate_pem)
        losses: list[NexarError] = []
        control: list[Message] = []
        one, two = (
            LinkedNode(
                authority.admit(node),
                trust,
                ["memory"],
                network=network,
                config=Config(**both, **(own or {})),  # type: ignore[arg-type]
                on_control=lambda _, message: control.append(message),
                on_lost=lambda _, error: losses.append(error),
            )
            for node, own in ((1, left), (2, right))
        )
        made.extend((one, two))
        to_right = one.connect(2, two.addresses_for(1))
        return Pair(one, two, to_right, two.accept(), losses, control)

    yield make
    for node in made:
        node.close()


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair()
