import logging
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from operator import attrgetter
from typing import Any

import pytest

from nexar.errors import UsageError
from nexar.security.certificates import Trust
from nexar.transport import registry
from nexar.transport.memory import MemoryNetwork, MemoryTransport
from nexar.transport.registry import ForeignTransport, TransportFailed
from nexar.transport.sleeper import PollSleeper
from tests.unit.links.waiting import Sleep, Told

LOGGER = "nexar.transport.registry"


class Torn(Told):
    """Raises, whatever it is asked, once it is torn."""

    address = "the second drawer"
    torn = False

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
        if self.torn:
            raise RuntimeError("no paper left")


@pytest.fixture
def torn() -> Torn:
    return Torn(Sleep())


@pytest.fixture
def foreign(torn: Torn) -> ForeignTransport:
    return ForeignTransport(torn, lambda error: f"the transport of somebody raised {error}")


def test_what_it_is_asked_goes_through(foreign: ForeignTransport, torn: Torn) -> None:
    torn.tell(lambda: None)
    assert foreign.poll()
    assert (foreign.prepare_sleep(), foreign.due(), foreign.spins) == (False, 3.0, True)
    assert (foreign.scheme, foreign.address, foreign.address_for(3)) == ("told", "the second drawer", torn.address)
    foreign.close()
    foreign.abandon()
    assert torn.closed
    assert torn.abandoned


@pytest.mark.parametrize(
    "ask",
    [ForeignTransport.poll, ForeignTransport.prepare_sleep, ForeignTransport.due, attrgetter("spins")],
    ids=["poll", "arm", "due", "spins"],
)
def test_what_it_raises_while_it_is_driven_names_it(
    foreign: ForeignTransport, torn: Torn, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    torn.torn = True
    with pytest.raises(TransportFailed, match="of somebody raised no paper left") as broke:
        ask(foreign)
    assert isinstance(broke.value, UsageError)
    assert isinstance(broke.value.__cause__, RuntimeError)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]


def test_it_is_logged_once(foreign: ForeignTransport, torn: Torn, caplog: pytest.LogCaptureFixture) -> None:
    torn.torn = True
    for _ in range(2):
        with pytest.raises(TransportFailed):
            foreign.poll()
    foreign.close()
    assert [(record.name, record.levelno) for record in caplog.records] == [(LOGGER, logging.ERROR)]


def test_a_close_that_raises_is_told_and_over(
    foreign: ForeignTransport, torn: Torn, caplog: pytest.LogCaptureFixture
) -> None:
    torn.torn = True
    foreign.close()
    assert torn.closed
    assert "no paper left" in caplog.text


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
    from nexar.transport.quic import available

    assert "nexar-native" in available()


class Pigeon(MemoryTransport):
    scheme = "pigeon"


def installed(monkeypatch, **transports):
    points = [EntryPoint(name, value, registry.GROUP) for name, value in transports.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: points)


def test_others_may_add_transports_but_not_replace_ours(monkeypatch):
    installed(monkeypatch, pigeon=f"{__name__}:Pigeon", tls=f"{__name__}:Pigeon")
    sleeper = PollSleeper()
    transport = registry.load("pigeon")(sleeper, 1, MemoryNetwork())
    assert isinstance(transport, ForeignTransport)
    assert isinstance(transport.inside, Pigeon)
    transport.close()
    sleeper.close()
    assert "pigeon" in registry.schemes()
    assert registry.load("tls").__module__.startswith("nexar.")
    assert registry.is_ours("tls")
    assert not registry.is_ours("pigeon")


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
