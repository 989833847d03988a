"""Opening all of them at one port number, with loaders that follow a script."""

import errno
import gc
import logging
import socket
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from nexar.cluster.transports import _Opening, bind_ports, open_transports, quic_settings_for, usable_schemes
from nexar.config import Config
from nexar.errors import ConfigError, InternalError, UsageError
from nexar.native import version_problem
from nexar.security.authority import provisional_credentials
from nexar.security.certificates import Trust
from nexar.transport import registry
from nexar.transport.base import Carrier, TransportCapabilities
from nexar_tools.transports import why_unavailable

Tried = list[str]


def taking(*free: str, error: int = errno.EADDRINUSE) -> tuple[Tried, Callable[[str], str]]:
    """A system where only these addresses are to be had."""
    tried: Tried = []

    def open_at(address: str) -> str:
        tried.append(address)
        if address in free:
            return f"opened {address}"
        raise OSError(error, "the system says no")

    return tried, open_at


def test_any_port_of_every_interface_is_what_one_gets_without_asking():
    tried, open_at = taking(":0")
    assert bind_ports(Config(), open_at) == "opened :0"
    assert tried == [":0"]


def test_the_port_and_the_address_of_the_settings_are_used():
    for bind, address in (
        ("10.0.0.7", "10.0.0.7:4000"),
        ("fd00::7", "[fd00::7]:4000"),
        ("[fd00::7]", "[fd00::7]:4000"),
    ):
        _, open_at = taking(address)
        assert bind_ports(Config(port=4000, bind=bind), open_at) == f"opened {address}"


def test_the_port_goes_before_the_range():
    tried, open_at = taking(":4000")
    bind_ports(Config(port=4000, port_range=(5000, 5010)), open_at)
    assert tried == [":4000"]


def test_the_first_free_port_of_the_range_is_taken():
    tried, open_at = taking(":5002", ":5003")
    assert bind_ports(Config(port_range=(5000, 5010)), open_at) == "opened :5002"
    assert tried == [":5000", ":5001", ":5002"]


def test_any_port_is_tried_again_if_it_was_free_for_one_protocol_only():
    chances = iter([False, False, True])

    def open_at(address: str) -> str:
        if next(chances):
            return address
        raise OSError(errno.EADDRINUSE, "taken for TCP")

    assert bind_ports(Config(), open_at) == ":0"


def test_a_port_in_use_names_the_setting_the_port_and_the_remedy():
    _, open_at = taking()
    with pytest.raises(ConfigError) as refused:
        bind_ports(Config(port=4000), open_at)
    assert (refused.value.variable, refused.value.value) == ("NEXAR_PORT", 4000)
    for messages in ("free for UDP and TCP", "the system says no", "another process uses it", "0 for any free"):
        assert messages in str(refused.value)


def test_a_range_in_use_names_the_range():
    tried, open_at = taking()
    with pytest.raises(ConfigError, match="widen it") as refused:
        bind_ports(Config(port_range=(5000, 5002)), open_at)
    assert (refused.value.variable, refused.value.value) == ("NEXAR_PORT_RANGE", "5000-5002")
    assert len(tried) == 3


def test_a_port_that_needs_privileges_says_so():
    _, open_at = taking(error=errno.EACCES)
    with pytest.raises(ConfigError, match="below 1024 need privileges"):
        bind_ports(Config(port=80), open_at)


def test_an_address_that_is_not_ours_names_the_setting():
    tried, open_at = taking(error=errno.EADDRNOTAVAIL)
    with pytest.raises(ConfigError) as refused:
        bind_ports(Config(bind="8.8.8.8", port_range=(5000, 5010)), open_at)
    assert (refused.value.variable, refused.value.value) == ("NEXAR_BIND", "8.8.8.8")
    assert len(tried) == 1


def test_a_name_that_does_not_exist_names_the_setting():
    def open_at(address: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(ConfigError, match="not known") as refused:
        bind_ports(Config(bind="nowhere"), open_at)
    assert refused.value.variable == "NEXAR_BIND"


@pytest.mark.parametrize("bind", ["10.0.0.7:4000", "a:b", "::1:::"])
def test_an_address_with_a_port_is_refused_with_the_setting_for_ports(bind):
    with pytest.raises(ConfigError, match="NEXAR_PORT") as refused:
        bind_ports(Config(bind=bind), taking()[1])
    assert refused.value.variable == "NEXAR_BIND"


def test_an_explicit_address_goes_before_the_settings_and_is_named_if_it_is_taken():
    _, open_at = taking("127.0.0.1:6000")
    assert bind_ports(Config(port=4000), open_at, listen="127.0.0.1:6000") == "opened 127.0.0.1:6000"
    with pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1:6001.*another process uses it"):
        bind_ports(Config(), open_at, listen="127.0.0.1:6001")
    with pytest.raises(UsageError):
        bind_ports(Config(), open_at, listen="nonsense")


def test_a_port_that_was_taken_keeps_nothing_alive_that_a_caller_holds():
    class Held:
        """A process group of torch's, say: it leaves when it is dropped."""

    def call() -> "weakref.ref[Held]":
        held = Held()
        _, open_at = taking(":5002")
        bind_ports(Config(port_range=(5000, 5010)), open_at)
        return weakref.ref(held)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


needs_quic = pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))


class Nobody:
    def carrier_accepted(self, carrier: Carrier) -> None:
        carrier.abort("nobody is here")

    def candidate_refused(self, address: str, reason: str) -> None:
        pass


class Opened:
    """Opens for real, closes at the end."""

    def __init__(self) -> None:
        self._made: list[Any] = []

    def __call__(self, *schemes: str, **settings: Any) -> Any:
        config = Config(transports=schemes, bind="127.0.0.1", **settings)
        made = open_transports(config, provisional_credentials(7), Trust(b""), Nobody())
        self._made.append(made)
        return made

    def close(self) -> None:
        for made in self._made:
            made.close()


@pytest.fixture
def opened() -> Iterator[Opened]:
    made = Opened()
    yield made
    made.close()


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexar.transport.registry.native_installed", lambda: False)


def test_the_settings_say_the_order_of_preference(opened: Opened) -> None:
    assert list(opened("shm", "tls").by_scheme) == ["shm", "tls"]
    assert list(opened("tls", "shm").by_scheme) == ["tls", "shm"]


def test_a_native_package_that_does_not_fit_is_named_with_what_to_do(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.transport.registry.native_installed", lambda: True)
    monkeypatch.setattr("nexar.cluster.transports.missing_support", lambda: version_problem("0.1.0"))
    with pytest.raises(UsageError, match=r"^QUIC cannot be used: nexar-native 0\.1\.0 .*NEXAR_TRANSPORTS=shm,tls$"):
        opened("quic", "tls")


@needs_quic
def test_udp_and_tcp_have_one_port_number(opened: Opened) -> None:
    made = opened("shm", "quic", "tls")
    assert list(made.by_scheme) == ["shm", "quic", "tls"]
    assert made.by_scheme["quic"].address == made.by_scheme["tls"].address == made.address
    assert made.sleeper is made.by_scheme["quic"]


@pytest.mark.usefixtures("without_native")
def test_without_the_native_package_the_rest_serves(opened: Opened) -> None:
    assert list(opened("shm", "quic", "tls").by_scheme) == ["shm", "tls"]


@pytest.mark.usefixtures("without_native")
def test_what_leads_nowhere_is_refused_and_the_missing_package_named() -> None:
    with pytest.raises(ConfigError, match="nexar-native is not installed"):
        usable_schemes(Config(transports=("shm", "quic")))
    with pytest.raises(ConfigError, match="quic or tls"):
        usable_schemes(Config(transports=("shm",)))


@pytest.mark.parametrize(
    ("schemes", "remedy"),
    [
        (("memory", "tls"), "memory connects nodes of one process, in tests only: leave it out"),
        (("tls", "tcp"), "tcp is used only for large payloads: leave it out, and set NEXAR_ENCRYPT_BULK_TRANSPORT=0"),
    ],
)
def test_a_scheme_that_no_node_opens_is_refused_with_the_remedy(
    opened: Opened, schemes: tuple[str, ...], remedy: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        opened(*schemes)
    assert raised.value.variable == "NEXAR_TRANSPORTS"
    assert raised.value.hint == remedy


def test_a_built_in_scheme_that_no_code_opens_is_a_bug_that_is_named(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = registry._BuiltinTransport(9, "nexar.transport.new:NewTransport", TransportCapabilities())
    monkeypatch.setitem(registry._BUILTIN, "new", new)
    with pytest.raises(InternalError, match=r"no code in nexar\.cluster\.transports opens .* 'new'"):
        opened("tls", "new")


def test_every_built_in_scheme_that_a_setting_may_name_is_opened() -> None:
    assert set(registry.opened_on_request()) == _Opening._BUILTIN


def test_a_host_where_memory_cannot_be_shared_does_without_and_says_why(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nexar.transport.shm.transport.make_socket_directory", full)
    with caplog.at_level(logging.INFO, "nexar.cluster.transports"):
        assert list(opened("shm", "tls").by_scheme) == ["tls"]
    assert "No space left" in caplog.text


def test_a_port_that_is_taken_leaves_nothing_open(opened: Opened) -> None:
    taken = int(opened("tls").address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(taken)):
        opened("shm", "tls", port=taken)


@needs_quic
def test_a_port_of_which_only_the_udp_half_is_free_leaves_nothing_open(opened: Opened) -> None:
    taken = int(opened("tls").address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=str(taken)):
        opened("quic", "tls", port=taken)


@pytest.mark.parametrize(("timeout", "keep_alive", "idle"), [(5.0, 5 / 3, 30.0), (0.3, 0.1, 30.0), (60.0, 5.0, 120.0)])
def test_quic_shows_life_several_times_within_the_heartbeat_timeout_and_outlasts_it(
    timeout: float, keep_alive: float, idle: float
) -> None:
    terms = quic_settings_for(Config(heartbeat_timeout=timeout, heartbeat_interval=0.1, join_auth_timeout=7))
    assert terms["keep_alive_interval"] == pytest.approx(keep_alive)
    assert (terms["idle_timeout"], terms["handshake_timeout"]) == (idle, 7)


def test_a_transport_of_another_package_listens_at_a_port_of_its_own(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("paper", "tests.packages.paper.nexar_paper:PaperTransport", "nexar.transports")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [point])
    made = opened("paper", "tls")
    assert list(made.by_scheme) == ["paper", "tls"]
    assert made.by_scheme["tls"].address == made.address
    assert made.by_scheme["paper"].address.startswith("127.0.0.1:")
    assert made.by_scheme["paper"].address != made.address


def test_a_transport_of_another_package_that_cannot_listen_is_named_and_no_port_of_ours_blamed(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "tests.packages.paper.nexar_paper:PaperTransport"
    tried: list[str] = []

    def refuse(_: object, address: str, acceptor: object) -> str:
        tried.append(address)
        raise OSError(errno.EADDRINUSE, "out of memory")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [EntryPoint("paper", place, "nexar.transports")])
    monkeypatch.setattr("tests.packages.paper.nexar_paper.PaperTransport.listen", refuse)
    with pytest.raises(UsageError, match=rf"'paper' of the package that has '{place}' cannot be used .*out of memory"):
        opened("tls", "paper")
    assert len(tried) == 1


def test_a_scheme_that_nobody_has_is_refused_and_nothing_is_left_open(opened: Opened) -> None:
    with pytest.raises(ConfigError, match="unknown transport 'vellum'"):
        opened("tls", "vellum")


@pytest.mark.parametrize(
    ("given", "problem"), [(("tsl",), "did you mean tls?"), (("tls", "vellum"), "known: quic, shm, ")]
)
def test_an_unknown_scheme_of_the_setting_is_named(given: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        usable_schemes(Config(transports=given))
    assert f"unknown transport {given[-1]!r}; {problem}" in str(refused.value)
