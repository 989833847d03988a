"""A communicator that somebody still holds leads to the newest one, and keeps none of those between alive."""

import gc
import weakref

import pytest

import nexar


def test_the_first_communicator_leads_to_the_newest_and_holds_none_between() -> None:
    with nexar.local(1) as (first,):
        second = first.shrink()
        third = second.shrink()
        with pytest.raises(nexar.MembershipChanged) as raised:
            first.barrier()
        assert raised.value.communicator is third
        assert first.shrink() is third
        between = weakref.ref(second)
        del second, raised
        gc.collect()
        assert between() is None
        assert third.all_reduce(2.0) == 2.0
