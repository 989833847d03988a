import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.communicator.objects import decode_object, encode_object
from nexar.communicator.values import ObjectError
from nexar.errors import UsageError


class Trap:
    """Says so when somebody reads it."""

    sprung = False

    @staticmethod
    def spring() -> None:
        Trap.sprung = True

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return Trap.spring, ()


@pytest.mark.parametrize("pickled", [False, True])
def test_a_value_and_its_arrays_come_back(pickled: bool) -> None:
    value = {"weights": np.arange(10_000.0), "names": ("a", 2), "few": np.ones(3, np.float16)}
    parts = encode_object(value, pickle=pickled)
    assert sum(len(part) for part in parts[1:]) >= 80_000
    got = decode_object(parts, pickle=pickled)
    assert np.array_equal(got["weights"], value["weights"])
    assert got["few"].dtype == np.float16
    assert got["names"] == ("a", 2)


def test_a_pickled_value_is_not_even_looked_at_by_who_did_not_ask() -> None:
    parts = encode_object(Trap(), pickle=True)
    with pytest.raises(UsageError, match="nothing was read"):
        decode_object(parts)
    assert not Trap.sprung
    decode_object(parts, pickle=True)
    assert Trap.sprung


def test_who_allows_pickle_takes_values_without_it_too() -> None:
    assert decode_object(encode_object([1, (2,)]), pickle=True) == [1, (2,)]


def test_pickle_takes_what_values_do_not() -> None:
    assert decode_object(encode_object({1j: range(3)}, pickle=True), pickle=True) == {1j: range(3)}
    with pytest.raises(UsageError, match="cannot be pickled"):
        encode_object(lambda: None, pickle=True)


@given(st.lists(st.binary(max_size=64), max_size=3))
def test_any_parts_are_a_value_or_an_error(parts: list[bytes]) -> None:
    try:
        decode_object([memoryview(bytearray(part)) for part in parts])
    except (ObjectError, UsageError):
        return


@pytest.mark.parametrize("parts", [[], [b""], [b"\x00"], [b"\x07abc"], [b"\x01"]])
def test_what_is_no_object_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(ObjectError):
        decode_object([memoryview(part) for part in parts], pickle=True)


def test_a_pickle_that_cannot_be_read_here_says_so() -> None:
    unreadable = b"\x02" + pickle.dumps(Trap()).replace(b"Trap", b"Trop")
    with pytest.raises(ObjectError, match="can be read here"):
        decode_object([memoryview(unreadable)], pickle=True)
