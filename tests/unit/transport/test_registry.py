import sys
from importlib.metadata import EntryPoint

import pytest

from nexar.errors import UsageError
from nexar.security.credentials import Trust
from nexar.transport import registry
from nexar.transport.foreign import Foreign
from nexar.transport.memory import MemoryNetwork, MemoryTransport
from nexar.transport.sleep import PollSleeper


def test_our_schemes_are_there():
    assert {"memory", "quic", "shm", "tcp", "tls"} <= set(registry.schemes())


def test_an_unknown_scheme_lists_the_known_ones():
    with pytest.raises(
        UsageError, match="there is no transport 'carrier-pigeon'; there are: memory, quic, shm, tcp, tls"
    ):
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
    monkeypatch.setitem(sys.modules, "nexar_quic", None)
    for name in [name for name in sys.modules if name.startswith("nexar.transport.quic")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError):
        registry.load("quic")
    from nexar.transport.quic import available

    assert "nexar-quic" in available()


class Pigeon(MemoryTransport):
    scheme = "pigeon"


def installed(monkeypatch, **transports):
    points = [EntryPoint(name, value, registry.GROUP) for name, value in transports.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: points)


def test_others_may_add_transports_but_not_replace_ours(monkeypatch):
    installed(monkeypatch, pigeon=f"{__name__}:Pigeon", tls=f"{__name__}:Pigeon")
    sleeper = PollSleeper()
    transport = registry.load("pigeon")(sleeper, 1, MemoryNetwork())
    assert isinstance(transport, Foreign)
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
