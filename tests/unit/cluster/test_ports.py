import errno
import gc
import socket
import weakref
from collections.abc import Callable

import pytest

from nexar.cluster.ports import bind_ports
from nexar.config import Config
from nexar.errors import ConfigError, UsageError

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
    for words in ("free for UDP and TCP", "the system says no", "another process uses it", "0 for any free"):
        assert words in str(refused.value)


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
