"""Every operation with arrays of a device, checked against NumPy: the same for a device of the tests and for a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar import TopK
from nexar.communicator.communicator import Communicator

SIZE = 3


@dataclass(frozen=True)
class Device:
    """How a test makes arrays of a kind, and looks at them."""

    make: Callable[[Any], Any]
    values: Callable[[Any], NDArray[Any]]
    kind: type
    object_kind: type
    """What comes out where one went in as part of a value."""

    def equal(self, array: Any, expected: Any) -> bool:
        return isinstance(array, self.kind) and np.array_equal(self.values(array), expected)


def numbers(rank: int, shape: tuple[int, ...] = (3, 4)) -> NDArray[Any]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + rank


def total(size: int, shape: tuple[int, ...] = (3, 4)) -> NDArray[Any]:
    return np.sum([numbers(rank, shape) for rank in range(size)], axis=0)


def in_place(comm: Communicator, device: Device) -> None:
    given = device.make(numbers(comm.rank))
    assert comm.all_reduce(given) is given
    assert device.equal(given, total(comm.size))
    given = device.make(numbers(comm.rank))
    assert comm.broadcast(given, root=2) is given
    assert device.equal(given, numbers(2))
    given = device.make(numbers(comm.rank))
    result = comm.reduce(given, root=1)
    assert (result is given) if comm.rank == 1 else (result is None)
    assert device.equal(given, total(comm.size) if comm.rank == 1 else numbers(comm.rank))


def new_arrays(comm: Communicator, device: Device) -> None:
    size, rank = comm.size, comm.rank
    every = np.stack([numbers(each) for each in range(size)])
    assert device.equal(comm.all_gather(device.make(numbers(rank))), every)
    gathered = comm.gather(device.make(numbers(rank)), root=0)
    assert device.equal(gathered, every) if rank == 0 else gathered is None
    assert device.equal(comm.reduce_scatter(device.make(numbers(rank))), total(size)[rank : rank + 1])
    swapped = np.stack([numbers(each)[rank] for each in range(size)])
    assert device.equal(comm.all_to_all(device.make(numbers(rank))), swapped)
    assert device.equal(comm.scan(device.make(numbers(rank))), total(rank + 1))
    rows = comm.all_gather_v(device.make(numbers(rank, (rank + 1,))))
    assert all(device.equal(row, numbers(at, (at + 1,))) for at, row in enumerate(rows))
    mine = comm.scatter(device.make(every) if rank == 0 else None, root=0)
    assert np.array_equal(device.values(mine) if rank == 0 else mine, numbers(rank))


def elsewhere(comm: Communicator, device: Device) -> None:
    """`out=`: from a device to a device, to the host, and from there."""
    given, out = device.make(numbers(comm.rank)), device.make(np.zeros((3, 4), np.float32))
    assert comm.all_reduce(given, out=out) is out
    assert device.equal(out, total(comm.size))
    assert device.equal(given, numbers(comm.rank))
    host = np.zeros((3, 4), np.float32)
    assert comm.all_reduce(given, out=host) is host
    assert np.array_equal(host, total(comm.size))
    every = device.make(np.zeros((comm.size, 3, 4), np.float32))
    assert comm.all_gather(numbers(comm.rank), out=every) is every
    assert device.equal(every, np.stack([numbers(each) for each in range(comm.size)]))


def mixed(comm: Communicator, device: Device) -> None:
    """One rank on the device, the others on the host."""
    given = device.make(numbers(0)) if comm.rank == 0 else numbers(comm.rank)
    comm.all_reduce(given)
    assert np.array_equal(device.values(given) if comm.rank == 0 else given, total(comm.size))


def messages(comm: Communicator, device: Device) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for shape in ((5,), (600, 500)):
        into = device.make(np.zeros(shape, np.float32))
        assert comm.sendrecv(device.make(numbers(comm.rank, shape)), right, into, left) is into
        assert device.equal(into, numbers(left, shape))
        request = comm.start.send(device.make(numbers(comm.rank, shape)), right, tag=3)
        assert comm.recv(into, left, tag=3) is into
        request.wait()
        assert device.equal(into, numbers(left, shape))
        found = comm.sendrecv(device.make(numbers(comm.rank, shape)), right, source=left)
        assert np.array_equal(found, numbers(left, shape))


def requests(comm: Communicator, device: Device) -> None:
    given = [device.make(numbers(comm.rank + each, (200, 300))) for each in range(4)]
    running = [comm.start.all_reduce(each) for each in given]
    for each, request in enumerate(running):
        assert request.wait() is given[each]
        assert device.equal(given[each], total(comm.size, (200, 300)) + each * comm.size)
    assert device.equal(comm.start.all_gather(given[0]).wait(), np.stack([total(comm.size, (200, 300))] * comm.size))


def buckets(comm: Communicator, device: Device) -> None:
    shapes = [(7,), (100, 3), (), (5000,), (0,), (64,)]
    given = [device.make(numbers(comm.rank, shape)) for shape in shapes]
    host = numbers(comm.rank, (9,))
    result = comm.all_reduce_bucketed([*given, host], bucket_bytes=4096)
    assert all(one is other for one, other in zip(result, [*given, host], strict=True))
    assert all(device.equal(each, total(comm.size, shape)) for each, shape in zip(given, shapes, strict=True))
    assert np.array_equal(host, total(comm.size, (9,)))
    request = comm.start.all_reduce_bucketed(given[:3])
    request.wait()
    assert all(
        device.equal(each, total(comm.size, shape) * comm.size) for each, shape in zip(given[:3], shapes, strict=False)
    )


def compressed(comm: Communicator, device: Device) -> None:
    given, residual = device.make(numbers(comm.rank)), device.make(np.zeros((3, 4), np.float32))
    assert comm.all_reduce_compressed(given, TopK(0.5), residual=residual) is given
    values, rest = device.values(given), device.values(residual)
    assert np.array_equal(values[2], total(comm.size)[2])
    assert not values[0].any()
    assert np.array_equal(rest[0], numbers(comm.rank)[0])


def objects(comm: Communicator, device: Device) -> None:
    small, large = device.make(numbers(comm.rank)), device.make(numbers(comm.rank, (100, 100)))
    for rank, value in enumerate(comm.all_gather_object({"small": small, "large": [large]})):
        assert isinstance(value["small"], device.object_kind)
        assert np.array_equal(np.asarray(value["small"]), numbers(rank))
        assert np.array_equal(np.asarray(value["large"][0]), numbers(rank, (100, 100)))


def remote_calls(comm: Communicator, device: Device) -> None:
    @comm.serve
    def double(array: Any) -> Any:
        assert isinstance(array, device.object_kind)
        return device.make(np.asarray(array) * 2)

    comm.barrier()
    result = comm.on((comm.rank + 1) % comm.size).double(device.make(numbers(comm.rank)))
    assert np.array_equal(np.asarray(result), numbers(comm.rank) * 2)
    comm.barrier()


OPERATIONS = (in_place, new_arrays, elsewhere, mixed, messages, requests, buckets, compressed, objects, remote_calls)
