"""What an adapter need not say."""

import numpy as np
import pytest

from nexar.arrays.device_adapter import CopyDone, DeviceAdapter
from tests.packages.slate.nexar_slate import Engine, Slate, SlateAdapter


class Plain(SlateAdapter):
    """As little as an adapter can have."""

    stream_of = DeviceAdapter.stream_of
    host_memory = DeviceAdapter.host_memory
    reduce = DeviceAdapter.reduce


def test_a_device_need_have_no_streams_no_memory_of_its_own_and_no_arithmetic() -> None:
    adapter, slate = Plain(), Slate([1.0])
    assert adapter.stream_of(slate) is None
    assert adapter.host_memory(10).shape == (10,)
    assert adapter.reduce("sum", slate, slate, None) is False
    assert adapter.overlap(slate, slate)
    assert not adapter.overlap(slate, Slate([1.0]))
    assert slate.values().tolist() == [1]


def test_copies_that_are_over_at_once_are_done() -> None:
    assert CopyDone().done()


def test_the_rest_must_be_said() -> None:
    with pytest.raises(TypeError, match="abstract"):
        DeviceAdapter()  # type: ignore[abstract]


def test_a_device_may_reduce_by_itself() -> None:
    engine = Engine()
    one, other = Slate(np.ones(3), engine), Slate(np.full(3, 2.0), engine)
    assert SlateAdapter().reduce("sum", one, other, engine)
    assert one.values().tolist() == [3, 3, 3]
    assert not SlateAdapter().reduce("prod", one, other, engine)
