"""CUDA tensors, on a real GPU: every operation, the caller's stream, nothing but that stream, and what all of it costs.

`make test-cuda` runs it with an interpreter that has torch and sees a GPU.
"""

import time
from typing import Any

import numpy as np
import pytest

import nexar
from nexar.arrays.devices import ADAPTERS
from nexar.arrays.dtypes import DTYPES
from nexar.arrays.operand import adapt
from nexar.communicator.communicator import Communicator
from nexar.errors import DeviceError, UsageError
from tests.devices import cuda_rank
from tests.devices.operations import OPERATIONS, SIZE, Device, numbers, total
from tests.ranks import on_every

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
# What the driver opens once for the process is no leak of the test that comes first.
torch.ones(1, pin_memory=True).to("cuda", non_blocking=True).sum().item()


def make(values: Any) -> Any:
    return torch.tensor(np.asarray(values), device="cuda")


DEVICE = Device(make, lambda tensor: tensor.cpu().numpy(), torch.Tensor, torch.Tensor)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_every_verb_takes_cuda_tensors_and_gives_them_back(world: list[Communicator], operation: Any) -> None:
    on_every(world, lambda comm: operation(comm, DEVICE))


@pytest.mark.parametrize("transports", ["shm,tls", "tls"])
def test_every_verb_between_processes_that_share_a_gpu(transports: str) -> None:
    assert nexar.spawn(cuda_rank.every_operation, SIZE, transports=transports) == [len(OPERATIONS)] * SIZE


@pytest.mark.parametrize("name", list(map(str, DTYPES)))
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
def test_every_dtype_goes_to_the_host_and_back(name: str, shape: tuple[int, ...]) -> None:
    given = torch.ones(shape).to(getattr(torch, name)).cuda()
    operand = adapt(given, writable=True)
    operand.array[...] = np.zeros((), operand.array.dtype)
    operand.commit()
    assert operand.result() is given
    assert not given.cpu().to(torch.complex64).count_nonzero()
    made = operand.like(np.ones((2, 2), operand.array.dtype))
    assert (made.dtype, made.device, made.shape) == (given.dtype, given.device, (2, 2))
    assert bool((made.cpu().to(torch.complex64) == 1).all())


def test_strided_tensors_are_written_in_place() -> None:
    whole = torch.arange(12.0, device="cuda").reshape(3, 4)
    operand = adapt(whole.t()[1:3], writable=True)
    assert operand.array.tolist() == [[1, 5, 9], [2, 6, 10]]
    operand.array[...] += 100
    operand.commit()
    assert whole.tolist() == [[0, 101, 102, 3], [4, 105, 106, 7], [8, 109, 110, 11]]


def busy(seconds: float) -> None:
    """Give the current stream something to do."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def test_what_the_callers_stream_did_before_is_seen_and_what_it_does_after_sees_the_result(
    pair: list[Communicator],
) -> None:
    def run(comm: Communicator) -> Any:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            given = torch.zeros(1 << 20, device="cuda")
            busy(0.05)
            given += comm.rank + 1  # not done yet when the call is made
            comm.all_reduce(given)
            after = given * 2  # nobody waits here
        stream.synchronize()
        return after.min().item(), after.max().item()

    assert on_every(pair, run) == [(6.0, 6.0)] * 2


def test_other_streams_are_not_waited_for(pair: list[Communicator]) -> None:
    """A second of work on one stream, an all_reduce on another."""

    def run(comm: Communicator) -> tuple[bool, float]:
        given, mine = torch.ones(1000, device="cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(mine):
            comm.all_reduce(given)  # warm: memory is there
        mine.synchronize()
        comm.barrier()
        other, event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(other):
            busy(2.0)
            event.record()
        begun = time.monotonic()
        with torch.cuda.stream(mine):
            comm.all_reduce(given)
        still = not event.query()
        took = time.monotonic() - begun
        other.synchronize()
        return still, took

    assert all(still for still, _ in on_every(pair, run)), "the call waited for a stream that is none of its own"


def test_a_tensor_that_is_dropped_at_once_is_sent_whole(pair: list[Communicator]) -> None:
    def run(comm: Communicator) -> bool:
        stream = torch.cuda.Stream()
        for number in range(20):
            with torch.cuda.stream(stream):
                request = comm.start.send(
                    torch.full((1 << 18,), float(number), device="cuda"), 1 - comm.rank, tag=number
                )
                torch.full((1 << 18,), -1.0, device="cuda")  # may get the memory of the first
            found = comm.recv(source=1 - comm.rank, tag=number)
            request.wait()
            if not (found == number).all():
                return False
        return True

    assert on_every(pair, run) == [True, True]


def test_host_memory_is_pinned_and_used_again(pair: list[Communicator]) -> None:
    before = pair[0].stats()["staging"].get("cuda", {"hits": 0, "misses": 0})

    def run(comm: Communicator) -> None:
        given = torch.ones(100_000, device="cuda")
        for _ in range(50):
            comm.all_reduce(given)

    on_every(pair, run)
    after = pair[0].stats()["staging"]["cuda"]
    assert after["hits"] - before["hits"] >= 80
    assert after["misses"] - before["misses"] <= 20
    staging = ADAPTERS.find(torch.ones(1, device="cuda"))
    assert staging is not None
    assert torch.from_numpy(staging.adapter.host_memory(4096)).is_pinned()


def test_a_graph_that_is_being_captured_cannot_hold_a_message(pair: list[Communicator]) -> None:
    given = torch.ones(4, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        given += 1  # an empty graph is warned of
        with pytest.raises(UsageError, match="outside of the graph"):
            pair[0].all_reduce(given)


def test_no_memory_on_the_device_is_a_device_error(pair: list[Communicator], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(comm: Communicator) -> str:
        given = numbers(comm.rank)
        if comm.rank == 0:
            comm.all_reduce(given)
            return "a host array"
        tensor = make(given)

        def empty(*_: object, **__: object) -> Any:
            return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

        monkeypatch.setattr("nexar.arrays.torch_tensors.empty", empty)
        with pytest.raises(DeviceError, match="making an array on device cuda:0 failed: OutOfMemoryError") as raised:
            adapt(tensor).like(given)
        comm.all_reduce(tensor)
        assert DEVICE.equal(tensor, total(2))
        return str(raised.value.device)

    assert on_every(pair, run) == ["a host array", "cuda:0"]


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64"])
def test_a_gpu_reduces_as_the_host_does(op: str, name: str) -> None:
    dtype = getattr(torch, name)
    one, other = (torch.randint(-9, 9, (1000,)).to(dtype).cuda() for _ in range(2))
    names = {"sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}
    expected = names[op](one.cpu(), other.cpu())
    staging = ADAPTERS.find(one)
    assert staging is not None
    assert staging.adapter.reduce(op, one, other, torch.cuda.current_stream())
    assert torch.equal(one.cpu(), expected)
