"""The verbs as runs; what they do over each transport is in tests/conformance."""

import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.communicator import point_to_point
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.multipart import Run
from nexar.communicator.point_to_point import (
    BufferScatter,
    BufferSlice,
    as_array,
    cut_pieces,
    pieces_of,
    receive_target,
    send_payload,
    space_and_tag,
    space_and_wanted_tag,
)
from nexar.config import Config
from nexar.errors import Cancelled, PeerMisbehaved, UsageError
from nexar.group import Group, deadline_after
from nexar.links.messages import OBJECT
from nexar.links.sending import MessageHeader
from nexar.types import ANY_TAG
from nexar.wire.frame import Space
from tests.ranks import EVENT_TIMEOUT

LARGE_BUFFER = 100_000


def test_large_buffers_are_pieces_of_their_own_and_small_ones_go_together() -> None:
    large = np.arange(LARGE_BUFFER, dtype=np.uint8)
    pieces = pieces_of([b"a", b"", array.array("B", b"bc"), large, bytearray(b"d"), large])
    assert [len(piece) for piece in pieces] == [3, LARGE_BUFFER, 1, LARGE_BUFFER]
    large[0] = 77
    assert pieces[1][0] == pieces[3][0] == 77
    assert bytes(pieces[0]) == b"abc"


def test_many_small_buffers_are_a_few_pieces() -> None:
    pieces = pieces_of([bytes(1000)] * 1000)
    assert sum(len(piece) for piece in pieces) == 1_000_000
    assert len(pieces) < 10


def test_nothing_is_no_piece() -> None:
    assert pieces_of([]) == []
    assert [len(piece) for piece in pieces_of([b"", b""])] == [0]


@given(st.lists(st.integers(0, 9), max_size=8), st.randoms())
def test_cuts_tile_the_buffers_in_order(sizes: list[int], random: object) -> None:
    total = sum(sizes)
    edges = sorted(random.randint(0, total) for _ in range(4))  # type: ignore[attr-defined]
    lengths = [stop - start for start, stop in zip([0, *edges], [*edges, total], strict=True)]
    cuts = cut_pieces(sizes, lengths)
    assert [sum(s.stop - s.start for s in stretches) for stretches in cuts] == sizes
    flat = [(s.buffer, at) for stretches in cuts for s in stretches for at in range(s.start, s.stop)]
    assert flat == [(buffer, at) for buffer, length in enumerate(lengths) for at in range(length)]


def test_a_piece_within_one_buffer_goes_straight_into_it() -> None:
    assert cut_pieces([3, 4], [5, 0, 2]) == [[BufferSlice(0, 0, 3)], [BufferSlice(0, 3, 5), BufferSlice(2, 0, 2)]]
    buffers = [bytearray(5), bytearray(2)]
    scatter = BufferScatter(buffers)
    room = scatter.room((3, 4))
    room[0][:] = b"abc"
    assert buffers[0][:3] == b"abc"
    room[1][:] = b"defg"
    assert buffers[1] == bytes(2)
    scatter.settle(room)
    assert [bytes(buffer) for buffer in buffers] == [b"abcde", b"fg"]


def test_what_came_elsewhere_is_brought_in() -> None:
    buffers = [np.zeros(2, np.uint8), bytearray(0), bytearray(3)]
    scatter = BufferScatter(buffers)
    assert (scatter.total, len(scatter)) == (5, 3)
    scatter.settle([memoryview(b"abcde")])
    assert [bytes(buffer) for buffer in buffers] == [b"ab", b"", b"cde"]


def test_what_cannot_be_filled_or_read_is_refused() -> None:
    with pytest.raises(UsageError, match="read-only"):
        BufferScatter([b"abc"])
    with pytest.raises(UsageError, match="contiguous"):
        BufferScatter([np.zeros((4, 4))[:, 0]])
    with pytest.raises(UsageError, match="contiguous"):
        pieces_of([np.zeros((4, 4))[:, 0]])
    with pytest.raises(UsageError, match="contiguous"):
        pieces_of([5])


def test_an_array_is_sent_from_its_own_memory() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    message = send_payload(values, None)
    assert message.shape == (2, 3)
    values[0, 0] = 7
    assert np.frombuffer(message.data, np.float32)[0] == 7


def test_an_array_with_gaps_is_sent_as_a_copy_in_its_own_order() -> None:
    values = np.arange(12).reshape(3, 4)
    for gappy in (values[:, ::2], values.T, values[::-1]):
        message = send_payload(gappy, None)
        assert message.shape == gappy.shape
        assert np.array_equal(np.frombuffer(message.data, values.dtype).reshape(gappy.shape), gappy)


@pytest.mark.parametrize(
    ("value", "shape"),
    [(3, ()), (2.5, ()), (1j, ()), (True, ()), ([1, 2], (2,)), ([[1], [2]], (2, 1)), ((), (0,)), (np.float32(1), ())],
)
def test_numbers_and_lists_are_arrays_too(value: object, shape: tuple[int, ...]) -> None:
    assert send_payload(value, None).shape == shape


@pytest.mark.parametrize("value", ["text", object(), None, 2**70, [[1], [1, 2]], {"a": 1}, np.array(["x"])])
def test_what_is_no_array_of_numbers_is_refused_by_name(value: object) -> None:
    with pytest.raises(UsageError, match=r"cannot be sent|is not an array|expected an array, got|does not fit"):
        send_payload(value, None)


def test_a_message_without_a_tag_lives_apart_from_tag_0() -> None:
    assert space_and_tag(None) == (Space.UNTAGGED, 0)
    assert space_and_tag(0) == (Space.TAGGED, 0)
    assert space_and_tag(2**64 - 1) == (Space.TAGGED, 2**64 - 1)
    assert space_and_tag(np.int64(5)) == (Space.TAGGED, 5)


@pytest.mark.parametrize("tag", [-1, -7, 2**64, 1.0, "7"])
def test_what_is_no_tag_cannot_be_sent(tag: object) -> None:
    with pytest.raises(UsageError, match="is not a tag"):
        space_and_tag(tag)


def test_only_a_receive_may_take_any_tag() -> None:
    assert space_and_wanted_tag(ANY_TAG) == (Space.TAGGED, ANY_TAG)
    assert space_and_wanted_tag(3) == (Space.TAGGED, 3)
    assert space_and_wanted_tag(None) == (Space.UNTAGGED, 0)


def test_a_masked_array_is_refused_since_its_mask_would_be_lost() -> None:
    masked = np.ma.masked_array([1.0, 2.0], [0, 1])
    with pytest.raises(UsageError, match="mask"):
        send_payload(masked, 1)
    with pytest.raises(UsageError, match="mask"):
        receive_target(masked)


def test_an_array_of_another_class_is_sent_as_the_memory_it_has() -> None:
    class Named(np.ndarray):
        def reshape(self, *_: object, **__: object) -> "Named":
            raise AssertionError("what a class of somebody else does with its memory is not ours to use")

    message = send_payload(np.arange(6.0).reshape(2, 3).view(Named), 1)
    assert message.shape == (2, 3)
    assert np.frombuffer(message.data).tolist() == list(range(6))


def test_without_a_buffer_there_is_nothing_to_fill() -> None:
    assert receive_target(None)[:2] == (None, 0)


@pytest.mark.parametrize("buffer", [bytearray(8), memoryview(bytearray(8)), array.array("d", [0.0]), np.zeros(8, "u1")])
def test_whatever_holds_memory_is_received_into(buffer: object) -> None:
    memory = receive_target(buffer).memory
    assert memory is not None
    memory[:] = bytes(range(8))
    assert bytes(memoryview(buffer).cast("B")) == bytes(range(8))  # type: ignore[arg-type]


@pytest.mark.parametrize("buffer", [[0, 0], (0, 0), 0, 0.0, np.float64(0), "text", object()])
def test_what_numpy_would_copy_cannot_be_received_into(buffer: object) -> None:
    with pytest.raises(UsageError, match="can be received into"):
        receive_target(buffer)


def test_a_buffer_that_cannot_be_filled_is_refused_with_the_reason() -> None:
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        receive_target(read_only)
    with pytest.raises(UsageError, match="read-only"):
        receive_target(memoryview(bytes(8)))
    read_only = np.zeros((4, 4))[:, :2]
    read_only.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        receive_target(read_only)


@pytest.mark.parametrize("gappy", [np.zeros((4, 4))[:, :2], np.zeros((4, 2), order="F"), np.zeros(16)[::-2]])
def test_an_array_with_gaps_is_filled_when_all_is_here(gappy: np.ndarray) -> None:
    target = receive_target(gappy)
    assert target.memory is not None
    target.memory[:] = np.arange(8.0).tobytes()
    assert not gappy.any()
    target.commit()
    assert gappy.reshape(-1).tolist() == list(range(8))


def test_an_array_stays_the_array_it_is() -> None:
    values = np.zeros(3)
    assert as_array(values) is values


class Exported:
    """Memory that only DLPack shows."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._values.__dlpack_device__()


@pytest.mark.parametrize("buffer", [b"abcd", bytearray(b"abcd"), array.array("B", b"abcd"), memoryview(b"abcd")])
def test_buffers_are_arrays_too(buffer: object) -> None:
    assert bytes(send_payload(buffer, None).data) == b"abcd"
    assert send_payload(buffer, None).shape == (4,)


def test_memory_that_dlpack_shows_is_sent() -> None:
    assert bytes(send_payload(Exported(np.arange(3.0)), None).data) == np.arange(3.0).tobytes()


def test_a_torch_tensor_is_sent_and_filled_where_it_is() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    tensor = torch.arange(4, dtype=torch.bfloat16)
    message = send_payload(tensor, None)
    into = torch.zeros(2, 4, dtype=torch.bfloat16)[:, ::2]
    target = receive_target(into)
    assert target.memory is not None
    target.memory[:] = message.data
    target.commit()
    assert into.flatten().tolist() == [0, 1, 2, 3]


LARGE = 300_000


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    with local_communicators(2, Config()) as made:
        yield [comm._group for comm in made]


def soon() -> float:
    return deadline_after(EVENT_TIMEOUT)


RUNS: dict[str, Callable[[Group], Run[Any]]] = {
    "send": lambda group: point_to_point.send(group, np.ones(LARGE), 1, 1, soon()),
    "recv": lambda group: point_to_point.recv(group, np.zeros(3), 1, 1, return_source=False),
    "sendrecv": lambda group: point_to_point.sendrecv(
        group, np.ones(LARGE), 1, None, 1, sendtag=1, recvtag=1, deadline=soon(), return_source=False
    ),
    "probe": lambda group: point_to_point.probe(group, 1, 1),
    "send_bytes": lambda group: point_to_point.send_bytes(group, bytes(LARGE), 1, 1, soon()),
    "recv_bytes": lambda group: point_to_point.recv_bytes(group, None, 1, 1, return_source=False),
    "send_iov": lambda group: point_to_point.send_iov(group, [bytes(LARGE)], 1, 1, soon()),
    "recv_iov": lambda group: point_to_point.recv_iov(group, [bytearray(3)], 1, 1, return_source=False),
    "send_object": lambda group: point_to_point.send_object(group, np.ones(LARGE), 1, 1, pickle=False, deadline=soon()),
    "recv_object": lambda group: point_to_point.recv_object(group, 1, 1, pickle=False, return_source=False),
}


@pytest.mark.parametrize("verb", RUNS)
def test_a_run_that_is_closed_has_let_go_of_everything(verb: str) -> None:
    with local_communicators(2, Config(early_bytes=1)) as made:
        run = RUNS[verb](made[0]._group)
        waited = list(next(run))
        assert not all(operation.done for operation in waited)
        run.close()
        ended = [operation for operation in waited if operation.error is not None]
        assert ended
        assert all(operation.done for operation in waited)
        assert all(isinstance(operation.error, Cancelled) for operation in ended)
        assert len(made[0]._group.matching._posted) == 0


@pytest.mark.parametrize("verb", [verb for verb in RUNS if verb.startswith("recv")])
def test_a_closed_communicator_ends_what_a_run_waits_for(verb: str, groups: list[Group]) -> None:
    run = RUNS[verb](groups[0])
    waited = list(next(run))
    groups[0].close()
    assert all(operation.error is not None for operation in waited)
    run.close()


def test_the_receive_of_a_run_whose_send_is_refused_is_taken_back(groups: list[Group]) -> None:
    run = point_to_point.sendrecv(
        groups[0], np.ones(2), 7, None, 1, sendtag=None, recvtag=None, deadline=soon(), return_source=False
    )
    with pytest.raises(UsageError, match="no rank 7"):
        next(run)
    assert len(groups[0].matching._posted) == 0


def test_an_object_that_is_none_names_who_sent_it(groups: list[Group]) -> None:
    left, right = groups
    row = point_to_point.send_parts(
        left, 1, [memoryview(b"\x01\xc1")], MessageHeader(space=Space.UNTAGGED, dtype=OBJECT), soon()
    )
    point_to_point.run_to_end(left, row, soon())
    run = point_to_point.recv_object(right, 0, None, pickle=True, return_source=False)
    with pytest.raises(PeerMisbehaved, match="not an encoded object") as raised:
        point_to_point.run_to_end(right, run, soon())
    assert raised.value.rank == 0


def test_an_array_that_is_none_names_who_sent_it(groups: list[Group]) -> None:
    left, right = groups
    about = MessageHeader(space=Space.UNTAGGED, dtype=12)
    left.wait((left.post_send(1, memoryview(bytes(12)), soon(), shape=(3,), about=about),), soon())
    run = point_to_point.recv(right, None, 0, None, return_source=False)
    with pytest.raises(PeerMisbehaved) as raised:
        point_to_point.run_to_end(right, run, soon())
    assert raised.value.rank == 0


def test_every_verb_is_a_method_of_a_communicator() -> None:
    assert all(callable(getattr(Communicator, verb)) for verb in RUNS)
