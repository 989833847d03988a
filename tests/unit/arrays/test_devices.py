"""What the adapter for CUDA asks of torch, on tensors of the CPU; what a GPU does is in tests/devices/test_cuda.py.

Who knows which device arrays; packages are looked through once, when one comes that nobody knows.
"""

import contextlib
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nexar.arrays import devices, torch_tensors
from nexar.arrays.device_adapter import Pending
from nexar.arrays.devices import CudaAdapter, DeviceRegistry
from nexar.arrays.dtypes import DTYPES
from nexar.arrays.staging import Staging, gather, scatter
from nexar.errors import DeviceError, UsageError
from tests.packages.slate.nexar_slate import Slate, SlateAdapter

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

BY_NAME = {str(dtype): dtype for dtype in DTYPES}  # torch uses the same names


class Event:
    def query(self) -> bool:
        return True


class Runtime:
    """Instead of torch.cuda."""

    def __init__(self) -> None:
        self.capturing = False
        self.used: list[str] = []

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, device: Any) -> str:
        return f"the current stream of {device}"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.used.append(stream)
        yield


class Adapter(CudaAdapter):
    def __init__(self) -> None:
        self.runtime = Runtime()
        self.followed: list[tuple[int, str]] = []

    def recognises(self, value: object) -> bool:
        return torch_tensors.is_tensor(value)

    def host_memory(self, size_bytes: int) -> NDArray[np.uint8]:
        return np.empty(size_bytes, np.uint8)

    def _runtime(self) -> Any:
        return self.runtime

    def _after(self, values: Sequence[Any], stream: str) -> Pending:
        from nexar.arrays.devices import _Event

        self.followed.append((len(values), stream))
        return _Event(Event())


@pytest.fixture
def staging() -> Staging:
    return Staging(Adapter())


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3)])
def test_every_dtype_goes_to_the_host_and_back(staging: Staging, name: str, shape: tuple[int, ...]) -> None:
    given = torch.ones(shape).to(getattr(torch, name))
    staged = staging.stage(given)
    array = staged.read()
    assert array.dtype == BY_NAME[name]
    assert np.array_equal(array, np.ones(shape, BY_NAME[name]))
    made = staged.new_array(array)
    assert (made.dtype, tuple(made.shape)) == (given.dtype, shape)
    assert not made.numel() or bool((made.to(torch.complex64) == 1).all())


def test_everything_is_done_on_the_callers_stream(staging: Staging) -> None:
    adapter: Any = staging.adapter
    staged = staging.stage(torch.ones(3))
    staged.write(staged.read())
    staged.new_array(np.zeros(3, np.float32))
    assert set(adapter.runtime.used) == {"the current stream of cpu"}
    assert adapter.followed == [(1, "the current stream of cpu")] * 3


def test_strided_tensors_are_read_in_order_and_written_in_place(staging: Staging) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    staged = staging.stage(whole.t()[1:3])
    array = staged.read()
    assert array.tolist() == [[1, 5, 9], [2, 6, 10]]
    staged.write(array + 100)
    assert whole.tolist() == [[0, 101, 102, 3], [4, 105, 106, 7], [8, 109, 110, 11]]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2"])
def test_many_tensors_are_one_copy(staging: Staging, name: str) -> None:
    dtype = getattr(torch, name)
    given = [torch.full(shape, number + 1.0).to(dtype) for number, shape in enumerate([(2,), (2, 2), (), (0,)])]
    staged_arrays = [staging.stage(each) for each in given]
    flat = staged_arrays[0].allocate((7,), staged_arrays[0].dtype)
    gather(staged_arrays, flat).wait()
    assert flat.astype(np.float32).tolist() == [1, 1, 2, 2, 2, 2, 3]
    flat[:] = np.ones(7, flat.dtype)
    scatter(staged_arrays, flat)
    assert all(bool((each.float() == 1).all()) for each in given)
    assert len(staging.adapter.followed) == 2  # type: ignore[attr-defined]


def test_autograd_learns_of_what_was_written(staging: Staging) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = (parameter * parameter).sum()
    staged = staging.stage(parameter)
    staged.write(staged.read() * 2)
    assert parameter.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("op", "result"), [("sum", [4, 6]), ("prod", [3, 8]), ("min", [1, 2]), ("max", [3, 4])])
def test_a_device_reduces_what_has_one_instruction(op: str, result: list[int]) -> None:
    into, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert Adapter().reduce(op, into, other, "stream")
    assert into.tolist() == result


def test_what_it_cannot_reduce_is_left_alone() -> None:
    into = torch.ones(2)
    assert not Adapter().reduce("avg", into, into, "stream")
    assert not Adapter().reduce("sum", into, into.double(), "stream")
    eight = into.to(torch.float8_e5m2)
    assert not Adapter().reduce("sum", eight, eight, "stream")


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((op, dtype) for op in ("sum", "min", "band") for dtype in (torch.uint16, torch.uint32, torch.uint64)),
        ("band", torch.float32), ("bxor", torch.complex64), ("max", torch.complex64),
    ],
)  # fmt: skip
def test_a_type_that_the_device_only_stores_is_left_alone(op: str, dtype: torch.dtype) -> None:
    into, other = torch.tensor([1, 2]).to(dtype), torch.tensor([3, 4]).to(dtype)
    assert not Adapter().reduce(op, into, other, "stream")
    assert into.tolist() == [1, 2]


def test_bits_of_integers_are_reduced() -> None:
    into = torch.tensor([1, 6])
    assert Adapter().reduce("bxor", into, torch.tensor([3, 3]), "stream")
    assert into.tolist() == [2, 5]


def test_a_graph_that_is_being_captured_cannot_hold_a_message(staging: Staging) -> None:
    staging.adapter.runtime.capturing = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="outside of the graph"):
        staging.stage(torch.ones(1))


PLAINLESS = {
    r"give tensor\.to_dense": lambda: torch.eye(2).to_sparse(),
    "resolve_conj": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "convert it": lambda: torch.ones(2).to(torch.float8_e4m3fnuz),
}


@pytest.mark.parametrize("advice", PLAINLESS)
def test_tensors_without_plain_values_are_refused(staging: Staging, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        staging.stage(PLAINLESS[advice]())


def test_tensors_of_the_cpu_are_none_of_a_device() -> None:
    assert not CudaAdapter().recognises(torch.ones(1))
    assert not CudaAdapter().recognises(np.ones(1))


def test_tensors_overlap_where_their_addresses_do() -> None:
    whole, adapter = torch.zeros(4, 6), Adapter()
    assert adapter.overlap(whole, whole[2])
    assert adapter.overlap(whole[1:3], whole[2:])
    assert adapter.overlap(whole[:, 1], whole[:, 2]), "they interleave"
    assert not adapter.overlap(whole[:2], whole[2:])
    assert not adapter.overlap(whole, torch.zeros(4, 6))
    assert not adapter.overlap(whole[:0], whole)


SLATE = "tests.packages.slate.nexar_slate:SlateAdapter"


class Installed:
    """What packages say, and how often they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **adapters: str) -> None:
        self.asked = 0
        self._points = [EntryPoint(name, value, devices.GROUP) for name, value in adapters.items()]
        monkeypatch.setattr("importlib.metadata.entry_points", self._entry_points)

    def _entry_points(self, *, group: str) -> list[EntryPoint]:
        self.asked += 1
        assert group == "nexar.device_adapters"
        return self._points


def test_packages_are_asked_when_an_array_comes_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    installed, adapters = Installed(monkeypatch, slate=SLATE), DeviceRegistry()
    assert installed.asked == 0
    found = adapters.find(Slate([1]))
    assert found is not None
    assert found.adapter.name == "slate"
    assert adapters.find(Slate([2])) is found
    assert adapters.find(object()) is None
    assert installed.asked == 1


def test_one_that_was_registered_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    installed, adapters = Installed(monkeypatch), DeviceRegistry()
    adapters.add(SlateAdapter())
    assert adapters.find(Slate([1])) is not None
    assert installed.asked == 0


def test_what_is_no_adapter_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a nexar"):
        DeviceRegistry().add(SlateAdapter)  # type: ignore[arg-type]

    class Nameless(SlateAdapter):
        name = None  # type: ignore[assignment]

    with pytest.raises(UsageError, match="has no name"):
        DeviceRegistry().add(Nameless())


@pytest.mark.parametrize(
    ("value", "why"),
    [("nowhere_at_all:X", "ModuleNotFoundError"), ("math:nothing", "AttributeError"), ("math:pi", "TypeError"),
     ("sys:exit", "SystemExit"), ("collections:OrderedDict", "UsageError")],
)  # fmt: skip
def test_a_broken_package_is_named_and_disturbs_no_other(monkeypatch: pytest.MonkeyPatch, value: str, why: str) -> None:
    installed, adapters = Installed(monkeypatch, broken=value, slate=SLATE), DeviceRegistry()
    assert adapters.find(Slate([1])) is not None
    for _ in range(2):
        with pytest.raises(
            UsageError,
            match="no device adapter accepts arrays of type object; the device adapter 'broken' of the package that "
            rf"has '{value}' could not be loaded \({why}: .*\); repair or uninstall that package",
        ):
            adapters.find(object())
    assert installed.asked == 1


def test_an_adapter_that_fails_when_it_is_asked_is_named() -> None:
    class Torn(SlateAdapter):
        name = "torn"

        def recognises(self, value: object) -> bool:
            raise RuntimeError("no driver")

    adapters = DeviceRegistry()
    adapters.add(Torn())
    with pytest.raises(DeviceError, match="recognising an array on device torn failed: RuntimeError: no driver"):
        adapters.find(object())


def test_only_adapters_that_were_used_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    Installed(monkeypatch)
    adapters: Any = DeviceRegistry()
    adapters.add(SlateAdapter())
    assert adapters.stats() == {}
    adapters.find(Slate([1.0])).stage(Slate([1.0])).read()
    assert adapters.stats()["slate"].misses == 1
