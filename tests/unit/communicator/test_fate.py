"""What becomes of a communicator: open until it is sealed, and told to everybody after."""

import threading
from typing import Any, cast

import pytest

from nexar.communicator.fate import Fate
from nexar.errors import MembershipChanged, NoQuorum
from tests.unit.communicator.branches import Drive


def fate() -> tuple[Fate, Drive]:
    drive = Drive()
    return Fate(cast(Any, drive)), drive


def test_while_it_is_open_nothing_is_raised() -> None:
    open_one, _ = fate()
    open_one.check()
    open_one.cancel()  # who waits no longer changes nothing
    assert not open_one.done
    assert open_one.name == "the agreement on the next membership"
    assert open_one.awaited().missing == "its vote"


def test_once_sealed_every_call_raises_its_own_copy() -> None:
    sealed, drive = fate()
    error = NoQuorum(alive=[0], needed=2)
    sealed.seal(error)
    for _ in range(2):
        with pytest.raises(NoQuorum) as raised:
            sealed.check()
        assert raised.value is not error
        assert (raised.value.alive, raised.value.needed) == (error.alive, 2)
    assert drive.kicks  # who waits for it may sleep, and nothing else would wake it


def test_a_later_word_replaces_an_earlier_one() -> None:
    """Who has no quorum may still hear that the others went on."""
    sealed, _ = fate()
    sealed.seal(NoQuorum(alive=[0], needed=2))
    sealed.seal(MembershipChanged(communicator="the next one", lost={1: "gone"}, joined=(), completed_by_all=None))
    with pytest.raises(MembershipChanged) as raised:
        sealed.check()
    assert raised.value.communicator == "the next one"


def test_who_waits_for_it_is_told() -> None:
    awaited, _ = fate()
    told = threading.Event()
    with awaited.lock:
        awaited.when_done(told.set)
    assert not told.is_set()
    awaited.seal(NoQuorum(alive=[0], needed=2))
    assert told.is_set()
    with pytest.raises(NoQuorum):
        awaited.result()
