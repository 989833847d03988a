import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.multipart import (
    WHOLE_BYTES,
    flatten,
    new_memory,
    read_table,
    receive_parts,
    send_parts,
    unflatten,
)
from nexar.communicator.point_to_point import run_to_end
from nexar.config import Config
from nexar.errors import PeerMisbehaved
from nexar.group import Group, deadline_after
from nexar.links.messages import OBJECT, ObjectReceive, Receive
from nexar.links.sending import MessageHeader
from nexar.wire.frame import Space
from tests.ranks import EVENT_TIMEOUT, on_every

ABOUT = MessageHeader(space=Space.TAGGED, tag=1, dtype=OBJECT)


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_pieces_come_out_of_a_flat_row_as_they_went_in(pieces: list[bytes]) -> None:
    row = flatten([memoryview(piece) for piece in pieces])
    assert [bytes(piece) for piece in unflatten(row)] == pieces


def test_pieces_of_a_flat_row_are_aligned_and_share_its_memory() -> None:
    row = flatten([memoryview(b"abc"), memoryview(np.arange(5.0)).cast("B")])
    numbers = np.frombuffer(unflatten(row)[1], np.float64)
    assert (numbers.ctypes.data - np.frombuffer(row, np.uint8).ctypes.data) % 64 == 0
    row[-8:] = np.float64(9).tobytes()
    assert numbers[4] == 9


@given(st.binary(max_size=100))
def test_any_row_is_a_table_or_an_error(row: bytes) -> None:
    try:
        read_table(memoryview(row))
    except ValueError:
        return


@pytest.mark.parametrize("cut", [0, 15, 16, 20, -1])
def test_a_row_that_was_cut_is_refused(cut: int) -> None:
    row = flatten([memoryview(b"abc")])[:cut]
    with pytest.raises(ValueError, match=r"table|pieces"):
        unflatten(row)


def test_memory_that_there_is_not_is_refused() -> None:
    assert [len(room) for room in new_memory((3, 0))] == [3, 0]
    with pytest.raises(MemoryError, match="does not fit"):
        new_memory((1 << 62,))


def asked(group: Group) -> Receive:
    return group.post_receive(0, None, space=Space.TAGGED, tag=1, dtype=OBJECT, ask=ObjectReceive)


@pytest.mark.parametrize("sizes", [(), (0,), (5, 0, 7), (WHOLE_BYTES,), (WHOLE_BYTES, 1), (300_000, 0, 10, 400_000)])
def test_pieces_arrive_as_they_were_sent(sizes: tuple[int, ...]) -> None:
    pieces = [memoryview(np.random.default_rng(size).bytes(size)) for size in sizes]
    deadline = deadline_after(EVENT_TIMEOUT)

    def talk(comm: Communicator) -> list[bytes]:
        group = comm._group
        if comm.rank == 0:
            run_to_end(group, send_parts(group, 1, pieces, ABOUT, deadline), deadline)
            return []
        return [bytes(piece) for piece in run_to_end(group, receive_parts(group, asked(group), new_memory), deadline)]

    with local_communicators(2, Config()) as world:
        assert on_every(world, talk)[1] == [bytes(piece) for piece in pieces]


@pytest.mark.parametrize("row", [b"", b"x" * 40, bytes(flatten([memoryview(b"abc")]))])
def test_a_first_part_that_is_none_is_the_senders_fault(row: bytes) -> None:
    """The last one says nothing of how much it is in all."""
    deadline = deadline_after(EVENT_TIMEOUT)
    with local_communicators(2, Config()) as world:
        left, right = (comm._group for comm in world)
        left.wait((left.post_send(1, memoryview(row), deadline, about=ABOUT),), deadline)
        with pytest.raises(PeerMisbehaved) as raised:
            run_to_end(right, receive_parts(right, asked(right), new_memory), deadline)
        assert raised.value.rank == 0


def test_a_message_for_which_there_is_no_memory_is_kept_for_the_next_receive() -> None:
    deadline = deadline_after(EVENT_TIMEOUT)

    def refuse(sizes: tuple[int, ...]) -> list[memoryview]:
        raise MemoryError("no room")

    def talk(comm: Communicator) -> int:
        group = comm._group
        if comm.rank == 0:
            run_to_end(group, send_parts(group, 1, [memoryview(bytes(300_000))] * 3, ABOUT, deadline), deadline)
            comm.barrier()
            return 0
        with pytest.raises(MemoryError, match="no room"):
            run_to_end(group, receive_parts(group, asked(group), refuse), deadline)
        parts = run_to_end(group, receive_parts(group, asked(group), new_memory), deadline)
        assert [len(part) for part in parts] == [300_000] * 3
        comm.barrier()
        return len(group.matching._waiting) + len(group.matching._posted)

    with local_communicators(2, Config()) as world:
        assert on_every(world, talk) == [0, 0]
