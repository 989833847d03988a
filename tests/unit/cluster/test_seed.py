import pytest

from nexar.cluster.seed import open_seed_transports, previous_listen_address, seed_addresses
from nexar.cluster.transports import Transports
from nexar.config import Config
from nexar.errors import ConfigError, UsageError
from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.transport.base import Carrier
from nexar_tools.transports import why_unavailable


class Nobody:
    def carrier_accepted(self, carrier: Carrier) -> None:
        raise AssertionError("nobody was expected")

    def candidate_refused(self, address: str, reason: str) -> None:
        raise AssertionError("nobody was expected")


def open_here(config: Config, listen: str = "127.0.0.1:0") -> Transports:
    authority = Authority.create("c")
    return open_seed_transports(
        config,
        authority.admit(7),
        Trust(authority.certificate_pem, allow_anonymous=True),
        Nobody(),
        size=2,
        listen=listen,
    )


def test_all_transports_have_one_port() -> None:
    place = open_here(Config())
    assert list(place.by_scheme) == (["tls"] if why_unavailable("quic") else ["quic", "tls"])
    assert {transport.address for transport in place.by_scheme.values()} == {place.address}
    place.close()
    place.close()


@pytest.mark.parametrize("wanted", [("tls",), ("shm", "tls")])
def test_nobody_joins_through_memory(wanted: tuple[str, ...]) -> None:
    place = open_here(Config(transports=wanted))
    assert list(place.by_scheme) == ["tls"]
    place.close()


def test_a_port_that_is_taken_is_named_and_nothing_stays_open() -> None:
    place = open_here(Config())
    with pytest.raises(UsageError, match=place.address):
        open_here(Config(), place.address)
    place.close()


@pytest.mark.parametrize(
    ("port", "listen", "expected"),
    [
        (0, None, None),
        (0, "10.0.0.1:5", "10.0.0.1:5"),
        (4711, None, ":4711"),
        (4711, "10.0.0.1:0", "10.0.0.1:4711"),
        (4711, "[::1]:4711", "[::1]:4711"),
    ],
)
def test_a_seed_comes_back_at_its_port(port: int, listen: str | None, expected: str | None) -> None:
    assert previous_listen_address(port, listen, Config()) == expected


def test_the_settings_say_at_which_address_it_comes_back() -> None:
    assert previous_listen_address(4711, None, Config(bind="[::1]")) == "[::1]:4711"


def test_a_seed_cannot_come_back_elsewhere() -> None:
    with pytest.raises(UsageError, match="4711"):
        previous_listen_address(4711, ":4712", Config())
    with pytest.raises(UsageError, match="4711"):
        previous_listen_address(4711, None, Config(port=4712))


def test_others_are_notified_where_it_is() -> None:
    assert seed_addresses(Config(), "127.0.0.1:5") == ("127.0.0.1:5",)
    assert seed_addresses(Config(advertise="seed.example"), "[::]:5") == ("seed.example:5",)
    everywhere = seed_addresses(Config(), "0.0.0.0:5")
    loopback = [address for address in everywhere if address.startswith("127.")]
    assert everywhere
    assert loopback in ([], list(everywhere))


def test_without_any_address_there_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexar.cluster.seed.read_interfaces", tuple)
    assert seed_addresses(Config(), "0.0.0.0:5") == ("127.0.0.1:5",)


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="NEXAR_IFACE"):
        seed_addresses(Config(iface="nothere0"), "0.0.0.0:5")
