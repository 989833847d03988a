"""A link between two nodes of one process.

How links begin, are replaced, and end.

Closing many links at once.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
import time

import numpy as np
import pytest
from msgspec.structs import replace

from nexar.errors import (
    BufferMismatch,
    Cancelled,
    LinkClosed,
    OperationTimeout,
    PeerLost,
    PeerMisbehaved,
    Revoked,
    UsageError,
)
from nexar.links.link import Closing, Link, close_all
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.links.sending import MessageHeader, Sending
from nexar.testing.faults import Faults, LinkStall
from nexar.transport.base import Carrier, CarrierLost, Expected, Redirected
from nexar.transport.sleeper import PollSleeper
from nexar.types import AwaitedPeer
from nexar.wire.control import Ping
from nexar.wire.frame import Frame, FrameKind, Lane, Space, encode
from nexar_tools.bare_nodes import LinkedNode
from tests.unit.cluster.memory_mesh import eventually
from tests.unit.links.conftest import MakePair, Pair

TAG = MessageHeader(space=Space.TAGGED, tag=7)
LARGE = 300_000


def receive(node: LinkedNode, source: int, tag: int = 7, into: memoryview | None = None) -> bytes:
    operation = node.matching.post(into, source=source, space=Space.TAGGED, tag=tag)
    node.wait(operation)
    assert operation.into is not None
    return bytes(operation.into)


def large(seed: int, size: int = LARGE) -> bytes:
    return bytes((seed + i) % 251 for i in range(1000)) * (size // 1000)


def test_messages_of_any_size_arrive_in_order(pair: Pair) -> None:
    messages = [b"", b"x", large(1), b"y" * 65536, b"z" * 65537, large(2), b"end"]
    operations = [pair.to_right.post_send(0, memoryview(message), about=TAG) for message in messages]
    assert [receive(pair.right, 1) for _ in messages] == messages
    pair.left.wait(*operations)


def test_both_ends_may_send_first_and_receive_then(pair: Pair) -> None:
    sends = [
        pair.to_right.post_send(0, memoryview(large(1)), about=TAG),
        pair.to_left.post_send(0, memoryview(large(2)), about=TAG),
    ]
    pair.left.wait(sends[0])
    pair.right.wait(sends[1])
    assert receive(pair.left, 2) == large(2)
    assert receive(pair.right, 1) == large(1)


def test_a_message_on_another_tag_passes_many_that_nobody_reads(make_pair: MakePair) -> None:
    pair = make_pair(early_bytes=LARGE)
    unread = [pair.to_right.post_send(0, memoryview(large(n)), about=TAG) for n in range(20)]
    pair.to_right.post_send(0, memoryview(b"hello"), about=MessageHeader(Space.TAGGED, 8))
    assert receive(pair.right, 1, tag=8) == b"hello"
    assert not unread[-1].done
    assert [receive(pair.right, 1) for _ in unread] == [large(n) for n in range(20)]
    pair.left.wait(*unread)


def test_small_messages_beyond_the_credit_wait_and_none_is_lost(make_pair: MakePair) -> None:
    pair = make_pair(credit_bytes=262_144, eager_limit_bytes=1024, early_bytes=8192)
    sends = [pair.to_right.post_send(0, memoryview(n.to_bytes(4, "little") * 200), about=TAG) for n in range(4000)]
    assert not sends[-1].done
    assert pair.to_right.stats()["sends_stalled"] > 0
    for number in range(4000):
        assert receive(pair.right, 1) == number.to_bytes(4, "little") * 200
    pair.left.wait(*sends)


def test_sends_that_waited_go_on_when_the_peer_allows_more_than_was_assumed(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its terms may come late, when a packet was lost; and it gives nothing back for the little it got until then."""
    late: list[tuple[Sending, Frame]] = []
    with monkeypatch.context() as patch:
        patch.setattr(Sending, "allowed", lambda sending, frame: late.append((sending, frame)))
        pair = make_pair(credit_bytes=8 << 20)
        pair.to_left.post_send(0, memoryview(b"hello"), about=TAG)
        receive(pair.left, 2)  # its terms have come before it
        sends = [pair.to_right.post_send(0, memoryview(bytes([n % 251]) * 800), about=TAG) for n in range(4000)]
        assert pair.to_right.stats()["sends_stalled"] > 0
    for sending, frame in late:
        with sending.lock:
            sending.allowed(frame)
    pair.left.router.deferred_io.flush()
    assert [receive(pair.right, 1)[0] for _ in sends] == [n % 251 for n in range(4000)]
    pair.left.wait(*sends)


def test_an_array_of_more_than_4_gib_is_announced_with_its_length(make_pair: MakePair) -> None:
    pair = make_pair(early_bytes=1)
    with mmap.mmap(-1, 5 << 30) as nothing, memoryview(nothing) as data:  # pages nobody touches cost nothing
        send = pair.to_right.post_send(0, data, about=TAG)
        pair.to_right.post_send(0, memoryview(b"small"), about=MessageHeader(space=Space.TAGGED, tag=8))
        receive(pair.right, 1, tag=8)
        message = pair.right.matching.probe(source=1, space=Space.TAGGED, tag=7)
        assert message is not None
        assert message.frame.length == 5 << 30
        send.cancel()


def test_a_send_that_nobody_receives_times_out_and_names_the_missing_receive(make_pair: MakePair) -> None:
    pair = make_pair(early_bytes=1)
    send = pair.to_right.post_send(0, memoryview(large(1)), about=TAG)
    with pytest.raises(OperationTimeout, match="missing a receive with tag 7"):
        pair.left.wait(send, timeout=0.05)
    with pytest.raises(Cancelled):
        send.result()
    pair.to_right.post_send(0, memoryview(b"next"), about=TAG)
    assert receive(pair.right, 1) == b"next"


def test_a_receive_that_times_out_names_the_missing_send_and_takes_nothing_later(pair: Pair) -> None:
    into = bytearray(4)
    operation = pair.right.matching.post(memoryview(into), source=1, space=Space.TAGGED, tag=7)
    with pytest.raises(OperationTimeout, match=r"node 0000000000000001, missing a send with tag 7"):
        pair.right.wait(operation, timeout=0.05)
    pair.to_right.post_send(0, memoryview(b"data"), about=TAG)
    assert receive(pair.right, 1) == b"data"
    assert bytes(into) == bytes(4)


def test_a_send_cancelled_while_it_waits_for_credit_leaves_no_gap(make_pair: MakePair) -> None:
    pair = make_pair(credit_bytes=262_144, eager_limit_bytes=1024, early_bytes=1)
    sends = [pair.to_right.post_send(0, memoryview(bytes([n % 251]) * 2000), about=TAG) for n in range(4000)]
    waiting = next(index for index, send in enumerate(sends) if not getattr(send, "announced", True))
    sends[waiting + 3].cancel()
    expected = [n % 251 for n in range(4000) if n != waiting + 3]
    assert [receive(pair.right, 1)[0] for _ in expected] == expected


def test_closing_politely_delivers_what_was_sent_and_notifies_the_peer(pair: Pair) -> None:
    pair.to_right.post_send(0, memoryview(b"last words"), about=TAG)
    pair.to_right.close()
    assert receive(pair.right, 1) == b"last words"
    with pytest.raises(PeerLost, match="it closed the link"):
        receive(pair.right, 1)
    with pytest.raises(LinkClosed):
        pair.to_right.post_send(0, memoryview(b""), about=TAG)
    with pytest.raises(PeerLost):
        pair.to_left.post_send(0, memoryview(b""), about=TAG)


def test_a_lost_link_wakes_every_waiter_at_once_with_the_reason(pair: Pair) -> None:
    errors: list[BaseException] = []

    def wait(tag: int) -> None:
        try:
            receive(pair.right, 1, tag=tag)
        except PeerLost as error:
            errors.append(error)

    threads = [threading.Thread(target=wait, args=(tag,)) for tag in range(8)]
    for thread in threads:
        thread.start()
    while len(pair.right.matching._posted) < 8:
        time.sleep(0.001)
    pair.to_right.abort("gone fishing")
    for thread in threads:
        thread.join(5)
    assert len(errors) == 8
    assert "gone fishing" in str(errors[0])
    assert len(pair.losses) == 1


def test_after_a_new_connection_only_the_next_generation_works(pair: Pair) -> None:
    pending = pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=7)
    carrier = pair.left.transports["memory"].connect(
        pair.right.addresses_for(1)["memory"], Expected(2), time.monotonic() + 5
    )
    pair.to_right.adopt(carrier)
    with pytest.raises(PeerLost):
        pair.right.wait(pending)
    for send in (pair.to_right, pair.to_left):
        with pytest.raises(PeerLost):
            send.post_send(0, memoryview(b"old"), about=TAG)
    left, right = pair.left.router.open(0, 1), pair.right.router.open(0, 1)
    pair.to_right.post_send(0, memoryview(b"new"), about=TAG)
    operation = right.post(None, source=1, space=Space.TAGGED, tag=7)
    pair.right.wait(operation)
    assert bytes(operation.into or b"") == b"new"
    assert left.generation == 1


def test_frames_for_a_communicator_that_is_not_open_yet_wait_for_it(pair: Pair) -> None:
    pair.left.router.open(5)
    pair.to_right.post_send(5, memoryview(b"early bird"), about=TAG)
    pair.to_right.post_send(0, memoryview(b"marker"), about=TAG)
    assert receive(pair.right, 1) == b"marker"
    matching = pair.right.router.open(5)
    operation = matching.post(None, source=1, space=Space.TAGGED, tag=7)
    pair.right.wait(operation)
    assert bytes(operation.into or b"") == b"early bird"


def test_frames_of_a_generation_that_is_over_are_dropped_and_counted(pair: Pair) -> None:
    pair.right.router.open(0, 1)
    pair.to_right.post_send(0, memoryview(b"stale"), about=TAG)
    pair.left.router.open(9)
    other = pair.right.router.open(9)
    pair.to_right.post_send(9, memoryview(b"fresh"), about=TAG)
    operation = other.post(None, source=1, space=Space.TAGGED, tag=7)
    pair.right.wait(operation)
    assert pair.right.router.stale_frames == 1


def test_a_communicator_that_is_not_open_cannot_be_sent_on(pair: Pair) -> None:
    with pytest.raises(UsageError, match="communicator 77 is not open"):
        pair.to_right.post_send(77, memoryview(b""), about=TAG)


def test_control_messages_arrive_whatever_data_is_outstanding(pair: Pair) -> None:
    for number in range(5):
        pair.to_right.post_send(0, memoryview(large(number)), about=TAG)
    assert pair.to_right.send_control(Ping(number=3))
    while not pair.control:
        pair.right.progress.wait([], 0)
        time.sleep(0.001)
    assert pair.control == [Ping(number=3)]


def rogue(pair: Pair, frame: Frame, body: bytes = b"") -> None:
    """Send a frame that no link would."""
    carrier = pair.to_right._state.connected()
    carrier.send_frame(Lane.DATA, frame.communicator, encode(replace(frame, body=len(body))), body)


@pytest.mark.parametrize(
    ("frame", "body", "what"),
    [
        (Frame(kind=FrameKind.EAGER, space=Space.TAGGED, message=0, length=2), b"ab", "message 0 twice"),
        (Frame(kind=FrameKind.CREDIT, length=1 << 40), b"", "more credit"),
        (
            Frame(kind=FrameKind.ENVELOPE, space=Space.TAGGED, message=1, carrier=99, transfer=1, length=9),
            b"",
            "carrier 99",
        ),
        (
            Frame(kind=FrameKind.EAGER, space=Space.TAGGED, message=1, dimensions=33, length=0),
            bytes(33 * 8),
            "dimensions",
        ),
    ],
    ids=["repeated", "credit", "carrier", "shape"],
)
def test_a_peer_that_breaks_the_protocol_is_named_and_cut_off(pair: Pair, frame: Frame, body: bytes, what: str) -> None:
    pair.to_right.post_send(0, memoryview(b"honest"), about=TAG)
    pair.to_left.post_send(0, memoryview(b"honest"), about=TAG)
    receive(pair.right, 1)
    receive(pair.left, 2)
    operation = pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=1)
    rogue(pair, frame, body)
    with pytest.raises(PeerMisbehaved, match=what):
        pair.right.wait(operation)


def test_a_bad_frame_read_after_the_link_was_lost_does_not_lose_the_peer_for_a_later_generation(pair: Pair) -> None:
    (carrier,) = pair.to_left._state.carriers.values()
    bad = Frame(kind=FrameKind.CONTROL, length=1)
    pair.to_left.frame_arrived(carrier, bad, memoryview(b"\xff"))
    assert isinstance(pair.to_left.failure, PeerMisbehaved)
    later = pair.right.router.open(0, pair.right.matching.generation + 1)
    pair.to_left.frame_arrived(carrier, bad, memoryview(b"\xff"))
    assert later.lost(1) is None


def test_a_peer_that_overdraws_its_credit_is_cut_off(pair: Pair) -> None:
    operation = pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=1)
    for number in range(20):
        body = bytes(65536)
        rogue(pair, Frame(kind=FrameKind.EAGER, space=Space.TAGGED, tag=2, message=number, length=len(body)), body)
    with pytest.raises(PeerMisbehaved, match="more than its credit"):
        pair.right.wait(operation)


def test_a_frame_of_an_unknown_kind_is_dropped_and_counted(pair: Pair) -> None:
    rogue(pair, Frame(kind=200), b"whatever")
    pair.to_right.post_send(0, memoryview(b"after"), about=TAG)
    assert receive(pair.right, 1) == b"after"
    assert pair.to_left.stats()["frames_dropped"] == 1


def test_messages_that_overtake_one_another_are_put_back_in_order(pair: Pair) -> None:
    pair.to_right.post_send(0, memoryview(b"0"), about=TAG)
    for number in (3, 2, 1):
        rogue(
            pair, Frame(kind=FrameKind.EAGER, space=Space.TAGGED, tag=7, message=number, length=1), str(number).encode()
        )
    assert [receive(pair.right, 1) for _ in range(4)] == [b"0", b"1", b"2", b"3"]


def test_cancelling_a_send_in_mid_flight_frees_its_memory_and_the_link_goes_on(make_pair: MakePair) -> None:
    pair = make_pair(early_bytes=1)
    data = bytearray(large(1))
    send = pair.to_right.post_send(0, memoryview(data), about=TAG)
    send.cancel()
    data[:] = bytes(len(data))
    pair.to_right.post_send(0, memoryview(b"after"), about=TAG)
    assert receive(pair.right, 1) == b"after"


def test_eight_threads_share_a_link_and_none_starves(pair: Pair) -> None:
    rounds = 200
    failures: list[BaseException] = []

    def talk(node: LinkedNode, link: object, peer: int, tag: int, first: bool) -> None:
        try:
            about = MessageHeader(Space.TAGGED, tag)
            for number in range(rounds):
                if first:
                    link.post_send(0, memoryview(number.to_bytes(4, "little")), about=about)  # type: ignore[attr-defined]
                assert receive(node, peer, tag) == number.to_bytes(4, "little")
                if not first:
                    link.post_send(0, memoryview(number.to_bytes(4, "little")), about=about)  # type: ignore[attr-defined]
        except BaseException as error:
            failures.append(error)
            raise

    threads = [
        threading.Thread(target=talk, args=(node, link, peer, tag, first))
        for tag in range(8)
        for node, link, peer, first in (
            (pair.left, pair.to_right, 2, True),
            (pair.right, pair.to_left, 1, False),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not failures


def test_operations_can_be_awaited(pair: Pair) -> None:
    async def talk() -> bytes:
        operation = pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=7)
        await pair.to_right.post_send(0, memoryview(large(3)), about=TAG)
        return bytes((await operation).into)

    assert asyncio.run(talk()) == large(3)


def test_cancelling_a_task_cancels_the_operation_it_awaits(pair: Pair) -> None:
    operation = pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=7)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait_for(operation), 0.02)

    asyncio.run(give_up())
    assert isinstance(operation.error, Cancelled)


async def wait_for(operation: Operation) -> None:
    await operation


def test_wait_returns_at_once_for_operations_that_are_done(pair: Pair) -> None:
    operation: Operation = pair.to_right.post_send(0, memoryview(b"x"), about=TAG)
    pair.left.wait(operation)
    assert operation.result() is None


def test_the_end_of_a_generation_ends_its_sends_and_receives_on_both_ends(make_pair: MakePair) -> None:
    pair = make_pair(early_bytes=1)
    waiting = pair.to_right.post_send(0, memoryview(large(1)), about=TAG)
    receive_ = pair.left.matching.post(None, source=2, space=Space.TAGGED, tag=7)
    pair.left.router.open(0, 1)
    for operation in (waiting, receive_):
        with pytest.raises(Revoked, match="generation 1 has begun"):
            operation.result()


def test_a_message_that_no_memory_can_keep_costs_its_link_and_nothing_else(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(*_: object) -> None:
        raise MemoryError

    waiting = pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=8)
    monkeypatch.setattr(pair.right.matching._unexpected_buffers, "keep", keep)
    pair.to_right.post_send(0, memoryview(b"unasked for"), about=TAG)
    with pytest.raises(PeerLost, match="this rank has no memory for a message of 11 bytes"):
        pair.right.wait(waiting)
    assert pair.right.progress._progress_thread._thread.is_alive()


def receive_bytes(node: LinkedNode, source: int, tag: int = 7) -> bytes:
    operation = node.matching.post(None, source=source, space=Space.TAGGED, tag=tag)
    node.wait(operation)
    return bytes(operation.into or b"")


def dial(pair: Pair) -> Carrier:
    transport = pair.left.transports["memory"]
    return transport.connect(pair.right.addresses_for(1)["memory"], Expected(2), time.monotonic() + 5)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_link_that_was_ended_takes_no_carrier_any_more(pair: Pair, end: str) -> None:
    if end == "close":
        pair.to_right.close()
    else:
        pair.to_right.abort("enough")
    late = dial(pair)
    pair.to_right.adopt(late)
    with pytest.raises(CarrierLost):
        late.queued_bytes(0)  # type: ignore[arg-type]
    with pytest.raises(LinkClosed):
        pair.to_right.post_send(0, memoryview(b"x"), about=TAG)


@pytest.mark.parametrize(("kind", "ended"), [("ended", True), ("peer", False)])
def test_a_link_knows_whether_the_process_of_its_peer_has_ended(pair: Pair, kind: str, ended: bool) -> None:
    carrier = pair.to_right._state.carriers["memory"]
    replaced = pair.to_left._state.carriers["memory"]
    pair.to_right.carrier_lost(replaced, CarrierLost("ended", "its process has ended"))
    assert not pair.to_right.process_ended, "not a carrier of this link"
    pair.to_right.carrier_lost(carrier, CarrierLost(kind, "its process has ended"))
    assert pair.to_right.process_ended is ended
    assert isinstance(pair.to_right.failure, PeerLost)


def test_a_lost_link_that_is_closed_stays_closed(pair: Pair) -> None:
    pair.to_left.abort("gone")
    with pytest.raises(PeerLost):
        receive_bytes(pair.left, 2)
    pair.to_right.close()
    pair.to_right.adopt(dial(pair))
    assert pair.to_right.failure is not None


def test_a_closed_link_is_forgotten_by_its_node(pair: Pair) -> None:
    before = len(pair.left.router._links)
    pair.to_right.close()
    assert len(pair.left.router._links) == before - 1


def test_closing_twice_and_from_both_ends_is_fine(pair: Pair) -> None:
    pair.to_right.close()
    pair.to_right.close()
    pair.to_left.close()
    pair.to_left.abort("late")


def test_closing_while_a_large_send_waits_ends_it_and_is_polite(make_pair: MakePair) -> None:
    pair = make_pair(early_bytes=1)
    send = pair.to_right.post_send(0, memoryview(bytes(300_000)), about=TAG)
    pair.to_right.close()
    with pytest.raises(LinkClosed):
        send.result()
    with pytest.raises(PeerLost, match="it closed the link"):
        receive_bytes(pair.right, 1)


def test_a_carrier_that_comes_while_a_link_closes_is_closed_politely_with_the_first(make_pair: MakePair) -> None:
    pair = make_pair()
    faults = Faults(pair.right.transports["memory"].network, LinkStall(source=2))  # type: ignore[attr-defined]
    pair.to_left.post_send(0, memoryview(b"the last word"), about=TAG)
    closing = pair.to_left.begin_close()
    assert closing is not None
    second = as_another_scheme(pair)
    pair.to_right.adopt(second)  # the peer has it already, and has read nothing yet
    faults.clear()
    assert receive_bytes(pair.left, 2) == b"the last word"
    with pytest.raises(PeerLost, match="it closed the link"):
        receive_bytes(pair.left, 2)
    pair.right.wait(closing)
    with pytest.raises(CarrierLost, match="both sides have finished"):
        second.queued_bytes(Lane.DATA)


def test_a_carrier_of_the_dialer_that_comes_while_its_link_closes_is_closed_politely(make_pair: MakePair) -> None:
    pair = make_pair()
    faults = Faults(pair.left.transports["memory"].network, LinkStall(source=1))  # type: ignore[attr-defined]
    second = as_another_scheme(pair)
    pair.to_right.post_send(0, memoryview(b"the last word"), about=TAG)
    closing = pair.to_right.begin_close()
    assert closing is not None
    pair.to_right.adopt(second)
    faults.clear()
    assert receive_bytes(pair.right, 1) == b"the last word"
    with pytest.raises(PeerLost, match="it closed the link"):
        receive_bytes(pair.right, 1)
    pair.left.wait(closing)


def as_another_scheme(pair: Pair) -> Carrier:
    """One more carrier from left to right, which right has adopted; left has not."""
    accepted: list[Carrier] = []
    take = pair.right.carrier_accepted

    def accept(carrier: Carrier) -> None:
        carrier.scheme = "shm"
        accepted.append(carrier)
        take(carrier)

    pair.right.carrier_accepted = accept  # type: ignore[method-assign]
    carrier = dial(pair)
    carrier.scheme = "shm"
    eventually(lambda: accepted, "the carrier")
    return carrier


def test_nodes_with_different_credit_and_limits_understand_each_other(make_pair: MakePair) -> None:
    pair = make_pair(left={"credit_bytes": 8 << 20, "eager_limit_bytes": 1 << 20}, right={"credit_bytes": 262_144})
    messages = [bytes([n]) * 100_000 for n in range(30)]
    sends = [pair.to_right.post_send(0, memoryview(m), about=TAG) for m in messages]
    sends += [pair.to_left.post_send(0, memoryview(m), about=TAG) for m in messages]
    assert [receive_bytes(pair.right, 1) for _ in messages] == messages
    assert [receive_bytes(pair.left, 2) for _ in messages] == messages
    pair.left.wait(*sends[:30])
    pair.right.wait(*sends[30:])


def test_a_message_of_the_largest_eager_size_travels_whole(make_pair: MakePair) -> None:
    pair = make_pair(credit_bytes=8 << 20, eager_limit_bytes=1 << 20)
    pair.to_left.post_send(0, memoryview(b"hello"), about=TAG)
    assert receive_bytes(pair.left, 2) == b"hello"  # its terms have come before it
    data = bytes(range(256)) * 4096
    assert pair.to_right.post_send(0, memoryview(data), about=TAG).done
    assert receive_bytes(pair.right, 1) == data


@pytest.mark.parametrize("tag", [-1, 1 << 64])
def test_a_tag_that_does_not_fit_is_refused_and_leaves_no_gap(pair: Pair, tag: int) -> None:
    with pytest.raises(UsageError, match="tags are 0 to"):
        pair.to_right.post_send(0, memoryview(b"x"), about=MessageHeader(Space.TAGGED, tag))
    pair.to_right.post_send(0, memoryview(b"next"), about=TAG)
    assert receive_bytes(pair.right, 1) == b"next"


def test_who_is_no_member_can_neither_be_sent_to_nor_speak(pair: Pair) -> None:
    pair.left.router.open(5, members=frozenset({1, 3}))
    with pytest.raises(UsageError, match="not a member of communicator 5"):
        pair.to_right.post_send(5, memoryview(b"x"), about=TAG)
    pair.right.router.open(6)
    pair.left.router.open(6, members=frozenset({1, 3}))
    waiting = pair.left.matching.post(None, source=2, space=Space.TAGGED, tag=7)
    pair.to_left.post_send(6, memoryview(b"psst"), about=TAG)
    with pytest.raises(PeerMisbehaved, match="not a member"):
        pair.left.wait(waiting)


class StubCarrier(Carrier):
    """A connection of which only its origin and its end matter."""

    scheme = "stub"

    def __init__(self, *, dialed: bool, frames_received: int = 0) -> None:
        self.dialed = dialed
        self._frames_received = frames_received
        self.aborted = False

    def attach(self, sink: object) -> None: ...
    def send_frame(self, *_: object) -> None: ...
    def send_payload(self, *_: object) -> None: ...
    def withdraw_payload(self, *_: object) -> None: ...
    def expect_payload(self, *_: object) -> None: ...
    def finish(self) -> None: ...

    def queued_bytes(self, _: object) -> int:
        return 0

    def redirect_payload(self, *_: object) -> Redirected:
        return Redirected.UNKNOWN

    def abort(self, reason: str) -> None:
        self.aborted = True

    def stats(self) -> dict[str, float]:
        return {"frames_received": self._frames_received}


def adopt_both(node: LinkedNode, peer: int, first: StubCarrier, second: StubCarrier) -> None:
    link = Link(node.router, peer)
    link.adopt(first)
    link.adopt(second)


@pytest.mark.parametrize("own_first", [True, False])
def test_of_two_dials_that_crossed_the_lower_nodes_stays_on_both_ends(pair: Pair, own_first: bool) -> None:
    for node, peer in ((pair.left, 2), (pair.right, 1)):
        first, second = StubCarrier(dialed=own_first), StubCarrier(dialed=not own_first)
        adopt_both(node, peer, first, second)
        by_lower, by_higher = (first, second) if first.dialed == (node.node < peer) else (second, first)
        assert by_higher.aborted
        assert not by_lower.aborted


def test_a_dial_after_a_loss_that_only_the_peer_noticed_replaces_the_old_connection(pair: Pair) -> None:
    old, new = StubCarrier(dialed=True, frames_received=5), StubCarrier(dialed=False)
    adopt_both(pair.left, 2, old, new)
    assert old.aborted
    assert not new.aborted


# -- careless calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [[1, 2], "text", np.zeros((4, 4))[:, 1], 7], ids=["list", "str", "column", "number"])
def test_what_holds_no_contiguous_bytes_is_refused_and_leaves_no_trace(pair: Pair, data: object) -> None:
    with pytest.raises(UsageError, match="a send needs contiguous bytes"):
        pair.to_right.post_send(0, data, about=TAG)  # type: ignore[arg-type]
    pair.to_right.post_send(0, memoryview(b"next"), about=TAG)
    assert receive_bytes(pair.right, 1) == b"next"


@pytest.mark.parametrize("size", [3, 100_000])
def test_arrays_and_bytes_are_sent_as_the_bytes_they_hold(pair: Pair, size: int) -> None:
    for data in (np.arange(float(size)), bytes(size), bytearray(size), memoryview(np.arange(size))):
        send = pair.to_right.post_send(0, data, about=TAG)  # type: ignore[arg-type]
        assert receive_bytes(pair.right, 1) == bytes(memoryview(data).cast("B"))
        pair.left.wait(send)


@pytest.mark.parametrize(
    ("into", "why"),
    [(memoryview(bytes(4)), "read-only"), (np.zeros((4, 4))[:, 1], "contiguous memory"), ([0], "contiguous memory")],
    ids=["read-only", "column", "list"],
)
def test_a_receive_into_what_cannot_be_written_is_refused_at_once(pair: Pair, into: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        pair.right.matching.post(into, source=1, space=Space.TAGGED, tag=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("tag", [-2, 1 << 64])
def test_a_receive_with_a_tag_that_cannot_be_sent_is_refused(pair: Pair, tag: int) -> None:
    with pytest.raises(UsageError, match="tags are 0 to"):
        pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=tag)


def test_a_buffer_of_another_size_names_the_sender_and_says_that_the_message_is_kept(pair: Pair) -> None:
    operation = pair.right.matching.post(memoryview(bytearray(2)), source=1, space=Space.TAGGED, tag=7)
    pair.to_right.post_send(0, memoryview(b"abc"), about=TAG)
    with pytest.raises(BufferMismatch, match=r"node 0000000000000001 with tag 7 is 3 bytes; it is kept"):
        pair.right.wait(operation)


def test_connecting_again_gives_the_link_there_is(pair: Pair) -> None:
    assert pair.left.connect(2, pair.right.addresses_for(1)) is pair.to_right
    assert "open" in repr(pair.to_right)


def test_a_node_without_a_transport_in_common_and_a_closed_one_say_so(pair: Pair) -> None:
    with pytest.raises(UsageError, match="no transport in common"):
        pair.left.connect(9, {"pigeon": "post"})
    pair.left.close()
    with pytest.raises(UsageError, match="this node is closed"):
        pair.left.connect(2, pair.right.addresses_for(1))


EVENT_TIMEOUT = 0.1


class Slow:
    """A link whose peer says something now and then, and agrees after a while, or never."""

    def __init__(self, progress: Progress, *, words: int, agrees: bool) -> None:
        self.aborted: str | None = None
        self._progress = progress
        self._notices = words
        self._agrees = agrees
        self._closing = Closing(progress.lock, AwaitedPeer(node=3))

    def begin_close(self) -> Closing:
        return self._closing

    def heard_bytes(self) -> float:
        """Asked once in each round."""
        self._notices -= 1
        if self._notices < 0 and self._agrees:
            with self._progress.lock:
                self._closing.finish()
        return -self._notices if self._notices >= 0 else 0.0

    def abort(self, reason: str) -> None:
        self.aborted = reason


@pytest.fixture
def progress() -> Progress:
    sleeper = PollSleeper()
    with Progress(sleeper, []) as made:
        yield made
    sleeper.close()


def test_a_peer_that_is_slow_is_waited_for_while_it_says_anything(progress: Progress) -> None:
    slow = Slow(progress, words=4, agrees=True)
    begin = time.monotonic()
    close_all(progress, [slow], close_timeout=EVENT_TIMEOUT, longest=60)  # type: ignore[list-item]
    assert slow.aborted is None
    assert time.monotonic() - begin > 2 * EVENT_TIMEOUT


def test_peers_that_are_silent_are_given_up_after_one_timeout(progress: Progress) -> None:
    silent = [Slow(progress, words=0, agrees=False) for _ in range(3)]
    begin = time.monotonic()
    close_all(progress, silent, close_timeout=EVENT_TIMEOUT, longest=60)  # type: ignore[arg-type]
    assert all(link.aborted is not None for link in silent)
    assert time.monotonic() - begin < 10


def test_a_peer_that_never_agrees_is_given_up_in_the_end(progress: Progress) -> None:
    endless = Slow(progress, words=1 << 40, agrees=False)
    close_all(progress, [endless], close_timeout=EVENT_TIMEOUT / 10, longest=EVENT_TIMEOUT)  # type: ignore[list-item]
    assert endless.aborted is not None


def test_a_link_behind_a_silent_one_is_closed_politely(pair: Pair) -> None:
    silent = Slow(pair.left.progress, words=0, agrees=False)
    links: list[Link] = [silent, pair.to_right]  # type: ignore[list-item]
    terms = {"close_timeout": 1, "longest": 60}
    begin = threading.Thread(target=close_all, args=(pair.left.progress, links), kwargs=terms)
    begin.start()
    begin.join()
    assert silent.aborted is not None
    assert [str(loss) for loss in pair.losses] == [str(pair.to_left.failure)]
    assert "it closed the link" in str(pair.to_left.failure)
