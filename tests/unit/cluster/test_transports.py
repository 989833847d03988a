"""Opening all of them at one port number, with loaders that do as they are told."""

import errno
import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from nexar.cluster.transports import has_native, open_transports, quic_terms, usable
from nexar.config import Config
from nexar.errors import ConfigError, UsageError
from nexar.security.credentials import Trust
from nexar.security.provisional import provisional_credentials
from nexar.testing.availability import why_absent
from nexar.transport.base import Carrier
from nexar.transport.quic import misfit

needs_quic = pytest.mark.skipif(why_absent("quic") is not None, reason=str(why_absent("quic")))


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
    monkeypatch.setattr("nexar.cluster.transports.has_native", lambda: False)


def test_the_settings_say_the_order_of_preference(opened: Opened) -> None:
    assert list(opened("shm", "tls").by_scheme) == ["shm", "tls"]
    assert list(opened("tls", "shm").by_scheme) == ["tls", "shm"]


def test_a_native_package_that_does_not_fit_is_named_with_what_to_do(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nexar.cluster.transports.has_native", lambda: True)
    monkeypatch.setattr("nexar.cluster.transports.available", lambda: misfit("0.1.0"))
    with pytest.raises(UsageError, match=r"^QUIC cannot be used: nexar-quic 0\.1\.0 .*NEXAR_TRANSPORTS=shm,tls$"):
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
    with pytest.raises(ConfigError, match="nexar-quic is not installed"):
        usable(Config(transports=("shm", "quic")))
    with pytest.raises(ConfigError, match="quic or tls"):
        usable(Config(transports=("shm",)))


def test_a_host_where_memory_cannot_be_shared_does_without_and_says_why(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nexar.transport.shm.transport.make_place", full)
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


def test_the_native_package_is_looked_for_without_being_loaded() -> None:
    assert has_native() == (why_absent("quic") is None)


@pytest.mark.parametrize(("timeout", "keep_alive", "idle"), [(5.0, 5 / 3, 30.0), (0.3, 0.1, 30.0), (60.0, 5.0, 120.0)])
def test_quic_shows_life_several_times_within_the_heartbeat_timeout_and_outlasts_it(
    timeout: float, keep_alive: float, idle: float
) -> None:
    terms = quic_terms(Config(heartbeat_timeout=timeout, heartbeat_interval=0.1, join_auth_timeout=7))
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
        raise OSError(errno.EADDRINUSE, "no paper left")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [EntryPoint("paper", place, "nexar.transports")])
    monkeypatch.setattr("tests.packages.paper.nexar_paper.PaperTransport.listen", refuse)
    with pytest.raises(UsageError, match=rf"'paper' of the package that has '{place}' cannot be used .*no paper left"):
        opened("tls", "paper")
    assert len(tried) == 1


def test_a_scheme_that_nobody_has_is_refused_and_nothing_is_left_open(opened: Opened) -> None:
    with pytest.raises(UsageError, match="there is no transport 'vellum'"):
        opened("tls", "vellum")
