"""A second connection for large payloads, and what happens when it is lost."""

from __future__ import annotations

import hashlib
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from nexar.links.link import Link
from nexar.links.messages import Receive
from nexar.links.operation import Operation
from nexar.links.sending import MessageHeader
from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.transport.base import Carrier, Expected
from nexar.wire.frame import Frame, FrameKind, Lane, Space, encode
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.transports import why_unavailable
from tests.unit.cluster.memory_mesh import eventually

TAG = MessageHeader(space=Space.TAGGED, tag=7)
BULK = bytes(range(251)) * 40_000
COMBINATIONS = ["quic+tcp", "quic+tls", "tls+tcp"]


@dataclass
class Linked:
    left: LinkedNode
    right: LinkedNode
    to_right: Link
    to_left: Link
    sidecar: str

    def known(self) -> bool:
        """Whether both ends announce large payloads on the sidecar."""
        return self.to_right._state._sidecar_known and self.to_left._state._sidecar_known

    def carrier(self, link: Link) -> Carrier:
        found = link._state.sidecar
        assert found is not None
        return found


def make(authority: Authority, combination: str) -> Linked:
    mesh, sidecar = combination.split("+")
    trust = Trust(authority.certificate_pem)
    left, right = (LinkedNode(authority.admit(n), trust, [mesh, sidecar], sidecar=sidecar) for n in (1, 2))
    to_right = left.connect(2, right.addresses_for(1))
    linked = Linked(left, right, to_right, right.accept(), sidecar)
    eventually(linked.known, "a sidecar that both ends know")
    return linked


@pytest.fixture(params=COMBINATIONS)
def linked(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Linked]:
    for scheme in request.param.split("+"):
        if reason := why_unavailable(scheme):
            pytest.skip(reason)
    made = make(authority, request.param)
    yield made
    made.left.close()
    made.right.close()


def receive(node: LinkedNode, source: int, into: memoryview | None = None) -> Receive:
    return node.matching.post(into, source=source, space=Space.TAGGED, tag=7)


def exchange(linked: Linked, data: bytes = BULK) -> None:
    """There and back at the same time."""
    there, back = receive(linked.right, 1), receive(linked.left, 2)
    sends = [
        linked.to_right.post_send(0, memoryview(data), about=TAG),
        linked.to_left.post_send(0, memoryview(data), about=TAG),
    ]
    linked.left.wait(back, sends[0])
    linked.right.wait(there, sends[1])
    assert bytes(there.into or b"") == data
    assert bytes(back.into or b"") == data


def test_large_payloads_take_the_sidecar_and_everything_else_the_mesh_connection(linked: Linked) -> None:
    sidecar, mesh = f"{linked.sidecar}.bytes_received", f"{linked.to_right.schemes[0]}.bytes_received"
    exchange(linked)
    before = linked.to_right.stats()
    assert before[sidecar] > len(BULK) > before[mesh]
    exchange(linked, b"small")
    exchange(linked, bytes(100_000))  # a payload of its own, and not large
    after = linked.to_right.stats()
    assert after[sidecar] == before[sidecar]
    assert after[mesh] > before[mesh] + 100_000
    assert after["sidecar_failovers"] == 0


def test_order_is_kept_between_small_and_large(linked: Linked) -> None:
    messages = [bytes([n]) * (1 if n % 2 else len(BULK)) for n in range(12)]
    sends = [linked.to_right.post_send(0, memoryview(message), about=TAG) for message in messages]
    for message in messages:
        received = receive(linked.right, 1)
        linked.right.wait(received)
        assert bytes(received.into or b"") == message
    linked.left.wait(*sends)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_sidecar_that_is_lost_between_messages_is_done_without(
    linked: Linked, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    exchange(linked)
    broken, other = (linked.to_right, linked.to_left) if side == "sender" else (linked.to_left, linked.to_right)
    with caplog.at_level(logging.WARNING, "nexar.links.bulk_channel"):
        linked.carrier(broken).abort("broken by the test")  # which the link on this side does not learn of
        exchange(linked)
        eventually(lambda: other.stats()["sidecar_failovers"] == 1, "the other end")
    assert broken.stats()["sidecar_failovers"] == 1
    assert "lost the bulk sidecar to node" in caplog.text
    assert broken.stats()[f"{linked.sidecar}.bytes_sent"] > len(BULK)  # what it carried is not forgotten


def hold(linked: Linked) -> None:
    """From now on the sidecar's bytes are not read on the right: whatever is sent on it stays in the middle."""
    carrier = linked.carrier(linked.to_left)
    reactor = carrier._selector  # type: ignore[attr-defined]
    for connection in (carrier._control, carrier._data):  # type: ignore[attr-defined]
        with connection.lock:
            reactor.change(connection.descriptor, 0)


def begin(linked: Linked, into: bytearray | None) -> tuple[Receive | None, Operation]:
    """A transfer on the sidecar that gets stuck; with a receive, or early."""
    hold(linked)
    receiving = receive(linked.right, 1, memoryview(into)) if into is not None else None
    send = linked.to_right.post_send(0, memoryview(BULK), about=TAG)
    eventually(lambda: getattr(send, "flowing", False), "the transfer")
    return receiving, send


@pytest.mark.parametrize("early", [False, True], ids=["direct", "early"])
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_payload_that_was_on_its_way_when_the_sidecar_was_lost_starts_again(
    linked: Linked, side: str, early: bool
) -> None:
    receiving, send = begin(linked, None if early else bytearray(len(BULK)))
    broken = linked.to_right if side == "sender" else linked.to_left
    linked.carrier(broken).abort("broken by the test")
    broken.sidecar.lost_by_peer()
    linked.left.wait(send)
    received = receiving or receive(linked.right, 1)
    linked.right.wait(received)
    assert bytes(received.into or b"") == BULK
    assert linked.to_right.stats()["messages_sent"] == linked.to_left.stats()["messages_received"] == 1


def test_a_message_that_is_being_moved_when_the_sidecar_is_lost_starts_again_where_it_went(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, send = begin(linked, None)
    origin = linked.to_left._receiving
    redirect = origin.redirect

    def lose_meanwhile(*arguments: object) -> object:
        monkeypatch.undo()
        found = redirect(*arguments)  # type: ignore[arg-type]
        linked.to_left.sidecar.lost_by_peer()
        return found

    monkeypatch.setattr(origin, "redirect", lose_meanwhile)
    into = bytearray(len(BULK))
    received = receive(linked.right, 1, memoryview(into))
    linked.right.wait(received)
    linked.left.wait(send)
    assert into == BULK


def test_a_send_that_is_cancelled_while_it_starts_again_leaves_the_link_usable(linked: Linked) -> None:
    into = bytearray(len(BULK))
    receiving, send = begin(linked, into)
    assert receiving is not None
    linked.to_left.sidecar.lost_by_peer()
    send.cancel()
    linked.to_right.post_send(0, memoryview(b"instead"), about=TAG)
    receiving.cancel()
    after = receive(linked.right, 1)
    linked.right.wait(after)
    assert bytes(after.into or b"") in (b"instead", BULK)
    exchange(linked)


def test_frames_that_do_not_belong_on_a_sidecar_are_dropped(linked: Linked) -> None:
    header = encode(Frame(kind=FrameKind.EAGER, lane=Lane.DATA, length=4, body=4))
    linked.carrier(linked.to_right).send_frame(Lane.DATA, 0, header, b"psst")
    eventually(lambda: linked.to_left.stats()["frames_dropped"] == 1, "the frame")
    assert linked.right.matching.probe(source=1, space=Space.TAGGED, tag=0) is None
    exchange(linked)


def test_a_link_with_a_sidecar_closes_politely_and_nobody_calls_that_a_failure(
    linked: Linked, caplog: pytest.LogCaptureFixture
) -> None:
    exchange(linked)
    sidecars = [linked.carrier(link) for link in (linked.to_right, linked.to_left)]
    with caplog.at_level(logging.INFO, "nexar.links.bulk_channel"):
        linked.to_right.close()
        eventually(lambda: linked.to_left.failure is not None, "the end")
    assert "it closed the link" in str(linked.to_left.failure)
    assert not caplog.records
    assert all(link.stats()["sidecar_failovers"] == 0 for link in (linked.to_right, linked.to_left))
    for carrier in sidecars:
        eventually(lambda carrier=carrier: carrier._ending.lost, "the end of the sidecar")  # type: ignore[misc]


def test_a_link_that_is_lost_takes_its_sidecar_along(linked: Linked) -> None:
    sidecars = [linked.carrier(link) for link in (linked.to_right, linked.to_left)]
    linked.to_right.abort("enough")
    for carrier in sidecars:
        eventually(lambda carrier=carrier: carrier._ending.lost, "the end of the sidecar")  # type: ignore[misc]
    assert linked.to_right._state.sidecar is None


def test_a_second_sidecar_is_refused(linked: Linked) -> None:
    first = linked.carrier(linked.to_right)
    refused = threading.Event()

    class Second:
        scheme = linked.sidecar

        def abort(self, reason: str) -> None:
            refused.set()

    linked.to_right.sidecar.adopt(Second())  # type: ignore[arg-type]
    assert refused.is_set()
    assert linked.to_right._state.sidecar is first


# -- again and again -------------------------------------------------------------------------------------------------

ROUNDS, AT_ONCE = 12, 3
SIZE = 3_000_000


def sever(carrier: Carrier, way: int) -> None:
    """Below everything that is ours: both ends of the TCP connection learn of it from the system."""
    connection = carrier._data if way % 2 else carrier._control  # type: ignore[attr-defined]
    with connection.lock:
        if connection.ended is None:
            connection.channel.socket.shutdown(socket.SHUT_RDWR)


def renew(linked: Linked) -> None:
    eventually(lambda: not (linked.to_right._state.sidecar or linked.to_left._state.sidecar), "the loss at both ends")
    transport, address = linked.left.transports[linked.sidecar], linked.right.addresses_for(1)[linked.sidecar]
    linked.to_right.sidecar.adopt(transport.connect(address, Expected(2), time.monotonic() + 10))
    eventually(linked.known, "a new sidecar")


def test_no_byte_is_lost_however_often_the_sidecar_is_cut_in_the_middle(linked: Linked) -> None:
    draw = random.Random(5)
    total = 0
    for number in range(ROUNDS):
        data = [draw.randbytes(SIZE) for _ in range(2 * AT_ONCE)]
        cut = linked.carrier((linked.to_right, linked.to_left)[number % 2])
        enough = cut.stats()["bytes_received"] + draw.randrange(SIZE * AT_ONCE)
        there = [receive(linked.right, 1) for _ in range(AT_ONCE)]
        back = [receive(linked.left, 2) for _ in range(AT_ONCE)]
        sends = [linked.to_right.post_send(0, memoryview(each), about=TAG) for each in data[:AT_ONCE]]
        answers = [linked.to_left.post_send(0, memoryview(each), about=TAG) for each in data[AT_ONCE:]]
        eventually(lambda: cut.stats()["bytes_received"] >= enough, "some of it")  # noqa: B023
        sever(cut, number // 2)
        linked.left.wait(*back, *sends)
        linked.right.wait(*there, *answers)
        digests = [hashlib.sha256(bytes(each.into or b"")).digest() for each in (*there, *back)]
        assert digests == [hashlib.sha256(each).digest() for each in data]
        renew(linked)
        total += 1
    stats = linked.to_right.stats()
    assert stats["sidecar_failovers"] >= total
    assert stats[f"{linked.to_right.schemes[0]}.bytes_received"] > SIZE  # what had to start again
    assert stats["messages_received"] == stats["messages_sent"] == ROUNDS * AT_ONCE
