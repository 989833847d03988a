"""Whether anybody listens at an address, on loopback."""

import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from nexar.cluster.knock import Knock, nobody_listens
from tests.ranks import PATIENCE


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def until(selector: selectors.BaseSelector, true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        for key, _ in selector.select(0.01):
            key.data()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_where_somebody_listens_it_stands_and_lasts(selector: selectors.BaseSelector, listener: socket.socket) -> None:
    with Knock(address_of(listener), selector) as knock:
        assert not knock.lasts(0)
        until(selector, lambda: knock.stands)
        until(selector, lambda: knock.lasts(0.01))
        assert knock.failed is None
    assert not selector.get_map()


def test_where_nobody_listens_it_is_refused(selector: selectors.BaseSelector, listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    with Knock(address, selector) as knock:
        until(selector, lambda: knock.failed)
        assert knock.refused
        assert not knock.stands


def test_a_process_that_ends_while_we_knock_is_found_to_have_ended(
    selector: selectors.BaseSelector, listener: socket.socket
) -> None:
    with Knock(address_of(listener), selector) as knock:
        until(selector, lambda: knock.stands)
        listener.close()  # which resets what it has not accepted
        until(selector, lambda: knock.failed)
        assert knock.refused


def test_one_that_takes_connections_and_ends_them_is_left_alone_after_a_few(
    selector: selectors.BaseSelector, listener: socket.socket
) -> None:
    listener.settimeout(0.001)

    def turn_away() -> bool:
        try:
            reset(listener.accept()[0])
        except TimeoutError:
            return knock.failed is not None
        return False

    with Knock(address_of(listener), selector) as knock:
        until(selector, turn_away)
        assert not knock.refused
        assert knock.failed == "it takes connections and ends them"


def test_an_address_that_leads_nowhere_has_failed_at_once(selector: selectors.BaseSelector) -> None:
    with Knock("nowhere.invalid:80", selector) as knock:
        assert knock.failed
        assert not knock.refused


# -- several addresses -----------------------------------------------------------------------------------------------


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as once:
        return address_of(once)


def test_nobody_listens_where_every_address_refuses() -> None:
    assert nobody_listens([free_address(), free_address()], PATIENCE)


def test_somebody_listens_where_one_address_takes_connections(listener: socket.socket) -> None:
    assert not nobody_listens([free_address(), address_of(listener)], PATIENCE)


def test_an_address_that_is_none_is_no_refusal() -> None:
    assert not nobody_listens([free_address(), "no.such.host.invalid:1"], PATIENCE)


def test_who_is_silent_may_be_there() -> None:
    assert not nobody_listens([free_address()], 0.0)
