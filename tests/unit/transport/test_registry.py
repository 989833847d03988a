import logging
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from operator import attrgetter
from typing import Any

import pytest

from nexar.errors import UsageError
from nexar.security.certificates import Trust
from nexar.transport import registry
from nexar.transport.base import TransportCapabilities
from nexar.transport.memory import MemoryNetwork, MemoryTransport
from nexar.transport.registry import ThirdPartyTransport, TransportFailed
from nexar.transport.sleeper import PollSleeper
from tests.unit.links.waiting import ScriptedTransport, Sleep

LOGGER = "nexar.transport.registry"


class FailingTransport(ScriptedTransport):
    """Raises, whatever it is asked, once it is failing."""

    address = "opaque address"
    failing = False

    def poll(self) -> bool:
        self._check()
        return super().poll()

    def prepare_sleep(self) -> bool:
        self._check()
        return False

    def due(self) -> float | None:
        self._check()
        return 3.0

    @property
    def spins(self) -> bool:
        self._check()
        return True

    def close(self) -> None:
        super().close()
        self._check()

    def _check(self) -> None:
        if self.failing:
            raise RuntimeError("out of memory")


@pytest.fixture
def failing() -> FailingTransport:
    return FailingTransport(Sleep())


@pytest.fixture
def third_party(failing: FailingTransport) -> ThirdPartyTransport:
    return ThirdPartyTransport(
        failing, TransportCapabilities(), lambda error: f"the transport of somebody raised {error}"
    )


def test_what_it_is_asked_goes_through(third_party: ThirdPartyTransport, failing: FailingTransport) -> None:
    failing.execute(lambda: None)
    assert third_party.poll()
    assert (third_party.prepare_sleep(), third_party.due(), third_party.spins) == (False, 3.0, True)
    assert (third_party.scheme, third_party.address, third_party.address_for(3)) == (
        "told",
        "opaque address",
        failing.address,
    )
    third_party.close()
    third_party.abandon()
    assert failing.closed
    assert failing.abandoned


@pytest.mark.parametrize(
    "ask",
    [ThirdPartyTransport.poll, ThirdPartyTransport.prepare_sleep, ThirdPartyTransport.due, attrgetter("spins")],
    ids=["poll", "arm", "due", "spins"],
)
def test_what_it_raises_while_it_is_driven_names_it(
    third_party: ThirdPartyTransport,
    failing: FailingTransport,
    ask: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing.failing = True
    with pytest.raises(TransportFailed, match="of somebody raised out of memory") as broke:
        ask(third_party)
    assert isinstance(broke.value, UsageError)
    assert isinstance(broke.value.__cause__, RuntimeError)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]


def test_it_is_logged_once(
    third_party: ThirdPartyTransport, failing: FailingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    failing.failing = True
    for _ in range(2):
        with pytest.raises(TransportFailed):
            third_party.poll()
    third_party.close()
    assert [(record.name, record.levelno) for record in caplog.records] == [(LOGGER, logging.ERROR)]


def test_a_close_that_raises_is_reported_and_over(
    third_party: ThirdPartyTransport, failing: FailingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    failing.failing = True
    third_party.close()
    assert failing.closed
    assert "out of memory" in caplog.text


def test_our_schemes_are_there():
    assert {"memory", "quic", "shm", "tcp", "tls"} <= set(registry.schemes())


def test_an_unknown_scheme_lists_the_known_ones():
    with pytest.raises(UsageError, match="unknown transport 'carrier-pigeon'; available: memory, quic, shm, tcp, tls"):
        registry.load("carrier-pigeon")


def test_a_transport_is_imported_when_it_is_asked_for():
    assert registry.load("memory").scheme == "memory"


@pytest.mark.parametrize("scheme", ["tls", "tcp"])
def test_what_makes_a_transport_of_a_scheme_makes_one_that_calls_itself_so(scheme):
    sleeper = PollSleeper()
    transport = registry.load(scheme)(sleeper, None, Trust(b""))
    assert transport.scheme == scheme
    transport.close()
    sleeper.close()


def test_a_missing_native_package_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "nexar_native", None)
    for name in [name for name in sys.modules if name.startswith("nexar.transport.quic")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError):
        registry.load("quic")
    from nexar.transport.quic import missing_support

    assert "nexar-native" in missing_support()


class RegisteredTransport(MemoryTransport):
    scheme = "pigeon"


def installed(monkeypatch, **transports):
    points = [EntryPoint(name, value, registry.GROUP) for name, value in transports.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: points)


def test_others_may_add_transports_but_not_replace_ours(monkeypatch):
    installed(monkeypatch, pigeon=f"{__name__}:RegisteredTransport", tls=f"{__name__}:RegisteredTransport")
    sleeper = PollSleeper()
    transport = registry.load("pigeon")(sleeper, 1, MemoryNetwork())
    assert isinstance(transport, ThirdPartyTransport)
    assert isinstance(transport.inside, RegisteredTransport)
    transport.close()
    sleeper.close()
    assert "pigeon" in registry.schemes()
    assert registry.load("tls").__module__.startswith("nexar.")
    assert registry.is_builtin("tls")
    assert not registry.is_builtin("pigeon")


def test_the_capabilities_of_our_schemes():
    assert {scheme for scheme in registry.schemes() if registry.capabilities_of(scheme).shares_memory} == {"shm"}
    assert registry.node_port_schemes() == {"quic": "UDP", "tls": "TCP"}
    assert registry.tcp_scheme(["shm", "quic", "tls"]) == "tls"
    assert registry.tcp_scheme(["shm", "quic", "tcp"]) is None
    assert not registry.capabilities_of("tcp").encrypts


def test_an_unknown_scheme_has_the_default_capabilities():
    assert registry.capabilities_of("carrier-pigeon") == TransportCapabilities()


class DeclaringTransport(RegisteredTransport):
    scheme = "homing"
    capabilities = TransportCapabilities(closes_on_death=True)


def test_others_declare_capabilities(monkeypatch):
    monkeypatch.setattr(registry, "_declared", dict(registry._declared))
    installed(monkeypatch, homing=f"{__name__}:DeclaringTransport")
    sleeper = PollSleeper()
    transport = registry.load("homing")(sleeper, 1, MemoryNetwork())
    assert transport.capabilities == registry.capabilities_of("homing") == TransportCapabilities(closes_on_death=True)
    transport.close()
    sleeper.close()


class Claiming(RegisteredTransport):
    scheme = "claiming"


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        (TransportCapabilities(node_port="TCP"), "node_port='TCP'"),
        (TransportCapabilities(in_process=True), "in_process=True"),
        (TransportCapabilities(shares_memory=True), "shares_memory=True"),
        (TransportCapabilities(has_certificates=False), "has_certificates=False"),
        (TransportCapabilities(encrypts=False), "encrypts=False"),
        (TransportCapabilities(closes_on_death="no"), "must be True or False"),
        (None, "its capabilities are None"),
        ({}, "its capabilities are {}"),
    ],
    ids=str,
)
def test_others_declare_only_what_concerns_them_alone(monkeypatch, declared, problem):
    monkeypatch.setattr(Claiming, "capabilities", declared)
    installed(monkeypatch, claiming=f"{__name__}:Claiming")
    sleeper = PollSleeper()
    with pytest.raises(UsageError, match=re.escape(problem)) as refused:
        registry.load("claiming")(sleeper, 1, MemoryNetwork())
    assert "repair that package" in str(refused.value)
    assert registry.capabilities_of("claiming") == TransportCapabilities()
    sleeper.close()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("nowhere_at_all:X", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("math:nothing", "AttributeError: .*"),
        ("math:pi", "TypeError: 'float' object is not callable"),
        ("sys:exit", "SystemExit: "),
        ("collections:OrderedDict", r"TypeError: it made OrderedDict\(.*\), which is no Transport of that scheme"),
    ],
)
def test_a_package_whose_transport_cannot_be_used_is_named(monkeypatch, value, why):
    installed(monkeypatch, pigeon=value)
    with pytest.raises(
        UsageError,
        match=rf"the transport 'pigeon' of the package that has '{value}' cannot be used \({why}\); "
        "repair that package, or take 'pigeon' out of the transports",
    ):
        registry.load("pigeon")()
