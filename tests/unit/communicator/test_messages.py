import array
from typing import Any

import numpy as np
import pytest

from nexar.communicator.messages import as_array, incoming, outgoing, space_and_tag, space_and_wanted_tag
from nexar.errors import UsageError
from nexar.types import ANY_TAG
from nexar.wire.frame import Space


def test_an_array_is_sent_from_its_own_memory() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    message = outgoing(values, None)
    assert message.shape == (2, 3)
    values[0, 0] = 7
    assert np.frombuffer(message.data, np.float32)[0] == 7


def test_an_array_with_gaps_is_sent_as_a_copy_in_its_own_order() -> None:
    values = np.arange(12).reshape(3, 4)
    for gappy in (values[:, ::2], values.T, values[::-1]):
        message = outgoing(gappy, None)
        assert message.shape == gappy.shape
        assert np.array_equal(np.frombuffer(message.data, values.dtype).reshape(gappy.shape), gappy)


@pytest.mark.parametrize(
    ("value", "shape"),
    [(3, ()), (2.5, ()), (1j, ()), (True, ()), ([1, 2], (2,)), ([[1], [2]], (2, 1)), ((), (0,)), (np.float32(1), ())],
)
def test_numbers_and_lists_are_arrays_too(value: object, shape: tuple[int, ...]) -> None:
    assert outgoing(value, None).shape == shape


@pytest.mark.parametrize("value", ["text", object(), None, 2**70, [[1], [1, 2]], {"a": 1}, np.array(["x"])])
def test_what_is_no_array_of_numbers_is_refused_by_name(value: object) -> None:
    with pytest.raises(UsageError, match=r"cannot be sent|is not an array|expected an array, got|does not fit"):
        outgoing(value, None)


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
        outgoing(masked, 1)
    with pytest.raises(UsageError, match="mask"):
        incoming(masked)


def test_an_array_of_another_class_is_sent_as_the_memory_it_has() -> None:
    class Named(np.ndarray):
        def reshape(self, *_: object, **__: object) -> "Named":
            raise AssertionError("what a class of somebody else does with its memory is not ours to use")

    message = outgoing(np.arange(6.0).reshape(2, 3).view(Named), 1)
    assert message.shape == (2, 3)
    assert np.frombuffer(message.data).tolist() == list(range(6))


def test_without_a_buffer_there_is_nothing_to_fill() -> None:
    assert incoming(None)[:2] == (None, 0)


@pytest.mark.parametrize("buffer", [bytearray(8), memoryview(bytearray(8)), array.array("d", [0.0]), np.zeros(8, "u1")])
def test_whatever_holds_memory_is_received_into(buffer: object) -> None:
    memory = incoming(buffer).memory
    assert memory is not None
    memory[:] = bytes(range(8))
    assert bytes(memoryview(buffer).cast("B")) == bytes(range(8))  # type: ignore[arg-type]


@pytest.mark.parametrize("buffer", [[0, 0], (0, 0), 0, 0.0, np.float64(0), "text", object()])
def test_what_numpy_would_copy_cannot_be_received_into(buffer: object) -> None:
    with pytest.raises(UsageError, match="can be received into"):
        incoming(buffer)


def test_a_buffer_that_cannot_be_filled_is_refused_with_the_reason() -> None:
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        incoming(read_only)
    with pytest.raises(UsageError, match="read-only"):
        incoming(memoryview(bytes(8)))
    read_only = np.zeros((4, 4))[:, :2]
    read_only.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        incoming(read_only)


@pytest.mark.parametrize("gappy", [np.zeros((4, 4))[:, :2], np.zeros((4, 2), order="F"), np.zeros(16)[::-2]])
def test_an_array_with_gaps_is_filled_when_all_is_here(gappy: np.ndarray) -> None:
    target = incoming(gappy)
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
    assert bytes(outgoing(buffer, None).data) == b"abcd"
    assert outgoing(buffer, None).shape == (4,)


def test_memory_that_dlpack_shows_is_sent() -> None:
    assert bytes(outgoing(Exported(np.arange(3.0)), None).data) == np.arange(3.0).tobytes()


def test_a_torch_tensor_is_sent_and_filled_where_it_is() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    tensor = torch.arange(4, dtype=torch.bfloat16)
    message = outgoing(tensor, None)
    into = torch.zeros(2, 4, dtype=torch.bfloat16)[:, ::2]
    target = incoming(into)
    assert target.memory is not None
    target.memory[:] = message.data
    target.commit()
    assert into.flatten().tolist() == [0, 1, 2, 3]
