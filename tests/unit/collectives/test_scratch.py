import numpy as np

from nexar.collectives.scratch import Scratch


def test_there_is_room_for_what_was_asked_for_and_it_fits_every_dtype() -> None:
    scratch = Scratch()
    for size in (0, 1, 4096, 4097, 1_000_000):
        memory = scratch.take(size)
        assert memory.nbytes >= size
        assert memory.ctypes.data % np.dtype(np.complex128).alignment == 0


def test_what_is_given_back_is_taken_again_and_nobody_shares_it() -> None:
    scratch = Scratch()
    first, second = scratch.take(5000), scratch.take(5000)
    assert not np.may_share_memory(first, second)
    scratch.give_back(first)
    assert scratch.take(6000) is first
    assert scratch.take(6000) is not first


def test_no_more_is_kept_than_is_worth_keeping() -> None:
    scratch = Scratch()
    huge = scratch.take(100 << 20)
    scratch.give_back(huge)
    assert scratch.take(100 << 20) is not huge
    many = [scratch.take(16 << 20) for _ in range(5)]
    for each in many:
        scratch.give_back(each)
    again = [scratch.take(16 << 20) for _ in range(5)]
    assert sum(any(each is other for other in many) for each in again) == 4


def test_nothing_is_kept_for_a_communicator_that_is_over() -> None:
    scratch = Scratch()
    free, lent = scratch.take(5000), scratch.take(5000)
    scratch.give_back(free)
    scratch.close()
    scratch.close()
    scratch.give_back(lent)
    taken = scratch.take(5000)
    assert taken is not free
    assert taken is not lent
