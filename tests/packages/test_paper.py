"""A transport of another package: found by its entry point, judged by the suite that judges ours, used by a cluster."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

import nexar
from nexar.cli.doctor.machine import try_round_trip
from nexar.communicator.bootstrap import bootstrap
from nexar.config import Config
from nexar.errors import ConfigError, UsageError
from nexar.security.invitation import parse_ticket
from nexar.transport import registry
from nexar.transport.base import ConnectRefused
from nexar.transport.sleeper import PollSleeper
from tests.conformance.test_transport_endings import *  # noqa: F403
from tests.conformance.test_transport_frames import *  # noqa: F403
from tests.conformance.transports import Case, Made, World, closed_port, open_socket, silent_host, silent_port
from tests.packages.installing import install, install_broken
from tests.ranks import on_every


def make_paper(number: int, world: World) -> Made:
    sleeper = PollSleeper()
    return registry.load("paper")(sleeper, world.credentials[number], world.trust), sleeper


@pytest.fixture
def case(site: Path) -> Case:
    """What the suite runs on here."""
    install("paper", site)
    return Case(
        "paper", make_paper, between_processes=False, dead_address=closed_port, silent_address=silent_port,
        unresponsive_host=silent_host, raw_socket=open_socket,
    )  # fmt: skip


def test_it_is_loaded_when_it_is_asked_for_by_name(site: Path) -> None:
    install("paper", site)
    assert "paper" in registry.schemes()
    assert "nexar_paper" not in sys.modules
    registry.load("paper")
    assert "nexar_paper" in sys.modules


def test_a_cluster_that_names_it_talks_over_it(site: Path) -> None:
    install("paper", site)
    config = Config(transports=("paper", "tls"), bind="127.0.0.1")
    with nexar.Seed(listen="127.0.0.1:0", size=3, transports=("tls",)) as seed:
        invitation = parse_ticket(seed.ticket)
        ranks = on_every(range(3), lambda rank: bootstrap(config, invitation, rank=rank))
        try:
            totals = on_every(ranks, lambda comm: comm.all_reduce(np.full(100_000, comm.rank + 1.0))[0])
            schemes = [link.schemes for comm in ranks for link in comm._group.links().values()]
        finally:
            on_every(ranks, lambda comm: comm.close())
    assert totals == [6.0] * 3
    assert schemes
    assert {tuple(each) for each in schemes} == {("paper",)}


def test_one_who_has_it_reaches_one_who_has_not(site: Path) -> None:
    install("paper", site)
    with nexar.Seed(listen="127.0.0.1:0", size=2, transports=("tls",)) as seed:
        invitation = parse_ticket(seed.ticket)
        wanted = [("paper", "tls"), ("tls",)]
        configs = [Config(transports=each, bind="127.0.0.1") for each in wanted]
        ranks = on_every(range(2), lambda rank: bootstrap(configs[rank], invitation, rank=rank))
        try:
            assert on_every(ranks, lambda comm: comm.all_reduce(comm.rank + 1.0)) == [3.0, 3.0]
        finally:
            on_every(ranks, lambda comm: comm.close())


def test_the_doctor_measures_a_round_trip_over_it(site: Path) -> None:
    install("paper", site)
    trip = try_round_trip("paper", Config())
    assert trip.problem == ""
    assert trip.round_trip is not None


def test_the_doctor_says_why_it_does_not_connect(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(_: object, address: str, *__: object) -> object:
        raise ConnectRefused(address, "paper jam")

    install("paper", site)
    registry.load("paper")
    monkeypatch.setattr(sys.modules["nexar_paper"].PaperTransport, "connect", connect)
    trip = try_round_trip("paper", Config())
    assert trip.round_trip is None
    assert "paper jam" in trip.problem


def tear(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every transport of the package raises when it is driven."""

    def poll(_: object) -> bool:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sys.modules["nexar_paper"].PaperTransport, "poll", poll)


BROKEN = r"the transport 'paper' of the package 'nexar-paper' cannot be used \(RuntimeError: out of memory\)"


def test_one_that_raises_ends_the_joining_at_once(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install("paper", site)
    registry.load("paper")
    tear(monkeypatch)
    with nexar.Seed(listen="127.0.0.1:0", size=2, transports=("tls",)) as seed:
        begin = time.monotonic()
        with pytest.raises(UsageError, match=BROKEN):
            bootstrap(Config(transports=("paper", "tls"), bind="127.0.0.1"), parse_ticket(seed.ticket))
        assert time.monotonic() - begin < 30  # of the 60 that forming may take
    assert sum("out of memory" in record.getMessage() for record in caplog.records) == 1


def test_one_that_raises_ends_the_calls_of_its_node_and_the_others_go_on(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("paper", site)
    wanted = [("paper", "tls"), ("tls",), ("tls",)]
    with nexar.Seed(listen="127.0.0.1:0", size=3, transports=("tls",)) as seed:
        invitation = parse_ticket(seed.ticket)
        configs = [Config(transports=each, bind="127.0.0.1") for each in wanted]
        ranks = on_every(range(3), lambda rank: bootstrap(configs[rank], invitation, rank=rank))
        try:
            tear(monkeypatch)
            with pytest.raises(UsageError, match=BROKEN):
                ranks[0].recv(source=1)
            ranks[0].close()
            assert on_every(ranks[1:], lambda comm: comm.resilient().all_reduce(1.0)) == [2.0, 2.0]
        finally:
            on_every(ranks, lambda comm: comm.close())


def test_a_package_that_cannot_be_loaded_is_named(site: Path) -> None:
    install_broken("nexar-torn", registry.GROUP, "torn", site)
    with pytest.raises(
        UsageError,
        match=r"the transport 'torn' of the package 'nexar-torn' cannot be used \(ModuleNotFoundError: .*nowhere'\); "
        "repair that package, or take 'torn' out of the transports",
    ):
        registry.load("torn")


def test_a_scheme_that_nobody_has_is_refused_before_anything_is_open() -> None:
    from nexar.cluster.node import Node

    with pytest.raises(ConfigError, match=r"unknown transport 'vellum'; known: .*quic, shm, tls"):
        Node(Config(transports=("vellum", "tls"), bind="127.0.0.1"))
