"""Connections for large payloads between members: who opens them, who takes them, and who does without."""

import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from nexar.cluster.handshake import DialingHandshake
from nexar.cluster.node import Node
from nexar.cluster.seed import SeedService
from nexar.communicator.bootstrap import bootstrap
from nexar.communicator.communicator import Communicator
from nexar.config import Config
from nexar.links.link import Link
from nexar.security.invitation import parse_ticket
from nexar.transport.base import Carrier, ConnectRefused, Expected
from nexar.wire.control import Introduce
from nexar_tools.transports import why_unavailable
from tests.ranks import EVENT_TIMEOUT, on_every
from tests.unit.cluster.memory_mesh import eventually, soon

COUNT = 1_000_000
Form = Callable[..., list[Communicator]]
quic = pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))


def config(*transports: str, **settings: object) -> Config:
    return Config(transports=transports, bind="127.0.0.1", **settings)  # type: ignore[arg-type]


@pytest.fixture
def form() -> Iterator[Form]:
    """A world of as many members as there are configs."""
    made: list[Communicator] = []
    seeds: list[SeedService] = []

    def forming(*configs: Config) -> list[Communicator]:
        transports = tuple(scheme for scheme in configs[0].transports if scheme != "shm")
        seeds.append(SeedService("127.0.0.1:0", len(configs), transports=transports))
        invitation = parse_ticket(seeds[-1].ticket)
        made.extend(on_every(configs, lambda each: bootstrap(each, invitation)))
        return sorted(made, key=lambda comm: comm.rank)

    yield forming
    if made:
        on_every(made, Communicator.close)
    for seed in seeds:
        seed.close()


def link(comm: Communicator) -> Link:
    (found,) = comm._group.mesh.links().values()
    return found


def sidecar(comm: Communicator) -> str | None:
    """Of its one link, once both ends know it."""
    line = link(comm)._state
    return line.sidecar.scheme if line.sidecar is not None and line._sidecar_known else None


def exchange(ranks: list[Communicator]) -> None:
    def talk(comm: Communicator) -> bool:
        other = 1 - comm.rank
        comm.send(np.full(COUNT, comm.rank, np.float32), dest=other, tag=3)
        return bool((comm.recv(source=other, tag=3) == other).all())

    assert on_every(ranks, talk) == [True, True]


@pytest.mark.parametrize(
    ("transports", "settings", "scheme"),
    [
        pytest.param(("quic", "tls"), {"encrypt_bulk_transport": False}, "tcp", marks=quic),
        pytest.param(("quic", "tls"), {"enable_tcp_bulk_sidecar": True}, "tls", marks=quic),
        (("tls",), {"encrypt_bulk_transport": False}, "tcp"),
    ],
    ids=["plain beside quic", "encrypted beside quic", "plain beside tls"],
)
def test_large_payloads_take_the_sidecar_that_the_settings_ask_for(
    form: Form, transports: tuple[str, ...], settings: dict[str, object], scheme: str
) -> None:
    ranks = form(*[config(*transports, **settings)] * 2)
    eventually(lambda: [sidecar(comm) for comm in ranks] == [scheme] * 2, "a sidecar")
    exchange(ranks)
    for comm in ranks:
        stats = link(comm).stats()
        assert min(stats[f"{scheme}.bytes_received"], stats[f"{scheme}.bytes_sent"]) > 4 * COUNT
        assert stats[f"{transports[0]}.bytes_received"] < COUNT
        assert stats["sidecar_failovers"] == stats["sidecar_failures"] == 0


@pytest.mark.parametrize(
    ("transports", "settings"),
    [
        pytest.param(("quic", "tls"), {}, marks=quic),
        pytest.param(("quic", "tls"), {"enable_tcp_bulk_sidecar": False, "encrypt_bulk_transport": False}, marks=quic),
        pytest.param(("quic",), {"encrypt_bulk_transport": False}, marks=quic),
        (("tls",), {"enable_tcp_bulk_sidecar": True}),
        (("shm", "tls"), {"encrypt_bulk_transport": False}),
    ],
    ids=["by default", "refused", "without TCP", "beside its own kind", "beside shared memory"],
)
def test_where_it_is_of_no_use_there_is_none(
    form: Form, transports: tuple[str, ...], settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialed: list[object] = []
    monkeypatch.setattr(Node, "connect_sidecar", lambda *facts: dialed.append(facts))
    ranks = form(*[config(*transports, **settings)] * 2)
    exchange(ranks)
    assert not dialed
    assert all(link(comm)._state.sidecar is None for comm in ranks)


def test_members_that_want_different_things_do_without(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    dialed: list[object] = []
    monkeypatch.setattr(Node, "connect_sidecar", lambda *facts: dialed.append(facts))
    exchange(form(config("tls", encrypt_bulk_transport=False), config("tls")))
    assert not dialed


def test_a_sidecar_that_cannot_be_opened_is_counted_and_the_link_works(
    form: Form, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> Carrier:
        raise ConnectRefused("10.0.0.1:1", "a firewall")

    monkeypatch.setattr(Node, "connect_sidecar", refuse)
    with caplog.at_level(logging.WARNING, "nexar.cluster.handshake"):
        ranks = form(*[config("tls", encrypt_bulk_transport=False)] * 2)
        eventually(lambda: sum(link(comm).stats()["sidecar_failures"] for comm in ranks) == 1, "the failure")
        exchange(ranks)
    assert [record.getMessage() for record in caplog.records if "a firewall" in record.getMessage()]


def test_the_loss_of_a_sidecar_between_members_costs_nothing(form: Form) -> None:
    ranks = form(*[config("tls", encrypt_bulk_transport=False)] * 2)
    eventually(lambda: [sidecar(comm) for comm in ranks] == ["tcp"] * 2, "a sidecar")
    exchange(ranks)
    lost = link(ranks[0])._state.sidecar
    assert lost is not None
    lost.abort("broken by the test")
    exchange(ranks)
    eventually(lambda: [sidecar(comm) for comm in ranks] == [None] * 2, "the loss")
    assert [link(comm).stats()["sidecar_failovers"] for comm in ranks] == [1, 1]


@pytest.mark.parametrize(
    ("settings", "introduce", "plain", "messages"),
    [
        ({"encrypt_bulk_transport": False}, {}, True, "not encrypted carries large payloads and nothing else"),
        ({}, {"sidecar": True}, False, "takes no sidecars"),
        ({"encrypt_bulk_transport": False}, {"sidecar": True}, False, "takes tcp sidecars, not tls"),
    ],
    ids=["a plain link", "unwanted", "of another kind"],
)
def test_a_member_that_dials_for_what_is_not_wanted_is_declined(
    form: Form, settings: dict[str, object], introduce: dict[str, bool], plain: bool, messages: str
) -> None:
    refused: list[str] = []
    ranks = form(*[config("tls", **settings)] * 2)
    ranks[1]._group.mesh.acceptor.on_refused = lambda _, reason: refused.append(reason)
    dial(ranks[0], ranks[1], Introduce(rank=0, epoch=1, **introduce), plain=plain)
    eventually(lambda: any(messages in reason for reason in refused), "the refusal")


def dial(comm: Communicator, other: Communicator, introduce: Introduce, *, plain: bool) -> None:
    """As a member that does not keep to the rules."""
    node, member = comm._group.mesh._node, comm.membership.members[other.rank]
    expected = Expected(member.node, member.fingerprint, plain=plain)
    carrier = node._by_scheme["tls"].connect(member.addresses["tls"][0], expected, soon(EVENT_TIMEOUT))
    answers: list[object] = []
    DialingHandshake(carrier, introduce, lambda _, answer: answers.append(answer))
    eventually(lambda: answers, "an answer")
    carrier.abort("enough")
