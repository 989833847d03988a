"""Every verb between two ranks, over every transport: small, large, to oneself, and what goes wrong."""

import array
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.point_to_point import recv_object
from nexar.errors import BufferMismatch, Cancelled, NexarError, OperationTimeout, Revoked, UsageError
from nexar.group import deadline_after
from nexar.types import ANY_SOURCE, ANY_TAG
from tests.conformance.worlds import SCHEMES, ranks_over
from tests.ranks import EVENT_TIMEOUT, on_every

LARGE = 300_000  # elements: far more than travels whole
SIZES = [0, 1, 1000, LARGE]


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(scheme: str) -> Iterator[list[Communicator]]:
    with ranks_over(scheme, 2) as made:
        yield made


def reported(pair: list[Communicator], say: Any, receive: Any) -> Any:
    """What rank 1 received while rank 0 spoke."""
    return on_every(pair, lambda comm: say(comm) if comm.rank == 0 else receive(comm))[1]


def same(left: object, right: object) -> bool:
    return isinstance(left, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- arrays


def test_arrays_of_all_sizes_and_dtypes_arrive(pair: list[Communicator]) -> None:
    for count in SIZES:
        for dtype in (np.float64, np.uint8, np.complex64, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
            values = (np.arange(count) % 7).astype(dtype)
            assert same(reported(pair, lambda c, v=values: c.send(v, 1, tag=3), lambda c: c.recv(tag=3)), values)
            into = np.zeros_like(values)
            reported(pair, lambda c, v=values: c.send(v, 1, tag=3), lambda c, i=into: c.recv(i, tag=3))
            assert same(into, values)


def test_layouts_do_not_matter_on_either_side(pair: list[Communicator]) -> None:
    values = np.arange(600_000.0).reshape(600, 1000)
    for sent in (values.T, values[:, ::2], np.asfortranarray(values), values[::-1], np.float32(2), values[:0]):
        for order in ("C", "F"):
            into = np.zeros(np.shape(sent), np.asarray(sent).dtype, order=order)
            got = reported(pair, lambda c, v=sent: c.send(v, 1), lambda c, i=into: c.recv(i, source=0))
            assert got is into
            assert np.array_equal(into, sent)
    wide = np.zeros((600, 2000))
    reported(pair, lambda c: c.send(values, 1), lambda c: c.recv(wide[:, ::2], source=0))
    assert np.array_equal(wide[:, ::2], values)
    assert not wide[:, 1::2].any()


def test_an_array_with_gaps_is_untouched_when_the_receive_fails(pair: list[Communicator]) -> None:
    gappy = np.zeros((10, 4))[:, ::2]
    pair[0].send(np.ones(7), 1)
    with pytest.raises(BufferMismatch, match=r"float64\[20\].*float64\[7\]"):
        pair[1].recv(gappy, source=0)
    assert not gappy.any()
    assert pair[1].recv(source=0).sum() == 7


def test_whatever_holds_memory_is_sent_and_filled(pair: list[Communicator]) -> None:
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    into = array.array("d", [0] * 4)
    assert reported(pair, lambda c: c.send(frozen, 1), lambda c: c.recv(into)) is into
    assert into.tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="read-only"):
        pair[1].recv(frozen)


@pytest.mark.parametrize("count", SIZES)
def test_both_send_and_receive_at_once(pair: list[Communicator], count: int) -> None:
    def swap(comm: Communicator) -> bool:
        other = 1 - comm.rank
        mine, theirs = np.full(count, comm.rank), np.full(count, other)
        fresh = comm.sendrecv(mine, other, source=other, tag=1)
        crossed = comm.sendrecv(mine, other, source=other, sendtag=comm.rank, recvtag=other)
        replaced = comm.sendrecv(mine, other, mine, other)
        return same(fresh, theirs) and same(crossed, theirs) and replaced is mine and same(mine, theirs)

    assert on_every(pair, swap) == [True, True]


# ---------------------------------------------------------------- looking


def test_a_probe_reports_what_is_here_and_leaves_it(pair: list[Communicator]) -> None:
    left, right = pair
    assert right.probe(timeout=0) is None
    values = np.ones((3, LARGE), np.float32)
    sending = threading.Thread(target=lambda: left.send(values, 1, tag=9))
    sending.start()
    found = right.probe(ANY_SOURCE, ANY_TAG)
    assert found is not None
    assert (found.source, found.tag, found.kind, found.dtype) == (0, 9, "array", np.float32)
    assert (found.shape, found.size_bytes) == (values.shape, values.nbytes)
    assert right.probe(0, 9, timeout=0) == found
    assert right.probe(0, 8, timeout=0) is None
    assert same(right.recv(source=found.source, tag=found.tag), values)
    sending.join(EVENT_TIMEOUT)
    assert right.probe(tag=ANY_TAG, timeout=0) is None


def test_a_probe_knows_every_kind_of_message(pair: list[Communicator]) -> None:
    left, right = pair
    left.send_bytes(b"abc", 1)
    left.send_object({"a": 1}, 1, tag=1)
    left.send_object(range(3), 1, tag=2, pickle=True)
    left.send_iov([b"ab", b"cde"], 1, tag=3)
    seen = [right.probe(0, tag) for tag in (None, 1, 2, 3)]
    assert [each and each.kind for each in seen] == ["bytes", "an object", "a pickled object", "a list of buffers"]
    assert seen[0] is not None
    assert seen[3] is not None
    assert (seen[0].size_bytes, seen[0].dtype, seen[3].size_bytes, seen[3].tag) == (3, None, 5, 3)


def test_a_probe_that_nothing_answers_names_whom_it_waited_for(pair: list[Communicator]) -> None:
    with pytest.raises(OperationTimeout, match=r"probe with tag 5.*rank 0"):
        pair[1].probe(0, 5, timeout=0.05)


# ---------------------------------------------------------------- bytes and buffers


@pytest.mark.parametrize("count", SIZES)
def test_bytes_arrive(pair: list[Communicator], count: int) -> None:
    data = bytes(range(256)) * (count // 256) + bytes(count % 256)
    assert reported(pair, lambda c: c.send_bytes(data, 1, 4), lambda c: c.recv_bytes(0, 4)) == data
    into = bytearray(count)
    assert reported(pair, lambda c: c.send_bytes(data, 1), lambda c: c.recv_bytes(into=into)) is into
    assert into == data
    pair[0].send_bytes(data[:1000], 1, 6)
    got, source = pair[1].recv_bytes(tag=ANY_TAG, return_source=True)
    assert (got, source.rank, source.tag) == (data[:1000], 0, 6)


CUTS = [
    ([], []),
    ([0], [0, 0]),
    ([1, 2, 3], [6]),
    ([6], [1, 2, 3]),
    ([LARGE, 5, 2 * LARGE], [LARGE, 5, 2 * LARGE]),
    ([LARGE, 5, 2 * LARGE], [5, 2 * LARGE, LARGE]),
    ([100] * 3000, [3000] * 100),
    ([LARGE, 0, LARGE], [2 * LARGE]),
]


@pytest.mark.parametrize(("sent", "wanted"), CUTS, ids=[str(number) for number in range(len(CUTS))])
@pytest.mark.parametrize("myself", [False, True])
def test_buffers_arrive_however_they_are_cut(
    pair: list[Communicator], sent: list[int], wanted: list[int], myself: bool
) -> None:
    random = np.random.default_rng(1)
    buffers = [random.integers(0, 256, size, np.uint8) for size in sent]
    into = [bytearray(size) for size in wanted]

    def receive(comm: Communicator) -> Any:
        return comm.recv_iov(into, ANY_SOURCE, ANY_TAG, return_source=True)

    if myself:
        pair[0].send_iov(buffers, 0, 8)
        got, source = receive(pair[0])
    else:
        got, source = reported(pair, lambda c: c.send_iov(buffers, 1, 8), receive)
    assert got is into
    assert (source.rank, source.tag) == (0, 8)
    assert b"".join(into) == b"".join(buffer.tobytes() for buffer in buffers)


@pytest.mark.parametrize("count", [3, LARGE])
def test_buffers_of_another_length_in_all_are_refused_and_name_both(pair: list[Communicator], count: int) -> None:
    def receive(comm: Communicator) -> None:
        with pytest.raises(BufferMismatch, match=f"{count + 2} bytes in 2 buffers.*{count} bytes"):
            comm.recv_iov([bytearray(2), bytearray(count)], 0)
        comm.recv_iov([bytearray(count)], 0)

    reported(pair, lambda c: c.send_iov([bytes(count)], 1), receive)


# ---------------------------------------------------------------- objects


@pytest.mark.parametrize("pickle", [False, True])
@pytest.mark.parametrize("myself", [False, True])
def test_objects_arrive(pair: list[Communicator], pickle: bool, myself: bool) -> None:
    value = {"a": (1, [2.5, None], {3}), "many": np.arange(LARGE), "few": np.ones(3, ml_dtypes.bfloat16), 2**70: b"x"}

    def say(comm: Communicator) -> None:
        comm.send_object(value, 0 if myself else 1, 2, pickle=pickle)

    def receive(comm: Communicator) -> Any:
        return comm.recv_object(ANY_SOURCE, ANY_TAG, pickle=pickle, return_source=True)

    if myself:
        say(pair[0])
        got, source = receive(pair[0])
    else:
        got, source = reported(pair, say, receive)
    assert (source.rank, source.tag) == (0, 2)
    assert (got["a"], got[2**70]) == (value["a"], b"x")
    assert same(got["many"], value["many"])
    assert same(got["few"], value["few"])
    got["many"][0] = 5


def test_a_pickled_object_is_refused_and_stays_for_who_asks(pair: list[Communicator]) -> None:
    pair[0].send_object(range(3), 1, pickle=True)
    with pytest.raises(UsageError, match="pickle=True"):
        pair[1].recv_object(0)
    with pytest.raises(UsageError, match="recv_object"):
        pair[1].recv(source=0)
    assert pair[1].recv_object(0, pickle=True) == range(3)


def test_messages_of_all_kinds_keep_their_order(pair: list[Communicator]) -> None:
    many = np.arange(LARGE)

    def say(comm: Communicator) -> None:
        comm.send_object([many, many], 1, 1)
        comm.send(many, 1, 1)
        comm.send_iov([many, b"x"], 1, 1)
        comm.send_bytes(b"end", 1, 1)

    def receive(comm: Communicator) -> bool:
        first, second = comm.recv_object(0, 1)
        third, fourth = comm.recv(None, 0, 1), np.zeros(LARGE, many.dtype)
        comm.recv_iov([fourth, bytearray(1)], 0, 1)
        return comm.recv_bytes(0, 1) == b"end" and all(same(each, many) for each in (first, second, third, fourth))

    assert reported(pair, say, receive)


# ---------------------------------------------------------------- giving up halfway


@pytest.mark.parametrize("early_bytes", [1, 1 << 29])
def test_a_receiver_that_gives_up_halfway_loses_nothing_and_leaves_nothing_behind(
    scheme: str, early_bytes: int
) -> None:
    value = [np.full(LARGE, 1.0), np.full(LARGE, 2.0)]

    def say(comm: Communicator) -> None:
        comm.send_object(value, 1, 1)
        comm.send_object("next", 1, 1)

    def receive(comm: Communicator) -> list[int]:
        _begun(comm).close()
        assert all(map(same, comm.recv_object(0, 1), value))
        assert comm.recv_object(0, 1) == "next"
        matching = comm._group.matching
        return [len(matching._waiting), len(matching._posted), matching._unexpected_buffers.budget.used]

    with ranks_over(scheme, 2, early_bytes=early_bytes) as pair:
        assert reported(pair, say, receive) == [0, 0, 0]


def _begun(comm: Communicator) -> Any:
    """A receive of tag 1 that has got its first part, and waits for the others."""
    run = recv_object(comm._group, 0, 1, pickle=False, return_source=False)
    comm._group.wait(next(run), deadline_after(EVENT_TIMEOUT))
    next(run)
    return run


def test_a_sender_that_gives_up_halfway_ends_the_receive_at_once(scheme: str) -> None:
    with ranks_over(scheme, 2, early_bytes=1) as pair:
        left, right = pair
        with pytest.raises(OperationTimeout):
            left.send_object(np.ones(LARGE), 1, 1, timeout=0.1)
        with pytest.raises(Cancelled, match=r"rank 0.*gave up"):
            right.recv_object(0, 1, timeout=EVENT_TIMEOUT)
        left.send_object("again", 1, 1)
        assert right.recv_object(0, 1) == "again"
        assert len(right._group.matching._waiting) == 0


def test_the_communicator_goes_on_after_a_receive_of_parts_has_timed_out(scheme: str) -> None:
    with ranks_over(scheme, 2) as pair:
        with pytest.raises(OperationTimeout):
            pair[1].recv_iov([bytearray(LARGE)], 0, timeout=0.05)
        reported(pair, lambda c: c.send_iov([bytes(LARGE)], 1), lambda c: c.recv_iov([bytearray(LARGE)], 0))


def test_a_closed_communicator_refuses_every_verb(pair: list[Communicator]) -> None:
    comm = pair[0]
    comm.close()
    verbs = [
        lambda: comm.sendrecv(1, 1), lambda: comm.probe(timeout=0), lambda: comm.send_bytes(b"", 1), comm.recv_bytes,
        lambda: comm.send_iov([], 1), lambda: comm.recv_iov([]), lambda: comm.send_object(1, 1), comm.recv_object,
    ]  # fmt: skip
    for verb in verbs:
        with pytest.raises(NexarError, match="closed"):
            verb()


# ---------------------------------------------------------------- a rank that closes its part


def test_a_receive_from_a_rank_that_closed_its_part_says_so_at_once(pair: list[Communicator]) -> None:
    received = threading.Event()

    def talk(comm: Communicator) -> None:
        part = comm.split(0)
        assert part is not None
        with part:
            if comm.rank == 0:
                for count in (3, LARGE):
                    part.send(np.ones(count), 1, tag=1)
                received.wait(EVENT_TIMEOUT)
                return  # closes it
            waiting = part.start.recv(source=0, tag=2, timeout=10 * EVENT_TIMEOUT)
            received.set()
            with pytest.raises(Revoked, match="rank 0 has closed it") as reported:
                waiting.wait()
            assert (reported.value.rank, reported.value.closed) == (0, True)
            assert [part.recv(source=0, tag=1).size for _ in range(2)] == [3, LARGE], "sent before"
            for source in (0, ANY_SOURCE):
                with pytest.raises(Revoked, match="closed it"):
                    part.recv(source=source, timeout=10 * EVENT_TIMEOUT)

    on_every(pair, talk)
    assert reported(pair, lambda comm: comm.send(1, 1), lambda comm: int(comm.recv(source=0))) == 1


@pytest.mark.parametrize("length", [5, 8 * LARGE])
@pytest.mark.parametrize("form", ["bytes", "iov", "array"])
def test_a_bytearray_can_be_resized_once_its_request_is_done(pair: list[Communicator], form: str, length: int) -> None:
    def say(comm: Communicator) -> None:
        data = bytearray(length)
        request = {
            "bytes": lambda: comm.start.send_bytes(data, 1),
            "iov": lambda: comm.start.send_iov([data, b"end"], 1),
            "array": lambda: comm.start.send(np.zeros(length, np.uint8), 1),
        }[form]()
        request.wait(EVENT_TIMEOUT)
        data.append(1)  # BufferError while somebody holds its memory
        assert request.done()

    def receive(comm: Communicator) -> None:
        data = bytearray(length)
        request = {
            "bytes": lambda: comm.start.recv_bytes(0, into=data),
            "iov": lambda: comm.start.recv_iov([data, bytearray(3)], 0),
            "array": lambda: comm.start.recv(data, 0),
        }[form]()
        request.wait(EVENT_TIMEOUT)
        data.append(1)
        assert request.done()

    reported(pair, say, receive)


def test_a_bytearray_can_be_resized_once_its_request_is_cancelled(pair: list[Communicator]) -> None:
    data = bytearray(8 * LARGE)
    request = pair[1].start.recv_bytes(0, into=data)
    assert request.cancel()
    data.append(1)
    with pytest.raises(Cancelled):
        request.wait()
