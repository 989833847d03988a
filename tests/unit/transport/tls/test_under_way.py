import os
import select

import pytest

from nexar.transport.base import ConnectRefused
from nexar.transport.tls.under_way import DialsUnderWay


def is_to_end(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_a_dial_goes_on_until_all_are_ended():
    dials = DialsUnderWay()
    with dials.one_more("here:1") as one, dials.one_more("there:1") as two:
        assert not is_to_end(one)
        assert not is_to_end(two)
        dials.end()
        assert is_to_end(one)
        assert is_to_end(two)
    dials.end()


def test_one_that_is_over_is_not_ended():
    dials = DialsUnderWay()
    with dials.one_more("here:1") as one:
        assert one >= 0
    dials.end()


def test_none_begins_after_the_end():
    dials = DialsUnderWay()
    dials.end()
    with pytest.raises(ConnectRefused, match=r"cannot connect to here:1: .* closed"), dials.one_more("here:1"):
        pass


def test_a_forked_child_does_not_keep_a_dial_of_its_parent_from_ending():
    dials = DialsUnderWay()
    reading, writing = os.pipe()
    with dials.one_more("here:1") as one:
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        dials.end()
        assert is_to_end(one)
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_a_forked_child_can_let_go():
    dials = DialsUnderWay()
    with dials.one_more("here:1") as one:
        child = os.fork()
        if child == 0:
            dials.abandon()
            os._exit(1 if os.path.exists(f"/proc/self/fd/{one}") else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not is_to_end(one)
